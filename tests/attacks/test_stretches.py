"""Models of several nodes: each node is checked with the types of its values, and what is declared of these is true."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cpu_plans import floats, plan_file, write_model
from hostile_plans import refusal, with_model, with_program
from onnx import ModelProto, TensorProto, helper

import nimblert
from nimblert.check import verify
from nimblert.errors import InputError, PlanInvalidError
from nimblert.plan import Launch, Memset, Plan, Pointer, Region
from nimblert.plan.records import Limits

node = helper.make_node
ROWS, WIDTH = 4, 16


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Return a plan of -reshape(tanh(x)) and exp(x); values o0 and o1 lie between the nodes."""
    path = write_model(
        tmp_path_factory.mktemp("stretches") / "m.onnx",
        [
            node("Tanh", ["x"], ["a"]),
            node("Reshape", ["a", "s"], ["b"]),
            node("Neg", ["b"], ["y"]),
            node("Exp", ["x"], ["z"]),
        ],
        [floats("x", ROWS, WIDTH)],
        [floats("y", WIDTH, ROWS), floats("z", ROWS, WIDTH)],
        constants={"s": np.array([WIDTH, ROWS])},
    )
    made = plan_file(path)
    assert [kernel.symbol for kernel in made.kernels] == ["Tanh to Exp (4 ops)"]
    return made


def declared(model: ModelProto, name: str) -> TensorProto:
    (value,) = (value for value in model.graph.value_info if value.name == name)
    return value.type.tensor_type


def resize(model: ModelProto, name: str, *shape: int) -> None:
    """Declare another shape of a value."""
    for size, dim in zip(shape, declared(model, name).shape.dim, strict=True):
        dim.dim_value = size


def swap(model: ModelProto) -> None:
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([nodes[1], nodes[0], *nodes[2:]])


def cycle(model: ModelProto) -> None:
    model.graph.node[0].input[0] = "o1"


def with_body(model: ModelProto) -> None:
    body = helper.make_graph([node("Neg", ["o0"], ["q"])], "body", [], [helper.make_tensor_value_info("q", 1, None)])
    model.graph.node[1].op_type = "If"
    branches = (helper.make_attribute(f"{which}_branch", body) for which in ("then", "else"))
    model.graph.node[1].attribute.extend(branches)


UNKNOWN = "Reshape: the declared shape of a value that it makes cannot be inferred"
HOSTILE: list[tuple[Callable[[ModelProto], object], str]] = [
    (lambda m: m.graph.value_info.pop(), "its outputs and declared values are not those that its nodes compute"),
    (lambda m: m.graph.value_info.add(name="o9"), "its outputs and declared values are not those"),
    (lambda m: m.graph.value_info.append(m.graph.value_info[0]), "its outputs and declared values are not those"),
    (lambda m: m.graph.value_info[0].ClearField("type"), UNKNOWN),
    (lambda m: declared(m, "o0").ClearField("shape"), UNKNOWN),
    (lambda m: declared(m, "o0").shape.dim[0].ClearField("dim_value"), UNKNOWN),
    (lambda m: setattr(declared(m, "o0"), "elem_type", TensorProto.STRING), "value 'o0'.dtype: '' is not one that"),
    (lambda m: resize(m, "o0", -4, 16), "value 'o0'.shape: .* has a negative dimension"),
    (lambda m: resize(m, "o0", 1 << 30, 1 << 30), "value 'o0'.shape: .* the limit is"),
    (lambda m: m.graph.node[1].output.__setitem__(0, "o0"), "declared values are not those"),
    (lambda m: m.graph.node[1].output.__setitem__(0, "i0"), "declared values are not those"),
    (lambda m: setattr(m.graph.value_info[0], "name", "i0"), "declared values are not those"),
    (swap, "Reshape: reads 'o0', which nothing gives"),
    (cycle, "Tanh: reads 'o1', which nothing gives"),
    (lambda m: m.graph.node[2].input.__setitem__(0, "o7"), "Neg: reads 'o7', which nothing gives"),
    (lambda m: setattr(m.graph.node[1], "op_type", "RandomNormalLike"), "RandomNormalLike of opset 18 is no operator"),
    (lambda m: setattr(m.graph.node[2], "op_type", "Not"), "Not: 'o1' has element type 1, which it does not take"),
    (
        lambda m: setattr(m.graph.node[3], "op_type", "Log"),
        "symbol: 'Tanh to Exp .4 ops.', its model calls 'Tanh to Log",
    ),
    (with_body, "If: the declared shape of a value that it makes cannot be inferred"),
    (lambda m: m.opset_import.add(domain="com.microsoft", version=1), "imports operators of .*, its nodes are of"),
]


@pytest.mark.parametrize(("change", "sentence"), HOSTILE)
def test_verify_refuses_hostile_nodes(plan: Plan, change: Callable[[ModelProto], object], sentence: str) -> None:
    assert re.search(sentence, refusal(with_model(plan, change)))


def test_verify_refuses_division_that_may_end_the_process(tmp_path: Path) -> None:
    """Nobody can look at the operands of a node among several."""
    path = write_model(
        tmp_path / "m.onnx",
        [node("Neg", ["x"], ["a"]), node("Add", ["x", "a"], ["b"]), node("Neg", ["b"], ["y"])],
        [("x", TensorProto.INT64, (4,))],
        [("y", TensorProto.INT64, (4,))],
    )
    sentence = refusal(with_model(plan_file(path), lambda model: setattr(model.graph.node[1], "op_type", "Div")))
    assert "Div: divides integers in a model of several nodes, where the least one by -1" in sentence


def test_verify_takes_name_of_a_value_once(plan: Plan) -> None:
    def change(model: ModelProto) -> None:
        model.graph.node[1].output[0] = "i0"
        model.graph.node[2].input[0] = "i0"
        model.graph.value_info[1].name = "i0"

    assert "model: 'i0' is not the name of one value" in refusal(with_model(plan, change))


def test_verify_checks_each_node_with_declared_shapes(tmp_path: Path) -> None:
    """A bias that a convolution would read past its end lies between two nodes."""
    path = write_model(
        tmp_path / "m.onnx",
        [node("Neg", ["b"], ["c"]), node("Conv", ["x", "w", "c"], ["y"], kernel_shape=[1, 1])],
        [floats("x", 1, 1, 4, 4), floats("b", 8), floats("w", 8, 1, 1, 1)],
        [floats("y", 1, 8, 4, 4)],
    )
    plan = plan_file(path)
    assert [kernel.symbol for kernel in plan.kernels] == ["Neg to Conv (2 ops)"]
    assert list(verify.problems(plan)) == []
    changed = with_model(plan, lambda model: resize(model, "o0", 3))
    assert "Conv: bias of shape (3,), expected (8,)" in refusal(changed)
    changed = with_model(plan, lambda model: declared(model, "o0").ClearField("shape"))
    assert "Conv: takes or gives a value whose size is not known before a run" in refusal(changed)


LIES: list[Callable[[ModelProto], object]] = [
    lambda m: resize(m, "o0", 2, 32),
    lambda m: resize(m, "o1", 8, 8),
    lambda m: (resize(m, "o1", 8, 8), setattr(m.graph.initializer[0], "raw_data", np.array([2, 32]).tobytes())),
    lambda m: setattr(declared(m, "o0"), "elem_type", TensorProto.FLOAT16),
]


@pytest.mark.parametrize("change", LIES)
def test_load_refuses_untrue_types(plan: Plan, change: Callable[[ModelProto], object]) -> None:
    """Rules are about declared types: no node may read a value of another one."""
    hostile = with_model(plan, change)
    with pytest.raises(
        PlanInvalidError, match=r"kernel Tanh to Exp .*: value 'o[01]' is declared .*, ONNX Runtime infers"
    ):
        nimblert.load(hostile)


def test_load_refuses_shape_that_is_not_known_before_a_run(tmp_path: Path) -> None:
    """A run could compute any other one."""
    path = write_model(
        tmp_path / "m.onnx",
        [node("Tanh", ["x"], ["a"]), node("Reshape", ["a", "s"], ["b"]), node("Neg", ["b"], ["y"])],
        [floats("x", ROWS, WIDTH)],
        [floats("y", WIDTH, ROWS)],
        constants={"s": np.array([WIDTH, ROWS])},
    )
    plan = plan_file(path)
    assert len(plan.kernels) == 1
    size = replace(plan.programs[0].inputs[0], name="s", dtype="int64", shape=(2,), strides=(1,))
    size = replace(size, pointer=Pointer(region=Region.INPUT, index=1))

    def change(model: ModelProto) -> None:
        (shape,) = model.graph.initializer
        model.graph.input.append(helper.make_tensor_value_info(shape.name, TensorProto.INT64, [2]))
        del model.graph.initializer[:]

    (kernel,), (launch,) = plan.kernels, plan.programs[0].commands
    assert isinstance(launch, Launch)
    x, y = kernel.parameters
    given = replace(x, name="i1", dtype="int64", shape=(2,), offset=8)
    kernel = replace(kernel, parameters=(x, given, replace(y, offset=16)))
    source, target = launch.relocations
    launch = replace(
        launch,
        params=bytes(24),
        relocations=(source, replace(source, param_offset=8, pointer=size.pointer), replace(target, param_offset=16)),
        reads=(*launch.reads, replace(launch.reads[0], pointer=size.pointer, nbytes=16)),
    )
    hostile = with_program(
        replace(with_model(plan, change), kernels=(kernel,)),
        commands=(launch,),
        inputs=(*plan.programs[0].inputs, size),
        input_nbytes=(*plan.programs[0].input_nbytes, 16),
    )
    assert list(verify.problems(hostile)) == []
    with pytest.raises(PlanInvalidError, match=r"value 'o1' is declared float32 .*, ONNX Runtime infers"):
        nimblert.load(hostile)


def test_value_of_another_shape_than_its_memory_ends_the_run(plan: Plan) -> None:
    """What is bound has the shape of its parameter: the model's own is compared with it."""

    def change(model: ModelProto) -> None:
        model.graph.initializer[0].raw_data = np.array([8, 8]).tobytes()
        resize(model, "o1", 8, 8)

    with nimblert.load(with_model(plan, change)) as model, pytest.raises(InputError, match=r"op Neg .*shape"):
        model.run({"x": np.zeros((ROWS, WIDTH), np.float32)})


@pytest.mark.parametrize("index", [0, 1])
def test_verify_refuses_outputs_over_what_a_launch_uses(plan: Plan, index: int) -> None:
    """ONNX Runtime may run the nodes in another order: the first may write over what the last reads."""
    (launch,) = plan.programs[0].commands
    assert isinstance(launch, Launch)
    places = [Pointer(region=Region.ARENA, offset=offset) for offset in (0, 512, 1024)]
    places[2] = replace(places[index], offset=places[index].offset + 4 * index)
    fill = Memset(stream=0, op=0, dst=Pointer(region=Region.ARENA), value=0, element_nbytes=4, count=512)
    relocations = tuple(replace(r, pointer=pointer) for r, pointer in zip(launch.relocations, places, strict=True))
    accesses = [replace(a, pointer=p) for a, p in zip((*launch.reads, *launch.writes), places, strict=True)]
    launch = replace(launch, relocations=relocations, reads=(accesses[0],), writes=tuple(accesses[1:]))
    hostile = with_program(plan, commands=(fill, launch), arena_nbytes=2048)
    assert "is written from" in refusal(hostile)


def test_verify_bounds_memory_between_nodes(plan: Plan) -> None:
    wide = with_model(plan, lambda model: (resize(model, "o0", 1 << 8, 1 << 20), resize(model, "o1", 1 << 8, 1 << 20)))
    assert list(verify.problems(wide, Limits(memory_nbytes=1 << 31))) == []
    (sentence,) = verify.problems(wide, Limits(memory_nbytes=1 << 30))
    assert f"the values between its nodes need {1 << 31} bytes, the limit is {1 << 30}" in sentence


def test_failure_names_no_op_that_is_not_there(plan: Plan) -> None:
    """The name of a node is a number of an op, which anyone may write."""

    def change(model: ModelProto) -> None:
        for number, call in enumerate(model.graph.node):
            call.name = f"node_99999999{number}"
        model.graph.initializer[0].raw_data = np.array([8, 8]).tobytes()
        resize(model, "o1", 8, 8)

    with (
        nimblert.load(with_model(plan, change)) as model,
        pytest.raises(InputError, match=r"^op Tanh to Exp \(4 ops\)"),
    ):
        model.run({"x": np.zeros((ROWS, WIDTH), np.float32)})
