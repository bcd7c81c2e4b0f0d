"""The batched-prefill switch: ASSAY_BATCHED_PREFILL = 0 (off), 1 (on) or validate."""

import os
from typing import Literal

from reference.model.errors import InputError

BatchedPrefill = Literal["off", "on", "validate"]

VARIABLE = "ASSAY_BATCHED_PREFILL"
_MODES: dict[str, BatchedPrefill] = {"0": "off", "1": "on", "validate": "validate"}


def mode_from_environment() -> BatchedPrefill | None:
    """The switch as the environment sets it, None when it is not set; other values are errors."""
    value = os.environ.get(VARIABLE)
    if value is None:
        return None
    if value not in _MODES:
        raise InputError(f"switch: {VARIABLE} is {value!r}, expected one of {', '.join(_MODES)}")
    return _MODES[value]
