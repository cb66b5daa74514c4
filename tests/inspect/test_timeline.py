"""When commands would run: start times, events, the critical path, and the three ways to look at them."""

import json
import re
import shutil
import subprocess
from itertools import pairwise

import pytest
from graphs import graphs, schedules
from hypothesis import given
from hypothesis import strategies as st
from plans import cpu_plan, cuda_plan, large_plan
from programs import planned, with_program, work
from rich.console import Console

from nimblec.base.ir import Graph, Schedule
from nimblec.cli.picture import picture
from nimblec.inspect.dot import dot
from nimblec.inspect.timeline import UNIT_NS, kind, timeline
from nimblec.inspect.trace import chrome_trace
from nimblec.plan.lower import lower
from nimblec.schedule.dependencies import dependencies, rename_workspaces
from nimblec.schedule.estimates import simulate
from nimblec.schedule.memory import layout
from nimblert.plan import Op, Plan, Program, Record, Wait

FORK = planned(
    work(0, 100),
    Record(stream=0, event=0),
    work(0, 300),
    Wait(stream=1, event=0),
    work(1, 50),
    work(1, 100),
    Record(stream=1, event=1),
    Wait(stream=0, event=1),
    work(0, 10),
)
"""100 ns, then 300 ns beside 50 + 100 ns, then 10 ns."""


def drawn(program: Program, width: int = 100) -> list[str]:
    """Return the lines of the picture as a terminal of that width without colours shows them."""
    console = Console(width=width, markup=False, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(*picture(program, width=width), sep="\n")
    return capture.get().splitlines()


# --- start times and the critical path


def test_work_starts_when_all_that_it_waits_for_has_ended() -> None:
    times = timeline(FORK)
    spans = [(span.work.stream, span.start_ns, span.end_ns) for span in times.spans]
    assert spans == [(0, 0, 100), (0, 100, 400), (1, 100, 150), (1, 150, 250), (0, 400, 410)]
    assert [span.command for span in times.spans] == [0, 2, 4, 5, 8]
    assert (times.duration_ns, times.work_ns, times.unmeasured) == (410, 560, 0)
    assert times.critical_path == (0, 1, 4)
    assert [(h.event, h.source, h.target) for h in times.handovers] == [(0, 0, 2), (1, 3, 4)]


def test_timeline_event_hands_on_wait() -> None:
    relay = planned(
        work(0, 5),
        Record(stream=0, event=0),
        Wait(stream=1, event=0),
        Record(stream=1, event=1),
        Wait(stream=2, event=1),
        work(2, 5),
    )
    assert [(h.event, h.source, h.target) for h in timeline(relay).handovers] == [(1, 0, 1)]


def test_unmeasured_commands_count_the_same() -> None:
    times = timeline(planned(work(0, 0), work(0, 0), work(1, 0)))
    assert [span.duration_ns for span in times.spans] == [UNIT_NS] * 3
    assert not times.measured
    some = timeline(planned(work(0, 70), work(0, 0), work(0, 50)))
    assert [span.duration_ns for span in some.spans] == [70, 50, 50]
    assert (some.measured, some.unmeasured) == (True, 1)


def test_a_program_without_work_takes_no_time() -> None:
    times = timeline(planned())
    assert (times.spans, times.critical_path, times.duration_ns) == ((), (), 0)
    assert drawn(planned()) == ["Program 'main': no work"]


@given(graphs(), st.integers(0, 1000))
def test_the_times_are_those_of_the_cost_model(model: Graph, seed: int) -> None:
    model = rename_workspaces(model)
    for schedule in schedules(dependencies(model), seed):
        program = lower(model, schedule, layout(model, schedule))
        times = timeline(program)
        assert times.duration_ns == simulate(schedule, [UNIT_NS] * len(model.tasks))
        assert waits(schedule) == {(h.source, h.target) for h in times.handovers}
        path = [times.spans[index] for index in times.critical_path]
        assert all(before.end_ns == after.start_ns for before, after in pairwise(path))
        assert sum(span.duration_ns for span in path) == times.duration_ns


def waits(schedule: Schedule) -> set[tuple[int, int]]:
    """Return the waits as positions in the order of issue."""
    place = {task: position for position, task in enumerate(schedule.order)}
    return {(place[before], place[after]) for before, after in schedule.waits}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten.convolution.default", "convolution"),
        ("aten.relu", "relu"),
        ("Conv", "Conv"),
        ("com.microsoft.Gelu", "Gelu"),
        ("", ""),
    ],
)
def test_the_kind_of_work_is_its_operator(name: str, expected: str) -> None:
    program = cuda_plan().programs[0]
    named = with_program(program, ops=(Op(name=name, source=""),) * 3)
    kinds = [kind(named, span.work) for span in timeline(named).spans]
    assert kinds == ["fill", expected, "copy", expected, expected]


# --- the terminal


def test_the_picture_shows_blocks_events_and_the_critical_path() -> None:
    lines = drawn(FORK, 9 + 41 + 5)
    rows = lines.index(next(line for line in lines if line.startswith("stream 0")))
    assert lines[rows - 1].split() == ["|0.00", "us", "|0.20", "us", "busy"]
    assert lines[rows : rows + 4] == [
        "stream 0 AaaaaaaaaaAaaaaaaaaaaaaaaaaaaaaaaaaaaaaaA 100%",
        "         =========>==============================<",
        "stream 1 ..........AaaaaAaaaaaaaaa................  37%",
        "                   <             >",
    ]
    text = [" ".join(line.split()) for line in drawn(FORK)]
    assert "Aa add 5 0.56 us 100.0% 100.0%" in text
    assert "0 stream 0: add layer.1 0.10 us stream 1: add layer.1 0.10 us" in text
    assert "1 stream 1: add layer.1 0.25 us stream 0: add layer.1 0.40 us" in text


def test_letters_are_distinct_and_the_rare_kinds_share_one() -> None:
    count = 30
    ops = tuple(Op(name=f"add{i}", source="") for i in range(count))
    program = with_program(planned(*(work(0, 1000 - i, op=i) for i in range(count))), ops=ops)
    lines = drawn(program, 120)
    (row,) = [line for line in lines if line.startswith("stream 0")]
    shown = {character for character in row[9:-5] if character.isupper() or character == "#"}
    assert len(shown) == 13
    assert sum(line.startswith(" ## ") for line in lines) == 20 - 12
    assert any("... and 10 more (--chrome-trace has every command)" in line for line in lines)


@pytest.mark.parametrize("width", [30, 60, 80, 200])
@pytest.mark.parametrize("program", [*cuda_plan().programs, *cpu_plan().programs, *large_plan(1400).programs])
def test_the_picture_fits_the_terminal(program: Program, width: int) -> None:
    lines = drawn(program, width)
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if re.match(r"stream \d+ ", line)]
    assert len(rows) == program.stream_count
    assert {len(row) for row in rows} == {width}


def test_a_long_list_of_events_says_where_the_rest_is() -> None:
    handed = [(work(0, 1), Record(stream=0, event=i), Wait(stream=1, event=i), work(1, 1)) for i in range(30)]
    lines = drawn(planned(*(command for commands in handed for command in commands)))
    assert "... and 10 more (--chrome-trace has all)" in [line.strip() for line in lines]


def test_colours_follow_the_kind_of_work() -> None:
    console = Console(width=80, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(*picture(cuda_plan().programs[0], width=80), sep="\n")
    assert "\x1b[30;44mR" in capture.get()  # black on blue: relu takes most of the time
    assert "\x1b[30;42mM" in capture.get()


def test_the_picture_says_what_was_not_measured() -> None:
    assert "(2 commands not measured)" in " ".join(drawn(cuda_plan().programs[0], 200))
    assert "Measured when the plan was made: 4.90 us." in drawn(cuda_plan().programs[0], 200)
    assert "every command counts the same: 2 launches" in " ".join(drawn(cpu_plan().programs[0], 200))


def test_names_cannot_steer_the_terminal() -> None:
    program = with_program(FORK, name="\x1b[2J", ops=(Op(name="aten.add.Tensor", source="\x1b]0;x\x07"),))
    text = "\n".join(drawn(program))
    assert "?]0;x?" in text
    assert "\x1b" not in text + dot(plan_of(program))


# --- the trace


def plan_of(*programs: Program) -> Plan:
    """Return a plan of these programs; kernel 0 is there to be launched."""
    return with_program(cuda_plan(), programs=programs)


def test_trace_has_thread_per_stream() -> None:
    events = json.loads(json.dumps(chrome_trace(plan_of(FORK, FORK)), allow_nan=False))["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads[0, 1] == threads[1, 1] == "stream 1"
    slices = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert [(e["tid"], e["ts"], e["dur"]) for e in slices] == [
        (0, 0, 0.1), (0, 0.1, 0.3), (1, 0.1, 0.05), (1, 0.15, 0.1), (0, 0.4, 0.01)
    ]  # fmt: skip
    assert [e["args"]["on critical path"] for e in slices] == [True, True, False, False, True]


def test_the_arguments_name_op_source_kernel_and_grid() -> None:
    events = chrome_trace(cuda_plan())["traceEvents"]
    fill, scale, copy, add, _ = [e["args"] for e in events if e["ph"] == "X"]
    expected = {"op": "aten.mul.Tensor", "source": "model.scale", "kernel": "_Z5scalePfS_S_i", "origin": "aten",
                "grid": "1x1x1", "block": "32x1x1", "command": 1, "measured_ns": 1500}  # fmt: skip
    assert expected.items() <= scale.items()
    assert (add["grid"], add["cluster"], add["measured_ns"]) == ("32x2x1", "16x1x1", 0)
    assert (fill["dst"], fill["nbytes"]) == ("arena+256", 64)
    assert (copy["dst"], copy["src"], copy["nbytes"]) == ("arena+512", "arena+0", 64)


@pytest.mark.parametrize("plan", [cuda_plan(), cpu_plan(), plan_of(FORK)])
def test_arrows_start_and_end_in_the_slices_that_they_join(plan: Plan) -> None:
    events = chrome_trace(plan)["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(isinstance(command, Wait) for command in plan.programs[0].commands)
    for identity, start in starts.items():
        end = ends[identity]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert start["tid"] != end["tid"]
        assert start["ts"] <= end["ts"]
        for arrow in (start, end):
            inside = [s for s in slices if s["tid"] == arrow["tid"] and s["ts"] <= arrow["ts"] < s["ts"] + s["dur"]]
            assert len(inside) == 1


# --- the graph


def test_the_graph_has_every_edge_and_marks_the_critical_path() -> None:
    lines = [line.strip() for line in dot(plan_of(FORK)).splitlines()]
    red = 'color="red" penwidth=3'
    assert [line for line in lines if "->" in line] == [
        f"p0_0 -> p0_1 [{red}]",
        'p0_0 -> p0_2 [style=dashed label="event 0"]',
        "p0_2 -> p0_3",
        f"p0_1 -> p0_4 [{red}]",
        'p0_3 -> p0_4 [style=dashed label="event 1"]',
    ]
    nodes = [line for line in lines if line.startswith("p0_") and "->" not in line]
    assert nodes[0] == f'p0_0 [label="0: add\\nlayer.1\\nstream 0, 0.1 us" fillcolor="0.000 0.350 1.000" {red}]'
    assert nodes[2] == 'p0_2 [label="4: add\\nlayer.1\\nstream 1, 0.05 us" fillcolor="0.382 0.350 1.000"]'
    assert "p0_3 -> p0_4 [style=dotted" in dot(cuda_plan())


def test_names_in_the_graph_are_quoted() -> None:
    source = 'a"] ; b\\n\n{x}'
    text = dot(plan_of(with_program(FORK, ops=(Op(name="aten.add.Tensor", source=source),))))
    assert r'label="0: add\na\"] ; b\\n\n{x}\nstream 0' in text
    if shutil.which("dot"):
        subprocess.run(["dot", "-Tsvg"], input=text, text=True, check=True, capture_output=True)
