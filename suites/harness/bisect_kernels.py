"""Which kernels made a trace point, and registry rows as people read them."""

from collections.abc import Mapping, Sequence
from typing import Any

from backend_hip.forward import FUSED
from suites.harness.rerun import LaunchTrace

JUDGED_APART = frozenset({"kv_write", "argmax_blocks", "argmax"})
"""Kernels that no trace point shows, launched on the way to one: checks of their own judge them."""

MADE_WITH: Mapping[str, str] = {
    **FUSED,
    "log_decay": "beta",
    "Qcur": "gate",
    "Vcur": "Kcur",
    "Vcur_normed": "Qcur_normed",
}
"""Points (stems) for which nothing may be launched, and the one whose kernels made them too."""

SIZES: Mapping[str, str] = {
    "attention": "head size",
    "attention_split": "head size",
    "attention_merge": "head size",
    "delta_rule": "state size",
    "route": "experts",
    "group_by_expert": "experts",
}


def launched(trace: LaunchTrace, name: str) -> tuple[str, ...]:
    """The registry rows ("op variant path") whose kernels made this point."""
    keys: Mapping[Any, int] = trace.launched.get(name, {})
    mine = [key for key in keys if key[0] not in JUDGED_APART]
    stem, dash, layer = name.partition("-")
    if not mine and stem in MADE_WITH:
        return launched(trace, f"{MADE_WITH[stem]}{dash}{layer}")
    return tuple(sorted(" ".join(part for part in key if part) for key in mine))


def readable(row: str) -> str:
    """ "delta_rule @128 any" as "delta_rule (state size 128)"."""
    op, *rest = row.split(" ")
    *variants, path = rest or ["any"]
    parts: list[str] = []
    for variant in variants:
        name, _, sizes = variant.partition("@")
        size, _, group = sizes.partition("x")
        parts += [name] if name else []
        parts += [f"{SIZES.get(op, 'size')} {size}"] if size else []
        parts += [f"{group} a KV head"] if group else []
    parts += [] if path == "any" else [f"path {path}"]
    return f"{op} ({', '.join(parts)})" if parts else op


def kernels_text(rows: Sequence[str]) -> str:
    """ "kernel a", "kernels a and b"; empty for none."""
    names = [readable(row) for row in rows]
    if len(names) < 2:
        return f"kernel {names[0]}" if names else ""
    return f"kernels {', '.join(names[:-1])} and {names[-1]}"
