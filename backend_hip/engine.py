"""The engine: sequences on one device, in two prefill modes and decode.

Two prefill modes give the same answer. `prefill_per_token` replays the decode graph once per prompt
token; `prefill_batched` sends a chunk of tokens through the batched products in one flow. The host
owns the positions: every flow copies them to the device with its tokens, inside the graph too.
A prompt is fed to one of a static batch of sequences, each with a cache and a position of its own;
a decode step advances any set of them together, with the weights read once for all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from backend_hip.attention_shape import split_bucket
from backend_hip.delta_net import RecurrentState
from backend_hip.device import Device, Progress
from backend_hip.dispatch import Kernels
from backend_hip.engine_options import DEFAULT_CONTEXT, check_logits, check_options
from backend_hip.forward import Forward
from backend_hip.fused import FusedForward
from backend_hip.fused_batch import FusedBatch
from backend_hip.fusion import choose_fusion
from backend_hip.graphs import DecodeGraphs, GraphKey, GraphUse
from backend_hip.half_columns import half_columns
from backend_hip.kv_cache import DeviceCache
from backend_hip.matrix import default_chunk
from backend_hip.ops import Flow, Splits
from backend_hip.registry import PACKED_MOST, REGISTRY, Key, Registry
from backend_hip.requirements import requirements
from backend_hip.results import PrefillMode, PrefillPair, PrefillResult, StepResult, TailRecord
from backend_hip.sampler import NAN_TOKEN, POISON, SamplerTail
from backend_hip.scratch import Scratch
from backend_hip.sequences import Sequences
from backend_hip.state import FlowRow, StepInput
from backend_hip.switch import BatchedPrefill
from backend_hip.tuning import decode_path
from backend_hip.weights import DeviceWeights
from reference.model import Model, check_tokens
from reference.model.errors import DeviceError, InputError
from reference.model.trace import Trace

DEFAULT_MAX_COLS = 40
Judge = Callable[[PrefillPair], Any]
POISON_BITS = np.uint32(0xFFFFFFFF)


class Engine:
    """A static batch of sequences on one device.

    `sequences`: how many; what takes no sequence speaks of sequence 0. `max_cols`: columns per
    batched product, 1 to 64. `chunk`: prompt tokens a flow, default max_cols, 1,024 on path matrix.
    `judge` receives both results when `batched_prefill` is "validate"; what it returns is kept as
    `validation`. `fused` lets decode graphs use fused kernels; `fusion` says which, and why not.
    Raises Unsupported before anything runs when the registry lacks a kernel.
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
        sequences: int = 1,
        fused: bool = True,
        batched_prefill: BatchedPrefill = "on",
        judge: Judge | None = None,
        registry: Registry = REGISTRY,
        progress: Progress | None = None,
    ) -> None:
        spec = model.spec
        chunk = default_chunk(path, max_cols) if chunk is None else chunk
        check_options(spec, max_cols, chunk, sequences, context_length, (kv_type_k, kv_type_v))
        context = min(spec.context_length, context_length or DEFAULT_CONTEXT)
        if batched_prefill == "validate" and judge is None:
            raise InputError("engine: batched prefill is validate, expected a judge beside it")

        self.model, self.device, self.path = model, device, path
        self.max_cols, self.chunk = max_cols, min(chunk, context)
        self.batched_prefill = batched_prefill
        self.validation: Any = None  # the judge's word on the last prefill under "validate"
        self._judge = judge
        self._stamp = 0

        kv_types, kinds = f"{kv_type_k},{kv_type_v}", (path, kv_type_k, kv_type_v)
        keys = requirements(spec, model.weights, *kinds, sequences, device.architecture)
        batch = decode_path(path, sequences, device.architecture) == "matrix"
        known = (spec, model.weights, registry, kv_types, path)
        self.fusion = choose_fusion(*known, fused=fused, batch=batch)
        keys = list(dict.fromkeys([*keys, *self.fusion.keys]))
        self.kernels = Kernels(device, registry, keys, {"MAX_COLS": max_cols}, progress=progress)
        self.weights = DeviceWeights(model.weights, device, progress=progress)
        self._cache = DeviceCache(spec, device, (kv_type_k, kv_type_v), context, sequences)
        rows = max(self.chunk, sequences)
        self._scratch = Scratch(spec, device, rows, sequences, context)
        self._halves = half_columns(path, model.weights, device, rows)
        self._step = StepInput(device, rows)
        self._tail = SamplerTail(device, sequences)
        held = (self.weights, self._cache, self._scratch, self._tail)
        self._pass = Forward(model, device, *held, kv_types, sequences)
        shared = (spec, self.weights, self._cache, self._scratch, self._pass, kv_types)
        self._fused, self._fused_batch = FusedForward(*shared), FusedBatch(*shared)
        self._sequences = Sequences(spec, self._cache, self._pass.states, sequences)
        self._graphs = DecodeGraphs()

    @property
    def position(self) -> int:
        """Number of tokens that sequence 0 holds in the cache."""
        return self._sequences.positions[0]

    @property
    def positions(self) -> tuple[int, ...]:
        """Number of tokens in the cache by sequence."""
        return tuple(self._sequences.positions)

    @property
    def context_length(self) -> int:
        return self._cache.context_length

    def reset(self) -> None:
        """Forgets all sequences; what the cache held is overwritten with poison."""
        for sequence in range(len(self._sequences)):
            self._sequences.rewind(0, sequence)

    def prefill(self, tokens: Sequence[int], *, sequence: int = 0) -> PrefillResult:
        """The production entry: per-token, batched, or both compared, as the switch says.

        In validate mode the engine's state afterwards is that of the batched run alone.
        """
        if self.batched_prefill == "off":
            return self.prefill_per_token(tokens, sequence=sequence)
        if self.batched_prefill == "on":
            return self.prefill_batched(tokens, sequence=sequence)
        held = self._sequences
        held.require(sequence)
        start, states = held.positions[sequence], held.recurrent(sequence)
        per_token = self.prefill_per_token(tokens, sequence=sequence)
        expected = held.contents(sequence)
        held.rewind(start, sequence)
        held.restore(states, sequence)
        batched = self.prefill_batched(tokens, sequence=sequence)
        equal = expected == held.contents(sequence)
        assert self._judge is not None
        self.validation = self._judge(PrefillPair(per_token, batched, equal))
        return batched

    def prefill_per_token(
        self,
        tokens: Sequence[int],
        *,
        trace: Trace | None = None,
        logits: Literal["last", "all"] = "last",
        sequence: int = 0,
    ) -> PrefillResult:
        """Feeds a prompt one token at a time through the decode graph (eagerly when traced)."""
        ids = self._accept(tokens, sequence, trace)
        before = dict(self.kernels.routes)
        rows = []
        for index, token in enumerate(ids):
            want = logits == "all" or index == len(ids) - 1
            seen = self._write_step(self._sequences.following((token,), sequence))
            if trace is None:
                self._replay(1, seen, with_tail=want)
            else:
                self._step.queue_copy(1)
                self._pass.run(self._decode_flow(1, seen), int(want), trace)
            self._sequences.advance(sequence, 1)
            if want:
                rows.append(self._scratch.logits.download(1))
        return self._result("per-token", ids, len(ids), rows, before, sequence)

    def prefill_batched(
        self,
        tokens: Sequence[int],
        *,
        trace: Trace | None = None,
        logits: Literal["last", "all"] = "last",
        sequence: int = 0,
    ) -> PrefillResult:
        """Feeds a prompt in chunks, each weight row read once per chunk and group of columns."""
        ids = self._accept(tokens, sequence, trace)
        before = dict(self.kernels.routes)
        rows = []
        starts = range(0, len(ids), self.chunk)
        for start in starts:
            part = ids[start : start + self.chunk]
            last = start + len(part) == len(ids)
            want = len(part) if logits == "all" else int(last)
            self._write_step(self._sequences.following(part, sequence))
            self._step.queue_copy(len(part))
            result = self._pass.run(self._flow(len(part), batched=True), want, trace)
            self._sequences.advance(sequence, len(part))
            if want:
                rows.append(result.download(want))
        return self._result("batched", ids, len(starts), rows, before, sequence)

    def decode(self, token: int, *, sequence: int = 0) -> StepResult:
        """Feeds one token through the decode graph and reads every link of the tail back."""
        return self.decode_batch([token], [sequence])[0]

    def decode_batch(
        self, tokens: Sequence[int], sequences: Sequence[int] | None = None
    ) -> list[StepResult]:
        """One token for each of several sequences, by default all, in one step; the tail as decode.

        `routes` of each result are those of the whole step.
        """
        before = dict(self.kernels.routes)
        chosen = self._advance(tokens, sequences)
        launched = self.kernels.launches_since(before)
        results = []
        for row, (sequence, tail) in enumerate(zip(chosen, self._tails(len(chosen)), strict=True)):
            position, fed = self.positions[sequence], self._step.fed_token(row)
            results.append(StepResult(tail.staged_token, tail, fed, position, launched))
        return results

    def step(self, token: int, *, sequence: int = 0) -> int:
        """The production decode: one graph replay, the next token read from staging.

        Reads nothing else back. DeviceError when staging does not hold a token of this very step.
        """
        return self.step_batch([token], [sequence])[0]

    def step_batch(
        self, tokens: Sequence[int], sequences: Sequence[int] | None = None
    ) -> list[int]:
        """The production decode of several sequences, by default all; their next tokens."""
        chosen = self._advance(tokens, sequences)
        emitted = []
        for row in range(len(chosen)):
            staged, stamp = self._tail.staged(row)
            if stamp != self._stamp or staged < 0:
                raise DeviceError(
                    f"sampler tail: staging holds token {staged} of step {stamp}, expected a token "
                    f"of step {self._stamp} ({POISON} was there before, {NAN_TOKEN}: a NaN logit)"
                )
            emitted.append(staged)
        return emitted

    def run_tail(self, logits: NDArray[np.float32]) -> list[TailRecord]:
        """The sampler tail alone, on logits (rows, V) of the caller's: nothing else is touched.

        What argmax does with ties, NaN and last elements can be shown only with chosen logits.
        """
        held = self._scratch.logits
        check_logits(logits, held.width, len(self._sequences))
        rows = len(logits)
        seen = self._write_step([FlowRow(0, 0, sequence=row) for row in range(rows)])
        self._step.queue_copy(rows)
        held.buffer.upload(np.ascontiguousarray(logits))
        self._tail.queue(self._decode_flow(rows, seen), held.row(0), held.width)
        self.device.stream.synchronise()
        return self._tails(rows)

    def kv_contents(self, layer: int, sequence: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values held for one layer, each (position, KVH, D) in storage type."""
        return self._sequences.kv(layer, sequence)

    def recurrent_state(self, layer: int, sequence: int = 0) -> RecurrentState:
        """The state of a delta net layer; its arrays are read from the device when asked for."""
        return self._sequences.state(layer, sequence)

    def contents(self, sequence: int = 0) -> list[bytes]:
        """All that a sequence has left behind, as bytes: KV of each layer, recurrent states."""
        return self._sequences.contents(sequence)

    def close(self) -> None:
        """Frees all device memory. The engine can't be used afterwards."""
        self.device.stream.synchronise()
        self._graphs.free()
        for owner in (self._pass, self._tail, self._step, self._scratch, self._cache, self._halves):
            if owner is not None:
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

    def _accept(self, tokens: Sequence[int], sequence: int, trace: Trace | None) -> tuple[int, ...]:
        ids = tuple(int(token) for token in tokens)
        check_tokens(ids, self.model.spec, self._sequences.room(sequence))
        if trace is not None:
            trace.tokens += ids
        self._scratch.poison_logits()
        return ids

    def _flow(
        self, tokens: int, *, batched: bool, sequences: int = 1, splits: Splits | None = None
    ) -> Flow:
        shared = (self.path, self.max_cols, sequences, splits, self._halves)
        return Flow(self.kernels, self._step.buffer, tokens, batched, *shared)

    def _decode_flow(self, rows: int, seen: int) -> Flow:
        """A flow of one token each of `rows` sequences, which see at most `seen` positions."""
        count = split_bucket(seen, self.context_length)
        splits = Splits(count, self._scratch.partials)
        flow = self._flow(rows, batched=rows > 1, sequences=rows, splits=splits)
        return replace(flow, path=decode_path(self.path, rows, self.device.architecture))

    def _write_step(self, rows: Sequence[FlowRow]) -> int:
        """The host side of a flow, after all queued before; positions that its rows see at most."""
        self.device.stream.synchronise()
        self._stamp += 1
        self._tail.arm()
        self._step.write(self._stamp, rows)
        return 1 + max(row.position for row in rows)

    def _advance(self, tokens: Sequence[int], sequences: Sequence[int] | None) -> Sequence[int]:
        """One token each through the decode graph; waits until the results have been staged."""
        chosen = range(len(self._sequences)) if sequences is None else sequences
        if len(tokens) != len(chosen) or not tokens or len(set(chosen)) != len(chosen):
            raise InputError(
                f"engine: {len(tokens)} tokens for sequences {list(chosen)}, expected one for each "
                "of at least one, and each sequence once"
            )
        rows: list[FlowRow] = []
        for token, sequence in zip(tokens, chosen, strict=True):
            check_tokens([token], self.model.spec, self._sequences.room(sequence))
            rows += self._sequences.following([int(token)], sequence)
        self._scratch.poison_logits()
        self._replay(len(rows), self._write_step(rows), with_tail=True)
        for sequence in chosen:
            self._sequences.advance(sequence, 1)
        self.device.stream.synchronise()
        return chosen

    def _replay(self, rows: int, seen: int, *, with_tail: bool) -> None:
        """Queues a decode flow as a graph, with or without LM head and sampler tail."""
        flow = self._decode_flow(rows, seen)
        assert flow.splits is not None

        def queue() -> None:
            self._step.queue_copy(rows)
            if flow.path == "matrix" and self.fusion.batch == "on" and rows <= PACKED_MOST:
                self._fused_batch.run(flow, with_tail=with_tail)
            elif rows == 1 and self.fusion.one == "on":
                self._fused.run(flow, with_tail=with_tail)
            else:
                self._pass.run(flow, rows if with_tail else 0, None)

        self._graphs.replay(self.kernels, GraphKey(rows, with_tail, flow.splits.count), queue)

    def _tails(self, rows: int) -> list[TailRecord]:
        """Every link of the tail of a decode flow, by row."""
        held, count, stamp = self._scratch.logits.buffer, self.model.spec.vocab_size, self._stamp
        return [self._tail.record(held, 4 * row * count, count, stamp, row) for row in range(rows)]

    @property
    def graph_use(self) -> GraphUse:
        """How often decode steps found their graph, and what capturing the others took."""
        return self._graphs.use

    def _result(
        self,
        mode: PrefillMode,
        ids: tuple[int, ...],
        chunks: int,
        rows: list[NDArray[np.float32]],
        before: Mapping[Key, int],
        sequence: int,
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
            routes=self.kernels.launches_since(before),
            position=self.positions[sequence],
            logits_poisoned=int((tail.logits.view(np.uint32) == POISON_BITS).sum()),
        )
