"""Ctrl-C while native code runs.

Python handles a signal once native code has returned, which a model with an endless loop never does. So a thread
watches for SIGINT too, and ends the process if Python has not reacted within a second. What that leaves behind (a
scratch folder, whose lock the operating system releases) is removed by the next run.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import NoReturn

_GRACE_S = 1.0
_STOP = b"\0"

INTERRUPTED = 128 + signal.SIGINT
"""The exit status of a program that Ctrl-C ended."""


@contextmanager
def prompt_interrupts() -> Iterator[None]:
    """Let Ctrl-C end the process within about a second, whatever the main thread is doing. Call it there."""
    heard = threading.Event()

    def raise_interrupt(number: int, frame: FrameType | None) -> None:
        heard.set()
        signal.default_int_handler(number, frame)

    def watch() -> None:
        """Read signal numbers, a byte each, until a zero."""
        while (number := os.read(read_end, 1)) != _STOP:
            if number[0] == signal.SIGINT and not heard.wait(_GRACE_S):
                os._exit(INTERRUPTED)

    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    watcher = threading.Thread(target=watch, daemon=True)
    with ExitStack() as stack:
        stack.callback(os.close, write_end)
        stack.callback(os.close, read_end)
        watcher.start()
        stack.callback(watcher.join)
        stack.callback(os.write, write_end, _STOP)
        stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, raise_interrupt))
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(write_end, warn_on_full_buffer=False))
        yield


def abandon() -> NoReturn:
    """End the process at once, whatever other threads are doing. What was printed stays printed."""
    sys.stdout.flush()
    os._exit(INTERRUPTED)
