"""What inspect says of a plan: facts that can be counted by hand."""

import json
from pathlib import Path

import pytest
from plans import cpu_plan, cuda_plan, large_plan
from rich.console import Console

from nimblec.cli import report
from nimblec.inspect import inspection
from nimblert.check.verify import read_plan
from nimblert.plan import Plan, Pointer, Region


def printed(*tables: object) -> str:
    console = Console(width=160, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(*tables)
    return capture.get()


@pytest.mark.parametrize("plan", [cuda_plan(), cpu_plan(), large_plan(50)])
def test_the_facts_are_json_and_do_not_depend_on_the_call(plan: Plan) -> None:
    facts = inspection.describe(plan, file_nbytes=10**6)
    assert facts == inspection.describe(plan, file_nbytes=10**6)
    assert json.loads(json.dumps(facts)) == facts


def test_the_sizes_add_up() -> None:
    sizes = inspection.sizes(cuda_plan(), file_nbytes=20000)
    assert sizes == {
        "file": 20000,
        "code": 64 + 5004,
        "weights": 16 + 8,
        "state": 64,
        "metadata": 20000 - 64 - 5004 - 16 - 8 - 64,
        "saved": 0,
        "arena": 1024,
    }


def test_commands_kernels_and_modules_are_counted() -> None:
    facts = inspection.describe(cuda_plan(), file_nbytes=20000)
    program = facts["programs"][0]
    assert program["commands"] == {"launch": 3, "memcpy": 1, "memset": 1, "record": 2, "wait": 2}
    assert facts["modules"] == {"aten": {"count": 1, "nbytes": 64}, "triton": {"count": 1, "nbytes": 5004}}
    assert [(k["origin"], k["symbol"], k["launches"]) for k in facts["kernels"]] == [
        ("aten", "_Z3addPfS_", 1),
        ("aten", "_Z5scalePfS_S_i", 1),
        ("triton", "relu", 1),
    ]
    assert facts["device"]["compute_capability"] == "9.0"
    assert facts["device"]["driver"] == "CUDA 13.0"
    assert facts["regions"] == {"weights": 1024, "state": 256}
    assert program["golden"] == {"seed": 7, "tolerance": 0.0}


def test_the_arena_map_gives_the_life_of_every_range() -> None:
    program = cuda_plan().programs[0]
    assert inspection.arena_map(program) == [
        {"offset": 0, "nbytes": 64, "first_command": 1, "last_command": 6},
        {"offset": 64, "nbytes": 64, "first_command": 6, "last_command": 6},
        {"offset": 256, "nbytes": 64, "first_command": 0, "last_command": 0},
        {"offset": 512, "nbytes": 64, "first_command": 4, "last_command": 8},
    ]


@pytest.mark.parametrize(
    ("region", "offset", "text"),
    [(Region.ARENA, 4096, "arena+4096"), (Region.INPUT, 0, "input[2]+0"), (Region.STATE, -64, "state-64")],
)
def test_places_read_like_region_plus_offset(region: Region, offset: int, text: str) -> None:
    index = 2 if region is Region.INPUT else 0
    assert inspection.pointer_text(Pointer(region=region, index=index, offset=offset)) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (66454, "66.5 kB"), (999_949, "999.9 kB"),
     (999_950, "1.0 MB"), (5 * 10**9, "5.0 GB"), (3 * 10**16, "30000.0 TB")],
)  # fmt: skip
def test_sizes_are_decimal(nbytes: int, text: str) -> None:
    assert report.nbytes_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.00 us"), (3.3e-8, "0.03 us"), (66.34e-6, "66.3 us"), (0.00431, "4.31 ms"), (1.25, "1.25 s"),
     (1234.5, "1234 s")],
)  # fmt: skip
def test_durations_have_about_three_digits(seconds: float, text: str) -> None:
    assert report.seconds_text(seconds) == text


def test_long_lists_are_capped_and_say_so() -> None:
    facts = inspection.describe(cpu_plan(), file_nbytes=10**5)
    weight = facts["weights"][0]
    many = {**facts, "weights": [{**weight, "name": f"layer.{i}"} for i in range(report.ROWS + 5)]}
    out = printed(*report.inspected(many))
    assert f"layer.{report.ROWS - 1}" in out
    assert f"layer.{report.ROWS}" not in out
    assert "... and 5 more (--json lists all)" in out


def test_names_are_printed_as_they_are_not_as_markup() -> None:
    facts = inspection.describe(cpu_plan(), file_nbytes=10**5)
    facts["weights"][0]["name"] = "[bold]w[/bold]"
    assert "[bold]w[/bold]" in printed(*report.inspected(facts))


def test_latencies_are_shown_as_quantiles() -> None:
    text = report.latency_text([i * 1e-6 for i in range(1, 102)])
    assert text == "latency of 101 runs: median 51.0 us, p5 6.00 us, p95 96.0 us"


def test_weights_that_can_be_replaced_are_counted() -> None:
    plan = read_plan(Path(__file__).parents[1] / "data" / "plan-2.1.plan")
    facts = inspection.describe(plan, file_nbytes=0)
    (refit,) = facts["refits"]
    assert [weight["name"] for weight in refit["weights"]] == ["scale", "bias"]
    assert "2 can be replaced, by 0 commands" in printed(*report.inspected(facts))
