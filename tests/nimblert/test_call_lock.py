"""Calls within calls, calls of several threads, and exceptions that come within a call."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Never

import numpy as np
import pytest
from cpu_plans import bent_sum
from interrupting import WITHIN, interrupted
from kept_state import keeping

import nimblert
from nimblert import Context, Executable, InputError

X = np.ones(4, np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return bent_sum(tmp_path)


@pytest.fixture
def model(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executable]:
    monkeypatch.setattr("nimblert.cpu.streams.cores", lambda: 2)
    with nimblert.load(path) as executable:
        executable(X)
        yield executable


CALLS: dict[str, Callable[[Context], Any]] = {
    "call": lambda context: context(X),
    "reuse": lambda context: context.run({"x": X}, reuse_outputs=True)["y"],
    "out": lambda context: context.run({"x": X}, out={"y": np.empty(4, np.float32)})["y"],
    "replay": lambda context: context.replay() or context(X),
    "profile": lambda context: context.profile({"x": X}) and context(X),
}
USES: dict[str, Callable[[Executable], object]] = {
    "close": lambda model: model.close(),
    "replay": lambda model: model.replay(),
    "launch": lambda model: model.launch(),
    "refit": lambda model: model.refit({}),
    "warm": lambda model: model.warm(),
    "bind": lambda model: model.bind("x", X.copy()),
    "steps": lambda model: list(model.steps({"x": X})),
    "reset": lambda model: model.reset(),
    "reuse": lambda model: model.run({"x": X}, reuse_outputs=True),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("call", CALLS)
def test_use_within_a_call_is_refused(model: Executable, call: str, use: str) -> None:
    result, message = interrupted(model, lambda: CALLS[call](model), lambda: USES[use](model))
    assert WITHIN in message
    assert np.array_equal(result, model(X))


def test_call_within_a_call_runs_in_a_context_of_its_own(model: Executable) -> None:
    given: list[Any] = []
    result, message = interrupted(model, lambda: model(X), lambda: given.append(model(2 * X)))
    assert message == "none"
    assert np.allclose(result, 2 * np.tanh(1))
    assert np.allclose(given, 2 * np.tanh(2))


def test_call_within_a_call_of_a_plan_with_state_is_refused() -> None:
    with nimblert.load(keeping()) as model:
        write = model.entry("write")
        _, message = interrupted(model, lambda: write(X), lambda: write(2 * X))
        assert WITHIN in message
        assert model.entry("read")().tolist() == X.tolist()


def test_close_within_the_call_of_a_context_is_refused(model: Executable) -> None:
    with model.context() as context:
        _, message = interrupted(context, lambda: context(X), context.close)
        assert message.startswith("this context")
        assert WITHIN in message
        assert np.array_equal(context(X), model(X))
        _, message = interrupted(model, lambda: model(X), context.close)
        assert message == "none"


def test_server_closes_its_model_at_a_signal(path: Path) -> None:
    """As docs/serving.md advises: the handler ends the program, whose block closes the model."""
    kept: list[Executable] = []

    def serve() -> None:
        with nimblert.load(path) as model:
            kept.append(model)
            for count in range(1000):
                model(X)
                if count == 100:
                    signal.raise_signal(signal.SIGTERM)

    def end(*_: object) -> None:
        raise SystemExit

    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(SystemExit):
            serve()
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(InputError, match="closed"):
        kept[0](X)


def interrupt() -> Never:
    raise KeyboardInterrupt


@pytest.mark.parametrize("call", CALLS)
def test_exception_within_a_call_closes_the_context_and_no_other(model: Executable, call: str) -> None:
    context, other = model.context(), model.context()
    context(X)
    with pytest.raises(KeyboardInterrupt):
        interrupted(context, lambda: CALLS[call](context), interrupt)
    with pytest.raises(InputError, match="this context is closed, as KeyboardInterrupt came within a call: make anoth"):
        context(X)
    context.close()
    assert np.array_equal(other(X), model(X))


def test_close_waits_for_the_call_of_another_thread(model: Executable) -> None:
    began, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with model.between_runs():
            began.set()
            assert go_on.wait(20)

    with ThreadPoolExecutor(2) as pool:
        holding = pool.submit(hold)
        assert began.wait(20)
        closing = pool.submit(model.close)
        assert not closing.done()
        go_on.set()
        holding.result(20)
        closing.result(20)
    with pytest.raises(InputError, match="this executable is closed: load the plan again"):
        model(X)
