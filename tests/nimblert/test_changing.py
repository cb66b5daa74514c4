"""Changes that no exception of a signal handler ends half way."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nimblert.calls import changing
from nimblert.calls.changing import uninterrupted
from nimblert.calls.turn import inner_threads


def interrupted(steps: list[int]) -> None:
    """A change of two steps, between which Ctrl-C comes."""
    steps.append(1)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)
    steps.append(2)


def test_an_interrupt_is_raised_once_the_change_is_made() -> None:
    steps: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(lambda: interrupted(steps))
    assert steps == [1, 2]


def test_the_error_of_a_change_is_raised_rather_than_an_interrupt() -> None:
    threads: list[threading.Thread] = []

    def failing() -> None:
        threads.append(threading.current_thread())
        interrupted([])
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        uninterrupted(failing)
    threads[0].join(20)
    others = {thread.ident for thread in threading.enumerate()}
    assert threads[0].ident not in inner_threads - others


def test_a_change_of_another_thread_is_made_there() -> None:
    found: list[int] = []
    with ThreadPoolExecutor(1) as threads:
        own = threads.submit(threading.get_ident).result()
        threads.submit(uninterrupted, lambda: found.append(threading.get_ident())).result()
    assert found == [own]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
@pytest.mark.parametrize("has_started", [False, True])
def test_nothing_changes_where_the_thread_does_not_start(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, *, has_started: bool
) -> None:
    steps: list[int] = []
    started: list[threading.Thread] = []

    class Failing(threading.Thread):
        def start(self) -> None:
            if has_started:
                super().start()
                started.append(self)
            raise error

    monkeypatch.setattr(changing.threading, "Thread", Failing)
    with pytest.raises(type(error)):
        uninterrupted(lambda: steps.append(1))
    for thread in started:
        thread.join(20)
    assert not steps
