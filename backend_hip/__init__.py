"""The engine under test: HIP C++ kernels driven through hip-python, on a runtime chosen at start.

open_device -> Device    Engine(model, device): prefill_per_token, prefill_batched, decode
"""

from backend_hip.device import Device, open_device
from backend_hip.engine import Engine

__all__ = ["Device", "Engine", "open_device"]
