"""GGUF metadata to ModelSpec: every key is read here or refused by name."""

import math

from reference.model.architectures import ARCHITECTURES, Architecture
from reference.model.errors import InputError, Unsupported
from reference.model.gguf import GGUFFile
from reference.model.metadata_keys import MetadataKeys
from reference.model.spec import (
    DeltaNetSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
    ValueSource,
    YarnSpec,
)

# Gemma 3 27B is the one size whose query scale follows width / heads instead of the head size;
# llama.cpp recognises it by its number of blocks (src/models/gemma3.cpp).
_GEMMA3_27B_BLOCKS = 62
_SLIDING_ROPE_BASE = 10000.0
# Written by the converter for other families; llama.cpp reads none of them for these.
_YARN_KEYS_WITHOUT_EFFECT = (
    "rope.scaling.finetuned",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
)


def read_spec(file: GGUFFile) -> ModelSpec:
    """The spec of a file. Raises Unsupported for what is not known, InputError for nonsense."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise InputError(
            f"model: {file.path} has no string general.architecture; "
            "a GGUF that holds a language model names one"
        )
    if name not in ARCHITECTURES:
        raise Unsupported(f"model: architecture is {name}; supported: {', '.join(ARCHITECTURES)}")
    reader = _Reader(file, ARCHITECTURES[name])
    spec = reader.spec()
    reader.keys.refuse_unread()
    return spec


class _Reader:
    def __init__(self, file: GGUFFile, rules: Architecture) -> None:
        self.keys = MetadataKeys(file.metadata, rules.name)
        self._file = file
        self._rules = rules
        # Lists have a value for every block, those for prediction too.
        blocks = self._blocks = self.keys.count("block_count")
        # Blocks for predicting several tokens ahead follow the model's own; nothing here uses them.
        self._skipped = self.keys.count("nextn_predict_layers", 0, zero=True)
        if blocks > len(file.tensors):
            raise InputError(
                f"model: block_count is {blocks}, but the file holds only {len(file.tensors)} "
                "tensors and every block has several"
            )
        self._layers = blocks - self._skipped
        if self._layers < 1:
            raise InputError(
                f"model: block_count is {blocks} with {self._skipped} prediction blocks, expected "
                "at least one block besides"
            )
        self._width = self.keys.count("embedding_length")
        self._heads = self.keys.count("attention.head_count")

    def spec(self) -> ModelSpec:
        keys, rules = self.keys, self._rules
        layers = self._layer_specs()
        full_size = next((layer.head_size for layer in layers if layer.window is None), 0)
        size = full_size or layers[0].head_size
        if rules.name == "gemma3" and len(layers) == _GEMMA3_27B_BLOCKS:
            size = self._width // self._heads
        context = keys.count("context_length")
        return ModelSpec(
            architecture=rules.name,
            context_length=context,
            embedding_length=self._width,
            vocab_size=self._vocab_size(),
            rms_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
            attention_scale=1.0 if rules.unit_attention_scale else 1.0 / math.sqrt(size),
            embedding_scale=math.sqrt(self._width) if rules.scaled_embeddings else 1.0,
            activation=rules.activation,
            qk_norm=rules.qk_norm,
            post_norms=rules.post_norms,
            layers=layers,
            gated_attention=rules.gated_attention,
            value_norm=rules.value_norm,
            qkv_bias=rules.qkv_bias,
            per_layer_length=self._gemma4_count("embedding_length_per_layer_input"),
            logit_softcap=(
                keys.number("final_logit_softcapping")
                if rules.name == "gemma4" and keys.has("final_logit_softcapping")
                else None
            ),
            skipped_blocks=self._skipped,
        )

    def _gemma4_count(self, name: str) -> int:
        return self.keys.count(name, 0, zero=True) if self._rules.name == "gemma4" else 0

    def _vocab_size(self) -> int:
        info = self._file.tensors.get("token_embd.weight")
        if info is None or len(info.shape) != 2:
            shape = "missing" if info is None else f"of shape {info.shape}"
            raise InputError(
                f"model: tensor token_embd.weight is {shape}, expected (vocabulary, width)"
            )
        declared = self.keys.count("vocab_size", info.shape[0])
        if declared != info.shape[0]:
            raise InputError(
                f"model: vocab_size is {declared}, expected {info.shape[0]} because "
                "token_embd.weight has that many rows"
            )
        return info.shape[0]

    # --- layers -------------------------------------------------------------------------------

    def _layer_specs(self) -> tuple[LayerSpec, ...]:
        keys, rules, count = self.keys, self._rules, self._layers
        slides = self._sliding_layers()
        window = keys.count("attention.sliding_window") if rules.sliding else None
        recurrent = self._recurrent_layers()
        kv_heads = keys.counts("attention.head_count_kv", self._blocks, self._heads)
        full_size = self._head_size("")
        sliding_size = (
            self._head_size("_swa") if keys.has("attention.key_length_swa") else full_size
        )
        full_rope = self._rope(full_size)
        sliding_rope = self._sliding_rope(sliding_size) if rules.sliding else full_rope
        lengths = [0] * count if rules.routed else keys.counts("feed_forward_length", self._blocks)
        if rules.routed:
            keys.without_effect("feed_forward_length")
        delta_net = self._delta_net() if rules.hybrid else None
        kv_layers = self._kv_layers(slides)
        layers = []
        for i in range(count):
            size = sliding_size if slides[i] else full_size
            if self._heads % kv_heads[i]:
                raise InputError(
                    f"model: attention.head_count is {self._heads}, expected a multiple of "
                    f"head_count_kv = {kv_heads[i]} because query heads share key/value heads "
                    "evenly"
                )
            layers.append(
                LayerSpec(
                    index=i,
                    head_count=self._heads,
                    head_count_kv=kv_heads[i],
                    head_size=size,
                    feed_forward_length=lengths[i],
                    window=window if slides[i] else None,
                    rope=sliding_rope if slides[i] else full_rope,
                    value_source=self._value_source(i, kv_layers[i], recurrent[i]),
                    kv_layer=kv_layers[i],
                    delta_net=delta_net if recurrent[i] else None,
                    experts=self._experts(i),
                    output_scale=f"blk.{i}.layer_output_scale.weight" in self._file.tensors,
                )
            )
        if rules.routed and not any(layer.experts for layer in layers):
            raise InputError(f"model: architecture {rules.name} has no experts in this file")
        return tuple(layers)

    def _sliding_layers(self) -> list[bool]:
        rules, name = self._rules, "attention.sliding_window_pattern"
        if not rules.sliding:
            return [False] * self._layers
        if rules.sliding_period is None or self.keys.is_list(name):
            flags = self.keys.flags(name, self._blocks)
            if flags is None:
                raise InputError(
                    f"model: metadata key {rules.name}.{name} is missing, expected true or false "
                    "per layer"
                )
            return flags
        period = self.keys.count(name, rules.sliding_period)
        return [i % period < period - 1 for i in range(self._layers)]

    def _recurrent_layers(self) -> list[bool]:
        if not self._rules.hybrid:
            return [False] * self._layers
        interval = self.keys.count("full_attention_interval", 4)
        named = self.keys.flags("attention.recurrent_layers", self._blocks)
        return named or [(i + 1) % interval != 0 for i in range(self._layers)]

    def _kv_layers(self, slides: list[bool]) -> list[int]:
        """Whose cache each layer reads: shared ones that of the last own layer of their kind."""
        shared = self._gemma4_count("attention.shared_kv_layers")
        own = self._layers - shared
        if own < 1:
            raise InputError(
                f"model: attention.shared_kv_layers is {shared}, expected less than "
                f"{self._layers} because some layer must write the cache"
            )
        result = list(range(own))
        for i in range(own, self._layers):
            alike = [j for j in range(own) if slides[j] == slides[i]]
            if not alike:
                raise InputError(
                    f"model: layer {i} shares the cache of an earlier layer of its kind, "
                    "but there is none"
                )
            result.append(alike[-1])
        return result

    def _value_source(self, i: int, kv_layer: int, recurrent: bool) -> ValueSource:
        there = f"blk.{i}.attn_v.weight" in self._file.tensors
        raw_key = self._rules.value_norm and not there and kv_layer == i and not recurrent
        return "key" if raw_key else "projection"

    def _head_size(self, suffix: str) -> int:
        keys = self.keys
        if not keys.has(f"attention.key_length{suffix}") and self._width % self._heads:
            raise InputError(
                f"model: embedding_length is {self._width}, expected a multiple of head_count = "
                f"{self._heads} because no attention.key_length is given"
            )
        size = keys.count(f"attention.key_length{suffix}", self._width // self._heads or None)
        value_size = keys.count(f"attention.value_length{suffix}", size)
        if value_size != size:
            raise Unsupported(
                f"model: attention.value_length{suffix} is {value_size} and "
                f"key_length{suffix} {size}; supported: equal head sizes"
            )
        return size

    # --- rotary embedding ---------------------------------------------------------------------

    def _rope(self, head_size: int) -> RopeSpec:
        keys = self.keys
        keys.without_effect("rope.dimension_sections", *_YARN_KEYS_WITHOUT_EFFECT)
        base = keys.number("rope.freq_base", 10000.0)
        kind = keys.text("rope.scaling.type", ("none", "linear", "yarn"), "linear")
        # Files from before October 2023 say scale_linear.
        factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
        magnitude = keys.number("rope.scaling.attn_factor", 1.0)
        original = keys.count("rope.scaling.original_context_length", keys.count("context_length"))
        yarn = YarnSpec(factor, original) if kind == "yarn" else None
        return RopeSpec(
            pairing=self._rules.pairing,
            dimensions=self._rope_dimensions("", head_size),
            base=base,
            divisor=factor if kind == "linear" else 1.0,
            yarn=yarn,
            magnitude=magnitude * (yarn.magnitude if yarn else 1.0),
        )

    def _sliding_rope(self, head_size: int) -> RopeSpec:
        """Sliding layers are never scaled."""
        return RopeSpec(
            pairing=self._rules.pairing,
            dimensions=self._rope_dimensions("_swa", head_size),
            base=self.keys.number("rope.freq_base_swa", _SLIDING_ROPE_BASE),
        )

    def _rope_dimensions(self, suffix: str, head_size: int) -> int:
        dimensions = self.keys.count(f"rope.dimension_count{suffix}", head_size)
        if dimensions > head_size or dimensions % 2:
            raise InputError(
                f"model: rope.dimension_count{suffix} is {dimensions}, expected an even number of "
                f"at most the head size, {head_size}"
            )
        return dimensions

    # --- delta net and experts ----------------------------------------------------------------

    def _delta_net(self) -> DeltaNetSpec:
        keys = self.keys
        net = DeltaNetSpec(
            state_size=keys.count("ssm.state_size"),
            key_heads=keys.count("ssm.group_count"),
            value_heads=keys.count("ssm.time_step_rank"),
            conv_kernel=keys.count("ssm.conv_kernel"),
        )
        inner = keys.count("ssm.inner_size", net.value_length)
        if inner != net.value_length:
            raise InputError(
                f"model: ssm.inner_size is {inner}, expected {net.value_length} = state_size x "
                "time_step_rank"
            )
        if net.value_heads % net.key_heads:
            raise InputError(
                f"model: ssm.time_step_rank is {net.value_heads}, expected a multiple of "
                f"ssm.group_count = {net.key_heads}"
            )
        return net

    def _experts(self, i: int) -> ExpertsSpec | None:
        rules, keys = self._rules, self.keys
        there = f"blk.{i}.ffn_gate_inp.weight" in self._file.tensors
        if not (rules.routed or (rules.may_route and there)):
            if rules.may_route:
                keys.without_effect("expert_count", "expert_used_count")
                keys.without_effect("expert_feed_forward_length")
            return None
        count, used = keys.count("expert_count"), keys.count("expert_used_count")
        if used > count:
            raise InputError(f"model: expert_used_count is {used}, expected at most {count}")
        shared = keys.count("expert_shared_feed_forward_length") if rules.shared_expert else None
        return ExpertsSpec(
            count=count,
            used=used,
            feed_forward_length=keys.count("expert_feed_forward_length"),
            router="scaled" if rules.may_route else "plain",
            shared_length=shared,
        )
