"""Feeds a walk to the engine and compares all that it gives with the canonical way, bit for bit.

The canonical way is one token a call through the decode graph, from a new engine. Every walk gets a
new engine too (about 15 ms for a tiny model), so that its id says all that the engine has seen and
replays exactly; an engine shared between walks would carry what no id tells.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend_hip.engine import Engine
from backend_hip.kv_cache import CacheTensor
from backend_hip.results import PrefillResult, TailRecord
from reference.model import Model
from reference.model.spec import ModelSpec
from reference.model.trace import Trace
from suites.correctness.relations import FILLS, Piece, Walk
from suites.harness.compare import compare, same_bits

Array = NDArray[Any]
Held = dict[str, Array]
OpenEngine = Callable[..., Engine]
"""open_engine(model, **options of Engine) -> a new Engine that the caller closes."""

CONTEXT = 320
"""Positions of every engine here, where the model allows them; more only for a longer walk."""
PLAIN = ("f32", "f32")


def walk_tokens(spec: ModelSpec, seed: int, count: int) -> list[int]:
    """The first `count` tokens of a seed's prompt; a shorter prompt is a prefix of a longer one."""
    generator = np.random.default_rng([spec.vocab_size, seed])
    return [int(token) for token in generator.integers(0, spec.vocab_size, 4096)[:count]]


class Canonical:
    """One model, pair of KV types and seed, fed one token a call as far as asked for.

    `logits`, `tokens` (what the sampler tail staged) and `states` are by position. Nothing here
    depends on how far another walk had it fed: what is kept of a position was read right after it.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self._rows: dict[str, list[Array]] = {name: [] for name in kv_of(engine)}
        self.logits: list[Array] = []
        self.tokens: list[int] = []
        self.states: list[Held] = []
        self._problems: list[tuple[int, str]] = []
        self._prompt = walk_tokens(engine.model.spec, seed, engine.context_length)

    def extend(self, length: int) -> None:
        for token in self._prompt[self.engine.position : length]:
            result = self.engine.prefill_per_token([token])
            self.logits.append(result.logits[0])
            self.tokens.append(result.tail.staged_token)
            self.states.append(states_of(self.engine))
            self._judge(token, result)

    def kv(self, length: int) -> Held:
        """Keys and values of the first positions by name, each (position, KVH, D)."""
        return {name: np.stack(rows[:length]) for name, rows in self._rows.items()}

    def problems(self, length: int) -> list[str]:
        """What makes the first `length` positions unfit to be compared with."""
        return [text for position, text in self._problems if position < length]

    def _judge(self, token: int, result: PrefillResult) -> None:
        logits, position = result.logits[0], len(self.logits) - 1
        found = []
        if not np.isfinite(logits).all() or (logits == logits[0]).all():
            found.append("logits are not finite or all equal")
        if position and same_bits(logits, self.logits[-2]) and token != self._prompt[position - 1]:
            found.append("logits are those of the position before")
        if any("batched" in route for route in result.routes):
            found.append("batched kernels ran per token")
        for name, array in kv_of(self.engine).items():
            if not np.isfinite(array[position]).all():
                found.append(f"{name} is not finite")
            if position and not same_bits(array[:position], np.stack(self._rows[name])):
                found.append(f"earlier {name} changed")
            self._rows[name].append(array[position])
        self._problems += [(position, f"canonical run at {position}: {text}") for text in found]


class Walker:
    """Runs walks and keeps the canonical runs between them; use as a context manager.

    `load` gives the model of a name. Canonical runs are kept with their engines, one for each
    model, pair of types and seed.
    """

    def __init__(self, load: Callable[[str], Model], open_engine: OpenEngine) -> None:
        self._load, self._open = load, open_engine
        self._canonical: dict[tuple[Any, ...], Canonical] = {}

    def __enter__(self) -> "Walker":
        return self

    def __exit__(self, *error: object) -> None:
        while self._canonical:
            self._canonical.popitem()[1].engine.close()

    def spec(self, walk: Walk) -> ModelSpec:
        return self._load(walk.model).spec

    def differences(self, walk: Walk) -> tuple[str, ...]:
        """What the walk computes otherwise than the canonical way, a line each; empty: nothing."""
        want = self._canonical_of(walk, (walk.kv_type_k, walk.kv_type_v))
        found = want.problems(walk.length) + self._stored_otherwise(walk, want)
        spec = self.spec(walk)
        prompt = walk_tokens(spec, walk.seed, walk.length)
        with self._engine(walk) as engine:
            start = 0
            other = walk_tokens(spec, walk.seed + 1, walk.positions)
            for piece in walk.earlier:
                _feed(engine, piece, other[start : start + piece.tokens])
                start += piece.tokens
            for call in range(walk.calls):
                at = f"call {call + 1}: " if walk.calls > 1 else ""
                engine.reset()
                if engine.position:
                    found.append(f"{at}position after the reset is {engine.position}")
                _fill(engine, walk.fill)
                found += [at + line for line in _fed_otherwise(engine, walk, prompt, want)]
                found += [at + line for line in _left_otherwise(engine, walk, want)]
        return tuple(found)

    @contextmanager
    def _engine(self, walk: Walk) -> Iterator[Engine]:
        engine = self._open(
            self._load(walk.model),
            max_cols=walk.max_cols,
            chunk=walk.chunk,
            path=walk.path,
            kv_type_k=walk.kv_type_k,
            kv_type_v=walk.kv_type_v,
            context_length=self._context(walk),
        )
        with engine:
            yield engine

    def _context(self, walk: Walk) -> int:
        return min(self.spec(walk).context_length, max(CONTEXT, walk.positions))

    def _canonical_of(self, walk: Walk, types: tuple[str, str]) -> Canonical:
        """Long enough for the walk."""
        key = (walk.model, types, walk.seed, self._context(walk))
        if key not in self._canonical:
            engine = self._open(
                self._load(walk.model),
                path=walk.path,
                kv_type_k=types[0],
                kv_type_v=types[1],
                context_length=self._context(walk),
            )
            engine.reset()
            self._canonical[key] = Canonical(engine, walk.seed)
        self._canonical[key].extend(walk.length)
        return self._canonical[key]

    def _stored_otherwise(self, walk: Walk, want: Canonical) -> list[str]:
        """Across pairs: the first layer that keeps K and V has seen no rounding of a cache yet, so
        each pair must hold the float32 pair's content, rounded to its own types.
        """
        types = (walk.kv_type_k, walk.kv_type_v)
        if types == PLAIN:
            return []
        plain = self._canonical_of(walk, PLAIN).kv(walk.length)
        first_layer = list(want.kv(walk.length).items())[:2]
        return [
            f"{name} is not {PLAIN} rounded to {types}"
            for name, stored in first_layer
            if not same_bits(stored, plain[name].astype(stored.dtype))
        ]


# --- feeding ------------------------------------------------------------------------------------


def _feed(engine: Engine, piece: Piece, part: Sequence[int]) -> PrefillResult | list[Any]:
    """The piece's result; for decode and step one result (StepResult, token) for each token."""
    if piece.way == "d":
        return [engine.decode(token) for token in part]
    if piece.way == "s":
        return [engine.step(token) for token in part]
    prefill = engine.prefill_batched if piece.way in "bBtT" else engine.prefill_per_token
    trace = Trace() if piece.way in "eEtT" else None
    return prefill(part, trace=trace, logits="all" if piece.way.isupper() else "last")


def _fed_otherwise(
    engine: Engine, walk: Walk, prompt: Sequence[int], want: Canonical
) -> Iterator[str]:
    """Feeds all pieces; yields what each returned that the canonical run did not."""
    start = 0
    for piece in walk.pieces:
        end = start + piece.tokens
        part = prompt[start:end]
        at = f"piece {piece.id} at {start}"
        result = _feed(engine, piece, part)
        if isinstance(result, PrefillResult):
            yield from _prefill_otherwise(result, piece, start, at, want)
            if result.fed_token != part[-1]:
                yield f"{at}: the kernels read token {result.fed_token}, not {part[-1]}"
            chunks = -(-piece.tokens // engine.chunk) if piece.way in "bBtT" else piece.tokens
            if (result.n_tokens, result.chunks, result.position) != (piece.tokens, chunks, end):
                yield f"{at}: {result.n_tokens} tokens in {result.chunks} flows to {end}"
        else:
            for place, step in enumerate(result, start):
                if piece.way == "s":
                    if step != want.tokens[place]:
                        yield f"{at}: token {step} at {place}, not {want.tokens[place]}"
                    continue
                yield from _rows_otherwise(step.tail.logits[None], place, at, want)
                yield from _tail_otherwise(step.tail, place, at, want)
        start = end
        if engine.position != end:
            yield f"{at}: position is {engine.position}, not {end}"


def _prefill_otherwise(
    result: PrefillResult, piece: Piece, start: int, at: str, want: Canonical
) -> Iterator[str]:
    rows = piece.tokens if piece.way.isupper() else 1
    if len(result.logits) != rows or result.logits_poisoned:
        yield f"{at}: {len(result.logits)} rows of logits, {result.logits_poisoned} unwritten"
    batched = any(route.startswith("matvec_batched") for route in result.routes)
    if batched != (piece.way in "bBtT"):
        yield f"{at}: batched products {'ran' if batched else 'never ran'}"
    last = start + piece.tokens - 1
    yield from _rows_otherwise(result.logits, last - rows + 1, at, want)
    yield from _tail_otherwise(result.tail, last, at, want)


def _rows_otherwise(logits: Array, first: int, at: str, want: Canonical) -> Iterator[str]:
    """`logits` (rows, V) against the canonical ones from position `first` on."""
    expected = np.stack(want.logits[first : first + len(logits)])
    if not same_bits(logits, expected):
        yield f"{at}: logits of {first} to {first + len(logits) - 1}: {_distance(logits, expected)}"


def _tail_otherwise(tail: TailRecord, position: int, at: str, want: Canonical) -> Iterator[str]:
    token = int(np.argmax(want.logits[position]))
    links = {
        "the canonical run's token": want.tokens[position],
        "the device's token": tail.device_token,
        "the staged token": tail.staged_token,
    }
    for name, got in links.items():
        if got != token:
            yield f"{at}: {name} is {got}, not {token}"
    if not tail.expected_stamp == tail.staged_stamp == tail.device_stamp:
        yield f"{at}: stamp {tail.staged_stamp} staged, step {tail.expected_stamp}"
    if not same_bits(tail.logits, want.logits[position]):
        yield f"{at}: the tail read other logits"


# --- what is left behind ------------------------------------------------------------------------


def kv_of(engine: Engine) -> Held:
    """Keys and values by name, each (position, KVH, D) in storage type."""
    return {
        f"{side} of layer {layer.index}": array
        for layer in engine.model.spec.layers
        if layer.owns_kv
        for side, array in zip("KV", engine.kv_contents(layer.index), strict=True)
    }


def states_of(engine: Engine) -> Held:
    """Recurrent states by name, float32."""
    return {
        f"{part} of layer {layer.index}": getattr(engine.recurrent_state(layer.index), part)
        for layer in engine.model.spec.layers
        if layer.delta_net is not None
        for part in ("memory", "tail")
    }


def _left_otherwise(engine: Engine, walk: Walk, want: Canonical) -> Iterator[str]:
    expected = want.kv(walk.length) | want.states[walk.length - 1]
    got = kv_of(engine) | states_of(engine)
    if not expected or expected.keys() != got.keys():
        yield "nothing was left behind to compare, or not the same"
    for name, array in expected.items():
        if not same_bits(got[name], array):
            yield f"{name}: {_distance(got[name], array)}"
    for tensor in _cache_tensors(engine):
        left = tensor.regions(walk.length, engine.context_length - walk.length)
        rest = [tensor.buffer.download((nbytes,), np.uint8, offset) for offset, nbytes in left]
        if not all((part == FILLS[walk.fill]).all() for part in rest):
            yield f"{tensor.buffer.name}: bytes behind position {walk.length} are not {walk.fill}"


def _fill(engine: Engine, fill: str) -> None:
    """Overwrites the empty cache; poison is what the reset itself must have left."""
    if fill == "poison":
        return
    for tensor in _cache_tensors(engine):
        engine.device.stream.fill(tensor.buffer.address, FILLS[fill], tensor.buffer.nbytes)


def _cache_tensors(engine: Engine) -> list[CacheTensor]:
    # What lies behind the position has no public reader, because no caller may rely on it.
    return [tensor for pair in engine._cache.tensors.values() for tensor in pair]


def _distance(got: Array, want: Array) -> str:
    """Where two arrays that differ in bits do so."""
    found = compare(got, want, 0.0)
    place = found.worst_difference
    return f"{found.reason() or 'other bits'}{'' if place is None else f', worst {place}'}"
