"""The adapters of samples/telemetry, with the packages that they are for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_plans import bent_sum

import nimblert
from nimblert import Executable, InputError

X = np.ones(4, np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Executable]:
    """Yield a model of tanh(x) + tanh(x)."""
    with nimblert.load(bent_sum(tmp_path)) as executable:
        yield executable


@contextmanager
def observed(observer: Any) -> Iterator[None]:
    nimblert.observe(observer)
    try:
        yield
    finally:
        nimblert.observe(None)


def test_nvtx_range_has_the_name_of_the_program(model: Executable, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvtx")
    import nvtx_ranges

    messages = []
    annotate = nvtx_ranges.nvtx.annotate

    def noted(message: str, domain: str) -> Any:
        messages.append((message, domain))
        return annotate(message, domain=domain)

    monkeypatch.setattr(nvtx_ranges.nvtx, "annotate", noted)
    with observed(nvtx_ranges.nvtx_range):
        model(X)
        with pytest.raises(InputError):
            model(X[1:])
    assert messages == [("run main", "nimblert")] * 2


def test_opentelemetry_gets_spans_and_durations(model: Executable) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry_spans import CallSpans

    exporter, reader, tracers = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    meters = MeterProvider(metric_readers=[reader])
    with observed(CallSpans(tracers, meters)):
        with tracers.get_tracer("test").start_as_current_span("request"):
            model(X)
            model.run({"x": X})
        with pytest.raises(InputError):
            model(X[1:])
    *spans, request, failed = exporter.get_finished_spans()
    of_all = {"nimblert.entry": "main", "nimblert.target": "cpu"}
    for span in spans:
        assert (span.name, span.parent) == ("run main", request.context)
        assert dict(span.attributes or {}) == {**of_all, "nimblert.program": "main", "nimblert.shape.x": (4,)}
    assert len(spans) == 2
    assert dict(failed.attributes or {}) == {**of_all, "error.type": "InputError", "nimblert.shape.x": (3,)}
    assert not failed.status.is_ok
    data: Any = reader.get_metrics_data()
    (metric,) = data.resource_metrics[0].scope_metrics[0].metrics
    assert (metric.name, metric.unit) == ("nimblert.call.duration", "s")
    assert sorted(point.count for point in metric.data.data_points) == [1, 2]
    meters.shutdown()
    tracers.shutdown()
