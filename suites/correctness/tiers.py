"""Which kernels' cases CI has time for; the others run with `-m full`."""

import re
from collections.abc import Iterable
from typing import Any

import pytest

from backend_hip.registry import Key
from reference.model.quant import FORMATS


def formats_in_ci(keys: Iterable[Key]) -> list[Any]:
    """Parameters: kernels with other formats than these run in the full tier, for their number, and
    so does what stores keys and values in other pairs of KV types."""
    kept = {"F32", "Q4_K", "Q6_K"}
    kept_pairs = ("f16,f16", "q8_0,q8_0")
    return [
        pytest.param(
            key,
            id=" ".join(filter(None, key)),
            marks=[pytest.mark.full]
            if _formats_of(key) - kept
            or (key[0] == "rope_store" and not key[1].endswith(kept_pairs))
            else [],
        )
        for key in keys
    ]


def _formats_of(key: Key) -> set[str]:
    return set(re.split("[,/@]", key[1])) & set(FORMATS)
