"""Where built things go: the user's cache folder, and writing a file whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

from reference.model.errors import InputError


def cache_folder(kind: str) -> Path:
    """The folder for one `kind` of cached thing ("runtimes", "kernels", "models"), made on demand.

    The base is the platform's user cache folder; the environment variable ASSAY_CACHE replaces it.
    """
    override = os.environ.get("ASSAY_CACHE")
    base = Path(override) if override else user_cache_path("assay", appauthor=False)
    folder = base / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cache: {folder} can't be made ({error.strerror}); ASSAY_CACHE names another folder"
        ) from None
    return folder


def atomic_write(path: Path, content: bytes) -> None:
    """Writes `content` beside `path` and renames it, so that no reader sees a part.

    A symbolic link is followed; what is no regular file (a pipe, a device) is written to as it is.
    InputError when the folder is missing, not writable or full.
    """
    target = path.resolve()
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
        else:
            with whole_file(target) as temporary:
                temporary.write_bytes(content)
    except OSError as error:
        raise InputError(f"write: {path} can't be written ({error.strerror})") from None


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """An empty file beside `path`, renamed to it where the block ends well and else removed.

    Raises the OSError of a folder that is missing, not writable or full.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".part-")
    temporary = Path(name)
    try:
        os.fchmod(descriptor, 0o666 & ~_umask())  # mkstemp makes it readable by its owner only
        os.close(descriptor)
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    current = os.umask(0)  # the only way to read it is to set it
    os.umask(current)
    return current
