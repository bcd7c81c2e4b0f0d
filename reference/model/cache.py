"""Where built things go: the user's cache folder, and writing a file whole or not at all."""

import os
import tempfile
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder(kind: str) -> Path:
    """The folder for one `kind` of cached thing ("runtimes", "kernels", "models"), made on demand.

    The base is the platform's user cache folder; the environment variable ASSAY_CACHE replaces it.
    """
    override = os.environ.get("ASSAY_CACHE")
    base = Path(override) if override else user_cache_path("assay", appauthor=False)
    folder = base / kind
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def atomic_write(path: Path, content: bytes) -> None:
    """Writes `content` beside `path` and renames it, so that no reader sees a part."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
