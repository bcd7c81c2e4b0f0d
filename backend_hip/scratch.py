"""Activation rows for one chunk: every value of the forward pass has a buffer with its name."""

from backend_hip.attention_shape import PARTIAL_EXTRA, splits_for
from backend_hip.device import Buffer, Device
from backend_hip.experts import ExpertScratch, Routing
from backend_hip.ops import Values
from reference.model.spec import ModelSpec


class Scratch:
    """Buffers as wide as the widest layer; `width(...)` gives the view that a layer needs."""

    def __init__(
        self, spec: ModelSpec, device: Device, rows: int, sequences: int, context: int
    ) -> None:
        self._device = device
        self._rows = rows
        self._buffers: list[Buffer] = []
        layers = spec.layers
        width = spec.embedding_length
        queries = max(layer.head_count * layer.head_size for layer in layers)
        keys = max(layer.head_count_kv * layer.head_size for layer in layers)
        nets = [layer.delta_net for layer in layers if layer.delta_net is not None]
        experts = [layer.experts for layer in layers if layer.experts is not None]
        inner = max(
            *(layer.feed_forward_length for layer in layers),
            *(shared.shared_length or 0 for shared in experts),
            1,
        )
        self.x = self._values("residual stream", width)
        self.normed = self._values("normed", width)
        self.q = self._values("queries", queries)
        self.k = self._values("keys", keys)
        self.v = self._values("values", keys)
        self.heads = self._values("queries, keys and values of one token", queries + 2 * keys, 1)
        self.mixed = self._values("attention result", queries)
        self.out = self._values("block output", width)
        self.gate = self._values("gate", inner)
        self.up = self._values("up", inner)
        self.logits = self._values("logits", spec.vocab_size, sequences)
        self._all_logits: Values | None = None
        splits = splits_for(context)
        partial = max(
            layer.head_count * (layer.head_size + PARTIAL_EXTRA)
            for layer in layers
            if layer.delta_net is None
        )
        self.partials = self._buffer("attention partials", sequences * splits * partial)
        if spec.gated_attention:
            self.both = self._values("queries and gates", 2 * queries)
            self.attention_gate = self._values("attention gates", queries)
        if nets:
            self.qkv = self._values("q, k, v channels", max(net.channels for net in nets))
            self.convolved = self._values("convolved", max(net.channels for net in nets))
            self.z = self._values("output gate", max(net.value_length for net in nets))
            self.delta = self._values("delta result", max(net.value_length for net in nets))
            self.unit_q = self._values("unit queries", max(net.key_length for net in nets))
            self.unit_k = self._values("unit keys", max(net.key_length for net in nets))
            heads = max(net.value_heads for net in nets)
            self.alpha, self.beta, self.decay = (
                self._values(name, heads) for name in ("alpha", "beta", "log decay")
            )
        if experts:
            used = max(spec.used for spec in experts)
            count = max(spec.count for spec in experts)
            expert_inner = max(spec.feed_forward_length for spec in experts)
            self.routing = Routing(
                self._values("router logits", count),
                self._buffer("chosen experts", rows * used),
                self._values("expert weights", used),
                self._buffer("expert offsets", count + 1),
                self._buffer("pairs by expert", rows * used),
            )
            self.experts = ExpertScratch(
                self._values("experts' gate", expert_inner, rows * used),
                self._values("experts' up", expert_inner, rows * used),
                self._values("experts' output", width, rows * used),
            )
            self.routed = self._values("routed sum", width)
            self.router_input = self._values("router input", width)
            self.shared_gate = self._values("shared expert's gate", 1)
        if spec.per_layer_length:
            total = spec.per_layer_length * spec.layer_count
            self.per_layer = self._values("per-layer inputs", total)
            self.per_layer_table = self._values("per-layer embeddings", total)
            self.per_layer_gate = self._values("per-layer gate", spec.per_layer_length)

    def _buffer(self, name: str, elements: int) -> Buffer:
        buffer = Buffer(self._device, elements * 4, name)
        self._buffers.append(buffer)
        return buffer

    def _values(self, name: str, width: int, rows: int | None = None) -> Values:
        count = self._rows if rows is None else rows
        return Values(self._buffer(name, count * width), width, count)

    def all_logits(self) -> Values:
        """Room for a chunk's logits at every position, made when first asked for."""
        if self._all_logits is None:
            self._all_logits = self._values("all logits", self.logits.width)
        return self._all_logits

    def poison_logits(self) -> None:
        """Overwrites all logits, so that one that a flow leaves unwritten shows."""
        for values in (self.logits, self._all_logits):
            if values is not None:
                values.buffer.poison()

    def free(self) -> None:
        while self._buffers:
            self._buffers.pop().free()
