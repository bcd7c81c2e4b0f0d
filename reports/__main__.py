"""`python -m reports FILE.json [--markdown OUT.md]`: the tables of a stored benchmark run.

Prints the tables; exit code 0, or 2 and one line where the file allows none.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from reports.records import ReportError, load_records, write_text
from reports.tables import document

BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m reports", description=__doc__)
    parser.add_argument("file", type=Path, help="JSON that `pytest --benchmark` left")
    parser.add_argument("--markdown", type=Path, metavar="OUT.md", help="also write Markdown here")
    options = parser.parse_args(arguments)
    try:
        records = load_records(options.file)
        text = document(records, markdown=False)
        if options.markdown is not None:
            write_text(options.markdown, document(records, markdown=True))
    except ReportError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return BAD_INPUT
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
