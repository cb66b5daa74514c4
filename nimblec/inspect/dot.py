"""A plan as a graph for Graphviz: what each command waits for, and on which stream it runs.

The language: https://graphviz.org/doc/info/lang.html
"""

from collections.abc import Iterator
from itertools import pairwise

from nimblec.inspect.timeline import Span, Timeline, kind, timeline, visible
from nimblert.cuda.graph import edges
from nimblert.plan import Plan, Program

_HUE_STEP = 0.381966
"""The golden section of the circle: colours of neighbouring streams are far apart, however many there are."""
_CRITICAL = 'color="red" penwidth=3'


def dot(plan: Plan) -> str:
    """Return the graph in the DOT language, a cluster per program.

    A node is a launch, copy or fill in the colour of its stream. Edges that the others imply are
    left out: full ones within a stream, dashed ones between streams, dotted programmatic ones. The
    critical path of the simulated run (`nimblec.inspect.timeline`) is red and thick.
    """
    lines = [
        "digraph plan {",
        '  node [shape=box style="filled,rounded" fontname="Helvetica" fontsize=10]',
        '  edge [fontname="Helvetica" fontsize=8]',
    ]
    for number, program in enumerate(plan.programs):
        lines.append(f"  subgraph cluster_{number} {{")
        title = f"program {program.name}: {program.stream_count} streams, {program.event_count} events"
        lines.append(f"    label={_quoted(title)}")
        lines.extend(f"    {line}" for line in _program_lines(number, program, timeline(program)))
        lines.append("  }")
    return "\n".join([*lines, "}", ""])


def _program_lines(number: int, program: Program, times: Timeline) -> Iterator[str]:
    critical = frozenset(times.critical_path)
    for index, span in enumerate(times.spans):
        marks = f" {_CRITICAL}" if index in critical else ""
        label = _quoted(_label(program, span, measured=times.measured))
        hue = span.work.stream * _HUE_STEP % 1
        yield f'p{number}_{index} [label={label} fillcolor="{hue:.3f} 0.350 1.000"{marks}]'
    steps = frozenset(pairwise(times.critical_path))
    events = {(handover.source, handover.target): handover.event for handover in times.handovers}
    for target, before in enumerate(edges(program.commands)):
        for edge in before:
            event = events.get((edge.source, target))
            if edge.programmatic:
                attributes = ["style=dotted", 'label="programmatic"']
            else:
                attributes = [] if event is None else ["style=dashed", f'label="event {event}"']
            if (edge.source, target) in steps:
                attributes.append(_CRITICAL)
            written = f" [{' '.join(attributes)}]" if attributes else ""
            yield f"p{number}_{edge.source} -> p{number}_{target}{written}"


def _label(program: Program, span: Span, *, measured: bool) -> str:
    lines = [f"{span.command}: {kind(program, span.work)}", program.ops[span.work.op].source]
    place = f"stream {span.work.stream}"
    lines.append(f"{place}, {span.duration_ns / 1000:g} us" if measured else place)
    return "\n".join(line for line in lines if line)


def _quoted(text: str) -> str:
    """Return a string of DOT: only quotes end it, but labels take backslashes for escapes of their own."""
    lines = (visible(line).replace("\\", "\\\\").replace('"', '\\"') for line in text.split("\n"))
    return '"' + "\\n".join(lines) + '"'
