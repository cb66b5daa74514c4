"""Changes that no exception of a signal handler ends half way."""

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nimblert.calls.changing import uninterrupted

NUMBERS = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class CameError(Exception):
    """A signal."""


@pytest.fixture
def came() -> Iterator[set[int]]:
    """The signals that handlers were called with, each of which has raised once."""
    found: set[int] = set()

    def handler(number: int, frame: object) -> None:
        del frame
        if number not in found:
            found.add(number)
            raise CameError

    before = {number: signal.signal(number, handler) for number in NUMBERS}
    yield found
    for number, old in before.items():
        signal.signal(number, old)


def interrupted(steps: list[int]) -> None:
    """A change of two steps, between which signals come, all at once."""
    steps.append(1)
    for number in NUMBERS:
        os.kill(os.getpid(), number)
    time.sleep(0.1)
    steps.append(2)


def test_handlers_raise_once_the_change_is_made(came: set[int]) -> None:
    steps: list[int] = []
    with pytest.raises(CameError):
        uninterrupted(lambda: interrupted(steps))
    assert steps == [1, 2]
    assert came == set(NUMBERS)


def test_the_error_of_a_change_is_raised_rather_than_an_interrupt(came: set[int]) -> None:
    def failing() -> None:
        interrupted([])
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        uninterrupted(failing)
    assert came


def test_nothing_changes_where_the_thread_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    start = _thread.start_new_thread
    steps: list[int] = []

    def not_at_all(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    def interrupted_then(function: Callable[[], object], arguments: tuple[Any, ...]) -> int:
        start(function, arguments)
        raise KeyboardInterrupt

    for starting, error in ((not_at_all, RuntimeError), (interrupted_then, KeyboardInterrupt)):
        with monkeypatch.context() as patch:
            patch.setattr(_thread, "start_new_thread", starting)
            with pytest.raises(error):
                uninterrupted(lambda: steps.append(1))
    time.sleep(0.05)
    assert not steps


def test_a_change_may_be_made_by_a_handler_that_interrupts_the_start_of_a_thread() -> None:
    steps: list[int] = []

    def handler(*_: object) -> None:
        uninterrupted(lambda: steps.append(1))
        if time.monotonic() < end:
            signal.setitimer(signal.ITIMER_REAL, 1e-4)

    end = time.monotonic() + 1
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-4)
    while time.monotonic() < end:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    assert steps


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_process_that_a_handler_forks_waits_for_nothing() -> None:
    statuses: list[int] = []

    def fork(*_: object) -> None:
        process = os.fork()
        if process == 0:
            raise CameError
        statuses.append(os.waitpid(process, 0)[1])

    before = signal.signal(signal.SIGUSR1, fork)
    parent = os.getpid()
    try:
        uninterrupted(lambda: (os.kill(parent, signal.SIGUSR1), time.sleep(0.05)))
    except CameError:
        os._exit(7)
    finally:
        if os.getpid() != parent:
            os._exit(1)
        signal.signal(signal.SIGUSR1, before)
    assert [os.waitstatus_to_exitcode(status) for status in statuses] == [7]


def test_a_change_of_another_thread_is_made_there() -> None:
    found: list[int] = []
    with ThreadPoolExecutor(1) as threads:
        own = threads.submit(threading.get_ident).result()
        threads.submit(uninterrupted, lambda: found.append(threading.get_ident())).result()
    assert found == [own]
