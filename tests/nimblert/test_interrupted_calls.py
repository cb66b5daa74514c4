"""Signal handlers and finalizers that use the executable whose call they interrupt: nothing waits for itself."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_plans import bent_sum
from interrupting import WITHIN, interrupted
from kept_state import keeping

import nimblert
from nimblert import Arena, Context, Executable, InputError
from nimblert.cpu.streams import Worker

X = np.ones(4, np.float32)


@pytest.fixture(autouse=True)
def waits_end() -> Iterator[None]:
    """A test that would wait for ever fails."""

    def fail(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return bent_sum(tmp_path)


@pytest.fixture
def model(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executable]:
    monkeypatch.setattr("nimblert.executable.cores", lambda: 2)
    with nimblert.load(path) as executable:
        executable(X)
        yield executable


CALLS: dict[str, Callable[[Context], Any]] = {
    "direct": lambda context: context(X),
    "other": lambda context: context.run({"x": X}, reuse_outputs=True)["y"],
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
    "context": lambda model: model.context(),
    "steps": lambda model: list(model.steps({"x": X})),
    "reset": lambda model: model.reset(),
    "reuse": lambda model: model.run({"x": X}, reuse_outputs=True),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("call", CALLS)
def test_what_would_wait_for_the_call_is_refused(model: Executable, call: str, use: str) -> None:
    for _ in range(3):
        result, message = interrupted(model._turn, lambda: CALLS[call](model), lambda: USES[use](model))
        assert WITHIN in message
        assert np.array_equal(result, model(X))


def test_a_call_within_a_call_takes_a_spare_context(model: Executable) -> None:
    given: list[Any] = []
    result, message = interrupted(model._turn, lambda: model(X), lambda: given.append(model(2 * X)))
    assert message == "none"
    assert np.allclose(result, 2 * np.tanh(1))
    assert np.allclose(given, 2 * np.tanh(2))


def test_a_call_within_a_call_of_a_plan_with_state_is_refused() -> None:
    with nimblert.load(keeping()) as model:
        write = model.entry("write")
        _, message = interrupted(model._turn, lambda: write(X), lambda: write(2 * X))
        assert WITHIN in message
        assert model.entry("read")().tolist() == X.tolist()


def test_a_close_within_the_call_of_a_context_closes_nothing(model: Executable) -> None:
    with model.context() as context:
        for _ in range(3):
            _, message = interrupted(context._turn, lambda: context(X), model.close)
            assert WITHIN in message
            assert np.array_equal(context(X), model(X))
        _, message = interrupted(context._turn, lambda: context(X), context.close)
        assert message.startswith("this context")
        assert WITHIN in message
        _, message = interrupted(model._turn, lambda: model(X), context.close)
        assert message == "none"


def test_a_close_within_the_call_of_a_spare_context_closes_nothing(model: Executable) -> None:
    interrupted(model._turn, lambda: model(X), lambda: model(X))  # which makes one
    (spare,) = model._idle_spares
    with spare._turn.taken(), spare._turn.lock, pytest.raises(InputError, match=WITHIN):
        model.close()
    assert np.allclose(model(X), 2 * np.tanh(1))


def test_a_close_while_a_spare_context_is_made_closes_nothing(
    model: Executable, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    init = Context.__init__

    def closing(self: Context, *args: Any, **options: Any) -> None:
        with pytest.raises(InputError) as raised:
            model.close()
        messages.append(str(raised.value))
        init(self, *args, **options)

    monkeypatch.setattr(Context, "__init__", closing)
    _, message = interrupted(model._turn, lambda: model(X), lambda: model(X))
    assert message == "none"
    assert WITHIN in messages[0]
    assert np.allclose(model(X), 2 * np.tanh(1))


def test_a_run_in_a_shared_arena(path: Path) -> None:
    with Arena.for_plans(path) as arena, nimblert.load(path, arena=arena) as model, model.context(arena=arena) as other:
        result, message = interrupted(model._turn, lambda: model(X), model.close)
        assert WITHIN in message
        _, message = interrupted(model._turn, lambda: model(X), lambda: other(X))
        assert message == "none" or "in use by another context" in message
        assert np.array_equal(result, other(X))


def test_a_finalizer(model: Executable) -> None:
    messages: list[str] = []

    class Server:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            with pytest.raises(InputError) as raised:
                model.close()
            messages.append(str(raised.value))

    Server()
    interrupted(model._turn, lambda: model(X), gc.collect)
    assert WITHIN in messages[0]


def test_a_server_that_closes_its_model_at_a_signal(path: Path) -> None:
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


@pytest.mark.parametrize("use", ["close", "refit", "warm", "direct"])
def test_a_finalizer_in_a_thread_that_works_for_a_call(model: Executable, use: str) -> None:
    messages: list[str] = []

    def finalize() -> None:
        try:
            (USES | CALLS)[use](model)
        except InputError as exc:
            messages.append(str(exc))

    worker = Worker(finalize)
    worker.begin()
    worker.start()
    worker.wait()
    worker.end()
    worker.join()
    assert len(messages) == (use != "direct")
    assert all(WITHIN in message for message in messages)
    assert np.allclose(model(X), 2 * np.tanh(1))


@pytest.mark.parametrize("use", [*USES.values(), CALLS["direct"]])
def test_what_would_wait_for_a_refit_that_waits_for_the_call(
    model: Executable, use: Callable[[Executable], object]
) -> None:
    context = model.context()
    threads: list[threading.Thread] = []

    def refit_elsewhere() -> None:
        threads.append(threading.Thread(target=model.refit, args=({},)))
        threads[0].start()
        while not model._turn.lock.locked():
            time.sleep(1e-3)
        use(model)

    _, message = interrupted(context._turn, lambda: context(X), refit_elsewhere)
    threads[0].join(20)
    assert WITHIN in message
    assert np.array_equal(context(X), model(X))


def test_an_exception_within_a_change_of_state_that_is_kept(model: Executable) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept:
        model.between_runs(interrupt)
    with ThreadPoolExecutor(1) as threads:
        assert np.array_equal(threads.submit(model, X).result(10), model(X))
    assert kept.value.__traceback__ is not None


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_no_thread_of_a_forked_process_works_for_a_call(path: Path) -> None:
    """Though it may have the number of a thread that does so in the parent."""
    worker = Worker(lambda: None)
    worker.begin()
    worker.start()
    worker.wait()
    process = os.fork()
    if process == 0:
        with suppress(BaseException), nimblert.load(path) as model, ThreadPoolExecutor(4) as pool:
            together = threading.Barrier(4, timeout=10)
            assert list(pool.map(lambda _: together.wait() >= 0 and model.warm(), range(4))) == [None] * 4
            os._exit(0)
        os._exit(1)
    assert os.waitpid(process, 0)[1] == 0
    worker.end()
    worker.join()
