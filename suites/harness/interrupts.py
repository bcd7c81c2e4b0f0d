"""Signals that end a process, as KeyboardInterrupt: what cleans up after one does after all."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_as_by_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as an interrupt does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handlers(dict.fromkeys((signal.SIGTERM, signal.SIGHUP), interrupt)):
        yield


@contextmanager
def deaf() -> Iterator[None]:
    """A second interrupt does not stop the cleaning up after the first."""
    with _handlers(dict.fromkeys(_ENDING_SIGNALS, signal.SIG_IGN)):
        yield


@contextmanager
def _handlers(wanted: "dict[signal.Signals, signal._HANDLER]") -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it gets them
        return
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
