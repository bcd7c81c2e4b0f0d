"""llama.cpp's measured speeds on one card, looked up for rows that can stand beside them."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _figures() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "peer.toml").read_text(encoding="utf-8"))


def peer_decode(
    device: str, model: str, kv: tuple[str, str], context: int, batch: int
) -> float | None:
    """Aggregate tok/s, None where nothing was measured on such a card, model and shape."""
    rows = _rows(device, model, kv, "decode")
    figure = None if rows is None else rows.get(str(context), {}).get(str(batch))
    return None if figure is None else float(figure)


def peer_prefill(
    device: str, model: str, kv: tuple[str, str], mode: str, prompt: int
) -> float | None:
    """Tok/s of a prompt, None as above."""
    rows = _rows(device, model, kv, "prefill", mode)
    figure = None if rows is None else rows.get(str(prompt))
    return None if figure is None else float(figure)


def _rows(device: str, model: str, kv: tuple[str, str], *place: str) -> dict[str, Any] | None:
    found = _figures()
    if found["device"] not in device or found["model"] != model or kv[0] != kv[1]:
        return None
    for name in (*place, kv[0]):
        found = found.get(name, {})
    return found
