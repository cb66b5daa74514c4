"""Several graphs in one plan: what is equal in them is stored once, and runs as it does alone."""

from dataclasses import replace

import numpy as np
import plans
import pytest

from nimblec.base.errors import CompileError
from nimblec.base.ir import Access, Buffer, BufferKind, Graph, KernelWork, Op, Part, Reference, Task
from nimblec.cuda.common_state import refuse_folded_state
from nimblec.plan.assembly import Provenance, assemble
from nimblec.schedule.dependencies import dependencies
from nimblec.schedule.memory import layout
from nimblec.schedule.streams import serial
from nimblert.check import verify
from nimblert.plan import Device, Kernel, Module, Parameter, Region, Target

PROVENANCE = Provenance(target=Target.CUDA, device=Device(name="cpu"), versions=())


def module(name: str) -> Module:
    return Module(origin="triton", code=memoryview(name.encode()))


def constant(*values: float, name: str = "w", kind: BufferKind = BufferKind.CONSTANT, storage: int = 0) -> Buffer:
    data = memoryview(np.array(values, np.float32).tobytes())
    shape = (len(values),)
    return Buffer(kind=kind, nbytes=data.nbytes, name=name, dtype="float32", shape=shape, data=data, storage=storage)


def graph(code: str, *buffers: Buffer, smem: int = 0, written: int | None = None) -> Graph:
    """Return one launch of a kernel "f" in a module of this code, which reads all buffers, and writes one."""
    kernel = Kernel(module=0, symbol="f", parameters=(Parameter(offset=0, nbytes=8),), max_dynamic_smem_nbytes=smem)
    accesses = tuple(Access(buffer=n, offset=0, nbytes=b.nbytes) for n, b in enumerate(buffers))
    work = KernelWork(
        kernel=0, params=bytes(8), references=(Reference(param_offset=0, buffer=len(buffers) - 1, offset=4),)
    )
    task = Task(op=0, work=work, reads=accesses, writes=() if written is None else (accesses[written],))
    return Graph(
        modules=(module(code),),
        kernels=(kernel,),
        buffers=buffers,
        ops=(Op(name="f", source=""),),
        tasks=(task,),
        inputs=(),
        outputs=(),
    )


def part(model: Graph, entry: str, **changes: object) -> Part:
    schedule = serial(dependencies(model))
    made = Part(graph=model, schedule=schedule, memory=layout(model, schedule), entry=entry)
    return replace(made, **changes)


def test_equal_modules_kernels_and_constants_are_stored_once() -> None:
    first = graph("code", constant(1, 2), constant(3, 4, name="bias"), smem=100)
    second = graph("code", constant(5, 6), constant(1, 2, name="other"), smem=200)
    third = graph("other code", constant(3, 4))
    plan = assemble([part(first, "a"), part(second, "b"), part(third, "c")], PROVENANCE)
    assert list(verify.problems(plan)) == []
    assert plan.modules == (module("code"), module("other code"))
    assert [(k.module, k.max_dynamic_smem_nbytes) for k in plan.kernels] == [(0, 200), (1, 0)]
    assert [(w.name, w.offset, np.frombuffer(w.data, np.float32).tolist()) for w in plan.weights] == [
        ("w", 0, [1, 2]),
        ("bias", 256, [3, 4]),
        ("b.w", 512, [5, 6]),
    ]
    pointers = [program.commands[0].relocations[0].pointer for program in plan.programs]
    assert [(p.region, p.offset) for p in pointers] == [
        (Region.WEIGHTS, 260),
        (Region.WEIGHTS, 4),
        (Region.WEIGHTS, 260),
    ]
    assert [program.commands[0].kernel for program in plan.programs] == [0, 0, 1]


def test_a_plan_of_one_graph_is_as_the_graph_is() -> None:
    model = graph("code", constant(1, 2), constant(1, 2, name="twin"))
    plan = assemble([part(model, "main")], PROVENANCE)
    assert [w.name for w in plan.weights] == ["w", "twin"]
    assert (plan.programs[0].name, plan.programs[0].entry) == ("main", "main")


def test_programs_are_named_by_entry_and_profile() -> None:
    model = graph("code", constant(1, 2))
    parts = [part(model, "main", profile=(("batch", n), ("length", 8))) for n in (1, 2)]
    assert [p.name for p in parts] == ["main[batch=1,length=8]", "main[batch=2,length=8]"]
    assert assemble(parts, PROVENANCE).programs[1].profile == (("batch", 2), ("length", 8))


def test_states_of_one_storage_are_one_state_for_all() -> None:
    writes = graph("code", constant(1, 2, name="cache", kind=BufferKind.STATE, storage=7), written=0)
    reads = graph("code", constant(9, 9), constant(1, 2, name="cache", storage=7))
    alone = graph("code", constant(1, 2, name="cache", kind=BufferKind.STATE), written=0)
    plan = assemble([part(writes, "write"), part(reads, "read"), part(alone, "alone")], PROVENANCE)
    assert [(w.name, w.offset) for w in plan.state] == [("cache", 0), ("alone.cache", 256)]
    assert [w.name for w in plan.weights] == ["w"]
    pointers = [program.commands[0].relocations[0].pointer for program in plan.programs]
    assert pointers == [plans.pointer(Region.STATE, offset) for offset in (4, 4, 260)]


def test_states_of_three_sizes_have_names_of_their_own() -> None:
    alone = graph("code", constant(1, 2, name="memory", kind=BufferKind.STATE), written=0)
    plan = assemble([part(alone, "main", profile=(("n", size),)) for size in (1, 2, 3)], PROVENANCE)
    assert [tensor.name for tensor in plan.state] == ["memory", "main[n=2].memory", "main[n=3].memory"]
    assert not [problem for problem in verify.problems(plan) if problem.startswith("state")]


class _Module:
    """What holds tensors of one storage each."""

    def __init__(self, *storages: int) -> None:
        self._storages = storages

    def named_buffers(self) -> None: ...

    def parameters(self) -> list["_Tensor"]:
        return []

    def buffers(self) -> list["_Tensor"]:
        return list(map(_Tensor, self._storages))


class _Tensor:
    def __init__(self, storage: int) -> None:
        self._cdata = storage

    def untyped_storage(self) -> "_Tensor":
        return self


def test_what_another_entry_writes_must_not_be_folded() -> None:
    graphs = {
        "write": graph("code", constant(1, name="cache", kind=BufferKind.STATE, storage=7), written=0),
        "read": graph("code", constant(1, name="folded")),
    }
    modules = {"write": _Module(7), "read": _Module(7, 8)}
    refuse_folded_state(modules, graphs, as_they_run=["read", "write"], kept={})
    refuse_folded_state({**modules, "read": _Module(8)}, graphs, as_they_run=[], kept={})
    refuse_folded_state({**modules, "read": len}, graphs, as_they_run=[], kept={})
    with pytest.raises(CompileError, match=r"entry 'read' has 'cache', which entry 'write' writes, .*: use -O0"):
        refuse_folded_state(modules, graphs, as_they_run=["write"], kept={})
    refuse_folded_state(modules, graphs, as_they_run=["write"], kept={"read": [7]})
