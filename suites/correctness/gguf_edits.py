"""Changes to a good GGUF file's metadata and tensor table, to see what the reader makes of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fixtures.golden import TINY_GATES, golden_model
from fixtures.registry import resolve_model
from reference.model.gguf import GGUFFile, TensorInfo, read_gguf
from reference.model.quant import FORMATS
from reference.model.spec import ModelSpec
from reference.model.spec_reader import read_spec
from reference.model.weights import load_weights

Edit = Callable[[dict[str, Any], dict[str, TensorInfo]], None]


class _Edited:
    """A GGUF file with its metadata and tensor table changed; tensor data is the original's."""

    def __init__(self, file: GGUFFile, edit: Edit) -> None:
        self.path = file.path
        self.metadata = dict(file.metadata)
        self.tensors = dict(file.tensors)
        self._file = file
        edit(self.metadata, self.tensors)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """A renamed tensor has the data of the one it was; an added one has zeros."""
        info = self.tensors[name]
        original = self._file.tensors.get(info.name)
        if original is None:
            return np.zeros(
                (*info.shape[:-1], info.format.row_nbytes(info.shape[-1], name)), np.uint8
            )
        return self._file.raw(info.name)


def _path(name: str) -> Path:
    return golden_model(name).path if name in TINY_GATES else resolve_model(name)


def load(name: str, edit: Edit) -> ModelSpec:
    file: Any = _Edited(read_gguf(_path(name)), edit)
    spec = read_spec(file)
    load_weights(file, spec)
    return spec


def put(key: str, value: object) -> Edit:
    return lambda metadata, tensors: metadata.__setitem__(key, value)


def drop(key: str) -> Edit:
    return lambda metadata, tensors: metadata.__delitem__(key)


def reshape(name: str, shape: tuple[int, ...]) -> Edit:
    return lambda metadata, tensors: tensors.__setitem__(name, replace(tensors[name], shape=shape))


def retype(name: str, form: str) -> Edit:
    return lambda metadata, tensors: tensors.__setitem__(
        name, replace(tensors[name], format=FORMATS[form])
    )


def lose(name: str) -> Edit:
    return lambda metadata, tensors: tensors.__delitem__(name)


def rename(old: str, new: str) -> Edit:
    return lambda metadata, tensors: tensors.__setitem__(new, tensors.pop(old))


def add(name: str, *shape: int) -> Edit:
    info = TensorInfo(name, FORMATS["F32"], shape, 0, 4 * int(np.prod(shape)))
    return lambda metadata, tensors: tensors.__setitem__(name, info)


def both(*edits: Edit) -> Edit:
    def edit(metadata: dict[str, Any], tensors: dict[str, TensorInfo]) -> None:
        for each in edits:
            each(metadata, tensors)

    return edit
