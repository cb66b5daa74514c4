"""compile(refittable=True): folded and repacked weights can be replaced, equal bit for bit to a fresh compile."""

import copy
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cpu_plans import floats, write_model
from onnx import helper, numpy_helper

import nimblec
import nimblert
from nimblec.cpu import refittable
from nimblert.errors import InputError
from nimblert.golden import draw_inputs
from nimblert.plan import Launch, Plan, Region

DIGITS = Path(__file__).parents[2] / "samples" / "digits.onnx"

node = helper.make_node
Weights = Mapping[str, np.ndarray]


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.5, 1.5, shape).astype(np.float32)


def compiled(model: Any, **options: Any) -> Plan:
    return nimblec.compile(model, target="cpu", plan_cache=None, streams="1", **options)


def with_weights(path: Path, weights: Weights) -> Path:
    """Return a copy of a model that has these weights."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    fresh = path.with_name("fresh.onnx")
    onnx.save(model, fresh)
    return fresh


def others(plan: Plan, seed: int = 7) -> dict[str, np.ndarray]:
    """Return new weights for all that can be replaced."""
    with nimblert.load(plan) as model:
        return {name: drawn(seed + i, *tensor.shape) for i, (name, tensor) in enumerate(model.weights.items())}


def assert_refitted(plan: Plan, weights: Weights, fresh: Sequence[Plan]) -> None:
    """Check that a refit gives what a plan compiled with these weights gives, in as many commands as before."""
    with nimblert.load(plan) as model:
        inputs = draw_inputs(plan.programs[0], 3)
        before = model.run(inputs)
        model.refit(weights)
        found = model.run(inputs)
    assert any(not np.array_equal(found[name], before[name]) for name in found)
    for one in fresh:
        assert len(one.programs[0].commands) == len(plan.programs[0].commands)
        with nimblert.load(one) as model:
            for name, array in model.run(inputs).items():
                np.testing.assert_array_equal(found[name], array, strict=True)


def test_all_weights_of_digits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "digits.onnx"
    shutil.copy(DIGITS, path)
    with caplog.at_level(logging.WARNING, "nimblec"):
        plan = compiled(path, refittable=True)
    weights = others(plan)
    assert weights["classifier.bias"].nbytes == 40  # so small a constant is part of a model otherwise
    fresh = compiled(with_weights(path, weights))
    assert_refitted(plan, weights, [fresh])
    for one, name in ((plan, "refittable"), (fresh, "plain")):
        one.save(tmp_path / name)
    more = (tmp_path / "refittable").stat().st_size - (tmp_path / "plain").stat().st_size
    known, cost = caplog.messages
    assert known == "refittable: no optimisation is given up"
    found = re.fullmatch(r"refittable: 8 weights can be replaced; the recipes take ([0-9,]+) bytes of the file", cost)
    assert found
    assert int(found[1].replace(",", "")) == pytest.approx(more, abs=4096)


@pytest.mark.parametrize("channels", [12, 16])
def test_folded_batch_norms_in_blocks(tmp_path: Path, channels: int) -> None:
    """A batch norm goes into its convolution, whose weights are laid out in blocks, filled up where they must be."""
    shape = (channels,)
    path = write_model(
        tmp_path / "model.onnx",
        [
            node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
            node("BatchNormalization", ["a", "scale", "shift", "mean", "var"], ["b"], epsilon=1e-3),
            node("Relu", ["b"], ["c"]),
            node("Conv", ["c", "v", "bias"], ["d"], pads=[1, 1, 1, 1]),
            node("BatchNormalization", ["d", "scale", "shift2", "mean", "var"], ["y"]),
        ],
        [floats("x", 1, 3, 8, 8)],
        [floats("y", 1, channels, 8, 8)],
        constants={
            "w": drawn(0, channels, 3, 3, 3),
            "v": drawn(1, channels, channels, 3, 3),
            "bias": drawn(2, *shape),
            **{name: drawn(i, *shape) for i, name in enumerate(["scale", "shift", "mean", "var", "shift2"], 3)},
        },
    )
    plan = compiled(path, refittable=True)
    assert not {"BatchNormalization"} & {plan.kernels[c.kernel].symbol for c in launches(plan)}
    weights = others(plan)
    assert len(weights) == 8
    fresh = with_weights(path, weights)
    assert_refitted(plan, weights, [compiled(fresh, refittable=True), compiled(fresh)])


def launches(plan: Plan) -> list[Launch]:
    return [command for command in plan.programs[0].commands if isinstance(command, Launch)]


def test_a_weight_that_is_used_in_two_forms(tmp_path: Path) -> None:
    """Token embeddings that are also the last matrix: rows are gathered, and a transposed copy is multiplied with."""
    path = write_model(
        tmp_path / "model.onnx",
        [
            node("Gather", ["table", "rows"], ["a"]),
            node("Tanh", ["a"], ["b"]),
            node("Transpose", ["table"], ["turned"], perm=[1, 0]),
            node("MatMul", ["b", "turned"], ["y"]),
        ],
        [("rows", onnx.TensorProto.INT64, [4])],
        [floats("y", 4, 40)],
        constants={"table": drawn(0, 40, 24)},
    )
    plain = compiled(path)
    with nimblert.load(plain) as model, pytest.raises(InputError, match=r"'table': .*compile with --refittable"):
        model.refit({"table": drawn(1, 40, 24)})
    plan = compiled(path, refittable=True, examples={"rows": np.array([0, 5, 39, 2])})
    (refit,) = plan.refits
    assert [(tensor.name, tensor.pointer.region) for tensor in refit.inputs] == [("table", Region.WEIGHTS)]
    weights = {"table": drawn(1, 40, 24)}
    assert_refitted(plan, weights, [compiled(with_weights(path, weights), refittable=True)])


def test_weights_of_one_constant_are_given_together(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "model.onnx",
        [node("Mul", ["w", "scale"], ["scaled"]), node("MatMul", ["x", "scaled"], ["y"])],
        [floats("x", 2, 32)],
        [floats("y", 2, 32)],
        constants={"w": drawn(0, 32, 32), "scale": drawn(1, 32)},
    )
    plan = compiled(path, refittable=True)
    with nimblert.load(plan) as model:
        inputs = draw_inputs(plan.programs[0], 0)
        before = model.run(inputs)["y"]
        with pytest.raises(InputError, match="weight 'w': the plan holds it folded with 'scale': give these, too"):
            model.refit({"w": drawn(5, 32, 32)})
        assert np.array_equal(model.run(inputs)["y"], before)
    weights = {"w": drawn(5, 32, 32), "scale": drawn(6, 32)}
    assert_refitted(plan, weights, [compiled(with_weights(path, weights))])


def test_a_constant_of_which_another_is_made(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("ReduceMean", ["w"], ["mean"], keepdims=1),
        helper.make_node("Div", ["w", "mean"], ["scaled"]),
        helper.make_node("Add", ["x", "scaled"], ["sum"]),
        helper.make_node("Mul", ["sum", "mean"], ["y"]),
    ]
    constants = {"w": drawn(0, 4)}
    path = write_model(tmp_path / "two.onnx", nodes, [floats("x", 3, 4)], [floats("y", 3, 4)], constants=constants)
    new = {"w": drawn(1, 4)}
    assert_refitted(compiled(path, refittable=True), new, [compiled(with_weights(path, new))])


def test_a_quantised_constant_that_close_weights_share_is_made_of_each(tmp_path: Path) -> None:
    nodes = [
        node("QuantizeLinear", ["w", "scale", "zero"], ["q"]),
        node("DequantizeLinear", ["q", "scale", "zero"], ["rounded"]),
        node("Add", ["x", "w"], ["sum"]),
        node("Mul", ["sum", "rounded"], ["y"]),
    ]
    constants = {"w": np.ones(4, np.float32), "scale": np.float32(0.1), "zero": np.int8(0)}
    path = write_model(tmp_path / "q.onnx", nodes, [floats("x", 3, 4)], [floats("y", 3, 4)], constants=constants)
    new = {"w": drawn(1, 4)}
    assert_refitted(compiled(path, refittable=True), new, [compiled(with_weights(path, new))])


def test_equal_weights_are_replaced_apart_from_each_other(tmp_path: Path) -> None:
    """A plan stores equal constants once; one that is to be given others does not."""
    same = drawn(0, 32, 32)
    path = write_model(
        tmp_path / "model.onnx",
        [node("MatMul", ["x", "w"], ["a"]), node("Tanh", ["a"], ["b"]), node("MatMul", ["b", "v"], ["y"])],
        [floats("x", 2, 32)],
        [floats("y", 2, 32)],
        constants={"w": same, "v": same},
    )
    plain = compiled(path)
    assert len(plain.weights) == 1
    with nimblert.load(plain) as model:
        assert not model.weights
        with pytest.raises(InputError, match="'w': the plan has no weights that a refit replaces: compile with"):
            model.refit({"w": same})
    plan = compiled(path, refittable=True)
    weights = {"w": same, "v": drawn(1, 32, 32)}
    assert_refitted(plan, {"v": weights["v"]}, [compiled(with_weights(path, weights))])


def unexplained(folder: Path) -> Path:
    """ONNX Runtime multiplies a convolution's weights by a constant of its own accord, which no recipe is known for."""
    return write_model(
        folder / "model.onnx",
        [
            node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
            node("Mul", ["a", "gain"], ["b"]),
            node("Flatten", ["b"], ["c"]),
            node("Gemm", ["c", "v", "bias"], ["y"]),
        ],
        [floats("x", 1, 3, 4, 4)],
        [floats("y", 1, 24)],
        constants={
            "w": drawn(0, 16, 3, 3, 3),
            "gain": drawn(1, 16, 1, 1),
            "v": drawn(2, 256, 24),
            "bias": drawn(3, 24),
        },
    )


def test_weights_without_a_recipe_keep_their_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = unexplained(tmp_path)
    with caplog.at_level(logging.WARNING, "nimblec"):
        plan = compiled(path, refittable=True)
    note = "refittable: weights that keep their values, as no recipe was found for them: 'gain', 'w'"
    assert note in caplog.messages
    weights = others(plan)
    assert set(weights) == {"v", "bias"}
    assert_refitted(plan, weights, [compiled(with_weights(path, weights))])


def test_a_batch_norm_that_is_not_folded(tmp_path: Path) -> None:
    """Its convolution is read twice; ONNX Runtime may make a convolution in blocks of it, which has no recipe."""
    path = write_model(
        tmp_path / "model.onnx",
        [
            node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
            node("BatchNormalization", ["a", "scale", "shift", "mean", "var"], ["b"]),
            node("Add", ["a", "b"], ["y"]),
        ],
        [floats("x", 1, 3, 8, 8)],
        [floats("y", 1, 16, 8, 8)],
        constants={
            "w": drawn(0, 16, 3, 3, 3),
            **{name: drawn(i, 16) for i, name in enumerate(["scale", "shift", "mean", "var"], 1)},
        },
    )
    plan = compiled(path, refittable=True)
    weights = others(plan)
    assert "w" in weights
    assert_refitted(plan, weights, [compiled(with_weights(path, weights))])


def test_a_batch_norm_whose_convolution_a_branch_reads_is_not_folded(tmp_path: Path) -> None:
    """The bodies of other nodes read values, too."""

    def branch(op_type: str, value: str) -> onnx.GraphProto:
        output = helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, [1, 16, 8, 8])
        return helper.make_graph([node(op_type, ["a"], [value])], value, [], [output])

    path = write_model(
        tmp_path / "model.onnx",
        [
            node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
            node("BatchNormalization", ["a", "scale", "shift", "mean", "var"], ["b"]),
            node("If", ["upper"], ["c"], then_branch=branch("Relu", "then"), else_branch=branch("Neg", "else")),
            node("Add", ["b", "c"], ["y"]),
        ],
        [floats("x", 1, 3, 8, 8), ("upper", onnx.TensorProto.BOOL, [1])],
        [floats("y", 1, 16, 8, 8)],
        constants={
            "w": drawn(0, 16, 3, 3, 3),
            **{name: drawn(i, 16) for i, name in enumerate(["scale", "shift", "mean", "var"], 1)},
        },
    )
    plan = compiled(path, refittable=True)
    weights = others(plan)
    assert "w" in weights
    assert_refitted(plan, weights, [compiled(with_weights(path, weights))])


def test_a_model_that_is_optimised_to_other_nodes_each_time_keeps_all_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever differs beside weights ends the search for recipes, not in a search without end."""
    monkeypatch.setattr(refittable, "_nodes", lambda _: object())
    path = write_model(
        tmp_path / "model.onnx",
        [node("MatMul", ["x", "w"], ["y"])],
        [floats("x", 2, 32)],
        [floats("y", 2, 32)],
        constants={"w": drawn(0, 32, 32)},
    )
    with caplog.at_level(logging.WARNING, "nimblec"):
        plan = compiled(path, refittable=True)
    assert not plan.refits
    assert "refittable: weights that keep their values, as no recipe was found for them: 'w'" in caplog.messages


def branch(operator: str) -> onnx.GraphProto:
    """Return the body of an If: an operator on v."""
    output = helper.make_tensor_value_info(operator, onnx.TensorProto.FLOAT, (4,))
    return helper.make_graph([helper.make_node(operator, ["v"], [operator])], operator, [], [output])


DECIDING = {
    "its sign": [helper.make_node("Sign", ["w"], ["d"])],
    "a comparison": [
        helper.make_node("Greater", ["w", "zero"], ["is_larger"]),
        helper.make_node("Where", ["is_larger", "two", "zero"], ["d"]),
    ],
    "what is cut off": [helper.make_node("Relu", ["w"], ["d"])],
    "an integer": [
        helper.make_node("Cast", ["w"], ["i"], to=onnx.TensorProto.INT64),
        helper.make_node("Cast", ["i"], ["d"], to=onnx.TensorProto.FLOAT),
    ],
    "a branch": [
        helper.make_node("ReduceSum", ["w"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["is_larger"]),
        helper.make_node("If", ["is_larger"], ["d"], then_branch=branch("Neg"), else_branch=branch("Exp")),
    ],
}
"""Nodes that compute a constant d of the weight w, and how."""


@pytest.mark.parametrize("how", DECIDING)
def test_a_weight_that_decides_something_keeps_its_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Also where it is used as a number, too; other weights are replaced."""
    constants = {"w": drawn(0, 4), "v": drawn(1, 4), "zero": np.float32(0), "two": np.float32(2)}
    used = {name for node in DECIDING[how] for name in node.input} | {"w", "v"}
    constants = {name: np.asarray(value) for name, value in constants.items() if name in used}
    nodes = [
        *DECIDING[how],
        helper.make_node("Mul", ["x", "d"], ["scaled"]),
        helper.make_node("Mul", ["scaled", "w"], ["more"]),
        helper.make_node("Add", ["more", "v"], ["y"]),
    ]
    path = write_model(tmp_path / "d.onnx", nodes, [floats("x", 3, 4)], [floats("y", 3, 4)], constants=constants)
    with caplog.at_level(logging.WARNING, "nimblec"):
        plan = compiled(path, refittable=True)
    assert "weights that keep their values, as no recipe was found for them: 'w'" in caplog.text
    new = {"v": drawn(2, 4)}
    assert_refitted(plan, new, [compiled(with_weights(path, new))])
    with nimblert.load(plan) as model, pytest.raises(InputError, match="weight 'w'"):
        model.refit({"w": -constants["w"]})


def test_a_weight_that_becomes_an_attribute_keeps_its_value(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """ONNX Runtime fuses a product with a number into the product of matrices before it."""
    path = write_model(
        tmp_path / "model.onnx",
        [node("MatMul", ["x", "w"], ["a"]), node("Mul", ["a", "factor"], ["y"])],
        [floats("x", 2, 32)],
        [floats("y", 2, 32)],
        constants={"w": drawn(0, 32, 32), "factor": drawn(1, 1)},
    )
    with caplog.at_level(logging.WARNING, "nimblec"):
        plan = compiled(path, refittable=True)
    weights = others(plan)
    assert set(weights) == {"w"}
    assert "refittable: weights that keep their values, as no recipe was found for them: 'factor'" in caplog.messages
    assert_refitted(plan, weights, [compiled(with_weights(path, weights))])


def test_a_scalar_is_no_weight(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "model.onnx",
        [node("MatMul", ["x", "w"], ["a"]), node("Add", ["a", "shift"], ["b"]), node("Tanh", ["b"], ["y"])],
        [floats("x", 2, 32)],
        [floats("y", 2, 32)],
        constants={"w": drawn(0, 32, 32), "shift": np.float32(0.5)},
    )
    assert set(others(compiled(path, refittable=True))) == {"w"}


def test_programs_of_several_sizes_share_their_recipes(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "model.onnx",
        [
            node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
            node("BatchNormalization", ["a", "scale", "shift", "mean", "var"], ["y"]),
        ],
        [floats("x", "batch", 3, 8, 8)],
        [floats("y", "batch", 16, 8, 8)],
        constants={
            "w": drawn(0, 16, 3, 3, 3),
            **{name: drawn(i, 16) for i, name in enumerate(["scale", "shift", "mean", "var"], 1)},
        },
    )
    plan = compiled(path, refittable=True, dims={"batch": (1, 2)})
    (refit,) = plan.refits
    assert len(refit.inputs) == 5
    weights = others(plan)
    fresh = compiled(with_weights(path, weights), dims={"batch": (1, 2)})
    with nimblert.load(plan) as model, nimblert.load(fresh) as expected:
        model.refit(weights)
        for program in plan.programs:
            inputs = draw_inputs(program, 0)
            assert np.array_equal(model.run(inputs)["y"], expected.run(inputs)["y"])


def test_names_that_mean_other_weights_in_another_entry_keep_their_values(caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    first, second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
    x = torch.randn(2, 32)
    with torch.no_grad():
        second.bias.copy_(first.bias)
    with caplog.at_level(logging.WARNING, "nimblec"):
        plan = compiled({"one": (first.eval(), (x,)), "two": (second.eval(), (x,))}, refittable=True)
    with nimblert.load(plan) as model:
        assert set(model.weights) == {"bias"}
        bias = drawn(0, 32)
        model.refit({"bias": bias})
        for name, module in (("one", first), ("two", second)):
            expected = (x @ module.weight.T).detach().numpy() + bias
            np.testing.assert_allclose(model(x.numpy(), entry=name), expected, rtol=1e-4, atol=1e-4)
    assert "refittable: weights that keep their values, as no recipe was found for them: 'weight'" in caplog.messages


def drawn_module(module: Any, seed: int) -> Any:
    """Return a copy of a module with other parameters and statistics."""
    torch = pytest.importorskip("torch")
    made = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in made.state_dict().values():
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator)
                tensor.copy_(tensor * (0.9 + 0.2 * noise) + 0.05 * noise)
    return made


@pytest.mark.parametrize("family", ["resnet", "bert"])
def test_a_module_refitted_with_its_state_dict(family: str) -> None:
    """By the names that PyTorch has for them; ResNet's batch norms are folded."""
    torch = pytest.importorskip("torch")
    from families import bert, resnet

    if family == "resnet":
        module, args = resnet.ResNet(width=16, classes=10, stages=(1, 1)).eval(), (torch.randn(1, 3, 32, 32),)
    else:
        module, args = bert.small()
    module = drawn_module(module, 0)
    plan = compiled(module, example_inputs=args, refittable=True)
    other = drawn_module(module, 1)
    state = {name: tensor.numpy() for name, tensor in other.state_dict().items()}
    with nimblert.load(plan) as model:
        assert {name for name in state if not name.endswith(".num_batches_tracked")} <= model.weights.keys()
    assert_refitted(plan, state, [compiled(other, example_inputs=args, refittable=True)])


def test_a_module_that_the_exporter_folds_is_refused_without_refittable() -> None:
    """Its file has a weight of the convolution's name and shape, with the batch norm in it."""
    torch = pytest.importorskip("torch")
    nn = torch.nn
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(180, 9))
    module = drawn_module(module, 0).eval()
    plan = compiled(module, example_inputs=(torch.randn(1, 3, 8, 8),))
    with nimblert.load(plan) as model:
        assert not {"0.weight", "0.bias", "1.weight"} & model.weights.keys()
        with pytest.raises(InputError, match=r"weight '0\.weight': .*--refittable"):
            model.refit({"0.weight": np.zeros((5, 3, 3, 3), np.float32)})


def test_inputs_and_outputs_of_a_module_keep_names_and_order() -> None:
    """Where an output is an input, another output, the state or a weight."""
    torch = pytest.importorskip("torch")

    class Same(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.arange(4.0))
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: Any) -> Any:
            y = self.weight * x
            return self.weight, y, x, y

    class Stateful(Same):
        def forward(self, x: Any) -> Any:
            return self.total.add_(x), *super().forward(x)

    class Twice(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return x, x

    x = torch.tensor([5.0, 6.0, 7.0, 8.0])
    dynamic = {"dynamic_shapes": ({0: torch.export.Dim("size", min=2, max=8)},), "dims": {"size": 4}}
    weight, y = np.arange(4), np.arange(4) * x.numpy()
    for module, options, expected in (
        (Same(), {}, [weight, y, x, y]),
        (Stateful(), {}, [x, weight, y, x, y]),
        (Twice(), dynamic, [x, x]),
    ):
        plan = compiled(module, example_inputs=(x,), refittable=True, **options)
        (program,) = plan.programs
        assert [tensor.name for tensor in program.inputs] == ["x"]
        assert [tensor.name for tensor in program.outputs] == [f"output_{i}" for i in range(len(expected))]
        with nimblert.load(plan) as model:
            for found, wanted in zip(model(x.numpy()), expected, strict=True):
                np.testing.assert_array_equal(found, np.asarray(wanted, np.float32))


@pytest.mark.parametrize("refittable", [False, True])
def test_outputs_may_have_the_names_of_weights_and_of_calls_within(refittable: bool) -> None:
    torch = pytest.importorskip("torch")

    class Named(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.arange(4.0))
            self.scale = torch.nn.Parameter(torch.full((4,), 2.0))

        def forward(self, x: Any) -> Any:
            y = self.weight * x
            return {"mul": torch.relu(y) + 1, "relu": y * self.scale, "weight": x + self.weight, "scale": self.scale}

    x = torch.tensor([5.0, -6.0, 7.0, 8.0])
    module = Named()
    with nimblert.load(compiled(module, example_inputs=(x,), refittable=refittable)) as model:
        found = model.run({"x": x.numpy()})
    expected = {name: tensor.detach().numpy() for name, tensor in module(x).items()}
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
