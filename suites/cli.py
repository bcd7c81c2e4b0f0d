"""The command line: `assay doctor|validate|trace|compare|generate`.

Exit codes: ok 0, diverged 1, unsupported or bad input 2, invalid or device error 3, interrupt 130.
Deliberate errors are one line on standard error, before the lines of a compiler's or runtime's log
where a device error carries one; any other exception is a bug and keeps its traceback.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from reference.model.errors import AssayError, DeviceError

COMMANDS = ("doctor", "validate", "trace", "compare", "generate")
INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="assay",
        description="Tests and measures a local-LLM inference engine for AMD RDNA4: a NumPy "
        "reference and HIP kernels run the same GGUF model and a verdict says whether they agree.",
        epilog="exit codes: ok 0, diverged 1, unsupported or bad input 2, invalid run or device "
        "error 3, interrupt 130",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        importlib.import_module(f"suites.commands.{command}").add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; argparse leaves with exit code 2 on a usage error."""
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except AssayError as error:
        print(f"assay: {_text(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("assay: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def _text(error: AssayError) -> str:
    """One line; a device error keeps its log, indented below its summary."""
    first, *log = str(error).strip().splitlines() or [""]
    if isinstance(error, DeviceError):
        return "\n".join([first.rstrip(":"), *(f"    {line}".rstrip() for line in log)])
    return " ".join(" ".join([first, *log]).split())
