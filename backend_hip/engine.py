"""The engine: one sequence on one device, in two prefill modes and decode.

Two prefill modes give the same answer. `prefill_per_token` replays the decode graph once per prompt
token; `prefill_batched` sends a chunk of tokens through the batched products in one flow. The host
owns the position: every flow copies it to the device with its tokens, inside the graph too.
"""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from backend_hip.delta_net import RecurrentState
from backend_hip.device import Device, Progress
from backend_hip.dispatch import CountedGraph, Kernels, route_name
from backend_hip.forward import Forward
from backend_hip.ops import Flow
from backend_hip.registry import KV_TYPES, MAX_COLS_LIMIT, REGISTRY, Key, Registry, requirements
from backend_hip.results import PrefillMode, PrefillPair, PrefillResult, StepResult, TailRecord
from backend_hip.sampler import NAN_TOKEN, POISON, SamplerTail
from backend_hip.scratch import Scratch
from backend_hip.state import DeviceCache, StepInput
from backend_hip.switch import BatchedPrefill
from backend_hip.weights import DeviceWeights
from reference.model import Model, check_tokens
from reference.model.errors import DeviceError, InputError, Unsupported
from reference.model.trace import Trace

DEFAULT_MAX_COLS = 40
DEFAULT_CONTEXT = 4096  # positions, where the model allows more; bounds the cache's memory

Judge = Callable[[PrefillPair], Any]
POISON_BITS = np.uint32(0xFFFFFFFF)


class Engine:
    """One sequence on one device.

    `max_cols`: columns per batched product, 1 to 64. `chunk`: prompt tokens per flow, default
    max_cols. `judge` receives both results when `batched_prefill` is "validate"; what it returns is
    kept as `validation`. Raises Unsupported before anything runs when the registry lacks a kernel.
    """

    def __init__(
        self,
        model: Model,
        device: Device,
        *,
        max_cols: int = DEFAULT_MAX_COLS,
        chunk: int | None = None,
        path: str = "kparallel",
        kv_type_k: str = "f16",
        kv_type_v: str = "f16",
        context_length: int | None = None,
        batched_prefill: BatchedPrefill = "on",
        judge: Judge | None = None,
        registry: Registry = REGISTRY,
        progress: Progress | None = None,
    ) -> None:
        spec = model.spec
        if not 1 <= max_cols <= MAX_COLS_LIMIT:
            raise InputError(f"engine: max-cols is {max_cols}, expected 1 to {MAX_COLS_LIMIT}")
        chunk = max_cols if chunk is None else chunk
        if chunk < 1:
            raise InputError(f"engine: chunk is {chunk} tokens, expected at least 1")
        context = min(spec.context_length, context_length or DEFAULT_CONTEXT)
        if context_length is not None and not 1 <= context_length <= spec.context_length:
            raise InputError(
                f"engine: context length is {context_length}, expected 1 to {spec.context_length} "
                "because the model was made for that many positions"
            )
        for name, kind in (("kv-type-k", kv_type_k), ("kv-type-v", kv_type_v)):
            if kind not in KV_TYPES:
                raise Unsupported(f"engine: {name} is {kind}; supported: {', '.join(KV_TYPES)}")
        if batched_prefill == "validate" and judge is None:
            raise InputError("engine: batched prefill is validate, expected a judge beside it")

        self.model, self.device, self.path = model, device, path
        self.max_cols, self.chunk = max_cols, min(chunk, context)
        self.batched_prefill = batched_prefill
        self.validation: Any = None  # the judge's word on the last prefill under "validate"
        self._judge = judge
        self._position = 0
        self._stamp = 0
        self._graphs: dict[bool, CountedGraph] = {}

        kv_types = f"{kv_type_k},{kv_type_v}"
        keys = requirements(spec, model.weights, path, kv_type_k, kv_type_v)
        parameters = {"MAX_COLS": max_cols}
        self.kernels = Kernels(device, registry, keys, parameters, progress=progress)
        self.weights = DeviceWeights(model.weights, device, progress=progress)
        self._cache = DeviceCache(spec, device, (kv_type_k, kv_type_v), context)
        self._scratch = Scratch(spec, device, self.chunk)
        self._step = StepInput(device, self.chunk)
        self._tail = SamplerTail(device)
        self._pass = Forward(
            model, device, self.weights, self._cache, self._scratch, self._tail, kv_types
        )

    # --- what callers use ---------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Number of tokens in the cache. This object is its only owner."""
        return self._position

    @property
    def context_length(self) -> int:
        return self._cache.context_length

    def reset(self) -> None:
        """Forgets the sequence; what the cache held is overwritten with poison."""
        self._rewind(0)

    def prefill(self, tokens: Sequence[int]) -> PrefillResult:
        """The production entry: per-token, batched, or both compared, as the switch says.

        In validate mode the engine's state afterwards is that of the batched run alone.
        """
        if self.batched_prefill == "off":
            return self.prefill_per_token(tokens)
        if self.batched_prefill == "on":
            return self.prefill_batched(tokens)
        start, states = self._position, self._recurrent_contents()
        per_token = self.prefill_per_token(tokens)
        expected = self._contents()
        self._rewind(start)
        for layer, (memory, tail) in states.items():
            self._pass.states[layer].restore(memory, tail)
        batched = self.prefill_batched(tokens)
        equal = expected == self._contents()
        assert self._judge is not None
        self.validation = self._judge(PrefillPair(per_token, batched, equal))
        return batched

    def prefill_per_token(
        self,
        tokens: Sequence[int],
        *,
        trace: Trace | None = None,
        logits: Literal["last", "all"] = "last",
    ) -> PrefillResult:
        """Feeds a prompt one token at a time through the decode graph (eagerly when traced)."""
        ids = self._accept(tokens, trace)
        before = dict(self.kernels.routes)
        rows = []
        for index, token in enumerate(ids):
            want = logits == "all" or index == len(ids) - 1
            self._write_step((token,))
            if trace is None:
                self.kernels.replay(self._graph(with_tail=want))
            else:
                self._step.queue_copy(1)
                self._pass.run(self._flow(1, batched=False), int(want), trace)
            self._position += 1
            if want:
                rows.append(self._scratch.logits.download(1))
        return self._result("per-token", ids, len(ids), rows, before)

    def prefill_batched(
        self,
        tokens: Sequence[int],
        *,
        trace: Trace | None = None,
        logits: Literal["last", "all"] = "last",
    ) -> PrefillResult:
        """Feeds a prompt in chunks, each weight row read once per chunk and group of columns."""
        ids = self._accept(tokens, trace)
        before = dict(self.kernels.routes)
        rows = []
        starts = range(0, len(ids), self.chunk)
        for start in starts:
            part = ids[start : start + self.chunk]
            last = start + len(part) == len(ids)
            want = len(part) if logits == "all" else int(last)
            self._write_step(part)
            self._step.queue_copy(len(part))
            result = self._pass.run(self._flow(len(part), batched=True), want, trace)
            self._position += len(part)
            if want:
                rows.append(result.download(want))
        return self._result("batched", ids, len(starts), rows, before)

    def decode(self, token: int) -> StepResult:
        """Feeds one token through the decode graph and reads every link of the tail back."""
        (token,) = self._accept([token], None)
        before = dict(self.kernels.routes)
        self._advance(token)
        tail = self._tail.record(
            self._scratch.logits.buffer, 0, self.model.spec.vocab_size, self._stamp
        )
        return StepResult(
            tail.staged_token,
            tail,
            self._step.fed_token(0),
            self._position,
            self._launches_since(before),
        )

    def step(self, token: int) -> int:
        """The production decode: one graph replay, the next token read from staging.

        Reads nothing else back. DeviceError when staging does not hold a token of this very step.
        """
        check_tokens([token], self.model.spec, self.context_length - self._position)
        self._advance(token)
        staged, stamp = self._tail.staged()
        if stamp != self._stamp or staged < 0:
            raise DeviceError(
                f"sampler tail: staging holds token {staged} of step {stamp}, expected a token of "
                f"step {self._stamp} ({POISON} is what was there before, {NAN_TOKEN} a NaN logit)"
            )
        return staged

    def run_tail(self, logits: NDArray[np.float32]) -> TailRecord:
        """The sampler tail alone, on logits (V,) of the caller's: nothing else is touched.

        What argmax does with ties, NaN and last elements can be shown only with chosen logits.
        """
        vocabulary = self.model.spec.vocab_size
        if logits.shape != (vocabulary,) or logits.dtype != np.float32:
            raise InputError(
                f"engine: logits are {logits.dtype} {logits.shape}, expected float32 "
                f"({vocabulary},)"
            )
        held = self._scratch.logits
        self._write_step((0,))
        self._step.queue_copy(1)
        held.buffer.upload(np.ascontiguousarray(logits))
        self._tail.queue(self._flow(1, batched=False), held.row(0), vocabulary)
        self.device.stream.synchronise()
        return self._tail.record(held.buffer, 0, vocabulary, self._stamp)

    def kv_contents(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values held for one layer, each (position, KVH, D) in storage type."""
        return self._cache.contents(layer, self._position)

    def recurrent_state(self, layer: int) -> RecurrentState:
        """The state of a delta net layer; its arrays are read from the device when asked for."""
        return self._pass.states[layer]

    def close(self) -> None:
        """Frees all device memory. The engine can't be used afterwards."""
        self.device.stream.synchronise()
        for graph in self._graphs.values():
            graph.free()
        self._graphs.clear()
        for owner in (self._pass, self._tail, self._step, self._scratch, self._cache):
            owner.free()
        self.weights.free()
        self.kernels.unload()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        # After a device error freeing fails too and would hide the error that matters.
        if not isinstance(error, DeviceError):
            self.close()

    # --- bookkeeping --------------------------------------------------------------------------

    def _accept(self, tokens: Sequence[int], trace: Trace | None) -> tuple[int, ...]:
        ids = tuple(int(token) for token in tokens)
        check_tokens(ids, self.model.spec, self.context_length - self._position)
        if trace is not None:
            trace.tokens += ids
        self._scratch.poison_logits()
        return ids

    def _flow(self, tokens: int, *, batched: bool) -> Flow:
        return Flow(self.kernels, self._step.buffer, tokens, batched, self.path, self.max_cols)

    def _write_step(self, part: Sequence[int]) -> None:
        """Prepares the host side of a flow, after everything queued before has left it alone."""
        self.device.stream.synchronise()
        self._stamp += 1
        self._tail.arm()
        self._step.write(self._position, self._stamp, part)

    def _advance(self, token: int) -> None:
        """One token through the decode graph; waits until its result has been staged."""
        self._write_step((token,))
        self.kernels.replay(self._graph(with_tail=True))
        self._position += 1
        self.device.stream.synchronise()

    def _graph(self, *, with_tail: bool) -> CountedGraph:
        """The captured one-token flow, with or without LM head and sampler tail."""
        if with_tail not in self._graphs:
            with self.kernels.capture() as captured:
                self._step.queue_copy(1)
                self._pass.run(self._flow(1, batched=False), int(with_tail), None)
            self._graphs[with_tail] = captured[0]
        return self._graphs[with_tail]

    def _rewind(self, position: int) -> None:
        """Back to `position` of the cache; recurrent states can only go back to their start."""
        self._cache.poison(position)
        for state in self._pass.states.values():
            state.reset()
        self._position = position

    def _recurrent_contents(self) -> dict[int, tuple[NDArray[Any], NDArray[Any]]]:
        return {layer: (state.memory, state.tail) for layer, state in self._pass.states.items()}

    def _contents(self) -> list[bytes]:
        """All that the sequence has left behind, as bytes: KV of each layer, recurrent states."""
        kv = [
            array.tobytes()
            for layer in self.model.spec.layers
            if layer.owns_kv
            for array in self.kv_contents(layer.index)
        ]
        states = self._recurrent_contents().values()
        return [*kv, *(array.tobytes() for pair in states for array in pair)]

    def _launches_since(self, before: Mapping[Key, int]) -> dict[str, int]:
        """Launches per registry row after `before` was copied from the counters."""
        return {
            route_name(key): count - before.get(key, 0)
            for key, count in self.kernels.routes.items()
            if count > before.get(key, 0)
        }

    def _result(
        self,
        mode: PrefillMode,
        ids: tuple[int, ...],
        chunks: int,
        rows: list[NDArray[np.float32]],
        before: Mapping[Key, int],
    ) -> PrefillResult:
        logits = np.concatenate(rows, axis=0)
        in_last_flow = 1 if mode == "per-token" else len(ids) - (chunks - 1) * self.chunk
        held = self._scratch.logits
        offset = 0
        if len(rows[-1]) > 1:
            held, offset = self._scratch.all_logits(), (len(rows[-1]) - 1) * held.width * 4
        tail = self._tail.record(held.buffer, offset, self.model.spec.vocab_size, self._stamp)
        return PrefillResult(
            mode=mode,
            path=self.path,
            n_tokens=len(ids),
            chunks=chunks,
            logits=logits,
            tail=tail,
            fed_token=self._step.fed_token(in_last_flow - 1),
            routes=self._launches_since(before),
            position=self._position,
            logits_poisoned=int((tail.logits.view(np.uint32) == POISON_BITS).sum()),
        )
