"""Compile small ONNX models for the CPU target and run them, in tests."""

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from nimblec.base.ir import Part
from nimblec.base.options import InputSpec
from nimblec.cpu.capture import capture
from nimblec.cpu.stretches import Joiner
from nimblec.plan import encoder
from nimblec.plan.assembly import Provenance, assemble
from nimblec.plan.planning import schedule_bodies
from nimblec.schedule.dependencies import dependencies
from nimblec.schedule.memory import layout
from nimblec.schedule.streams import maximal, serial
from nimblert.cpu.backend import CpuBackend, CpuLoaded
from nimblert.plan import Device, Plan, Target

Value = tuple[str, int, Sequence[Any] | None]
"""Name, ONNX element type and shape of an input or output."""


def write_model(
    path: Path,
    nodes: Sequence[NodeProto],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    *,
    constants: Mapping[str, np.ndarray] | None = None,
    opset: int = 18,
    **fields: Any,
) -> Path:
    """Save a model; ``fields`` go to helper.make_model."""
    graph = helper.make_graph(
        nodes,
        "model",
        [_value(*value) for value in inputs],
        [_value(*value) for value in outputs],
        [onnx.numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9, **fields), path)
    return path


def _value(name: str, element_type: int, shape: Sequence[Any] | None) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, element_type, shape)


def floats(name: str, *shape: int | str) -> Value:
    """Return a float32 input or output."""
    return name, TensorProto.FLOAT, shape


def plan_file(path: Path, specs: Sequence[InputSpec] = (), *, streams: int | None = 1, joins: bool = True) -> Plan:
    """Compile an ONNX file for one stream, or as many as it can use (None); if it ``joins``, nodes form stretches."""
    join = Joiner().join if joins else lambda graph, schedule: (graph, schedule)
    graph = schedule_bodies(capture(path, specs), join)
    graph, schedule = join(graph, (serial if streams == 1 else maximal)(dependencies(graph)))
    provenance = Provenance(target=Target.CPU, device=Device(name="cpu"), versions=())
    return assemble([Part(graph=graph, schedule=schedule, memory=layout(graph, schedule))], provenance)


def backend_of(plan: Plan, *, poison: bool = False) -> CpuBackend:
    """Load the first program of a plan, in memory of its own."""
    loaded = CpuLoaded(plan)
    return loaded.backend(plan.programs[0], loaded.working(poison=poison), poison=poison)


def run_plan(plan: Plan, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return the outputs of a run in poisoned memory."""
    with closing(backend_of(plan, poison=True)) as backend:
        for tensor, view in zip(plan.programs[0].inputs, backend.inputs, strict=True):
            np.copyto(view, inputs[tensor.name])
        backend.run()
        return [view.copy() for view in backend.outputs]


def run_onnxruntime(path: Path, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return the outputs of a plain session of the whole model."""
    session = onnxruntime.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])
    return [np.asarray(output) for output in session.run(None, dict(inputs))]


def assert_same(path: Path, inputs: Mapping[str, np.ndarray], *, plan: Plan | None = None) -> Plan:
    """Check that the plan of a model equals ONNX Runtime bit for bit."""
    plan = plan or plan_file(path)
    for actual, expected in zip(run_plan(plan, inputs), run_onnxruntime(path, inputs), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected, strict=True)
    return plan


def bent_sum(folder: Path, *, joins: bool = True) -> Path:
    """Write the plan of tanh(x) + tanh(x) for four numbers x to a file; its ops are called "bend" and "sum"."""
    node = helper.make_node
    nodes = [node("Tanh", ["x"], ["a"], name="bend"), node("Add", ["a", "a"], ["y"], name="sum")]
    model = write_model(folder / "m.onnx", nodes, [floats("x", 4)], [floats("y", 4)])
    encoder.write(plan_file(model, joins=joins), folder / "m.plan")
    return folder / "m.plan"
