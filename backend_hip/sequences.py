"""What an engine keeps for each of its sequences: position, KV cache, recurrent states."""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from backend_hip.delta_net import RecurrentState
from backend_hip.kv_cache import DeviceCache
from backend_hip.state import FlowRow
from reference.model.errors import InputError
from reference.model.spec import ModelSpec

Recurrent = dict[int, tuple[NDArray[Any], NDArray[Any]]]


class Sequences:
    """The only owner of positions: the number of tokens that each sequence holds in the cache."""

    def __init__(
        self,
        spec: ModelSpec,
        cache: DeviceCache,
        states: Mapping[int, RecurrentState],
        count: int,
    ) -> None:
        self._kv_layers = [layer.index for layer in spec.layers if layer.owns_kv]
        self.cache = cache
        self._states = states
        self.positions = [0] * count

    def __len__(self) -> int:
        return len(self.positions)

    def require(self, sequence: int) -> None:
        """Raises InputError for a sequence that does not exist."""
        if not 0 <= sequence < len(self):
            raise InputError(f"engine: sequence is {sequence}, expected 0 to {len(self) - 1}")

    def room(self, sequence: int) -> int:
        """Positions that are still free. Raises InputError as `require`."""
        self.require(sequence)
        return self.cache.context_length - self.positions[sequence]

    def following(self, tokens: Sequence[int], sequence: int) -> list[FlowRow]:
        """Rows for the next tokens of one sequence."""
        first, start = self.positions[sequence], self.cache.start(sequence)
        return [
            FlowRow(token, first + index, start, sequence) for index, token in enumerate(tokens)
        ]

    def advance(self, sequence: int, count: int) -> None:
        self.positions[sequence] += count

    def rewind(self, position: int, sequence: int) -> None:
        """Back to `position` of the cache; recurrent states can only go back to their start."""
        self.cache.poison(position, sequence)
        for state in self._states.values():
            state.of(sequence).reset()
        self.positions[sequence] = position

    def kv(self, layer: int, sequence: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values held for one layer, each (position, KVH, D): DeviceCache.contents."""
        self.require(sequence)
        return self.cache.contents(layer, self.positions[sequence], sequence)

    def state(self, layer: int, sequence: int) -> RecurrentState:
        """The state of a delta net layer; its arrays are read from the device when asked for."""
        self.require(sequence)
        return self._states[layer].of(sequence)

    def recurrent(self, sequence: int) -> Recurrent:
        """Copies of all recurrent states, (memory, tail) by layer."""
        states = {layer: self.state(layer, sequence) for layer in self._states}
        return {layer: (state.memory, state.tail) for layer, state in states.items()}

    def restore(self, recurrent: Recurrent, sequence: int) -> None:
        """Puts back what `recurrent` gave."""
        for layer, (memory, tail) in recurrent.items():
            self.state(layer, sequence).restore(memory, tail)

    def contents(self, sequence: int) -> list[bytes]:
        """All that a sequence has left behind, as bytes: KV of each layer, recurrent states."""
        count = self.positions[sequence]
        held = (self.cache.raw(layer, count, sequence) for layer in self._kv_layers)
        kv = [side for pair in held for side in pair]
        states = self.recurrent(sequence).values()
        return [*kv, *(array.tobytes() for pair in states for array in pair)]
