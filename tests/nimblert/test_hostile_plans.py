"""Well-formed CPU plans with a hostile meaning: each is refused by a sentence before ONNX Runtime sees it."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from cpu_plans import floats, plan_file, write_model
from hostile_plans import (
    gather_plan,
    node_plan,
    over_its_operand,
    placed,
    refusal,
    two_streams_plan,
    with_launch,
    with_model,
    with_parameter,
    with_program,
)
from onnx import GraphProto, ModelProto, TensorProto, helper

import nimblert
from fuzz import wrapped
from nimblec import cli
from nimblec.base.errors import UnsupportedModelError
from nimblec.plan import encoder
from nimblert.check import onnx_trust, verify
from nimblert.check.onnx_model import Attribute
from nimblert.check.onnx_trust import Call
from nimblert.plan import (
    Fit,
    Memset,
    ParameterKind,
    Plan,
    Pointer,
    Program,
    Region,
    Role,
    Tensor,
)
from nimblert.plan.records import Limits

node = helper.make_node
RNG = np.random.default_rng(0)


def test_what_the_changes_start_from_is_sound() -> None:
    for kind in wrapped.KINDS:
        with nimblert.load(gather_plan(kind)) as executable:
            np.testing.assert_array_equal(executable.run({})["y"], np.ones((4, 8), np.float32))


def entry(key: str, value: str) -> Callable[[ModelProto], object]:
    """Change what the first initializer says of its data."""

    def change(model: ModelProto) -> None:
        for found in model.graph.initializer[0].external_data:
            if found.key == key:
                found.value = value

    return change


def embed(model: ModelProto) -> None:
    tensor = model.graph.initializer[0]
    del tensor.external_data[:]
    tensor.ClearField("data_location")
    tensor.raw_data = bytes(4)


def tensor_attribute(model: ModelProto) -> None:
    tensor = TensorProto(name="t", data_type=1, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/passwd")
    call = model.graph.node[0]
    call.op_type = "ConstantOfShape"
    del call.input[1:]
    call.attribute.append(helper.make_attribute("value", tensor))


def sparse(model: ModelProto) -> None:
    model.graph.sparse_initializer.add().dims.append(1)


def function(model: ModelProto) -> None:
    model.functions.add(name="f", domain="custom")


def subgraph(model: ModelProto) -> None:
    body = helper.make_graph([node("Nothing", [], ["b"])], "body", [], [floats_info("b")])
    branches = [helper.make_attribute(f"{which}_branch", body) for which in ("then", "else")]
    call = model.graph.node[0]
    call.op_type = "If"
    del call.input[1:]
    call.attribute.extend(branches)


def floats_info(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, (4, 8))


MODELS: list[tuple[Callable[[ModelProto], object], str]] = [
    (lambda m: setattr(m.graph.initializer[0], "data_type", TensorProto.DOUBLE), "parameters: .* are initializers"),
    (lambda m: m.graph.initializer[0].dims.__setitem__(0, 1 << 16), "parameters: .* are initializers"),
    (lambda m: setattr(m.graph.initializer[0], "name", "v"), "parameters: .* are initializers"),
    (entry("location", "/etc/passwd"), "initializer 'w' is in"),
    (entry("offset", "4096"), "initializer 'w' is in"),
    (entry("length", "4"), "initializer 'w' is in"),
    (embed, "parameters: .* are initializers"),
    (tensor_attribute, "constant 't' of shape .* is not within the model"),
    (sparse, "protobuf: field 15 .* is none that Graph may have"),
    (function, "protobuf: field 25 .* is none that Model may have"),
    (subgraph, "Nothing of opset 18 is no operator that a plan may call"),
    (lambda m: m.graph.ClearField("node"), "expected a graph of nodes"),
    (lambda m: m.graph.node.append(m.graph.node[0]), r"model: 'y' is not the name of one value"),
    (lambda m: m.graph.node[0].input.__setitem__(1, ""), "Gather: input 1 is left out, and must be there"),
    (lambda m: m.graph.node[0].input.append("w"), "Gather: 3 inputs, expected 2 to 2"),
    (lambda m: m.graph.node[0].input.__setitem__(1, "q"), "Gather: reads 'q', which nothing gives"),
    (lambda m: m.graph.node[0].attribute.append(helper.make_attribute("axes", 1)), "Gather.axes: attribute type 2"),
    (lambda m: m.graph.node[0].attribute.append(helper.make_attribute("axis", 1.0)), "Gather.axis: attribute type 1"),
    (lambda m: setattr(m.graph.node[0], "op_type", "RandomNormalLike"), "RandomNormalLike of opset 18 is no operator"),
    (lambda m: setattr(m.graph.node[0], "op_type", "Compress"), "symbol: 'Gather', its model calls 'Compress'"),
    (lambda m: setattr(m.graph.node[0], "domain", "evil"), "evil.Gather of opset 0 is no operator"),
    (lambda m: setattr(m.opset_import[0], "version", 10**6), "Gather of opset 1000000 is no operator"),
    (lambda m: m.graph.output.append(floats_info("z")), "parameters: .* are outputs"),
    (lambda m: setattr(m.graph.output[0].type.tensor_type, "elem_type", 11), "parameters: .* are outputs"),
    (lambda m: m.graph.output[0].type.tensor_type.shape.dim[0].ClearField("dim_value"), "parameters: .* are outputs"),
    (lambda m: setattr(m, "producer_name", "x"), "protobuf: field 2 .* is none that Model may have"),
]


@pytest.mark.parametrize(("change", "sentence"), MODELS, ids=[sentence for _, sentence in MODELS])
def test_a_model_that_is_no_kernel_is_refused(change: Callable[[ModelProto], object], sentence: str) -> None:
    assert re.search(sentence, refusal(with_model(gather_plan(), change)))


@pytest.mark.parametrize(
    ("index", "changes"),
    [
        (0, {"dtype": "float64"}),
        (0, {"shape": (8, 8)}),
        (0, {"name": "v"}),
        (1, {"dtype": "uint8"}),
        (1, {"kind": ParameterKind.INPUT}),
        (2, {"shape": (4, 4)}),
        (2, {"dtype": "float64"}),
    ],
)
def test_parameters_are_what_the_model_reads_and_gives(index: int, changes: dict[str, object]) -> None:
    assert "parameters: " in refusal(with_parameter(gather_plan(), index, **changes))


CALLS = [
    (["Sum", "x", ""], {}, ""),
    (["MaxRoiPool", "x", "r"], {"pooled_shape": [1, 1]}, ""),
    (["SampleOp", "x"], {}, "com.microsoft"),
    (["BeamSearch", "x"], {}, "com.microsoft"),
    (["RandomUniformLike", "x"], {}, ""),
]


@pytest.mark.parametrize(("call", "attributes", "domain"), CALLS, ids=lambda value: str(value)[:30])
def test_calls_that_crash_onnx_runtime_or_draw_random_numbers_are_refused(
    call: list[str], attributes: dict[str, object], domain: str
) -> None:
    made = node(call[0], call[1:], ["y"], domain=domain, **attributes)
    arrays = [np.ones((1, 5), np.float32) for _ in dict.fromkeys(filter(None, call[1:]))]
    sentence = refusal(node_plan(*arrays, call=made, outputs=[("float32", (1, 5))], kind="input"))
    assert "no operator that a plan may call" in sentence or "is left out, and must be there" in sentence


def body(returned: Sequence[str], inputs: Sequence[str] = ()) -> GraphProto:
    """Return a body that makes a value "made" of x, or of its first input."""
    given = [floats_info(name) for name in inputs]
    return helper.make_graph([node("Neg", [*inputs, "x"][:1], ["made"])], "b", given, [*map(floats_info, returned)])


def test_bodies_of_many_nodes_and_many_bodies_are_judged_in_time() -> None:
    """In time that grows with their number: squared, these would take a minute and more."""
    small = helper.make_graph([node("Neg", ["x"], ["b"])], "b", [], [floats_info("b")])
    branches = {"then_branch": small, "else_branch": small}
    nodes = [node("Neg", ["x"], [f"n{i}"]) for i in range(20_000)]
    nodes += [node("If", ["c"], [f"m{i}"], **branches) for i in range(5_000)]
    whole = helper.make_graph(nodes, "whole", [], [floats_info("n0")])
    call = node("If", ["c"], ["y"], then_branch=whole, else_branch=small)
    given = {"c": np.array(True), "x": np.ones((4, 8), np.float32)}
    plan = wrapped.plan_of(call, 18, given, dict.fromkeys(given, "input"), [wrapped.output(0, "y", "float32", (4, 8))])
    begin = time.process_time()
    assert list(verify.problems(plan)) == []
    assert time.process_time() - begin < 10


def refit_of_many_axes() -> Plan:
    axes = 40_000
    start = Pointer(region=Region.INPUT)
    given = Tensor(name="w", dtype="float32", shape=(1 << 62,) * axes, strides=(1,) * axes, pointer=start)
    plan = gather_plan()
    fields = {"inputs": (given,), "input_nbytes": (64,), "outputs": (), "output_nbytes": (), "commands": ()}
    return replace(plan, refits=(replace(plan.programs[0], name="w", role=Role.REFIT, golden=None, **fields),))


def constant_of_many_axes() -> Plan:
    scale, zero = np.array(1, np.float32), np.array(0, np.uint8)
    call = helper.make_node("QLinearSigmoid", ["x", "a", "b", "c", "d"], ["y"], domain="com.microsoft")
    given = (np.ones((4, 8), np.uint8), scale, zero, scale, zero)
    plan = node_plan(*given, call=call, outputs=[("uint8", (4, 8))], kind="embedded")
    return with_model(plan, lambda model: model.graph.initializer[1].dims.extend([(1 << 62) + 1] * 40_000))


def programs_of_one_entry(count: int, names: int, tensors: int) -> Plan:
    """Return programs of ``names`` dimensions, with ``tensors`` inputs of 60 axes of other sizes than these."""
    plan = gather_plan()

    def program(number: int) -> Program:
        inputs = tuple(
            replace(tensor((number + 1 + i,) * 60, (0,) * 60), name=f"x{i}", pointer=Pointer(region=Region.INPUT))
            for i in range(tensors)
        )
        profile = tuple((f"n{name}", (1 << 20) + number) for name in range(names))
        return replace(
            plan.programs[0],
            name=f"p{number}",
            entry="main",
            inputs=inputs,
            profile=profile,
            fits=(Fit.PADDED,) * names,
        )

    return replace(plan, programs=tuple(map(program, range(count))))


def one_profile_of_many_dimensions() -> Plan:
    plan = programs_of_one_entry(1000, 1, 0)
    large = tuple((f"n{name}", 1) for name in range(50_000))
    return replace(plan, programs=(replace(plan.programs[0], profile=large), *plan.programs[1:]))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (refit_of_many_axes, "refits[0].inputs[0].shape: 40000 dimensions, expected at most 64"),
        (constant_of_many_axes, "kernels[0].model: constant 'a' of shape"),
        (lambda: programs_of_one_entry(2, 800, 1), "programs[1].profile: 800 dimensions, expected at most 64"),
        (lambda: programs_of_one_entry(20, 64, 10), "programs[19].fits: n63="),
        (one_profile_of_many_dimensions, "programs[0].profile: 50000 dimensions, expected at most 64"),
    ],
    ids=["refit", "constant", "long profiles", "many axes", "one long profile"],
)
def test_very_many_dimensions_are_judged_in_time(make: Callable[[], Plan], sentence: str) -> None:
    """In time that grows with their number: squared, each of these would take about ten seconds."""
    plan = make()
    begin = time.process_time()
    problems = list(verify.problems(plan))
    assert time.process_time() - begin < 3
    assert any(problem.startswith(sentence) for problem in problems)


def tree(*nodes: tuple[int, int] | None, leaves: bool) -> Call:
    """Return a tree of nodes that lead to two others each; ``leaves`` are in a list of their own (version 5)."""
    sides = [tuple(branches[side] if branches else 0 for branches in nodes) for side in (0, 1)]
    given = {f"nodes_{side}nodeids": ids for side, ids in zip(("true", "false"), sides, strict=True)}
    if leaves:
        given |= {"tree_roots": (0,)}
        for name, ids in zip(("true", "false"), sides, strict=True):
            given[f"nodes_{name}leafs"] = tuple(int(i >= len(nodes)) for i in ids)
    else:
        given |= {"nodes_treeids": (0,) * len(nodes), "nodes_nodeids": tuple(range(len(nodes)))}
    attributes = {name: Attribute(name=name, ints=ints) for name, ints in given.items()}
    modes = tuple(b"BRANCH_LEQ" if branches else b"LEAF" for branches in nodes)
    attributes["nodes_modes"] = Attribute(name="nodes_modes", strings=modes)
    return Call(attributes=attributes, inputs=((1, 4),), outputs=((1, 1),), constant={})


@pytest.mark.parametrize("leaves", [False, True], ids=["ids", "leaves apart"])
def test_trees_that_no_recursion_ends_are_refused(leaves: bool) -> None:
    def found(*nodes: tuple[int, int] | None) -> list[str]:
        return list(onnx_trust.problems("ai.onnx.ml.TreeEnsemble", tree(*nodes, leaves=leaves)))

    def chain(length: int) -> list[tuple[int, int] | None]:
        """So many nodes on the way to the last leaf; the list ends with a leaf where leaves are nodes."""
        if leaves:
            return [(i + 1, length) for i in range(length)]
        return [*((i + 1, length - 1) for i in range(length - 1)), None]

    assert found(*chain(3)) == found(*chain(1024)) == []
    sentence = ["ai.onnx.ml.TreeEnsemble: trees with a cycle, or higher than 1024 nodes"]
    assert found(*chain(1025)) == sentence
    assert found((1, 1), (0, 0)) == sentence
    assert found((0, 5), None if not leaves else (5, 5)) == sentence


UNWRITTEN: dict[str, tuple[dict[str, object], str]] = {
    "Cast": ({"to": 1, "saturate": 2}, "saturate: 2, expected 0 or 1"),
    "If": ({"then_branch": body(["made", "made"]), "else_branch": body(["made", "made"])}, "one value twice"),
    "Scan": ({"body": body(["made", "step"], ["step"]), "num_scan_inputs": 1}, "an input of its own"),
}


@pytest.mark.parametrize("operator", UNWRITTEN)
def test_calls_that_leave_an_output_as_its_memory_was_are_refused(operator: str) -> None:
    attributes, sentence = UNWRITTEN[operator]
    call = node(operator, ["x"], ["y"] if operator == "Cast" else ["y", "z"], **attributes)
    x = np.ones((1, 1), bool if operator == "If" else np.float32)
    outputs = [("float32", (1, 1))] * len(call.output)
    assert sentence in refusal(node_plan(x, call=call, outputs=outputs, kind="input", opset=19))


def test_inputs_left_out_by_name_at_the_end_are_refused_and_the_compiler_drops_them(tmp_path: Path) -> None:
    tail = node("Clip", ["x", "low", ""], ["y"])
    x, low = np.ones((2, 4), np.float32), np.array(0, np.float32)
    assert "its last input or output is left out" in refusal(
        node_plan(x, low, call=tail, outputs=[("float32", (2, 4))], kind="input")
    )
    path = write_model(tmp_path / "m.onnx", [tail], [floats("x", 2, 4)], [floats("y", 2, 4)], constants={"low": low})
    (module,) = plan_file(path).modules
    assert len(ModelProto.FromString(bytes(module.code)).graph.node[0].input) == 2


def test_a_bias_that_is_too_short_is_refused_though_the_parameters_agree() -> None:
    x, w, b = (np.ones(shape, np.float32) for shape in ((1, 1, 1, 1), (4096, 1, 1, 1), (1,)))
    call = node("Conv", ["x", "w", "b"], ["y"])
    plan = node_plan(x, w, b, call=call, outputs=[("float32", (1, 4096, 1, 1))], kind="external")
    assert refusal(plan) == "kernels[0].Conv: bias of shape (1,), expected (4096,)"


def test_a_workspace_of_many_times_the_tensors_is_refused() -> None:
    """LRN pads the channels by its size: 16 million of them make 4 GB of 64 numbers."""
    call = node("LRN", ["x"], ["y"], size=(1 << 24) + 1)
    plan = node_plan(np.ones((1, 1, 8, 8), np.float32), call=call, outputs=[("float32", (1, 1, 8, 8))], kind="input")
    assert refusal(plan) == "kernels[0].LRN: size is (16777217,), expected each from 1 to 4096"


def test_an_output_over_the_inputs_of_its_launch_is_refused() -> None:
    plan = gather_plan("input")
    arena = [Pointer(region=Region.ARENA, offset=offset) for offset in (1024, 0, 8)]
    fill = Memset(stream=0, op=0, dst=arena[1], value=0, element_nbytes=4, count=512)
    sentence = refusal(with_program(plan, commands=(fill, placed(plan, arena)), arena_nbytes=2048))
    assert "ARENA(0) is written from 8 to 32, and used otherwise too" in sentence


WHOLE, INDICES, ROW = (4, 8), (1, 1), (1, 8)


@pytest.mark.parametrize(("operator", "shapes"), [("Add", [WHOLE, WHOLE]), ("ScatterND", [WHOLE, INDICES, ROW])])
def test_an_output_may_lie_over_an_operand_where_the_operator_works_in_place(
    operator: str, shapes: list[tuple[int, ...]]
) -> None:
    assert list(verify.problems(over_its_operand(operator, shapes, 0))) == []


def test_the_model_of_many_launches_is_read_once() -> None:
    """Read for each launch, or repeated in a model of all, it would take a minute and more."""

    def fill(model: ModelProto) -> None:
        model.graph.initializer.append(helper.make_tensor("long", TensorProto.INT64, [100_000], range(100_000)))

    plan = with_model(over_its_operand("Add", [WHOLE, WHOLE], 0), fill)
    before, launch = plan.programs[0].commands
    begin = time.process_time()
    nimblert.load(with_program(plan, commands=(before, *[launch] * 1000), outputs=())).close()
    assert time.process_time() - begin < 10


@pytest.mark.parametrize(
    ("operator", "shapes", "over", "shift"),
    [
        ("Pow", [WHOLE, WHOLE], 0, 0),  # not known to work in place
        ("MatMul", [WHOLE, (8, 8)], 0, 0),
        ("Add", [WHOLE, WHOLE], 1, 32),  # beside the operand
        ("Add", [WHOLE, WHOLE], 1, -32),
        ("Add", [ROW, WHOLE], 0, 0),  # over a smaller operand
        ("ScatterND", [WHOLE, INDICES, ROW], 2, 0),  # over the new rows
        ("ScatterND", [WHOLE, (4, 1), WHOLE], 2, 0),
    ],
)
def test_an_output_over_another_operand_is_refused(
    operator: str, shapes: list[tuple[int, ...]], over: int, shift: int
) -> None:
    assert "and used otherwise too" in refusal(over_its_operand(operator, shapes, over, shift))


def test_an_output_over_two_operands_is_refused_unless_either_may_lie_there() -> None:
    for operator, shapes, refused in (
        ("Add", [WHOLE, WHOLE], False),
        ("ScatterND", [WHOLE, (4, 1), WHOLE], True),  # over the new rows too
    ):
        plan = over_its_operand(operator, shapes, 0)
        fill, launch = plan.programs[0].commands
        first, *middle, last, output = launch.relocations
        relocations = (first, *middle, replace(last, pointer=first.pointer), output)
        reads = tuple(dict.fromkeys((*launch.reads[:-1], replace(launch.reads[-1], pointer=first.pointer))))
        both = with_program(plan, commands=(fill, replace(launch, relocations=relocations, reads=reads)))
        assert any("and used otherwise too" in problem for problem in verify.problems(both)) == refused


def test_an_output_over_an_operand_of_a_kernel_without_code_is_judged() -> None:
    plan = over_its_operand("Add", [WHOLE, WHOLE], 0)
    nowhere = replace(plan, kernels=(replace(plan.kernels[0], module=1),))
    assert "kernels[0].module: 1 is out of range (there are 1 modules)" in refusal(nowhere)


@pytest.mark.parametrize("what", ["reads", "writes"])
def test_accesses_that_are_not_what_the_relocations_say_are_refused(what: str) -> None:
    sentence = refusal(with_launch(gather_plan(), **{what: ()}))
    assert f"commands[0].{what}: are not what the relocations point to" in sentence


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str = "float32") -> Tensor:
    return Tensor(name="y", dtype=dtype, shape=shape, strides=strides, pointer=Pointer(region=Region.OUTPUT))


@pytest.mark.parametrize(
    "output",
    [
        tensor((1 << 62, 4), (4, 1)),
        tensor((0, 1 << 62), (1, 1)),
        tensor((1 << 62, 0, 1 << 62), (0, 0, 0)),
        tensor((1, 8), (1 << 62, 1)),
        tensor((0,), (1 << 62,)),
        tensor((10**10,), (0,)),
        tensor((16, 8), (0, 1)),
        tensor((1 << 62, 1 << 62), (0, 0), "complex128"),
    ],
    ids=lambda output: f"{output.shape} {output.strides}",
)
def test_shapes_and_strides_beyond_any_memory_are_refused(output: Tensor) -> None:
    sentence = refusal(with_program(gather_plan(), outputs=(output,)))
    assert "programs[0].outputs[0]." in sentence


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (Limits(memory_nbytes=127), "memory: 128 bytes, the limit is 127"),
        (Limits(tensor_nbytes=127), "(4, 8) is 128 bytes, the limit is 127"),
        (Limits(model_nbytes=10), "modules[0].code: "),
        (Limits(model_fields=10), "more fields"),
        (Limits(kernels=0), "kernels: 1, the limit is 0"),
        (Limits(modules=0), "modules: 1, the limit is 0"),
        (Limits(programs=0), "programs: 1, the limit is 0"),
        (Limits(streams=0), "programs[0].stream_count: 1, the limit is 0"),
        (Limits(commands=0), "programs[0].commands: 1, the limit is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ceilings_are_kept(limits: Limits, sentence: str) -> None:
    assert not list(verify.problems(gather_plan()))
    assert any(sentence in problem for problem in verify.problems(gather_plan(), limits))


def test_waits_and_events_have_ceilings_too(tmp_path: Path) -> None:
    two_streams = two_streams_plan(tmp_path)
    assert not list(verify.problems(two_streams))
    found = [*verify.problems(two_streams, Limits(events=0)), *verify.problems(two_streams, Limits(clocks=1))]
    assert [sentence.split(",")[0] for sentence in found] == [
        f"programs[0].event_count: {two_streams.programs[0].event_count}",
        f"programs[0].commands: {2 * two_streams.programs[0].event_count} waits times streams",
    ]


def test_a_plan_that_asks_for_terabytes_is_refused_before_any_is_asked_for() -> None:
    plan = with_program(gather_plan(), arena_nbytes=1 << 42)
    begin = time.process_time()
    assert "memory: " in refusal(plan)
    assert time.process_time() - begin < 1


def test_the_compiler_names_the_node_that_no_plan_can_hold(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "m.onnx",
        [node("Conv", ["x", "w", "b"], ["y"], name="first", kernel_shape=[1, 1])],
        [floats("x", 1, 1, 4, 4)],
        [floats("y", 1, 8, 4, 4)],
        constants={"w": np.ones((8, 1, 1, 1), np.float32), "b": np.ones(3, np.float32)},
    )
    with pytest.raises(UnsupportedModelError, match=r"node 'first' \(Conv\): no plan for the CPU can hold it: .*bias"):
        plan_file(path)


def test_a_refusal_on_the_command_line_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.plan"
    path.write_bytes(encoder.encode_file(with_parameter(gather_plan(), 0, dtype="float64")))
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", str(path)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("nimblec: ")
    assert said.count("\n") == 1
