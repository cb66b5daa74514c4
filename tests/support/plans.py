"""Small valid plans for tests, one for each target, and one of any size for measurements.

The CUDA plans cannot run: their modules hold a few made-up bytes.
"""

import struct
from dataclasses import replace
from math import prod

from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from nimblert.plan import (
    Access,
    Candidate,
    Command,
    Device,
    Golden,
    GoldenOutput,
    Kernel,
    Launch,
    Memcpy,
    Memset,
    Module,
    Op,
    Parameter,
    ParameterKind,
    Plan,
    Pointer,
    Program,
    Record,
    Region,
    Relocation,
    ScheduleRecord,
    Target,
    Tensor,
    Wait,
    Weight,
)

H200 = Device(name="NVIDIA H200", compute_capability=(9, 0), multiprocessor_count=132, driver_version=13000)
MARKUP = "</script><img src=x onerror=alert(1)><!--\u202e"
"""A name that would end a script and start another where it is not escaped."""
VERSIONS = (("nimblec", "0.1.0"), ("torch", "2.13.0"))


def pointer(region: Region, offset: int = 0, index: int = 0) -> Pointer:
    """Return a pointer, with positional arguments."""
    return Pointer(region=region, index=index, offset=offset)


def access(region: Region, offset: int, nbytes: int, index: int = 0) -> Access:
    """Return an access to ``nbytes`` bytes from ``offset`` of a region."""
    return Access(pointer=pointer(region, offset, index), nbytes=nbytes)


def relocation(param_offset: int, region: Region, offset: int = 0, index: int = 0) -> Relocation:
    """Return the pointer at ``param_offset`` of a parameter buffer."""
    return Relocation(param_offset=param_offset, pointer=pointer(region, offset, index))


def weight(name: str, values: tuple[float, ...], offset: int) -> Weight:
    """Return a float32 vector at ``offset`` of its region."""
    data = memoryview(struct.pack(f"<{len(values)}f", *values))
    return Weight(name=name, dtype="float32", shape=(len(values),), offset=offset, data=data)


def _tensor(name: str, region: Region, *, dtype: str = "float32") -> Tensor:
    """Return a (4, 4) tensor, C order, in input or output 0."""
    return Tensor(name=name, dtype=dtype, shape=(4, 4), strides=(4, 1), pointer=pointer(region))


def cuda_plan() -> Plan:
    """Return a plan of two streams, two events, every kind of command, a module with two kernels and one with one.

    y = relu(x * scale + state); the middle of it runs beside a copy.
    """
    kernels = (
        Kernel(
            module=0,
            symbol="_Z5scalePfS_S_i",
            parameters=(
                Parameter(offset=0, nbytes=8),
                Parameter(offset=8, nbytes=8),
                Parameter(offset=16, nbytes=8),
                Parameter(offset=24, nbytes=4),
            ),
        ),
        Kernel(
            module=0,
            symbol="_Z3addPfS_",
            parameters=(Parameter(offset=0, nbytes=16),),
            max_dynamic_smem_nbytes=65536,
            non_portable_cluster=True,
        ),
        Kernel(module=1, symbol="relu", parameters=(Parameter(offset=0, nbytes=8), Parameter(offset=8, nbytes=8))),
    )
    commands: tuple[Command, ...] = (
        Memset(stream=0, op=0, dst=pointer(Region.ARENA, 256), value=0, element_nbytes=4, count=16, duration_ns=900),
        Launch(
            stream=0,
            op=0,
            kernel=0,
            params=bytes(24) + struct.pack("<i", 16),
            relocations=(relocation(0, Region.INPUT), relocation(8, Region.WEIGHTS), relocation(16, Region.ARENA, -64)),
            reads=(access(Region.INPUT, 0, 64), access(Region.WEIGHTS, 0, 16)),
            writes=(access(Region.ARENA, 0, 64),),
            block=(32, 1, 1),
            duration_ns=1500,
        ),
        Record(stream=0, event=0),
        Wait(stream=1, event=0),
        Memcpy(stream=1, op=1, dst=pointer(Region.ARENA, 512), src=pointer(Region.ARENA), nbytes=64, duration_ns=800),
        Record(stream=1, event=1),
        Launch(
            stream=0,
            op=2,
            kernel=1,
            params=bytes(16),
            relocations=(relocation(0, Region.ARENA), relocation(8, Region.STATE)),
            reads=(access(Region.ARENA, 0, 64), access(Region.STATE, 0, 64)),
            writes=(access(Region.ARENA, 64, 64),),
            grid=(32, 2, 1),
            block=(128, 2, 1),
            cluster=(16, 1, 1),
            dynamic_smem_nbytes=4096,
            cooperative=True,
        ),
        Wait(stream=0, event=1),
        Launch(
            stream=0,
            op=2,
            kernel=2,
            params=bytes(16),
            relocations=(relocation(0, Region.ARENA, 512), relocation(8, Region.OUTPUT)),
            reads=(access(Region.ARENA, 512, 64),),
            writes=(access(Region.OUTPUT, 0, 64),),
            block=(32, 1, 1),
            programmatic=True,
        ),
    )
    program = Program(
        name="main",
        inputs=(_tensor("x", Region.INPUT),),
        outputs=(_tensor("y", Region.OUTPUT),),
        input_nbytes=(64,),
        output_nbytes=(64,),
        arena_nbytes=1024,
        stream_count=2,
        event_count=2,
        ops=(
            Op(name="aten.mul.Tensor", source="model.scale"),
            Op(name="aten.clone.default", source="model"),
            Op(name="aten.relu.default", source="model.relu"),
        ),
        commands=commands,
        golden=Golden(seed=7, tolerance=0.0, outputs=(GoldenOutput(sha256=bytes(range(32)), samples=(0.5, -1.25)),)),
        schedule=ScheduleRecord(
            policy="max",
            antichain=(2, 3),
            arena_lower_bound_nbytes=576,
            fewest_sync_count=2,
            candidates=(
                Candidate(policy="1", stream_count=1, sync_count=0, arena_nbytes=768, duration_ns=5200),
                Candidate(policy="max", stream_count=2, sync_count=2, arena_nbytes=1024, duration_ns=4900),
            ),
        ),
    )
    return Plan(
        producer="nimblec 0.1.0",
        versions=VERSIONS,
        target=Target.CUDA,
        device=H200,
        modules=(
            Module(origin="aten", code=memoryview(b"\x7fELF" + bytes(range(60)))),
            Module(origin="triton", code=memoryview(b"\x7fELF" + bytes(5000))),
        ),
        kernels=kernels,
        weights_nbytes=1024,
        weights=(weight("scale", (1.0, 2.0, 3.0, 4.0), 0), weight("bias", (0.5, 0.25), 256)),
        state_nbytes=256,
        state=(weight("mean", (0.0,) * 16, 0),),
        programs=(program,),
    )


def markup_plan() -> Plan:
    """Return `cuda_plan` with `MARKUP` for the names of tensors, weights, ops, sources, kernels, origins, entries."""
    plan = cuda_plan()
    program = plan.programs[0]
    changed = replace(
        program,
        name=MARKUP,
        entry=MARKUP,
        inputs=tuple(replace(tensor, name=MARKUP) for tensor in program.inputs),
        outputs=tuple(replace(tensor, name=MARKUP) for tensor in program.outputs),
        ops=tuple(Op(name=f"aten.{MARKUP}", source=MARKUP) for _ in program.ops),
    )
    return replace(
        plan,
        producer=MARKUP,
        modules=tuple(replace(module, origin=MARKUP) for module in plan.modules),
        kernels=tuple(replace(kernel, symbol=MARKUP) for kernel in plan.kernels),
        weights=tuple(replace(weight, name=f"{MARKUP}{weight.offset}") for weight in plan.weights),
        programs=(changed,),
    )


def several_entries() -> Plan:
    """Return `cuda_plan` with an entry "main" of two profiles and an entry "tail"."""
    plan = cuda_plan()
    main = plan.programs[0]
    half = tuple(replace(tensor, shape=(2, 4)) for tensor in main.inputs)
    programs = (
        replace(main, profile=(("batch", 4),)),
        replace(main, name="main[batch=2]", profile=(("batch", 2),), inputs=half),
        replace(main, name="tail", entry="tail"),
    )
    return replace(plan, programs=programs)


def _cpu_parameter(position: int, kind: ParameterKind, name: str, shape: tuple[int, ...]) -> Parameter:
    """Return a float32 tensor of a CPU kernel, the ``position``-th pointer of its parameters."""
    return Parameter(offset=8 * position, nbytes=8, kind=kind, name=name, dtype="float32", shape=shape)


def _cpu_kernel(module: int, symbol: str, parameters: tuple[tuple[ParameterKind, str, tuple[int, ...]], ...]) -> Kernel:
    """Return a CPU kernel of these parameters, in this order."""
    records = tuple(_cpu_parameter(i, *parameter) for i, parameter in enumerate(parameters))
    return Kernel(module=module, symbol=symbol, parameters=records)


def _model(node: NodeProto, inputs: dict[str, tuple[int, ...]], external: dict[str, tuple[int, ...]]) -> memoryview:
    """Return the code of a CPU kernel: one node of float32 tensors that gives a (4, 4) one."""

    def value(name: str, shape: tuple[int, ...]) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    tensors = []
    for name, shape in external.items():
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
        for key, entry in (("location", "weights"), ("offset", "0"), ("length", str(4 * prod(shape)))):
            tensor.external_data.add(key=key, value=entry)
        tensors.append(tensor)
    values = [value(*item) for item in inputs.items()]
    graph = helper.make_graph([node], "kernel", values, [value(node.output[0], (4, 4))], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9, producer_name="")
    model.ClearField("producer_name")
    return memoryview(model.SerializeToString(deterministic=True))


def cpu_plan() -> Plan:
    """Return a plan of two kernels on two streams: y = relu(x + bias), and an unused int64 input."""
    add, relu = helper.make_node("Add", ["x", "bias"], ["sum"]), helper.make_node("Relu", ["sum"], ["y"])
    kernels = (
        _cpu_kernel(
            0,
            "Add",
            (
                (ParameterKind.INPUT, "x", (4, 4)),
                (ParameterKind.INITIALIZER, "bias", (4,)),
                (ParameterKind.OUTPUT, "sum", (4, 4)),
            ),
        ),
        _cpu_kernel(1, "Relu", ((ParameterKind.INPUT, "sum", (4, 4)), (ParameterKind.OUTPUT, "y", (4, 4)))),
    )
    commands: tuple[Command, ...] = (
        Launch(
            stream=0,
            op=0,
            kernel=0,
            params=bytes(24),
            relocations=(relocation(0, Region.INPUT), relocation(8, Region.WEIGHTS), relocation(16, Region.ARENA)),
            reads=(access(Region.INPUT, 0, 64), access(Region.WEIGHTS, 0, 16)),
            writes=(access(Region.ARENA, 0, 64),),
        ),
        Record(stream=0, event=0),
        Wait(stream=1, event=0),
        Launch(
            stream=1,
            op=1,
            kernel=1,
            params=bytes(16),
            relocations=(relocation(0, Region.ARENA), relocation(8, Region.OUTPUT)),
            reads=(access(Region.ARENA, 0, 64),),
            writes=(access(Region.OUTPUT, 0, 64),),
        ),
    )
    index = Tensor(
        name="index",
        dtype="int64",
        shape=(4,),
        strides=(1,),
        pointer=pointer(Region.INPUT, index=1),
        sample_range=(0, 9),
    )
    program = Program(
        name="main",
        inputs=(_tensor("x", Region.INPUT), index),
        outputs=(_tensor("y", Region.OUTPUT),),
        input_nbytes=(64, 32),
        output_nbytes=(64,),
        arena_nbytes=256,
        stream_count=2,
        event_count=1,
        ops=(Op(name="Add", source="/add"), Op(name="Relu", source="/relu")),
        commands=commands,
    )
    return Plan(
        producer="nimblec 0.1.0",
        versions=(("nimblec", "0.1.0"), ("onnxruntime", "1.23.0")),
        target=Target.CPU,
        device=Device(name="cpu"),
        modules=(
            Module(origin="onnxruntime", code=_model(add, {"x": (4, 4)}, {"bias": (4,)})),
            Module(origin="onnxruntime", code=_model(relu, {"sum": (4, 4)}, {})),
        ),
        kernels=kernels,
        weights_nbytes=64,
        weights=(weight("bias", (1.0, 2.0, 3.0, 4.0), 0),),
        state_nbytes=0,
        state=(),
        programs=(program,),
    )


def large_plan(launch_count: int, *, relocation_count: int = 6, access_count: int = 4, stream_count: int = 4) -> Plan:
    """Return a CUDA plan of ``launch_count`` launches in turn on all streams, each with its own op.

    Half the accesses of a launch are reads, half writes.
    """
    kernel = Kernel(module=0, symbol="k", parameters=(Parameter(offset=0, nbytes=8 * relocation_count + 16),))
    arena_nbytes = 4096 * (launch_count + access_count)

    def launch(i: int) -> Launch:
        touched = tuple(access(Region.ARENA, 4096 * (i + j), 4096) for j in range(access_count))
        return Launch(
            stream=i % stream_count,
            op=i,
            kernel=0,
            params=bytes(8 * relocation_count) + struct.pack("<QQ", i, 2**63 + i),
            relocations=tuple(
                relocation(8 * j, Region.ARENA, 4096 * (i + j % access_count)) for j in range(relocation_count)
            ),
            reads=touched[: access_count // 2],
            writes=touched[access_count // 2 :],
            grid=(i % 1000 + 1, 1, 1),
            block=(128, 1, 1),
            duration_ns=1000 + i,
        )

    program = Program(
        name="main",
        inputs=(_tensor("x", Region.INPUT),),
        outputs=(_tensor("y", Region.OUTPUT),),
        input_nbytes=(64,),
        output_nbytes=(64,),
        arena_nbytes=arena_nbytes,
        stream_count=stream_count,
        event_count=0,
        ops=tuple(Op(name="aten.add.Tensor", source=f"blocks.{i}") for i in range(launch_count)),
        commands=tuple(launch(i) for i in range(launch_count)),
    )
    return Plan(
        producer="nimblec 0.1.0",
        versions=VERSIONS,
        target=Target.CUDA,
        device=H200,
        modules=(Module(origin="triton", code=memoryview(b"\x7fELF" + bytes(100))),),
        kernels=(kernel,),
        weights_nbytes=256,
        weights=(weight("scale", (1.0, 2.0), 0),),
        state_nbytes=0,
        state=(),
        programs=(program,),
    )
