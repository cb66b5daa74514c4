"""Models of several entries, from Python and by name, through to a run."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import entry_models
import numpy as np
import pytest
import torch
from command_line import CommandLine
from cpu_plans import floats, write_model
from onnx import helper

import nimblec
import nimblert
from nimblec.base.errors import ArgumentError, CompileError
from nimblec.base.ir import Part
from nimblec.base.options import InputSpec, NamedInput, Options
from nimblec.base.source import Source
from nimblec.cpu import capture
from nimblec.cuda.load import load_models
from nimblec.cuda.request import CompileRequest
from nimblec.find_source import find_source
from nimblec.plan import encoder
from nimblec.plan.assembly import Provenance, assemble
from nimblec.pytorch.handover import hand_over
from nimblec.pytorch.model import TorchModel
from nimblec.schedule.dependencies import dependencies
from nimblec.schedule.memory import layout
from nimblec.schedule.streams import serial
from nimblert.check.verify import read_plan
from nimblert.plan import Device, Plan, Target


@pytest.fixture(scope="module")
def plan() -> Plan:
    return nimblec.compile(entry_models.head, target="cpu", plan_cache=None)


def test_each_entry_computes_what_its_module_does(plan: Plan) -> None:
    entries = entry_models.head()
    rows, row = entries["rows"][1][0], entries["probabilities"][1]
    with nimblert.load(plan) as model:
        assert model.entries == ("rows", "probabilities")
        found = model(rows.numpy(), entry="rows")
        np.testing.assert_allclose(found, entries["rows"][0](rows).detach().numpy(), rtol=1e-5, atol=1e-6)
        temperature = np.array(0.5, np.float32)
        found = model.entry("probabilities")(row.numpy(), temperature=temperature)
        expected = entries["probabilities"][0](row, torch.tensor(0.5)).detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        with pytest.raises(nimblert.InputError, match=r"input 'rows': shape \(2, 16\), expected \(3, 16\)"):
            model(rows[:2].numpy(), entry="rows")


def test_weights_are_stored_once(plan: Plan) -> None:
    alone = nimblec.compile(entry_models.Head().eval(), torch.zeros(3, 16), target="cpu", plan_cache=None)
    shared = {bytes(weight.data) for weight in alone.weights}
    assert shared <= {bytes(weight.data) for weight in plan.weights}
    assert sum(w.data.nbytes for w in plan.weights) < 1.5 * sum(w.data.nbytes for w in alone.weights)
    assert plan.arena_nbytes == max(program.arena_nbytes for program in plan.programs)
    assert all(program.golden is not None for program in plan.programs)


@pytest.mark.parametrize("model", ["entry_models:head", entry_models.head()])
def test_a_name_and_a_dict_give_the_same_plan(plan: Plan, model: Any) -> None:
    found = nimblec.compile(model, target="cpu", plan_cache=None)
    assert [p.name for p in found.programs] == ["rows", "probabilities"]
    assert [bytes(w.data) for w in found.weights] == [bytes(w.data) for w in plan.weights]
    assert [p.golden for p in found.programs] == [p.golden for p in plan.programs]


def test_the_command_line_compiles_runs_and_verifies_entries(nimblec: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "head.plan"
    nimblec.prints("compile", "entry_models:head", "-o", path, "--target", "cpu")
    assert "float32 1x4" in nimblec("run", path, "--entry", "probabilities").out
    verified = nimblec("verify", path)
    assert verified.status == 0
    assert "golden of 'probabilities'" in verified.out


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (entry_models.none, "the model: has no entries"),
        (entry_models.unnamed, "1 is not a name of an entry: expected a string"),
        (entry_models.without_inputs, r"entry 'rows' is Head, expected \(module, example_inputs\) or"),
        (lambda: 1, "example_inputs: a module or a function needs the arguments of one call"),
    ],
)
def test_what_are_no_entries_is_refused(model: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        nimblec.compile(model, target="cpu")
    if model.__name__ != "<lambda>":
        with pytest.raises(CompileError, match=message.removeprefix("the model: ")):
            nimblec.compile(f"entry_models:{model.__name__}", target="cpu")


def test_sizes_are_those_of_the_entries() -> None:
    for model in (entry_models.head, "entry_models:head"):
        with pytest.raises(CompileError, match="has several entries, which take sizes from their example inputs"):
            nimblec.compile(model, target="cpu", inputs={"rows": (4, 16)})


def test_shared_state_is_one_when_read(tmp_path: Path) -> None:
    source, *_ = hand_over(find_source(entry_models.counting, None, None, tmp_path), Options(), tmp_path)
    assert {name: part.shared for name, part in source.entries} == {
        "add": (("total", 0),),
        "total": (("counter.total", 0),),
    }
    assert [part.writes for _, part in source.entries] == [("total",), ()]
    add, total = _loaded(source, tmp_path)
    for count in (1, 2):
        assert add.module(*add.args)["output"].tolist() == [count] * 4
        assert total.module(*total.args)["output"].tolist() == [count] * 4


def test_entries_are_handed_over_as_a_file_each(tmp_path: Path) -> None:
    source, *_ = hand_over(find_source(entry_models.head, None, None, tmp_path), Options(), tmp_path)
    assert [(name, part.kind) for name, part in source.entries] == [("rows", "exported"), ("probabilities", "exported")]
    assert all(Path(part.model).is_file() for _, part in source.entries)


def test_weights_of_entries_are_handed_over_once(tmp_path: Path) -> None:
    source, *_ = hand_over(find_source(entry_models.head, None, None, tmp_path), Options(), tmp_path)
    head = entry_models.head()["rows"][0]
    assert [len(part.shared) for _, part in source.entries] == [4, 4]
    held = torch.export.load(source.entries[0][1].model).state_dict
    assert {tensor.numel() for tensor in held.values()} == {1}
    rows, probabilities = _loaded(source, tmp_path)
    torch.testing.assert_close(dict(rows.module.named_parameters()), dict(head.named_parameters()), rtol=0, atol=0)
    assert rows.module.wide.weight is probabilities.module.head.wide.weight


def _loaded(source: Source, folder: Path) -> list[TorchModel]:
    """Return the models as the capture process loads them, on the CPU."""
    request = CompileRequest(source=source, options=Options(), output=folder / "a.plan", sys_path=())
    return [*load_models(request, device="cpu").values()]


def test_compile_request_loads_every_field(tmp_path: Path) -> None:
    parts = tuple(
        (name, Source(kind="exported", model=f"/models/{name}.pt2", shared=(("kept", 0),))) for name in ("a", "b")
    )
    image, mask = np.ones((2, 3), np.float32), np.array([True])
    options = Options(
        target="cuda",
        inputs=(InputSpec(name="x", shape=(1, 2), dtype="float32"), InputSpec(name="y", shape=())),
        named_inputs=(NamedInput(name="z", shape=("batch", 2)),),
        dims=(("batch", 4),),
        sizes=(("length", (1, 2, 4)),),
        pad_masks=("mask",),
        constants=(("file", mask),),
        examples=(("image:0", image),),
        level=2,
        precision="fp16",
        max_error=1e-3,
        approximate=True,
        trip_limit=7,
        bounds=(("output", (4, 2)),),
        print_passes=True,
        refittable=True,
        streams="2",
        memory_limit=1 << 20,
        reproducible=True,
        timing_cache=Path("/models/timings.json"),
        plan_cache=None,
    )
    left = [field.name for field in fields(Options) if getattr(options, field.name) == getattr(Options(), field.name)]
    assert left == []
    source = Source(kind="entries", entries=parts, labels=(("s77", "batch"),))
    request = CompileRequest(source=source, options=options, output=Path("/m.plan"), sys_path=("/a", "/b"))
    request.save(tmp_path)
    found = CompileRequest.load(tmp_path)
    assert found == request
    ((name, constant),), ((other, example),) = found.options.constants, found.options.examples
    assert (name, other) == ("file", "image:0")
    np.testing.assert_array_equal(constant, mask)
    np.testing.assert_array_equal(example, image)


@pytest.mark.gpu
@pytest.mark.parametrize("level", [0, 1])
def test_entries_run_on_the_gpu(level: int) -> None:
    entries = entry_models.head()
    rows = entries["rows"][1][0]
    for model in (entry_models.head, "entry_models:head"):
        made = nimblec.compile(model, target="cuda", level=level, plan_cache=None)
        assert len({bytes(m.code) for m in made.modules}) == len(made.modules)
        assert len({bytes(w.data) for w in made.weights}) == len(made.weights)
        with nimblert.load(made) as loaded:
            found = loaded(rows.numpy(), entry="rows")
            np.testing.assert_allclose(found, entries["rows"][0](rows).detach().numpy(), rtol=1e-2, atol=1e-3)
            temperature = np.array(1.0, np.float32)
            found = loaded(rows[:1].numpy(), temperature, entry="probabilities")
            np.testing.assert_allclose(found.sum(), 1, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("model", ["entry_models:counting", entry_models.counting])
def test_entries_share_a_state_on_the_gpu(model: Any, level: int) -> None:
    made = nimblec.compile(model, target="cuda", level=level, plan_cache=None)
    assert [weight.name for weight in made.state] == ["total"]
    with nimblert.load(made) as loaded:
        ones, two = np.ones(4, np.float32), np.array(2.0, np.float32)
        assert loaded(two, entry="total").tolist() == [0, 0, 0, 0]
        loaded(ones, entry="add")
        assert loaded(ones, entry="add").tolist() == [2, 2, 2, 2]
        assert loaded(two, entry="total").tolist() == [4, 4, 4, 4]


# --- profiles: several sizes of one ONNX model


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an ONNX model with a dimension "batch", and beside it its plan for 1 and for 3 rows."""
    path = tmp_path_factory.mktemp("batches") / "model.onnx"
    weights = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Softmax", ["p"], ["y"])]
    write_model(path, nodes, [floats("x", "batch", 16)], [floats("y", "batch", 4)], constants={"w": weights})
    provenance = Provenance(target=Target.CPU, device=Device(name="cpu"), versions=())
    parts = []
    for rows in (1, 3):
        graph = capture.capture(path, [InputSpec(name="x", shape=(rows, 16))])
        schedule = serial(dependencies(graph))
        memory = layout(graph, schedule)
        parts.append(Part(graph=graph, schedule=schedule, memory=memory, profile=(("batch", rows),)))
    encoder.write(assemble(parts, provenance), path.with_suffix(".plan"))
    return path


def test_the_batch_chooses_the_profile(batches: Path) -> None:
    plan = read_plan(batches.with_suffix(".plan"))
    assert [p.name for p in plan.programs] == ["main[batch=1]", "main[batch=3]"]
    assert [w.name for w in plan.weights] == ["w"]
    with nimblert.load(plan) as model:
        rows = np.linspace(-1, 1, 48, dtype=np.float32).reshape(3, 16)
        together = model(rows)
        for index in range(3):
            np.testing.assert_allclose(model(rows[index : index + 1]), together[index : index + 1], rtol=1e-6)
        with pytest.raises(nimblert.InputError, match="'batch' is 2 at axis 0, and 'main' has programs for batch=1, 3"):
            model(rows[:2])


def test_every_profile_is_compared_with_the_model(nimblec: CommandLine, batches: Path) -> None:
    plan = batches.with_suffix(".plan")
    out = nimblec.prints("verify", plan, "--against", batches)
    assert all(f"against of 'main[batch={rows}]': output 'y'" in out for rows in (1, 3))
    refused = nimblec.refused("verify", plan, "--against", batches, "--entry", "tail")
    assert "has the entries 'main': none is called 'tail'" in refused
