"""`assay`, and `python -m suites`."""

import sys

INTERRUPTED = 130


def interrupted() -> int:
    """Says it; the exit code."""
    print("assay: interrupted", file=sys.stderr)
    return INTERRUPTED


def main() -> int:
    """Runs the command line. An interrupt is said in one line while modules are imported too."""
    try:
        from suites.cli import main as command_line

        return command_line()
    except KeyboardInterrupt:
        return interrupted()


if __name__ == "__main__":
    sys.exit(main())
