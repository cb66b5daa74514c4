"""Report each call of a plan to OpenTelemetry: a span, and a value of the histogram ``nimblert.call.duration``.

Copy this file beside your program, install opentelemetry-api (`pip install opentelemetry-api`) and your exporter, and
write:

>>> nimblert.observe(CallSpans())
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import metrics, trace

from nimblert import ObservedCall


class CallSpans:
    """An observer with a tracer and a meter of these providers, by default the global ones.

    Spans and values have the attributes ``nimblert.entry``, ``nimblert.program`` and ``nimblert.target``, and
    ``error.type`` where the call raises; spans also have ``nimblert.shape.NAME`` for each input.
    """

    def __init__(self, tracer_provider: Any = None, meter_provider: Any = None) -> None:
        self._tracer = trace.get_tracer("nimblert", tracer_provider=tracer_provider)
        meter = metrics.get_meter("nimblert", meter_provider=meter_provider)
        self._seconds = meter.create_histogram("nimblert.call.duration", unit="s", description="Duration of calls")

    @contextmanager
    def __call__(self, call: ObservedCall) -> Iterator[None]:
        """Open a span around the call."""
        attributes = {"nimblert.entry": call.entry, "nimblert.target": call.plan.target.name.lower()}
        if call.program is not None:
            attributes["nimblert.program"] = call.program.name
        begin = time.perf_counter()
        with self._tracer.start_as_current_span(f"run {call.entry}", attributes=attributes) as span:
            span.set_attributes({f"nimblert.shape.{name}": shape for name, shape in call.shapes.items()})
            try:
                yield
            except Exception as exc:
                attributes["error.type"] = type(exc).__name__
                span.set_attributes(attributes)
                raise
            finally:
                self._seconds.record(time.perf_counter() - begin, attributes)
