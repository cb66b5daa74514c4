"""Arrays of smaller shapes on a GPU: the rest of an input is filled by every call, also by those that are one graph.

They run on a driver of host memory, too; see test_arrays.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
import pytest
from copying import copying, drawn, laid_out, on_host, strides
from host_driver import HostDriver

import nimblert
from nimblert import Executable
from nimblert.arrays import layouts
from nimblert.arrays.layouts import element_strides, numpy_dtype
from nimblert.cuda import graph
from nimblert.cuda.driver import Context, Handle, call
from nimblert.cuda.graph import Step
from nimblert.cuda.memory import allocate
from nimblert.cuda.movers import GatherKernels, PaddingMover
from nimblert.plan import ITEM_NBYTES, Fit, Pointer, Program, Region, Tensor

pytest_plugins = ("gpu_memory",)
torch = pytest.importorskip("torch")
if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    pytest.skip("this torch offers no table of functions", allow_module_level=True)

Put = Callable[[np.ndarray], Any]

SIZES = (2, 8)
REST = (3, 6, 4)
JUNK = 113


def tensor_of(shape: Sequence[int], to: Sequence[int], dtype: str, first: int) -> Tensor:
    ranges = (first, 120) if first else None
    place = Pointer(region=Region.INPUT)
    return Tensor(name="x", dtype=dtype, shape=tuple(shape), strides=tuple(to), pointer=place, sample_range=ranges)


HEADS = {
    "outer axis": ((8, 3, 6, 4), (5, 3, 6, 4)),
    "inner axis": ((8, 3, 6, 4), (8, 3, 6, 3)),
    "two axes": ((8, 3, 6, 4), (5, 3, 2, 4)),
    "every axis": ((8, 3, 6, 4), (7, 2, 5, 3)),
    "axes of one": ((1, 8), (1, 5)),
}


def add_in_order(steps: Sequence[Step], built: Handle) -> None:
    """Add steps to a graph, each after the one before."""
    for earlier, later in pairwise([step(built) for step in steps]):
        graph.add_edges(built, [earlier], [later])


@pytest.mark.parametrize(("dtype", "first"), [("int8", 7), ("float16", 0), ("float32", 3), ("int64", 0), ("int64", 7)])
@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize(("whole", "given"), HEADS.values(), ids=HEADS)
def test_the_start_is_copied_and_the_rest_filled(
    put: Put, whole: tuple[int, ...], given: tuple[int, ...], gap: int, dtype: str, first: int
) -> None:
    put(np.zeros(1))  # starts torch's use of the device
    axes = tuple(range(len(whole)))
    for to_order, order, is_graph in product((axes, axes[::-1]), (axes, axes[::-1]), (False, True)):
        to = [stride * (1 + gap) for stride in strides(whole, to_order)]
        tensor = tensor_of(whole, to, dtype, first)
        array = laid_out(drawn(1, given, dtype), order)
        with closing(Context(0)) as context:
            memory, source, landing = (allocate(context, 8 * 2 * prod(whole)) for _ in range(3))
            call("cuMemsetD8", memory, JUNK, tensor.span_nbytes)
            call("cuMemcpyHtoD", source, array.ctypes.data, array.nbytes)
            mover = PaddingMover(GatherKernels(context), tensor, given, element_strides(array), lambda at=landing: at)
            if is_graph:
                made = graph.instantiated(partial(add_in_order, mover.steps(memory, source)))
                call("cuGraphLaunch", context.acquire(made, "cuGraphExecDestroy"), 0)
            else:
                mover.move(memory, source, 0)
            call("cuStreamSynchronize", 0)
            found = np.empty(tensor.span_nbytes, np.uint8)
            call("cuMemcpyDtoH", found.ctypes.data, memory, found.nbytes)
        expected = np.empty(whole, numpy_dtype(dtype))
        layouts.place(expected, array, first)
        nbytes = [stride * ITEM_NBYTES[dtype] for stride in to]
        view = np.lib.stride_tricks.as_strided(found.view(numpy_dtype(dtype)), whole, nbytes)
        assert np.array_equal(view, expected)


@pytest.fixture
def model(put: Put, order: tuple[int, ...]) -> Iterator[Executable]:
    """Yield a model that copies (rows, 3, 6, 4) of int64, one input at least 7, with a program per number of rows."""
    del put

    def program(rows: int) -> Program:
        (made,) = copying((rows, *REST), order, "int64").programs
        x = replace(made.inputs[0], sample_range=(7, 120))
        return replace(
            made, name=f"rows={rows}", entry="main", profile=(("rows", rows),), fits=(Fit.PADDED,), inputs=(x,)
        )

    plan = replace(copying((2, *REST), order, "int64"), programs=tuple(map(program, SIZES)))
    with nimblert.load(plan, poison=True) as executable:
        yield executable


def rest(model: Executable, rows: int) -> np.ndarray:
    """Return the elements of the input of 8 rows beyond a call of ``rows``."""
    x = model.plan.programs[1].inputs[0]
    memory = model.read(x.pointer, x.span_nbytes).view(np.int64)
    return np.lib.stride_tricks.as_strided(memory, x.shape, [8 * stride for stride in x.strides])[rows:]


def test_calls_that_come_again_fill_the_rest_again(model: Executable, put: Put) -> None:
    tensors = {rows: put(drawn(rows, (rows, *REST), "int64") + 7) for rows in (5, 6, 8)}
    kept = []
    for repeat in range(30):  # calls become graphs after 16
        for rows, tensor in tensors.items():
            tensor.add_(repeat)
            found = torch.from_dlpack(model(tensor))
            kept.append((found, tensor.clone()))
            assert torch.equal(found, tensor)
            assert (rest(model, rows) == 7).all()
        if repeat % 7 == 6:
            assert all(torch.equal(found, expected) for found, expected in kept)
            kept.clear()  # later calls get this memory
    model(tensors[5])
    model.replay()
    assert (rest(model, 5) == 7).all()


@on_host
def test_calls_that_come_again_are_one_launch(model: Executable, put: Put, host: HostDriver) -> None:
    tensor = put(drawn(1, (5, *REST), "int64") + 7)
    for _ in range(20):
        model(tensor)
    host.calls.clear()
    assert torch.equal(torch.from_dlpack(model(tensor)), tensor)
    assert host.calls.keys() <= {"cuCtxSetCurrent", "cuGraphLaunch", "cuStreamSynchronize", "cuCtxRecordEvent"}
    assert host.calls["cuGraphLaunch"] == 1


@on_host
def test_calls_of_many_sizes_are_one_launch_each(model: Executable, put: Put, host: HostDriver) -> None:
    tensors = [put(drawn(rows, (rows, *REST), "int64") + 7) for rows in (5, 2, 7, 8)]
    for _ in range(80):
        for tensor in tensors:
            model(tensor)
    host.calls.clear()
    for tensor in tensors:
        assert torch.equal(torch.from_dlpack(model(tensor)), tensor)
    assert host.calls["cuGraphLaunch"] == len(tensors)
    assert host.calls.keys() <= {"cuCtxSetCurrent", "cuGraphLaunch", "cuStreamSynchronize", "cuCtxRecordEvent"}


def test_arrays_of_the_host_come_between(model: Executable, put: Put) -> None:
    for seed in range(20):
        x = drawn(seed, (5, *REST), "int64") + 7
        assert torch.equal(torch.from_dlpack(model(put(x))), put(x))
        assert np.array_equal(model(x + 1), x + 1)
        assert (rest(model, 5) == 7).all()


def test_bound_arrays_end_them(model: Executable, put: Put) -> None:
    tensor = put(drawn(1, (5, *REST), "int64") + 7)
    for _ in range(20):
        model(tensor)
    y = put(np.zeros(8 * 72, np.int64)).as_strided((8, *REST), model.plan.programs[1].outputs[0].strides)
    model.bind("y", y)
    whole = put(drawn(2, (8, *REST), "int64") + 7)
    assert model.run({"x": whole})["y"] is y
    assert torch.equal(y, whole)
    model.bind("y", None)
    assert torch.equal(torch.from_dlpack(model(tensor)), tensor)
