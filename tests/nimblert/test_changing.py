"""Changes that no exception of a signal handler ends half way."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from nimblert.calls.changing import uninterrupted

NUMBERS = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class CameError(Exception):
    """A signal."""


@pytest.fixture
def came() -> Iterator[list[int]]:
    """The signals that handlers, all of which raise, were called with."""
    found: list[int] = []

    def handler(number: int, frame: object) -> None:
        del frame
        found.append(number)
        raise CameError

    before = {number: signal.signal(number, handler) for number in NUMBERS}
    yield found
    for number, old in before.items():
        signal.signal(number, old)


def interrupted(steps: list[int]) -> None:
    """A change of two steps, between which signals come."""
    steps.append(1)
    for number in NUMBERS:
        os.kill(os.getpid(), number)
    steps.append(2)


def test_all_handlers_run_once_the_change_is_made(came: list[int]) -> None:
    steps: list[int] = []
    handlers = [signal.getsignal(number) for number in NUMBERS]
    with pytest.raises(CameError):
        uninterrupted(lambda: interrupted(steps))
    assert steps == [1, 2]
    assert came == list(NUMBERS)
    assert [signal.getsignal(number) for number in NUMBERS] == handlers
    with pytest.raises(CameError):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_change_within_a_change_ends_none_of_them(came: list[int]) -> None:
    steps: list[int] = []

    def nested() -> None:
        uninterrupted(lambda: interrupted(steps))
        steps.append(3)

    with pytest.raises(CameError):
        uninterrupted(nested)
    assert (steps, came) == ([1, 2, 3], list(NUMBERS))


def test_what_a_change_raises_is_raised() -> None:
    handler = signal.getsignal(signal.SIGINT)

    def failing() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        uninterrupted(failing)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_signal_before_the_change_does_not_end_it_either(came: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And handlers that are not put back are as good as before."""
    steps: list[int] = []
    install = signal.signal

    def interrupting(number: int, handler: Callable[[int, object], object]) -> object:
        old = install(number, handler)
        if number == signal.SIGUSR1:
            os.kill(os.getpid(), signal.SIGINT)
        return old

    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", interrupting)
        for _ in range(2):
            with pytest.raises(CameError):
                uninterrupted(lambda: steps.append(1))
    assert steps == [1, 1]
    assert set(came) == {signal.SIGINT}
    with pytest.raises(CameError):
        os.kill(os.getpid(), signal.SIGUSR1)
    uninterrupted(lambda: steps.append(1))
    assert steps == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_process_that_was_forked_within_a_change_handles_its_signals(came: list[int]) -> None:
    statuses: list[int] = []

    def forking() -> None:
        process = os.fork()
        if process == 0:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except CameError:
                os._exit(0)
            os._exit(1)
        statuses.append(os.waitpid(process, 0)[1])

    uninterrupted(forking)
    assert (statuses, came) == ([0], [])


def test_a_change_of_another_thread_is_made_there() -> None:
    found: list[int] = []
    with ThreadPoolExecutor(1) as threads:
        own = threads.submit(threading.get_ident).result()
        threads.submit(uninterrupted, lambda: found.append(threading.get_ident())).result()
    assert found == [own]
