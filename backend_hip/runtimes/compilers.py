"""The C++ compiler that builds the stand-in runtimes and, through the CPU's, every kernel."""

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from subprocess import CompletedProcess

from reference.model.errors import InputError

MINIMUM_GCC = 11  # the first with the C++20 that the runtime uses

# Never fast-math, and no contraction: two compilations of one expression must round alike.
_ARITHMETIC = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_COMMON = ("-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-march=native")
_LIBRARY = ("-O3", "-pthread")
# -O2: g++ takes half as long as with -O3 for the matrix unit's kernels. One of them,
# matvec_packed.hip, runs 1.7 times as long, others as long or shorter.
_KERNEL = ("-O2", "-fno-exceptions", "-fno-rtti", "-x", "c++", "-DSIMT_CPU=1")


@dataclass(frozen=True)
class Compiler:
    """A working C++ compiler: command, one-line version, and what its family needs."""

    command: tuple[str, ...]
    version: str
    family: str  # "gcc" | "clang" | "zig"

    def shared_object_flags(self) -> list[str]:
        """Flags for the runtime's own libraries."""
        return [*_COMMON, *_ARITHMETIC, *_LIBRARY, *self._family_flags()]

    def kernel_command(self) -> list[str]:
        """Command and fixed flags for a kernel module; sources, defines and output follow."""
        return [*self.command, *_COMMON, *_ARITHMETIC, *_KERNEL, *self._family_flags()]

    def _family_flags(self) -> list[str]:
        if self.family == "gcc":
            # Two loaded copies of a library would else share a template's static variables.
            return ["-fno-gnu-unique"]
        if self.family == "zig":
            return ["-fno-sanitize=undefined"]
        return []


def find_compiler() -> Compiler:
    """$CXX when set, else the first of g++ (11 or newer), clang++, and the ziglang wheel's clang.

    Raises InputError when there is none, or when $CXX does not work: an explicit choice is never
    replaced silently.
    """
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        compiler, problem = _try(_words_of(chosen))
        if compiler is None:
            raise InputError(f"compiler: CXX is {chosen!r}, expected a C++ compiler: {problem}")
        return compiler
    problems = []
    for name in ("g++", "clang++"):
        path = shutil.which(name)
        if path is None:
            continue
        compiler, problem = _try((path,))
        if compiler is not None:
            return compiler
        problems.append(problem)
    if importlib.util.find_spec("ziglang") is not None:
        compiler, problem = _try((sys.executable, "-m", "ziglang", "c++"))
        if compiler is not None:
            return compiler
        problems.append(problem)
    found = f" ({'; '.join(problems)})" if problems else ""
    raise InputError(
        f"compiler: no C++ compiler{found}; install one with `apt install g++` "
        'or `pip install -e ".[compiler]"`, or set CXX'
    )


def run_tool(command: Sequence[str], *, timeout: float | None = None) -> CompletedProcess[str]:
    """Runs a command without input; its output as text, whatever its encoding."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=timeout,
        check=False,
    )


def how_it_ended(status: int) -> str:
    """A subprocess's return code in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by signal {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _words_of(chosen: str) -> tuple[str, ...]:
    """CXX's words, quoted as for a shell."""
    try:
        words = tuple(shlex.split(chosen))
    except ValueError as error:
        raise InputError(
            f"compiler: CXX is {chosen!r}, expected a command in shell quoting: {error}"
        ) from None
    if any("\n" in word for word in words):
        raise InputError(f"compiler: CXX is {chosen!r}, expected a command of one line")
    return words


def _try(command: tuple[str, ...]) -> tuple[Compiler | None, str]:
    """The compiler behind `command`, or None and why not."""
    text = " ".join(command)
    answers = []
    for question in (("--version",), ("-dM", "-E", "-x", "c++", os.devnull)):
        try:
            answer = run_tool([*command, *question], timeout=120)
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, f"{text}: {error}"
        if answer.returncode != 0 or not answer.stdout.strip():
            ended = "printed nothing" if answer.returncode == 0 else how_it_ended(answer.returncode)
            return None, f"`{text} {' '.join(question)}` {ended}, GCC and clang answer it"
        answers.append(answer.stdout.strip())
    version, macros = answers[0].splitlines()[0], answers[1]
    if "ziglang" in command:
        return Compiler(command, f"zig {version}", "zig"), ""
    if "__clang__" in macros:
        return Compiler(command, version, "clang"), ""
    match = re.search(r"#define __GNUC__ (\d+)", macros)
    if match is None or int(match[1]) < MINIMUM_GCC:
        return None, f"{text} is {version}, expected GCC {MINIMUM_GCC} or newer, or clang"
    return Compiler(command, version, "gcc"), ""
