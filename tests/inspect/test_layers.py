"""Plans by layer and phase: what sources say, and what inspect makes of them."""

from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from plans import cpu_plan, cuda_plan, large_plan
from rich.console import Console

from nimblec.base.places import Phase, Place, joined, places
from nimblec.cli import layer_tables
from nimblec.inspect import inspection
from nimblec.inspect.layers import Share, at_depth, by_layer
from nimblert.plan import Op, Plan, Record, Wait

FORWARD, BACKWARD, UPDATE = (phase.value for phase in Phase)

place = st.builds(Place, st.sampled_from(Phase), st.from_regex(r"[a-z]+[0-9]?(\.[a-z0-9]+){0,3}", fullmatch=True))


def with_sources(plan: Plan, *sources: str) -> Plan:
    """Return the plan with one op for each command, the sources in turn."""
    (program,) = plan.programs
    works = [n for n, command in enumerate(program.commands) if not isinstance(command, Record | Wait)]
    commands = list(program.commands)
    for op, n in enumerate(works):
        commands[n] = replace(commands[n], op=op)
    ops = tuple(Op(name="op", source=sources[op % len(sources)]) for op in range(len(works)))
    return replace(plan, programs=(replace(program, ops=ops, commands=tuple(commands)),))


def printed(plan: Plan) -> str:
    console = Console(width=160, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(*layer_tables.tables(inspection.describe(plan, file_nbytes=10**6)))
    return capture.get()


@examples(200)
@given(st.lists(place, min_size=1, max_size=8, unique=True))
def test_a_source_says_the_places_that_were_joined(found: list[Place]) -> None:
    assert places(joined(map(str, found))) == tuple(found)


def test_what_is_of_many_layers_is_of_the_module_that_holds_them() -> None:
    forward = [f"model.layer1.{n}.relu" for n in range(9)]
    assert joined([*forward, "update"]) == "model.layer1 + update"
    assert joined([f"backward of {layer}" for layer in ("a", "b", *forward)]) == "backward"


def test_the_name_of_an_onnx_node_stays_as_it_is() -> None:
    assert joined(["Conv '/stem/Conv'", "Relu '/stem/Relu'"], "Relu '/stem/Relu'") == "Relu '/stem/Relu'"


def test_a_step_is_shown_by_layer_and_phase() -> None:
    joint = "backward of model.0 + backward of model.1", "backward of model.0 + update of model.0"
    plan = with_sources(cuda_plan(), "model.0", "loss", *joint, "")
    found = by_layer(plan, plan.programs[0])
    assert list(found) == [
        (("model.0",), (FORWARD,)),
        (("model.0",), (BACKWARD, UPDATE)),
        (("model.0", "model.1"), (BACKWARD,)),
        (("loss",), (FORWARD,)),
        ((), ()),
    ]
    assert sum(share.launches for share in found.values()) == 3
    assert sum(share.copies for share in found.values()) == 2
    text = printed(plan)
    header = next(line for line in text.splitlines() if "layer " in line and "forward" in line)
    assert header.split()[::2] == ["layer", *["time"] * 5]
    assert header.split()[1::2] == [FORWARD, BACKWARD, "several", "unknown", "all"]
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert {"model.0", "model.0 + model.1", "loss", "(not known)", "in all"} <= rows.keys()


def test_the_shares_are_those_of_the_commands() -> None:
    plan = with_sources(cuda_plan(), "body")
    (program,) = plan.programs
    times = [c.duration_ns for c in program.commands if not isinstance(c, Record | Wait)]
    (row,) = inspection.describe(plan, file_nbytes=0)["programs"][0]["layers"]
    assert (row["layers"], row["phases"]) == (["body"], [])
    assert (row["launches"], row["copies"], row["duration_ns"]) == (3, 2, sum(times))
    assert row["written"] > 0


@pytest.mark.parametrize(
    ("node", "layer"),
    [("/layer1/layer1.0/conv1/Conv", "layer1.0.conv1"), ("/model.0/conv/Conv", "model.0.conv"), ("/Add", "")],
)
def test_names_of_the_older_exporter_tell_layers(node: str, layer: str) -> None:
    for plan in (with_sources(cpu_plan(), node), with_sources(cuda_plan(), f"Conv '{node}'")):
        assert [layers for layers, _ in by_layer(plan, plan.programs[0])] == ([(layer,)] if layer else [])


@pytest.mark.parametrize("plan", [with_sources(cpu_plan(), "node_conv2d"), with_sources(cuda_plan(), "Conv 'node_1'")])
def test_no_layers_are_made_of_other_names(plan: Plan) -> None:
    assert not by_layer(plan, plan.programs[0])
    assert not printed(plan).strip()


def test_layers_join_deep_modules() -> None:
    share = Share(launches=1, written=4)
    shares = {((f"model.layer{n // 10}.{n % 10}.conv",), (FORWARD,)): share for n in range(40)}
    cut, depth = at_depth(shares, 20)
    assert depth == 2
    assert cut == {((f"model.layer{n}",), (FORWARD,)): Share(launches=10, written=40) for n in range(4)}
    assert at_depth(shares, 40) == (shares, 0)
    fused = {(("a.0.x", "a.0.y"), ()): share, (("a.1.x", "b.0.x"), ()): share}
    assert at_depth(fused, 1) == ({(("a",), ()): share, (("a", "b"), ()): share}, 1)


def test_a_table_says_that_modules_are_taken_together() -> None:
    paths = [f"model.layer{n % 3}.{n}" for n in range(50)]
    text = printed(with_sources(large_plan(50), *paths))
    assert "model.layer2 " in text
    assert "... by the first 2 names of paths" in " ".join(text.split())
    assert "..." not in printed(with_sources(large_plan(50), *paths[:5]))
