"""`--plant ID`: a catalogued fault in a copy of the engine, to see how the judge tells it."""

import argparse
import atexit
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from fixtures.faults import Fault, find_fault
from reference.model import Model
from suites.harness.fault_models import edited
from suites.harness.patched import patched_engine

_copies = ExitStack()
"""Engine copies live until the process ends: kernels are read when an engine is built."""
atexit.register(_copies.close)


class _Once(argparse.Action):
    """Refuses a second value: it would silently replace the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        if before is not None:
            raise argparse.ArgumentError(
                self, f"got {before} and {values}, expected one fault at a time"
            )
        setattr(namespace, self.dest, values)


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plant",
        action=_Once,
        metavar="ID",
        help="plant a fault of the catalogue in a copy of the engine, to see what is said about it "
        "(`assay faults --list`)",
    )


def planted(arguments: argparse.Namespace) -> Fault | None:
    """The fault that --plant names; InputError for an unknown one."""
    name = getattr(arguments, "plant", None)
    return None if name is None else find_fault(name)


def model_for(arguments: argparse.Namespace, model: Model) -> Model:
    """The model with the edit that the planted fault needs, if any."""
    fault = planted(arguments)
    return model if fault is None else edited(model, fault.edit)


def engine_of(arguments: argparse.Namespace) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`open_device` and `Engine`: the installed ones, or those of the copy with the fault."""
    fault = planted(arguments)
    if fault is None:
        from backend_hip.device import open_device
        from backend_hip.engine import Engine

        return open_device, Engine
    copy = _copies.enter_context(patched_engine(fault.changes))
    return copy.open_device, copy.engine
