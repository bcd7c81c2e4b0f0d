"""The command line: `assay doctor|validate|trace|compare|generate|...`.

Exit codes: ok 0, diverged 1, unsupported or bad input 2, invalid or device error 3, interrupt 130.
Deliberate errors are one line on standard error, before the lines of a compiler's or runtime's log
where a device error carries one; any other exception is a bug, keeps its traceback and ends
with 3, never with the code of a verdict.
"""

import argparse
import errno
import importlib
import importlib.metadata
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn, TypeGuard

from reference.model.errors import AssayError, DeviceError
from suites.__main__ import interrupted
from suites.harness.verdict import State

COMMANDS = (
    *("doctor", "validate", "trace", "compare", "generate", "bisect", "limits", "faults"),
    *("bench", "geometry", "isa"),
)
CLOSED_PIPE = 141  # as a shell reports SIGPIPE


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the options in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        # What no command knows is said by the parser of them all.
        command = next((word for word in sys.argv[1:2] if word in COMMANDS), "")
        helped = self.prog if " " in self.prog or not command else f"{self.prog} {command}"
        self.exit(2, f"{self.prog}: {message}; `{helped} --help` has the options\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        try:
            version = importlib.metadata.version("assay")
        except importlib.metadata.PackageNotFoundError:
            version = "of a checkout that is not installed"
        print(f"assay {version}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="assay",
        description="Tests and measures a local-LLM inference engine for AMD RDNA4: a NumPy "
        "reference and HIP kernels run the same GGUF model and a verdict says whether they agree.",
        epilog="exit codes: ok 0, diverged 1, unsupported or bad input 2, invalid run or device "
        "error 3, interrupt 130",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print it and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        importlib.import_module(f"suites.commands.{command}").add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; argparse leaves with exit code 2 on a usage error."""
    for stream in (sys.stdout, sys.stderr):
        # Generated text must not fail in a terminal that lacks its characters.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        arguments = build_parser().parse_args(argv)
        code: int = arguments.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except AssayError as error:
        print(f"assay: {_text(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return interrupted()
    except BrokenPipeError:  # whoever read our output has enough
        _drop_output()
        return CLOSED_PIPE
    except Exception as error:
        if _is_of_output(error):
            _drop_output()
            print(f"assay: standard output can't be written ({error.strerror})", file=sys.stderr)
            return 2
        # A bug, or an operating system that failed us: no verdict, so not the code of one.
        traceback.print_exc()
        return State.INVALID.exit_code
    return code


def _is_of_output(error: Exception) -> TypeGuard[OSError]:
    """True for a standard output that can't take more; errors of files name the file."""
    full = (errno.ENOSPC, errno.EBADF, errno.EIO)
    return isinstance(error, OSError) and error.errno in full and error.filename is None


def _drop_output() -> None:
    """What is still buffered must not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _text(error: AssayError) -> str:
    """One line; a device error keeps its log, indented below its summary."""
    first, *log = str(error).strip().splitlines() or [""]
    if isinstance(error, DeviceError):
        return "\n".join([first.rstrip(":"), *(f"    {line}".rstrip() for line in log)])
    return " ".join(" ".join([first, *log]).split())
