"""What a built folder holds, written down when it is whole, so that damage is seen before use.

    assay-manifest.txt    one line a file: sha256, size in bytes, name

A loader answers a truncated library with a bus error and an empty one with a wrong cause.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

MANIFEST = "assay-manifest.txt"


def write_manifest(folder: Path, names: Iterable[str]) -> None:
    """Records the files `names` of `folder` as they are now."""
    (folder / MANIFEST).write_text("".join(_line(folder / name) for name in names))


def damage(folder: Path, names: Iterable[str]) -> str | None:
    """What differs from the record, in words; None when every file of `names` is as recorded."""
    names = list(names)
    for name in (*names, MANIFEST):
        if not (folder / name).is_file():
            return f"{name} is missing"
    try:
        recorded = (folder / MANIFEST).read_text(errors="replace").splitlines(keepends=True)
        for name in names:
            if _line(folder / name) not in recorded:
                return f"{name} is not as it was built"
    except OSError as error:
        return f"{error.filename} can't be read: {error.strerror}"
    return None


def _line(path: Path) -> str:
    content = path.read_bytes()
    return f"{hashlib.sha256(content).hexdigest()} {len(content)} {path.name}\n"
