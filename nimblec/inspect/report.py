"""`nimblec inspect PLAN --html FILE`: a plan as one page that a browser shows without a network.

The page is a template and the facts of this module as JSON; `templates/report.js` draws them. Names in a plan may come
from anywhere. So JSON holds no "<", the script writes text nodes alone, and a Content-Security-Policy lets the browser
run only the script that this module hashed, and load nothing.
"""

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from hashlib import sha256
from importlib.resources import files

import numpy as np

from nimblec.inspect.inspection import Json, describe, describe_program
from nimblec.inspect.parts import parts_of
from nimblec.inspect.timeline import Span, Timeline, kind, timeline
from nimblec.inspect.trace import arguments
from nimblert.plan import Launch, Plan, Program, Region
from nimblert.plan.pieces import bodies_of, cuts, reads, touches, writes

_BANDWIDTH = {
    "NVIDIA A100-SXM4-40GB": 1555,
    "NVIDIA A100-SXM4-80GB": 2039,
    "NVIDIA H100 80GB HBM3": 3350,
    "NVIDIA H200": 4800,
    "NVIDIA B200": 8000,
    "NVIDIA GeForce RTX 5090": 1792,
}
"""Bytes per nanosecond of a GPU's memory, by the name that the driver gives it. Source: NVIDIA's data sheets."""


def html_page(plan: Plan, *, name: str, file_nbytes: int) -> str:
    """Return the page of a plan; ``name`` and ``file_nbytes`` are those of the file that it came from."""
    facts = {"file": name, **collect(plan, file_nbytes=file_nbytes)}
    style, script = _template("report.css"), _template("report.js")
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    before, after = _template("report.html").split("{data}")
    for place, text in (("{policy}", policy), ("{style}", style)):
        before = before.replace(place, text)
    data = json.dumps(facts, separators=(",", ":")).replace("<", "\\u003c")
    return before + data + after.replace("{script}", script)


def collect(plan: Plan, *, file_nbytes: int) -> Json:
    """Return `inspection.describe`, with the commands in time of each program and body, and kernels in plan order."""
    return {
        **describe(plan, file_nbytes=file_nbytes),
        "programs": [_program(plan, program) for program in plan.programs],
        "bodies": [_program(plan, body) for body in plan.bodies],
        "kernels": [
            {
                "symbol": kernel.symbol,
                "origin": plan.modules[kernel.module].origin,
                "nbytes": plan.modules[kernel.module].code.nbytes,
            }
            for kernel in plan.kernels
        ],
        "bandwidth": _BANDWIDTH.get(plan.device.name),
    }


def live_ranges(spans: Sequence[Span]) -> list[tuple[int, int, int, int]]:
    """Return the values in the arena as (offset, bytes, first span, last span): written, and last in use.

    A value ends where its bytes are written without being read. So a concatenation whose parts are written apart is
    several values, and neighbours that live equally long are one.
    """
    touched = touches([span.work for span in spans]).get((Region.ARENA, 0))
    if touched is None:
        return []
    borders = cuts(touched)
    pieces = zip(
        np.searchsorted(borders, touched.start).tolist(),
        np.searchsorted(borders, touched.end).tolist(),
        touched.work.tolist(),
        touched.write.tolist(),
        strict=True,
    )
    # For each piece the spans of its lives, each with the work that touched it last in order of issue.
    lives: list[list[list[int]]] = [[] for _ in borders]
    for start, end, work, is_write in pieces:
        for piece in range(start, end):
            own = lives[piece]
            if not own or (is_write and own[-1][2] != work):
                own.append([work, work, work])
            life = own[-1]
            life[1], life[2] = max(life[1], work, key=lambda i: spans[i].end_ns), work
    return sorted(_joined(lives, borders.tolist()))


def _joined(lives: Sequence[Sequence[Sequence[int]]], borders: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Join neighbouring pieces that live from the same span to the same span."""
    starts: dict[tuple[int, int], int] = {}
    for piece, own in enumerate(lives):
        known = {(first, last) for first, last, _ in own}
        for ended in starts.keys() - known:
            offset = starts.pop(ended)
            yield offset, borders[piece] - offset, *ended
        for begun in known:
            starts.setdefault(begun, borders[piece])


def _program(plan: Plan, program: Program) -> Json:
    times = timeline(program)
    described = describe_program(plan, program)
    # `live_ranges` tells values that take turns in the same bytes apart.
    described.pop("arena_map")
    return {
        **described,
        "work": list(_commands(plan, program, times)),
        "handovers": [[h.event, h.source, h.target] for h in times.handovers],
        "lives": live_ranges(times.spans),
        "duration": times.duration_ns,
        "busy": times.work_ns,
        "unmeasured": times.unmeasured,
        "measured": times.measured,
    }


def _commands(plan: Plan, program: Program, times: Timeline) -> Iterator[Json]:
    critical = frozenset(times.critical_path)
    bandwidth = _BANDWIDTH.get(plan.device.name)
    for index, span in enumerate(times.spans):
        work = span.work
        nbytes = sum(access.nbytes for access in (*reads(work), *writes(work)))
        facts = {
            **arguments(plan, program, span),
            "kind": kind(program, work),
            "type": type(work).__name__.lower(),
            "stream": work.stream,
            "start": span.start_ns,
            "end": span.end_ns,
            "critical": index in critical,
            "touched": nbytes,
            "floor": nbytes / bandwidth if bandwidth else None,
            "run": bodies_of(work),
        }
        if isinstance(work, Launch):
            # The table of kernels has symbol and origin, once for all launches.
            del facts["origin"]
            facts["kernel"] = work.kernel
            ops = [program.ops[part.op] for part in parts_of(plan, work)]
            facts["nodes"] = [[op.name, op.source] for op in ops] if len(ops) > 1 else []
        yield facts


def _template(name: str) -> str:
    return (files("nimblec.inspect") / "templates" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the source expression of the Content-Security-Policy that admits an inline script or style."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
