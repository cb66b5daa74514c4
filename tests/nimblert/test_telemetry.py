"""Spans and metrics of calls: what observers are told, what real NVTX and OpenTelemetry take, and that off is off."""

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cpu_plans import bent_sum
from sized_plans import sized
from subprocesses import python

import nimblert
from nimblert import Executable, InputError, telemetry
from nimblert.context import Context
from nimblert.plan import Op

X = {"x": np.ones(4, np.float32)}
METHODS = ("_run", "_run_within", "replay", "launch", "profile", "steps")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tanh(x) + tanh(x) as a plan."""
    return bent_sum(tmp_path_factory.mktemp("telemetry"))


@pytest.fixture
def model(path: Path) -> Iterator[Executable]:
    with nimblert.load(path) as executable:
        yield executable


class Notes:
    """An observer that keeps what begins and ends."""

    def __init__(self) -> None:
        self.kept: list[str] = []

    @contextmanager
    def call(self, kind: str, context: Context, entry: str) -> Iterator[None]:
        """As `telemetry.Observer` has it."""
        assert context.entries == (entry,)
        with self._noted(f"{kind} {entry}"):
            yield

    @contextmanager
    def command(self, op: Op) -> Iterator[None]:
        """As `telemetry.Observer` has it."""
        with self._noted(f"{op.name} {op.source}"):
            yield

    @contextmanager
    def _noted(self, text: str) -> Iterator[None]:
        self.kept.append(text)
        try:
            yield
        finally:
            self.kept.append("end")


def every_call(model: Executable) -> None:
    """Make a call of each kind."""
    model(X["x"])
    model.entry("main")(**X)
    model.context().run(X)
    asyncio.run(model.arun(X))
    model.replay()
    model.launch(stream=None)
    model.profile(X)


KINDS = ["run main"] * 4 + ["replay main", "launch main", "profile main"]


def test_every_call_is_told_and_none_after_the_end(model: Executable) -> None:
    plain = {name: getattr(Context, name) for name in METHODS}
    first, second = Notes(), Notes()
    expected = model(X["x"])
    ends = [telemetry.observe(first), telemetry.observe(second)]
    try:
        every_call(model)
        assert np.array_equal(model(X["x"]), expected)
    finally:
        for end in ends:
            end()
            end()
    assert first.kept == second.kept == [text for kind in [*KINDS, "run main"] for text in (kind, "end")]
    assert all(getattr(Context, name) is plain[name] for name in METHODS)
    model(X["x"])
    assert len(first.kept) == 2 * len(KINDS) + 2


@pytest.mark.parametrize("observer", [None, Notes, SimpleNamespace(call=nullcontext)])
def test_what_cannot_observe_is_refused(model: Executable, observer: Any) -> None:
    with pytest.raises(InputError, match=r"^observer: got .*, expected an object with the methods call and command$"):
        telemetry.observe(observer)
    model(X["x"])


def test_steps_are_told_command_by_command(model: Executable) -> None:
    plain = [type(command) for command in model.steps(X)]
    notes = Notes()
    end = telemetry.observe(notes)
    try:
        assert [type(command) for command in model.steps(X)] == plain
        assert notes.kept == ["Tanh bend", "end", "Add sum", "end"]
        half = model.steps(X)
        next(half)
        half.close()
        assert model(X["x"]).shape == (4,)  # nothing is half done
        with pytest.raises(InputError, match="'x' is missing"):
            next(model.steps({}))
        model.bind("x", X["x"])
        assert [type(command) for command in model.steps({})] == plain
    finally:
        end()


def test_a_call_that_fails_ends_its_range(model: Executable) -> None:
    notes = Notes()
    end = telemetry.observe(notes)
    try:
        with pytest.raises(InputError, match="shape"):
            model(np.ones(3, np.float32))
        with pytest.raises(InputError, match="not found"):
            model.profile(X, entry="other")
    finally:
        end()
    assert notes.kept == ["run main", "end"]


class Ranges:
    """A stand-in of the package nvtx that keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    @contextmanager
    def annotate(self, message: str, *, domain: str) -> Iterator[None]:
        """As nvtx.annotate."""
        assert domain == "nimblert"
        self.messages.append(message)
        yield


def test_nvtx_ranges_have_the_names_of_calls_and_ops(model: Executable, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = Ranges()
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=ranges.annotate))
    end = telemetry.observe(telemetry.NvtxRanges())
    try:
        model(X["x"])
        list(model.steps(X))
    finally:
        end()
    assert ranges.messages == ["run main", "Tanh bend", "Add sum"]


@pytest.mark.parametrize("package", ["nvtx", "opentelemetry"])
def test_a_package_that_is_not_installed_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    made = {"nvtx": telemetry.NvtxRanges, "opentelemetry": telemetry.OpenTelemetry}[package]
    with pytest.raises(InputError, match=f"pip install {package}"):
        made()


FLAGGED = """
import os, sys, types
from contextlib import contextmanager
messages = []

@contextmanager
def annotate(message, domain):
    messages.append(message)
    yield

sys.modules["nvtx"] = types.SimpleNamespace(annotate=annotate)
os.environ["NIMBLERT_NVTX"] = sys.argv[2]
import nimblert, numpy
for _ in range(2):
    with nimblert.load(sys.argv[1]) as model:
        model(numpy.ones(4, numpy.float32))
print(messages, "nimblert.telemetry" in sys.modules)
"""


@pytest.mark.parametrize(("flag", "printed"), [("1", "['run main', 'run main'] True"), ("0", "[] False")])
def test_the_environment_asks_for_nvtx(path: Path, flag: str, printed: str) -> None:
    assert python(FLAGGED, path, flag) == f"{printed}\n"


def test_ranges_of_the_real_nvtx(model: Executable) -> None:
    pytest.importorskip("nvtx")
    end = telemetry.observe(telemetry.NvtxRanges())
    try:
        every_call(model)
        assert len(list(model.steps(X))) == 2
    finally:
        end()


def test_the_program_is_that_of_the_call_in_whichever_context_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})  # so that there are spare contexts
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    calls = [{"x": np.zeros((rows, 3), np.int32), "w": np.zeros((2, rows), np.int32)} for rows in (1, 4)]
    with nimblert.load(sized(1, 4)) as model, ThreadPoolExecutor(1) as threads:
        end = telemetry.observe(telemetry.OpenTelemetry(tracers))
        try:
            model.run(calls[1])
            with model._turn.owner, model._turn.lock:  # as during another thread's call
                threads.submit(model.run, calls[0]).result(20)
            threads.submit(model.run, calls[1]).result(20)
        finally:
            end()
    programs = [(span.attributes or {})["nimblert.program"] for span in exporter.get_finished_spans()]
    assert programs == ["main[rows=4]", "main[rows=1]", "main[rows=4]"]
    tracers.shutdown()


def test_spans_and_metrics_of_the_real_opentelemetry(model: Executable) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, reader, tracers = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    meters = MeterProvider(metric_readers=[reader])
    end = telemetry.observe(telemetry.OpenTelemetry(tracers, meters))
    try:
        with tracers.get_tracer("test").start_as_current_span("request"):
            every_call(model)
        with pytest.raises(InputError):
            model(np.ones(3, np.float32))
        list(model.steps(X))
    finally:
        end()
    *spans, request, failed = exporter.get_finished_spans()
    assert sorted(span.name for span in spans) == sorted(KINDS)
    assert all(span.parent == request.context for span in spans)
    attributes = {"nimblert.entry": "main", "nimblert.program": "main", "nimblert.target": "cpu"}
    assert all(dict(span.attributes or {}) == attributes for span in spans)
    assert dict(failed.attributes or {}) == {**attributes, "error.type": "InputError"}
    assert not failed.status.is_ok
    data: Any = reader.get_metrics_data()
    (metric,) = data.resource_metrics[0].scope_metrics[0].metrics
    assert (metric.name, metric.unit) == ("nimblert.call.duration", "s")
    assert sorted(point.count for point in metric.data.data_points) == [1, len(KINDS)]
    meters.shutdown()
    tracers.shutdown()
