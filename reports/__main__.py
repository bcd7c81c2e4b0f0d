"""`python -m reports FILE.json [--markdown OUT.md]`: the tables of a stored benchmark run.

Prints the tables; exit code 0, or 2 and one line where the file allows none.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from reports.records import ReportError, write_text
from reports.stored import stored_document

BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m reports", description=__doc__)
    parser.add_argument(
        "file", type=Path, help="JSON that `pytest --benchmark` or `assay bench` left"
    )
    parser.add_argument("--markdown", type=Path, metavar="OUT.md", help="also write Markdown here")
    options = parser.parse_args(arguments)
    try:
        text = stored_document(options.file, markdown=False)
        if options.markdown is not None:
            write_text(options.markdown, stored_document(options.file, markdown=True))
    except ReportError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return BAD_INPUT
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
