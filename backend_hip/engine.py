"""The engine: the forward pass on the device, in the same order as reference/forward.py.

Two prefill modes give the same answer. `prefill_per_token` replays the decode graph once per prompt
token; `prefill_batched` sends a chunk of tokens through the batched products in one flow. The host
owns the position: every flow copies it to the device with its tokens, inside the graph too.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from backend_hip import ops
from backend_hip.device import Device, Progress
from backend_hip.dispatch import CountedGraph, Kernels
from backend_hip.ops import Flow, Values
from backend_hip.registry import KV_TYPES, MAX_COLS_LIMIT, REGISTRY, Registry, requirements
from backend_hip.results import PrefillMode, PrefillPair, PrefillResult, StepResult
from backend_hip.sampler import SamplerTail
from backend_hip.state import DeviceCache, RopeTables, Scratch, StepInput
from backend_hip.switch import BatchedPrefill
from backend_hip.weights import DeviceWeights
from reference.model import Model, check_tokens
from reference.model.errors import DeviceError, InputError, Unsupported
from reference.model.trace import LOGITS, Trace

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
        head_sizes = {layer.head_size for layer in spec.layers}
        if len(head_sizes) > 1:
            raise Unsupported(f"engine: head sizes are {sorted(head_sizes)}; supported: one size")

        self.model, self.device, self.path = model, device, path
        self.max_cols, self.chunk = max_cols, min(chunk, context)
        self.batched_prefill = batched_prefill
        self.validation: Any = None  # the judge's word on the last prefill under "validate"
        self._judge = judge
        self._kv_types = f"{kv_type_k},{kv_type_v}"
        self._position = 0
        self._stamp = 0
        self._graphs: dict[bool, CountedGraph] = {}

        keys = requirements(spec, model.weights, path, kv_type_k, kv_type_v)
        parameters = {"MAX_COLS": max_cols, "HEAD_SIZE": head_sizes.pop()}
        self.kernels = Kernels(device, registry, keys, parameters, progress=progress)
        self.weights = DeviceWeights(model.weights, device, progress=progress)
        factors = model.weights.top.get("rope_freqs")
        self._tables = RopeTables(
            spec, device, None if factors is None else factors.vector(), context
        )
        self._cache = DeviceCache(spec, device, (kv_type_k, kv_type_v), context)
        self._scratch = Scratch(spec, device, self.chunk)
        self._step = StepInput(device, self.chunk)
        self._tail = SamplerTail(device)

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
        start = self._position
        per_token = self.prefill_per_token(tokens)
        expected = [self.kv_contents(layer.index) for layer in self.model.spec.layers]
        self._rewind(start)
        batched = self.prefill_batched(tokens)
        got = [self.kv_contents(layer.index) for layer in self.model.spec.layers]
        equal = all(
            a.tobytes() == b.tobytes()
            for want, have in zip(expected, got, strict=True)
            for a, b in zip(want, have, strict=True)
        )
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
                self._forward(self._flow(1, batched=False), int(want), trace)
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
            result = self._forward(self._flow(len(part), batched=True), want, trace)
            self._position += len(part)
            if want:
                rows.append(result.download(want))
        return self._result("batched", ids, len(starts), rows, before)

    def decode(self, token: int) -> StepResult:
        """Feeds one token through the decode graph and reads every link of the tail back."""
        (token,) = self._accept([token], None)
        self.step(token)
        tail = self._tail.record(
            self._scratch.logits.buffer, 0, self.model.spec.vocab_size, self._stamp
        )
        return StepResult(tail.staged_token, tail, self._step.fed_token(0), self._position)

    def step(self, token: int) -> int:
        """The production decode: one graph replay, the next token read from staging.

        Unlike `decode` it reads nothing else back.
        """
        check_tokens([token], self.model.spec, self.context_length - self._position)
        self._write_step((token,))
        self.kernels.replay(self._graph(with_tail=True))
        self._position += 1
        self.device.stream.synchronise()
        return self._tail.staged()[0]

    def kv_contents(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values held for one layer, each (position, KVH, D) in storage type."""
        return self._cache.contents(layer, self._position)

    def close(self) -> None:
        """Frees all device memory. The engine can't be used afterwards."""
        self.device.stream.synchronise()
        for graph in self._graphs.values():
            graph.free()
        self._graphs.clear()
        for owner in (self._tail, self._step, self._scratch, self._cache, self._tables):
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

    # --- the forward pass ---------------------------------------------------------------------

    def _forward(self, flow: Flow, want_rows: int, trace: Trace | None) -> Values:
        """Queues one flow through the model; logits of its last `want_rows` tokens and the tail."""
        spec, weights, cache, s = self.model.spec, self.weights, self._cache, self._scratch
        epsilon, kv_types = spec.rms_epsilon, self._kv_types

        def record(name: str, values: Values, *shape: int, rows: int = flow.tokens) -> None:
            if trace is not None:
                trace.record(name, values.download(rows, *shape))

        ops.embed(flow, weights.top["token_embd"], s.x, spec.embedding_scale)
        record("inp_embd", s.x)

        for layer in spec.layers:
            i, w = layer.index, weights.layers[layer.index]
            heads = (layer.head_count, layer.head_size)
            kv_heads = (layer.head_count_kv, layer.head_size)

            ops.rms_norm(flow, s.x, w["attn_norm"], s.normed, epsilon)
            record(f"attn_norm-{i}", s.normed)
            ops.linear(flow, s.normed, w["attn_q"], s.q)
            record(f"Qcur-{i}", s.q, *heads)
            ops.linear(flow, s.normed, w["attn_k"], s.k)
            record(f"Kcur-{i}", s.k, *kv_heads)
            ops.linear(flow, s.normed, w["attn_v"], s.v)
            record(f"Vcur-{i}", s.v, *kv_heads)
            if spec.qk_norm:
                ops.rms_norm(flow, s.q, w["attn_q_norm"], s.q, epsilon)
                record(f"Qcur_normed-{i}", s.q, *heads)
                ops.rms_norm(flow, s.k, w["attn_k_norm"], s.k, epsilon)
                record(f"Kcur_normed-{i}", s.k, *kv_heads)
            cosine, sine = self._tables[layer.rope]
            ops.rope(flow, s.q, cosine, sine, layer, layer.rope.pairing)
            record(f"Qcur_pos-{i}", s.q, *heads)
            ops.rope(flow, s.k, cosine, sine, layer, layer.rope.pairing)
            record(f"Kcur_pos-{i}", s.k, *kv_heads)
            keys, values = cache.keys[i], cache.values[i]
            ops.kv_write(flow, s.k, s.v, keys, values, kv_types)
            ops.attention(flow, s.q, keys, values, s.mixed, layer, spec.attention_scale, kv_types)
            record(f"kqv_out-{i}", s.mixed)
            ops.linear(flow, s.mixed, w["attn_output"], s.out)
            record(f"attn_out-{i}", s.out)
            if spec.post_norms:
                ops.rms_norm(flow, s.out, w["post_attention_norm"], s.out, epsilon)
                record(f"attn_post_norm-{i}", s.out)

            ops.add_rms_norm(flow, s.x, s.out, w["ffn_norm"], s.normed, epsilon)
            record(f"ffn_inp-{i}", s.x)
            record(f"ffn_norm-{i}", s.normed)
            ops.linear(flow, s.normed, w["ffn_gate"], s.gate)
            record(f"ffn_gate-{i}", s.gate)
            ops.linear(flow, s.normed, w["ffn_up"], s.up)
            record(f"ffn_up-{i}", s.up)
            ops.gated(flow, s.gate, s.up, s.gate, spec.activation)
            record(f"ffn_act-{i}", s.gate)
            ops.linear(flow, s.gate, w["ffn_down"], s.out)
            record(f"ffn_out-{i}", s.out)
            if spec.post_norms:
                ops.rms_norm(flow, s.out, w["post_ffw_norm"], s.out, epsilon)
                record(f"ffn_post_norm-{i}", s.out)
            ops.add(flow, s.x, s.out)
            record(f"l_out-{i}", s.x)

        if not want_rows:
            return s.logits
        last = replace(flow, tokens=want_rows)
        logits = s.logits if want_rows == 1 else s.all_logits()
        ops.rms_norm(
            last,
            s.x.from_row(flow.tokens - want_rows),
            weights.top["output_norm"],
            s.normed,
            epsilon,
        )
        record("result_norm", s.normed, rows=want_rows)
        ops.linear(last, s.normed, weights.lm_head, logits)
        record(LOGITS, logits, rows=want_rows)
        self._tail.queue(flow, logits.row(want_rows - 1), spec.vocab_size)
        return logits

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

    def _graph(self, *, with_tail: bool) -> CountedGraph:
        """The captured one-token flow, with or without LM head and sampler tail."""
        if with_tail not in self._graphs:
            with self.kernels.capture() as captured:
                self._step.queue_copy(1)
                self._forward(self._flow(1, batched=False), int(with_tail), None)
            self._graphs[with_tail] = captured[0]
        return self._graphs[with_tail]

    def _rewind(self, position: int) -> None:
        self._cache.poison(position)
        self._position = position

    def _result(
        self,
        mode: PrefillMode,
        ids: tuple[int, ...],
        chunks: int,
        rows: list[NDArray[np.float32]],
        before: dict[Any, int],
    ) -> PrefillResult:
        logits = np.concatenate(rows, axis=0)
        in_last_flow = 1 if mode == "per-token" else len(ids) - (chunks - 1) * self.chunk
        held = self._scratch.logits
        offset = 0
        if len(rows[-1]) > 1:
            held, offset = self._scratch.all_logits(), (len(rows[-1]) - 1) * held.width * 4
        tail = self._tail.record(held.buffer, offset, self.model.spec.vocab_size, self._stamp)
        ran = {
            " ".join(part for part in key if part): count - before.get(key, 0)
            for key, count in self.kernels.routes.items()
            if count > before.get(key, 0)
        }
        return PrefillResult(
            mode=mode,
            path=self.path,
            n_tokens=len(ids),
            chunks=chunks,
            logits=logits,
            tail=tail,
            fed_token=self._step.fed_token(in_last_flow - 1),
            routes=ran,
            position=self._position,
            logits_poisoned=int((tail.logits.view(np.uint32) == POISON_BITS).sum()),
        )
