"""Well-formed CPU plans with a hostile meaning: each is refused by a sentence before ONNX Runtime sees it."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from cpu_plans import floats, plan_file, write_model
from onnx import ModelProto, NodeProto, TensorProto, helper

import nimblert
from fuzz import wrapped
from nimblec import cli
from nimblec.errors import UnsupportedModelError
from nimblert import container, verify
from nimblert.errors import PlanError, PlanInvalidError
from nimblert.limits import Limits
from nimblert.plan import (
    Access,
    Launch,
    Memset,
    Module,
    ParameterKind,
    Plan,
    Pointer,
    Record,
    Region,
    Relocation,
    Tensor,
    Wait,
)

node = helper.make_node
RNG = np.random.default_rng(0)


def of(*inputs: np.ndarray, call: NodeProto, outputs: Sequence[tuple[str, tuple[int, ...]]], kind: str) -> Plan:
    """A plan of one node whose inputs, in order, are weights of it, bound as ``kind`` says; its outputs in order."""
    arrays = dict(zip(dict.fromkeys(filter(None, call.input)), inputs, strict=True))
    made = [wrapped.output(i, call.output[i], dtype, shape) for i, (dtype, shape) in enumerate(outputs)]
    call.overload = ""
    call.domain = call.domain or ""
    opset = 1 if call.domain else 18
    return wrapped.plan_of(call, opset, arrays, dict.fromkeys(arrays, kind), made)


def gather(kind: str = "external") -> Plan:
    """y = w[i], four rows of eight numbers."""
    w, i = np.ones((4, 8), np.float32), np.array([0, 1, 2, 3])
    return of(w, i, call=node("Gather", ["w", "i"], ["y"]), outputs=[("float32", (4, 8))], kind=kind)


def with_model(plan: Plan, change: Callable[[ModelProto], object]) -> Plan:
    """The plan with another model of its kernel."""
    model = ModelProto.FromString(bytes(plan.modules[0].code))
    change(model)
    code = memoryview(model.SerializeToString(deterministic=True))
    return replace(plan, modules=(Module(origin=plan.modules[0].origin, code=code),))


def with_parameter(plan: Plan, index: int, **changes: object) -> Plan:
    (kernel,) = plan.kernels
    parameters = list(kernel.parameters)
    parameters[index] = replace(parameters[index], **changes)
    return replace(plan, kernels=(replace(kernel, parameters=tuple(parameters)),))


def with_program(plan: Plan, **changes: object) -> Plan:
    return replace(plan, programs=(replace(plan.programs[0], **changes),))


def with_launch(plan: Plan, **changes: object) -> Plan:
    (launch,) = plan.programs[0].commands
    return with_program(plan, commands=(replace(launch, **changes),))


def refusal(plan: Plan) -> str:
    """What reading the plan's file says."""
    image = memoryview(container.encode_file(plan))
    with pytest.raises(PlanInvalidError) as caught:
        container.parse(image, "file")
    return "; ".join(caught.value.problems)


def test_what_the_changes_start_from_is_sound() -> None:
    for kind in wrapped.KINDS:
        with nimblert.load(gather(kind)) as executable:
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
    (lambda m: m.graph.node.append(m.graph.node[0]), "expected a graph of one node"),
    (lambda m: m.graph.node[0].input.__setitem__(1, ""), "Gather: input 1 is left out, and must be there"),
    (lambda m: m.graph.node[0].input.append("w"), "Gather: 3 inputs, expected 2 to 2"),
    (lambda m: m.graph.node[0].input.__setitem__(1, "q"), "Gather: reads 'q', which nothing gives"),
    (lambda m: m.graph.node[0].input.__setitem__(0, "i"), "'w' is not read by its node"),
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
    plan = gather()
    i = with_parameter_kind_input(plan)
    with pytest.raises(AssertionError) if sentence == "sound" else pytest.MonkeyPatch.context():
        assert __import__("re").search(sentence, refusal(with_model(i, change)))


def with_parameter_kind_input(plan: Plan) -> Plan:
    return plan
