"""The dispatcher: loaded kernels of one engine, launched on one stream and counted.

Counting is how a verdict knows that the path it names really ran: `routes` holds launches per
registry row, with graph replays counted for every kernel that the graph holds.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from backend_hip import attention_shape
from backend_hip.compile import KernelSource, build, flatten
from backend_hip.device import Device, Graph, Kernel, Module, Progress
from backend_hip.kernel_use import KernelUse
from backend_hip.registry import KernelRow, Key, Registry
from backend_hip.tuning import shape_of
from backend_hip.wave import WAVE


@dataclass(frozen=True)
class KernelIdentity:
    """What a loaded kernel was made of, each a SHA-256 in hex: source text with its defines, and
    code object, which depends on compiler and architecture too."""

    name: str
    source_sha256: str
    code_sha256: str


class CountedGraph:
    """A captured graph and the launches that one replay stands for."""

    def __init__(self, graph: Graph, launches: Mapping[Key, int]) -> None:
        self._graph = graph
        self.launches = launches

    def free(self) -> None:
        self._graph.free()


class Kernels:
    """The registry rows that an engine needs, compiled and loaded. Nothing else can be launched."""

    def __init__(
        self,
        device: Device,
        registry: Registry,
        keys: Sequence[Key],
        parameters: Mapping[str, int],
        *,
        progress: Progress | None = None,
    ) -> None:
        self.device = device
        self.routes: Counter[Key] = Counter()
        self._modules: list[Module] = []
        self._kernels: dict[Key, Kernel] = {}
        rows = [registry.find(*key) for key in keys]
        sources = {
            key: _source(key, row, parameters, device.architecture)
            for key, row in zip(keys, rows, strict=True)
        }
        code = build(device, list(sources.values()), progress=progress)
        self._code = {key: (source, code[source]) for key, source in sources.items()}
        loaded: dict[KernelSource, Module] = {}
        for key, row in zip(keys, rows, strict=True):
            source = sources[key]
            if source not in loaded:
                loaded[source] = Module(code[source], source.name)
                self._modules.append(loaded[source])
            block = row.block or _sizes(key)[0]
            self._kernels[key] = Kernel(loaded[source], row.entry, row.signature, block)

    @property
    def code_hashes(self) -> Mapping[Key, str]:
        """SHA-256 of each row's code object, in hexadecimal: two builds differ where it does."""
        return {key: _sha256(code) for key, (_, code) in self._code.items()}

    def block(self, key: Key) -> int:
        """Threads per block of a kernel."""
        return self._required(key).block

    def use(self, key: Key) -> KernelUse:
        """What a kernel takes of the device, as the driver says."""
        return self._required(key).use()

    def rows_per_block(self, key: Key) -> int:
        """Rows of a weight matrix that a block of a product's kernel takes."""
        waves = self.block(key) // WAVE
        return waves * shape_of(self.device.architecture, key[0], key[2])["ROWS_PER_WAVE"]

    def resident_blocks(self, key: Key, rows: int) -> int:
        """Blocks of a product whose blocks take one group of rows after the other."""
        shape = shape_of(self.device.architecture, key[0], key[2])
        most = self.device.compute_units * shape["BLOCKS_PER_UNIT"]
        return min(-(-rows // self.rows_per_block(key)), most)

    def identities(self) -> Mapping[str, KernelIdentity]:
        """By registry row, as `route_name` writes it."""
        return {
            route_name(key): KernelIdentity(
                source.name,
                _sha256(source.name.encode() + b"\0" + flatten(source.file).encode()),
                _sha256(code),
            )
            for key, (source, code) in self._code.items()
        }

    def launch(self, key: Key, grid: tuple[int, int], *arguments: Any) -> None:
        """Queues one kernel. A key that the gate did not ask for is a programming error."""
        self._required(key).launch(self.device.stream, grid, *arguments)
        self.routes[key] += 1

    def _required(self, key: Key) -> Kernel:
        if key not in self._kernels:
            raise RuntimeError(f"dispatch: {key} was not among the rows that the gate required")
        return self._kernels[key]

    @contextmanager
    def capture(self) -> Iterator[list[CountedGraph]]:
        """Records launches into a graph; they count when it is replayed, not now."""
        before = self.routes
        self.routes = Counter()
        result: list[CountedGraph] = []
        try:
            with self.device.stream.capture() as captured:
                yield result
            result.append(CountedGraph(captured[0], dict(self.routes)))
        finally:
            self.routes = before

    def replay(self, graph: CountedGraph) -> None:
        graph._graph.launch(self.device.stream)
        self.routes.update(graph.launches)

    def launches_since(self, before: Mapping[Key, int]) -> dict[str, int]:
        """Launches per registry row after `before` was copied from `routes`."""
        return {
            route_name(key): count - before.get(key, 0)
            for key, count in self.routes.items()
            if count > before.get(key, 0)
        }

    def unload(self) -> None:
        self._kernels.clear()
        while self._modules:
            self._modules.pop().unload()


def route_name(key: Key) -> str:
    """A registry row as routes name it: "op variant path"."""
    return " ".join(part for part in key if part)


def source_of(
    row: KernelRow, parameters: Mapping[str, int], size: int, architecture: str, group: int = 1
) -> KernelSource:
    """What to compile for a row.

    `parameters` supplies the defines that depend on the engine, `size` the row's sized define and
    `group` the query heads per KV head of a grouped one, `architecture` chooses the shape.
    """
    sizes = (("SIMT_BLOCK", row.block or size), ("SIMT_WAVE", WAVE))
    chosen = tuple((name, parameters[name]) for name in row.parameters)
    chosen += tuple((name, shape_of(architecture, row.op, row.path)[name]) for name in row.shape)
    if row.sized:
        chosen += ((row.sized, size),)
    if row.grouped:
        chosen += attention_shape.defines(size, group)
    return KernelSource(row.file, (*sizes, *row.defines, *chosen))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _source(
    key: Key, row: KernelRow, parameters: Mapping[str, int], architecture: str
) -> KernelSource:
    size, group = _sizes(key)
    return source_of(row, parameters, size, architecture, group)


def _sizes(key: Key) -> tuple[int, int]:
    """Size and group in a key's variant, as 128 and 4 in "f16,f16@128x4"; 0 and 1 where there are
    none."""
    size, _, group = key[1].partition("@")[2].partition("x")
    return int(size or 0), int(group or 1)
