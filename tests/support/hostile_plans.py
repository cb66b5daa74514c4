"""Well-formed CPU plans of one ONNX node, and changes that give them a hostile meaning."""

from ast import literal_eval
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_plans import floats, plan_file, write_model
from onnx import ModelProto, NodeProto, helper
from subprocesses import python

from fuzz import wrapped
from nimblec.plan import encoder
from nimblert.check.verify import parse_plan
from nimblert.errors import PlanInvalidError
from nimblert.plan import Access, Launch, Memset, Module, Plan, Pointer, Region

node = helper.make_node


def node_plan(
    *inputs: np.ndarray, call: NodeProto, outputs: Sequence[tuple[str, tuple[int, ...]]], kind: str, opset: int = 18
) -> Plan:
    """Return the plan of one node; its inputs, in order, are weights of the plan that are passed as ``kind`` says."""
    arrays = dict(zip(dict.fromkeys(filter(None, call.input)), inputs, strict=True))
    made = [wrapped.output(i, call.output[i], dtype, shape) for i, (dtype, shape) in enumerate(outputs)]
    call.overload = ""
    call.domain = call.domain or ""
    return wrapped.plan_of(call, 1 if call.domain else opset, arrays, dict.fromkeys(arrays, kind), made)


def gather_plan(kind: str = "external") -> Plan:
    """Return the plan of y = w[i], four rows of eight numbers."""
    w, i = np.ones((4, 8), np.float32), np.array([0, 1, 2, 3])
    return node_plan(w, i, call=node("Gather", ["w", "i"], ["y"]), outputs=[("float32", (4, 8))], kind=kind)


def with_model(plan: Plan, change: Callable[[ModelProto], object]) -> Plan:
    """Return the plan with a changed model of its kernel."""
    model = ModelProto.FromString(bytes(plan.modules[0].code))
    change(model)
    code = memoryview(model.SerializeToString(deterministic=True))
    return replace(plan, modules=(Module(origin=plan.modules[0].origin, code=code),))


def with_parameter(plan: Plan, index: int, **changes: Any) -> Plan:
    """Return the plan with other fields of one parameter of its kernel."""
    (kernel,) = plan.kernels
    parameters = list(kernel.parameters)
    parameters[index] = replace(parameters[index], **changes)
    return replace(plan, kernels=(replace(kernel, parameters=tuple(parameters)),))


def with_program(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with other fields of its first program."""
    return replace(plan, programs=(replace(plan.programs[0], **changes),))


def with_launch(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with other fields of its only launch."""
    (launch,) = plan.programs[0].commands
    assert isinstance(launch, Launch)
    return with_program(plan, commands=(replace(launch, **changes),))


def placed(plan: Plan, pointers: Sequence[Pointer]) -> Launch:
    """Return the only launch of a plan of `node_plan` with its parameters elsewhere."""
    (launch,) = plan.programs[0].commands
    assert isinstance(launch, Launch)
    accesses = zip((*launch.reads, *launch.writes), pointers, strict=True)
    moved = tuple(Access(pointer=pointer, nbytes=access.nbytes) for access, pointer in accesses)
    relocations = zip(launch.relocations, pointers, strict=True)
    return replace(
        launch,
        relocations=tuple(replace(relocation, pointer=pointer) for relocation, pointer in relocations),
        reads=moved[: len(launch.reads)],
        writes=moved[len(launch.reads) :],
    )


def two_streams_plan(folder: Path) -> Plan:
    """Return the plan of two chains of products beside one another, and of their sum."""
    nodes, constants = [], {}
    rng = np.random.default_rng(0)
    for chain in "ab":
        before = "x"
        for i in range(3):
            constants[f"w{chain}{i}"] = rng.standard_normal((16, 16)).astype(np.float32)
            nodes.append(node("MatMul", [before, f"w{chain}{i}"], [f"m{chain}{i}"]))
            before = f"m{chain}{i}"
    nodes.append(node("Add", ["ma2", "mb2"], ["y"]))
    path = write_model(folder / "m.onnx", nodes, [floats("x", 2, 16)], [floats("y", 2, 16)], constants=constants)
    plan = plan_file(path, streams=None)
    assert plan.programs[0].stream_count == 2
    return plan


def refusal(plan: Plan) -> str:
    """Return what reading the file of the plan says."""
    image = memoryview(encoder.encode_file(plan))
    with pytest.raises(PlanInvalidError) as caught:
        parse_plan(image, "file")
    return "; ".join(caught.value.problems)


def over_its_operand(operator: str, shapes: Sequence[tuple[int, ...]], over: int, shift: int = 0) -> Plan:
    """Return the plan of a node whose output (4, 8) lies in the arena ``shift`` bytes from one of its operands."""
    names = ["a", "b", "c"][: len(shapes)]
    dtypes = [np.int64 if operator.startswith("Scatter") and i == 1 else np.float32 for i in range(len(names))]
    arrays = [np.ones(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    plan = node_plan(*arrays, call=node(operator, names, ["y"]), outputs=[("float32", (4, 8))], kind="input")
    places = [Pointer(region=Region.ARENA, offset=512 * (i + 1)) for i in range(len(names))]
    places.append(replace(places[over], offset=places[over].offset + shift))
    fill = Memset(stream=0, op=0, dst=Pointer(region=Region.ARENA), value=0, element_nbytes=4, count=1024)
    return with_program(plan, commands=(fill, placed(plan, places)), arena_nbytes=4096)


def outcomes(folder: Path, plans: Iterable[Plan]) -> dict[str, int]:
    """Load and run plans in a process of its own, whose memory ends where a tensor does; count their outcomes.

    A crash, a hang or an exception that is not of nimblert fails the test.
    """
    files = []
    for i, plan in enumerate(plans):
        files.append(folder / f"{i}.plan")
        files[-1].write_bytes(encoder.encode_file(plan))
    said = python("import runpy; runpy.run_module('fuzz.corpus', run_name='__main__')", *files)
    counted: dict[str, int] = literal_eval(said[said.rindex("{") : said.rindex("}") + 1])
    return counted
