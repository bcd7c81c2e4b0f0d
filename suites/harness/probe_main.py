"""A script: `python -P probe_main.py ROOT validate MODEL ...` is `assay` of the tree at ROOT.

Ends with FOREIGN where a package of the project came from elsewhere: an installed copy fills in
for what a commit lacks, and would then be judged in its place. Imports only the standard library.
"""

import runpy
import sys
from collections.abc import Iterator
from pathlib import PurePath

FOREIGN = 70
PACKAGES = ("reference", "backend_hip", "suites", "fixtures", "reports")


def foreign_modules(root: str) -> Iterator[tuple[str, str]]:
    """The project's modules that were not loaded from below `root`, each with its place."""
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in PACKAGES:
            continue
        file = getattr(module, "__file__", None)
        places = [file] if file else list(getattr(module, "__path__", ()))
        for place in places:
            if not PurePath(place).is_relative_to(root):
                yield name, place


def main() -> None:
    root = sys.argv[1]
    sys.argv = ["assay", *sys.argv[2:]]
    try:
        runpy.run_module("suites", run_name="__main__", alter_sys=True)
    finally:
        for name, place in foreign_modules(root):
            print(f"assay: {name} was imported from {place}, not from {root}", file=sys.stderr)
            sys.exit(FOREIGN)


if __name__ == "__main__":
    main()
