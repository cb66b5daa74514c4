"""The page of a plan: its data, and that names from anywhere stay data."""

import json
import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from cpu_plans import floats, plan_file, write_model
from onnx import helper
from plans import MARKUP, cpu_plan, cuda_plan, large_plan, markup_plan
from programs import at, planned, work
from searched_plan import searched_plan

from nimblec.inspect import report
from nimblec.inspect.inspection import Json
from nimblec.inspect.timeline import timeline
from nimblert.check.verify import read_plan
from nimblert.plan import Plan, Program, Region

TEMPLATES = Path(report.__file__).parent / "templates"


def page(plan: Plan) -> str:
    return report.html_page(plan, name="model.plan", file_nbytes=10**6)


def data_of(html: str) -> Json:
    """Return the JSON in a page, as a browser finds it: up to the first end of the script."""
    found: Json = json.loads(html.partition('id="data">')[2].partition("</script")[0])
    return found


def lives(program: Program) -> list[tuple[int, int, int, int]]:
    return report.live_ranges(timeline(program).spans)


@pytest.mark.parametrize("plan", [cuda_plan(), cpu_plan(), markup_plan(), large_plan(50)])
def test_page_holds_what_is_collected(plan: Plan) -> None:
    collected = report.collect(plan, file_nbytes=10**6)
    assert data_of(page(plan)) == json.loads(json.dumps({"file": "model.plan", **collected}))


def test_page_escapes_names() -> None:
    harmless, hostile = (
        re.sub(r'id="data">.*?</script', "", page(p), flags=re.DOTALL) for p in (cuda_plan(), markup_plan())
    )
    assert hostile == harmless
    assert "<" not in page(markup_plan()).partition('id="data">')[2].partition("</script")[0]
    assert data_of(page(markup_plan()))["programs"][0]["inputs"][0]["name"] == MARKUP


def test_page_escapes_the_name_of_the_file() -> None:
    html = report.html_page(cuda_plan(), name=f"{MARKUP}{{script}}\udcff", file_nbytes=1)
    assert data_of(html)["file"] == f"{MARKUP}{{script}}\udcff"
    assert "<img" not in html
    html.encode()


def test_page_admits_only_its_own_script_and_style() -> None:
    html = page(cuda_plan())
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', html)
    kinds = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert kinds.pop("default-src") == kinds.pop("base-uri") == "'none'"
    for kind, text in (("style", "<style>(.*?)</style>"), ("script", '<script type="module">(.*?)</script>')):
        (found,) = re.findall(text, html, re.DOTALL)
        assert kinds.pop(f"{kind}-src") == f"'sha256-{b64encode(sha256(found.encode()).digest()).decode()}'"
    assert kinds == {}


def test_template_writes_text_alone_and_names_no_address() -> None:
    written = (TEMPLATES / "report.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(", written)
    for path in TEMPLATES.iterdir():
        assert not re.search(r"https?:|url\(|@import|\bsrc=|fetch\(", path.read_text()), path.name


def test_live_ranges_tell_values_in_the_same_bytes_apart() -> None:
    first, second = at(Region.ARENA, 0), at(Region.ARENA, 64)
    program = planned(
        work(0, writes=(first,)),
        work(0, reads=(first,), writes=(second,)),
        work(0, writes=(first,)),
        work(0, reads=(second,)),
    )
    assert lives(program) == [(0, 64, 0, 1), (0, 64, 2, 2), (64, 64, 1, 3)]


def test_live_ranges_go_on_where_work_is_in_place() -> None:
    value = at(Region.ARENA, 0)
    program = planned(work(0, writes=(value,)), work(0, reads=(value,), writes=(value,)), work(0, reads=(value,)))
    assert lives(program) == [(0, 64, 0, 2)]


def test_live_ranges_join_neighbours_of_one_life() -> None:
    halves = at(Region.ARENA, 0), at(Region.ARENA, 64)
    whole = at(Region.ARENA, 0, 128)
    joint = planned(work(0, writes=(whole,)), *(work(0, reads=(half,)) for half in halves), work(0, reads=(whole,)))
    assert lives(joint) == [(0, 128, 0, 3)]
    apart = planned(*(work(0, writes=(half,)) for half in halves), work(0, reads=(whole,)))
    assert lives(apart) == [(0, 64, 0, 2), (64, 64, 1, 2)]


def test_live_ranges_last_until_the_latest_reader_ends() -> None:
    value = at(Region.ARENA, 0)
    program = planned(work(0, 10, writes=(value,)), work(0, 500, reads=(value,)), work(1, 10, reads=(value,)))
    assert lives(program) == [(0, 64, 0, 1)]
    assert lives(planned(work(0))) == []


def test_commands_have_their_floor_where_the_gpu_is_known() -> None:
    known, other = cuda_plan(), replace(cuda_plan(), device=replace(cuda_plan().device, name="NVIDIA T4"))
    (program,) = report.collect(known, file_nbytes=0)["programs"]
    assert [command["touched"] for command in program["work"]] == [64, 144, 128, 192, 128]
    assert program["work"][1]["floor"] == 144 / 4800
    (program,) = report.collect(other, file_nbytes=0)["programs"]
    assert {command["floor"] for command in program["work"]} == {None}


def test_commands_name_their_op_and_kernel() -> None:
    facts = report.collect(cuda_plan(), file_nbytes=0)
    launch = facts["programs"][0]["work"][1]
    assert (launch["op"], launch["source"], launch["command"]) == ("aten.mul.Tensor", "model.scale", 1)
    assert facts["kernels"][launch["kernel"]] == {"symbol": "_Z5scalePfS_S_i", "origin": "aten", "nbytes": 64}


def test_bodies_are_in_the_page_with_the_command_that_runs_them() -> None:
    facts = report.collect(read_plan(Path(__file__).parents[1] / "data" / "plan-2.2.plan"), file_nbytes=0)
    run = {command["type"]: list(command["run"]) for p in facts["programs"] for command in p["work"] if command["run"]}
    assert {kind: [facts["bodies"][body]["name"] for body in bodies] for kind, bodies in run.items()} == {
        "while": ["tail.loop"],
        "switch": ["tail.else", "tail.then"],
    }
    assert [command["kind"] for command in facts["bodies"][0]["work"]] == ["fill"]


def test_launch_of_several_nodes_lists_them(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "x"], ["t"], "sum"), helper.make_node("Relu", ["t"], ["y"], "relu")]
    plan = plan_file(write_model(tmp_path / "m.onnx", nodes, [floats("x", 4)], [floats("y", 4)]))
    (launch,) = report.collect(plan, file_nbytes=0)["programs"][0]["work"]
    assert launch["nodes"] == [["Add", "sum"], ["Relu", "relu"]]


def test_page_of_1000_commands_is_at_most_3_mb() -> None:
    assert len(page(searched_plan()).encode()) <= 3_000_000
