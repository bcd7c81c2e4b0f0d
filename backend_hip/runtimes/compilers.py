"""The C++ compiler that builds the CPU runtime and, through it, every kernel."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

from reference.model.errors import InputError

MINIMUM_GCC = 11  # the first with the C++20 that the runtime uses

# Never fast-math, and no contraction: two compilations of one expression must round alike.
_ARITHMETIC = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_COMMON = ("-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-march=native")
_KERNEL = ("-fno-exceptions", "-fno-rtti", "-x", "c++", "-DSIMT_CPU=1")


@dataclass(frozen=True)
class Compiler:
    """A working C++ compiler: command, one-line version, and what its family needs."""

    command: tuple[str, ...]
    version: str
    family: str  # "gcc" | "clang" | "zig"

    def library_flags(self) -> list[str]:
        """Flags for the runtime's own libraries."""
        return [*_COMMON, *_ARITHMETIC, "-pthread", *self._family_flags()]

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
        compiler, problem = _try(tuple(shlex.split(chosen)))
        if compiler is None:
            raise InputError(f"CPU runtime: CXX is {chosen!r}, expected a C++ compiler: {problem}")
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
        f"CPU runtime: no C++ compiler{found}; install one with `apt install g++` "
        "or `pip install 'assay[compiler]'`, or set CXX"
    )


def _try(command: tuple[str, ...]) -> tuple[Compiler | None, str]:
    """The compiler behind `command`, or None and why not."""
    text = " ".join(command)
    try:
        answer = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=120, check=False
        )
        macros = subprocess.run(
            [*command, "-dM", "-E", "-x", "c++", os.devnull],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{text}: {error}"
    if answer.returncode != 0 or macros.returncode != 0 or not answer.stdout.strip():
        return None, f"{text} --version ended with status {answer.returncode}"
    version = answer.stdout.strip().splitlines()[0]
    if "ziglang" in command:
        return Compiler(command, f"zig {version}", "zig"), ""
    if "__clang__" in macros.stdout:
        return Compiler(command, version, "clang"), ""
    match = re.search(r"#define __GNUC__ (\d+)", macros.stdout)
    if match is None or int(match[1]) < MINIMUM_GCC:
        return None, f"{text} is {version}, expected GCC {MINIMUM_GCC} or newer"
    return Compiler(command, version, "gcc"), ""
