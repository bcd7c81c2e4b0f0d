"""Reading .npz files that hold arrays and `meta`, a JSON text: trace files and repro bundles."""

import json
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.model.errors import InputError


def read_npz(
    path: Path,
    what: str,
    noun: str,
    writer: str,
    parse_constant: Callable[[str], Any] | None = None,
) -> tuple[dict[str, NDArray[Any]], Any]:
    """The arrays but `meta`, and meta as JSON: whether it is an object, the caller says.

    InputError, one line that begins with `what`, for anything that is no such file; `noun` and
    `writer` say what was expected and which command writes it. `parse_constant`: as json.loads.
    """
    if not path.is_file():
        raise InputError(f"{what}: {path} is not a file, expected what `{writer}` wrote")
    try:
        # Opened here, because np.load leaves a damaged file open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return arrays, json.loads(str(arrays.pop("meta")), parse_constant=parse_constant)
    except KeyError:
        raise InputError(f"{what}: {path} has no array meta, expected a {noun}") from None
    except (  # what NumPy, zipfile, zlib and json raise for damaged or hostile files
        *(OSError, ValueError, EOFError, TypeError, AttributeError, NotImplementedError),
        *(MemoryError, RecursionError, zipfile.BadZipFile, zlib.error),
    ):
        raise InputError(f"{what}: {path} is not a whole {noun} (.npz)") from None
