"""Spans and metrics of calls, for NVTX and OpenTelemetry.

Without an observer there is no overhead: `observe` replaces methods of `Context`, and the function that it returns
restores them. Neither package is needed or imported before that.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, Protocol

import numpy as np

from nimblert.calls.entries import Signature
from nimblert.context import Context
from nimblert.errors import InputError, NimbleError
from nimblert.plan import Op, Work


class Observer(Protocol):
    """Is notified of calls, in the thread that makes them, while they run."""

    def call(self, kind: str, context: Context, entry: str) -> AbstractContextManager[object]:
        """Around a "run", "replay", "launch" or "profile" of an entry."""

    def command(self, op: Op) -> AbstractContextManager[object]:
        """Around a command of `Context.steps` that was made of this op."""


class NvtxRanges:
    """A range of the domain "nimblert" for each call, and for each command of `Context.steps`.

    Needs the package nvtx: InputError where it is not installed.
    """

    def __init__(self) -> None:
        try:
            import nvtx
        except ImportError as exc:
            raise InputError("NVTX ranges need the package nvtx: pip install nvtx") from exc
        self._annotate = nvtx.annotate

    def call(self, kind: str, context: Context, entry: str) -> AbstractContextManager[object]:
        """A range such as "run main"."""
        del context
        return self._range(f"{kind} {entry}")

    def command(self, op: Op) -> AbstractContextManager[object]:
        """A range with the op's name and source."""
        return self._range(f"{op.name} {op.source}".strip())

    def _range(self, message: str) -> AbstractContextManager[object]:
        made: AbstractContextManager[object] = self._annotate(message, domain="nimblert")
        return made


class OpenTelemetry:
    """A span for each call, and the histogram ``nimblert.call.duration`` in seconds.

    The attributes of both are ``nimblert.entry``, ``nimblert.program`` (the one that ran last) and ``nimblert.target``,
    and ``error.type`` where a call raises a NimbleError. Providers are the global ones by default. Needs the package
    opentelemetry-api: InputError where it is not installed.
    """

    def __init__(self, tracer_provider: Any = None, meter_provider: Any = None) -> None:
        try:
            from opentelemetry import metrics, trace
        except ImportError as exc:
            raise InputError("telemetry needs the package opentelemetry-api: pip install opentelemetry-api") from exc
        self._tracer = trace.get_tracer("nimblert", tracer_provider=tracer_provider)
        meter = metrics.get_meter("nimblert", meter_provider=meter_provider)
        self._seconds = meter.create_histogram("nimblert.call.duration", unit="s", description="Duration of calls")

    @contextmanager
    def call(self, kind: str, context: Context, entry: str) -> Iterator[None]:
        """A span such as "run main"."""
        attributes = {"nimblert.entry": entry, "nimblert.target": context.plan.target.name.lower()}
        with self._tracer.start_as_current_span(f"{kind} {entry}") as span:
            _within.program = None
            begin = time.perf_counter()
            try:
                yield
            except NimbleError as exc:
                attributes["error.type"] = type(exc).__name__
                raise
            finally:
                attributes["nimblert.program"] = _within.program or context._turn.program.name  # noqa: SLF001
                span.set_attributes(attributes)
                self._seconds.record(time.perf_counter() - begin, attributes)

    def command(self, op: Op) -> AbstractContextManager[object]:
        """No span: it would take longer than most commands."""
        del op
        return nullcontext()


_observers: list[Observer] = []

_within = threading.local()
"""The name of the ``program`` that ran in a spare context for this thread's call; None where that ran in its own."""


def observe(observer: Observer) -> Callable[[], None]:
    """Notify ``observer`` of the calls of every plan of this process, until the returned function is called.

    Raises InputError for what is no `Observer`.
    """
    if isinstance(observer, type) or not all(callable(getattr(observer, name, None)) for name in ("call", "command")):
        found = observer.__name__ if isinstance(observer, type) else f"an object of {type(observer).__name__}"
        raise InputError(f"observer: got {found}, expected an object with the methods call and command")
    if not _observers:
        for name, method in _OBSERVED.items():
            setattr(Context, name, method)
    _observers.append(observer)

    def end() -> None:
        if observer in _observers:
            _observers.remove(observer)
            if not _observers:
                for name, method in _PLAIN.items():
                    setattr(Context, name, method)

    return end


def observe_by_environment() -> None:
    """Observe calls with `NvtxRanges`, unless that is done already."""
    if not any(isinstance(observer, NvtxRanges) for observer in _observers):
        observe(NvtxRanges())


_PLAIN = {name: getattr(Context, name) for name in ("_run", "_run_within", "replay", "launch", "profile", "steps")}


@contextmanager
def _call(kind: str, context: Context, entry: str) -> Iterator[None]:
    with ExitStack() as stack:
        for observer in _observers:
            stack.enter_context(observer.call(kind, context, entry))
        yield


@wraps(_PLAIN["_run"])
def _run(context: Context, signature: Signature, *args: Any, **kwargs: Any) -> Any:
    with _call("run", context, signature.name):
        return _PLAIN["_run"](context, signature, *args, **kwargs)


@wraps(_PLAIN["_run_within"])
def _run_within(context: Context, *args: Any, **kwargs: Any) -> Any:
    try:
        return _PLAIN["_run_within"](context, *args, **kwargs)
    finally:
        _within.program = context._turn.program.name  # noqa: SLF001


@wraps(_PLAIN["replay"])
def _replay(context: Context) -> None:
    with _call("replay", context, context._turn.program.entry):  # noqa: SLF001
        _PLAIN["replay"](context)


@wraps(_PLAIN["launch"])
def _launch(context: Context, stream: Any = None) -> None:
    with _call("launch", context, context._turn.program.entry):  # noqa: SLF001
        _PLAIN["launch"](context, stream)


@wraps(_PLAIN["profile"])
def _profile(context: Context, arrays: Mapping[str, np.ndarray], *, entry: str | None = None) -> Any:
    with _call("profile", context, context.entry(entry).name):
        return _PLAIN["profile"](context, arrays, entry=entry)


@wraps(_PLAIN["steps"])
def _steps(
    context: Context, arrays: Mapping[str, np.ndarray], *, entry: str | None = None
) -> Generator[Work, None, None]:
    steps = _PLAIN["steps"](context, arrays, entry=entry)
    program, _ = context._choose(context._signatures[entry], arrays)  # noqa: SLF001
    try:
        for _, command in program.work:
            with ExitStack() as stack:
                for observer in _observers:
                    stack.enter_context(observer.command(program.ops[command.op]))
                done = next(steps)
            yield done
        yield from steps
    finally:
        steps.close()


_OBSERVED = {
    "_run": _run,
    "_run_within": _run_within,
    "replay": _replay,
    "launch": _launch,
    "profile": _profile,
    "steps": _steps,
}
