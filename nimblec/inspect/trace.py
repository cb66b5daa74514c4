"""A plan as a trace that chrome://tracing and https://ui.perfetto.dev open.

The format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterator

from nimblec.inspect.inspection import Json, pointer_text
from nimblec.inspect.timeline import Span, Timeline, kind, timeline
from nimblert.plan import Crop, Dim3, Launch, Memcpy, Memset, Plan, Program, Switch, While


def chrome_trace(plan: Plan) -> Json:
    """Return the trace as JSON: a process per program, a thread per stream, an arrow per event waited for.

    Times are simulated from the durations in the plan; see `nimblec.inspect.timeline`.
    """
    programs = [(number, program, timeline(program)) for number, program in enumerate(plan.programs)]
    return {
        "traceEvents": [
            event for number, program, times in programs for event in _program_events(plan, number, program, times)
        ],
        "displayTimeUnit": "ns",
        "otherData": {
            "producer": plan.producer,
            "device": plan.device.name,
            "commands without a measured duration": sum(times.unmeasured for _, _, times in programs),
        },
    }


def _program_events(plan: Plan, process: int, program: Program, times: Timeline) -> Iterator[Json]:
    yield _metadata("process_name", process, {"name": f"program {program.name}"})
    for stream in range(program.stream_count):
        yield _metadata("thread_name", process, {"name": f"stream {stream}"}, thread=stream)
        yield _metadata("thread_sort_index", process, {"sort_index": stream}, thread=stream)
    critical = frozenset(times.critical_path)
    for index, span in enumerate(times.spans):
        yield _slice(process, program, span, {**arguments(plan, program, span), "on critical path": index in critical})
    for number, handover in enumerate(times.handovers):
        # Each end of an arrow belongs to the slice that its time lies in: [start, end).
        source, target = times.spans[handover.source], times.spans[handover.target]
        shared = {"name": f"event {handover.event}", "cat": "event", "id": f"{process}.{number}", "pid": process}
        yield {**shared, "ph": "s", "tid": source.work.stream, "ts": (source.end_ns - 1) / 1000}
        yield {**shared, "ph": "f", "bp": "e", "tid": target.work.stream, "ts": target.start_ns / 1000}


def _metadata(name: str, process: int, arguments: Json, *, thread: int = 0) -> Json:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _slice(process: int, program: Program, span: Span, facts: Json) -> Json:
    return {
        "name": kind(program, span.work),
        "cat": type(span.work).__name__.lower(),
        "ph": "X",
        "pid": process,
        "tid": span.work.stream,
        "ts": span.start_ns / 1000,
        "dur": span.duration_ns / 1000,
        "args": facts,
    }


def arguments(plan: Plan, program: Program, span: Span) -> Json:
    """Return the facts about a command that its place in time does not tell."""
    work, op = span.work, program.ops[span.work.op]
    shared = {"command": span.command, "op": op.name, "source": op.source, "measured_ns": work.duration_ns}
    match work:
        case Launch():
            kernel = plan.kernels[work.kernel]
            return {
                **shared,
                "kernel": kernel.symbol,
                "origin": plan.modules[kernel.module].origin,
                "grid": _dim3(work.grid),
                "block": _dim3(work.block),
                "cluster": _dim3(work.cluster),
                "dynamic_smem_nbytes": work.dynamic_smem_nbytes,
                "programmatic": work.programmatic,
            }
        case Memcpy():
            place = {"dst": pointer_text(work.dst), "src": pointer_text(work.src)}
            return {**shared, **place, "nbytes": work.nbytes}
        case Memset():
            nbytes = work.count * work.element_nbytes
            return {**shared, "dst": pointer_text(work.dst), "value": work.value, "nbytes": nbytes}
        case While():
            return {**shared, "condition": pointer_text(work.condition), "body": plan.bodies[work.body].name}
        case Switch():
            bodies = ", ".join(plan.bodies[body].name for body in work.bodies)
            return {**shared, "index": pointer_text(work.index), "bodies": bodies}
        case Crop():
            return {**shared, "output": program.outputs[work.output].name, "sizes": pointer_text(work.sizes)}


def _dim3(sizes: Dim3) -> str:
    return "x".join(map(str, sizes))
