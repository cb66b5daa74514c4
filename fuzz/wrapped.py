"""One ONNX node as a self-contained plan, whose weights are the node's inputs."""

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import ModelProto, NodeProto, OperatorSetIdProto, TensorProto, ValueInfoProto, numpy_helper

from nimblec.cpu.constants import TensorType, external
from nimblec.onnx_import import model_file
from nimblert.arrays import layouts
from nimblert.check.onnx_rules import NCHWC_DOMAIN, ORIGIN
from nimblert.cpu.onnx_session import nchwc_block_size
from nimblert.plan import (
    Access,
    Device,
    Kernel,
    Launch,
    Module,
    Op,
    Parameter,
    ParameterKind,
    Plan,
    Pointer,
    Program,
    Region,
    Relocation,
    Target,
    Tensor,
    Weight,
)

KINDS = ("input", "external", "embedded")
"""The ways to pass a value to a node: bound at a run, an initializer bound at load, a constant of the model."""


def model_of(
    node: NodeProto, opset: int, arrays: Mapping[str, np.ndarray], kinds: Mapping[str, str], outputs: Sequence[Tensor]
) -> bytes:
    """Return the ONNX model of a kernel, as the compiler writes it."""
    model = ModelProto(ir_version=10)
    model.opset_import.append(OperatorSetIdProto(domain=node.domain, version=opset))
    graph = model.graph
    graph.name = "kernel"
    graph.node.append(node)
    for name, array in arrays.items():
        tensor_type = TensorType(dtype=array.dtype.name, shape=array.shape)
        if kinds[name] == "input":
            _declare(graph.input.add(), name, tensor_type)
        elif kinds[name] == "external":
            graph.initializer.append(external(name, tensor_type))
        else:
            graph.initializer.append(numpy_helper.from_array(array, name))
    for tensor in outputs:
        _declare(graph.output.add(), tensor.name, TensorType(dtype=tensor.dtype, shape=tensor.shape))
    serialized: bytes = model.SerializeToString(deterministic=True)
    return serialized


def _declare(value: ValueInfoProto, name: str, tensor_type: TensorType) -> None:
    value.name = name
    tensor = value.type.tensor_type
    tensor.elem_type = model_file.element_type(tensor_type.dtype) if tensor_type.dtype else TensorProto.UNDEFINED
    tensor.shape.SetInParent()
    for size in tensor_type.shape:
        tensor.shape.dim.add().dim_value = size


def output(index: int, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return the plan's output ``index``, in C order."""
    strides = layouts.dense_strides([*map(int, shape)])
    pointer = Pointer(region=Region.OUTPUT, index=index)
    return Tensor(name=name, dtype=dtype, shape=shape, strides=strides, pointer=pointer)


def plan_of(
    node: NodeProto, opset: int, arrays: Mapping[str, np.ndarray], kinds: Mapping[str, str], outputs: Sequence[Tensor]
) -> Plan:
    """Return a plan of the node alone; its inputs and initializers are the plan's weights."""
    parameters: list[Parameter] = []
    pointers: list[Pointer] = []
    weights: list[Weight] = []
    end = 0
    for name, array in arrays.items():
        if kinds[name] == "embedded":
            continue
        kind = ParameterKind.INPUT if kinds[name] == "input" else ParameterKind.INITIALIZER
        parameters.append(_parameter(len(parameters), kind, name, array.dtype.name, array.shape))
        pointers.append(Pointer(region=Region.WEIGHTS, offset=end))
        data = memoryview(np.ascontiguousarray(array).tobytes())
        weights.append(Weight(name=name, dtype=array.dtype.name, shape=array.shape, offset=end, data=data))
        end += -(-max(data.nbytes, 1) // 256) * 256
    for index, tensor in enumerate(outputs):
        made = _parameter(len(parameters), ParameterKind.OUTPUT, tensor.name, tensor.dtype, tensor.shape)
        parameters.append(made)
        pointers.append(Pointer(region=Region.OUTPUT, index=index))
    nbytes = [array.nbytes for name, array in arrays.items() if kinds[name] != "embedded"]
    nbytes += [tensor.span_nbytes for tensor in outputs]
    accesses = [Access(pointer=p, nbytes=n) for p, n in zip(pointers, nbytes, strict=True)]
    symbol = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    launch = Launch(
        stream=0,
        op=0,
        kernel=0,
        params=bytes(8 * len(parameters)),
        relocations=tuple(Relocation(param_offset=8 * i, pointer=p) for i, p in enumerate(pointers)),
        reads=tuple(accesses[: len(accesses) - len(outputs)]),
        writes=tuple(accesses[len(accesses) - len(outputs) :]),
    )
    program = Program(
        name="main",
        inputs=(),
        outputs=tuple(outputs),
        input_nbytes=(),
        output_nbytes=tuple(tensor.span_nbytes for tensor in outputs),
        arena_nbytes=0,
        stream_count=1,
        event_count=0,
        ops=(Op(name=symbol, source="fuzzed"),),
        commands=(launch,),
    )
    origin = f"{ORIGIN} nchwc{nchwc_block_size()}" if node.domain == NCHWC_DOMAIN else ORIGIN
    return Plan(
        producer="fuzz",
        versions=(),
        target=Target.CPU,
        device=Device(name="cpu"),
        modules=(Module(origin=origin, code=memoryview(model_of(node, opset, arrays, kinds, outputs))),),
        kernels=(Kernel(module=0, symbol=symbol, parameters=tuple(parameters)),),
        weights_nbytes=end,
        weights=tuple(weights),
        state_nbytes=0,
        state=(),
        programs=(program,),
    )


def _parameter(position: int, kind: ParameterKind, name: str, dtype: str, shape: tuple[int, ...]) -> Parameter:
    return Parameter(offset=8 * position, nbytes=8, kind=kind, name=name, dtype=dtype, shape=shape)
