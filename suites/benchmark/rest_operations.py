"""What a step or a prompt does beside products and decode's attention, to be timed."""

from collections.abc import Callable

from backend_hip import ops
from backend_hip.rope_store import rope_store
from backend_hip.state import FlowRow
from suites.benchmark.bench import Subject
from suites.benchmark.byte_model import step_bytes
from suites.benchmark.engine_runs import Runner
from suites.benchmark.operation_job import Job, fill, record_of

REST, PROMPT = "Rest of a step", "Attention of a prompt"
_REPEATS = 8  # in a graph, of what a step does once


def rest_jobs(subject: Subject, runner: Runner, kind: str) -> list[Job]:
    """Embedding, norms, rotations and cache writes of one sequence's step; bytes are those of the
    activations, which lie in the cache."""
    engine, spec = runner.engine, subject.model.spec
    s, top, flow = engine._scratch, engine.weights.top, engine._flow(1, batched=False)
    layers = [layer for layer in spec.layers if layer.delta_net is None and layer.owns_kv]
    for values in (s.x, s.q, s.k, s.v, s.heads):
        fill(values)
    runner.place(0)
    engine._write_step(engine._sequences.following([1], 0))
    engine._step.queue_copy(1)

    def embed() -> None:
        for _ in range(_REPEATS):
            ops.embed(flow, top["token_embd"], s.x, spec.embedding_scale)

    def norm() -> None:
        for _ in range(_REPEATS):
            ops.rms_norm(flow, s.x, top["output_norm"], s.normed, spec.rms_epsilon)

    def rotate() -> None:
        for layer in layers:
            q = s.q.of_width(layer.head_count * layer.head_size)
            w, tables = engine.weights.layers[layer.index], engine._pass.tables[layer]
            known = (tables, s.heads.buffer, q, engine._cache, f"{kind},{kind}")
            rope_store(flow, spec, layer, w, *known)

    def write() -> None:
        for layer in layers:
            k, v = (part.of_width(layer.head_count_kv * layer.head_size) for part in (s.k, s.v))
            keys, values = engine._cache.tensors[layer.index]
            ops.kv_write(flow, k, v, keys.buffer, values.buffer, layer, f"{kind},{kind}")

    width = spec.embedding_length * 4.0
    heads = sum(layer.head_size * (layer.head_count + layer.head_count_kv) for layer in layers)
    rows = sum(layer.head_size * 2 * layer.head_count_kv for layer in layers)
    parts: list[tuple[str, int, float, Callable[[], None]]] = [
        ("embedding", _REPEATS, _REPEATS * width, embed),
        ("final norm", _REPEATS, _REPEATS * 2 * width, norm),
        (f"KV {kind} writes", len(layers), 4.0 * rows, write),
    ]
    if engine.fusion.one == "on":
        fused = "norms, rotations, KV writes"
        parts.append((fused, len(layers), 8.0 * heads + 4.0 * rows, rotate))
    return [
        Job(record_of(subject, REST, what, "any", 1, count, nbytes, 0.0), queue)
        for what, count, nbytes, queue in parts
    ]


def prompt_job(subject: Subject, runner: Runner, kind: str, tokens: int) -> Job:
    """Attention of all layers for the first flow of a prompt, `tokens` long."""
    engine, spec = runner.engine, subject.model.spec
    s, cache = engine._scratch, engine._cache
    fill(s.q)
    flow = engine._flow(tokens, batched=True)
    layers = [layer for layer in spec.layers if layer.delta_net is None]

    def prepare() -> None:
        engine._write_step([FlowRow(1, position) for position in range(tokens)])
        engine._step.queue_copy(tokens)

    def queue() -> None:
        for layer in layers:
            width = layer.head_count * layer.head_size
            keys, values = cache.keys[layer.kv_layer], cache.values[layer.kv_layer]
            q, out = s.q.of_width(width), s.mixed.of_width(width)
            types = f"{kind},{kind}"
            ops.attention(flow, q, keys, values, out, layer, spec.attention_scale, types)

    pairs = sum(
        layer.head_count * layer.head_size * min(position + 1, layer.window or position + 1)
        for layer in layers
        for position in range(tokens)
    )
    nbytes = step_bytes(subject.model, [tokens], kind, kind).kv_read
    record = record_of(
        subject, PROMPT, f"KV {kind}", "any", tokens, len(layers), nbytes, 4.0 * pairs
    )
    width = layers[-1].head_count * layers[-1].head_size
    return Job(record, queue, prepare, s.mixed.of_width(width))
