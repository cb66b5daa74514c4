"""Outputs of calls from the host that the program's last kernel writes to page-locked memory itself."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")  # for the fixtures
from copying import ORDERS, SHAPE, by_kernel, copying, drawn, on_host
from host_driver import HostDriver

import nimblert
from nimblert.arrays.dtypes import numpy_dtype
from nimblert.plan import ITEM_NBYTES, Launch, Memcpy, Memset, Plan, Pointer, Region

pytest_plugins = ("gpu_memory",)
LARGEST = (1 << 10,)
"""Of an output in float32 that a kernel writes on the host."""
LARGER = (LARGEST[0] + 1,)


def added(plan: Plan, before: Sequence[Any] = (), after: Sequence[Any] = ()) -> Plan:
    (program,) = plan.programs
    return replace(plan, programs=(replace(program, commands=(*before, *program.commands, *after)),))


def downloads(host: HostDriver, plan: Plan) -> int:
    """How many downloads the graph of a whole call has."""
    (program,) = plan.programs
    shape = program.inputs[0].shape
    with nimblert.load(plan, poison=True) as model:
        calls = dict(host.calls)
        for seed in range(8):
            assert np.array_equal(model(drawn(seed, shape)), drawn(seed, shape))
    assert host.calls["cuGraphInstantiate"] - calls["cuGraphInstantiate"] == 1
    kernels = 1 + sum(isinstance(command, Launch) for _, command in program.work)  # that of the upload too
    return host.calls["cuGraphAddKernelNode"] - calls.get("cuGraphAddKernelNode", 0) - kernels


@on_host
def test_what_one_kernel_writes_needs_no_download(put: object, host: HostDriver) -> None:
    del put
    assert downloads(host, by_kernel(copying((2, 3, 4, 5), ORDERS["contiguous"]))) == 0
    assert downloads(host, by_kernel(copying(LARGEST, (0,)))) == 0
    assert downloads(host, by_kernel(copying(LARGER, (0,)))) == 1


@on_host
def test_what_is_also_read_or_written_by_others_is_downloaded(put: object, host: HostDriver) -> None:
    del put
    plan = by_kernel(copying(LARGEST, (0,)))
    output, arena, nbytes = Pointer(region=Region.OUTPUT), Pointer(region=Region.ARENA), LARGEST[0] * 4
    fill = Memset(dst=output, value=0, element_nbytes=1, count=nbytes, stream=0, op=0)
    read = Memcpy(dst=arena, src=output, nbytes=nbytes, stream=0, op=0)
    assert downloads(host, added(plan, before=[fill])) == 1
    assert downloads(host, added(plan, after=[read])) == 1
    assert downloads(host, copying(LARGEST, (0,))) == 1
    (program,) = plan.programs
    larger = replace(program, output_nbytes=(nbytes + 4,))
    assert downloads(host, replace(plan, programs=(larger,))) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "bool", "int64", "uint8"])
def test_every_call_gives_a_new_array(put: object, dtype: str) -> None:
    del put
    shape = (3, 40)
    plan = by_kernel(copying((*shape, ITEM_NBYTES[dtype]), (0, 1, 2), "uint8"))
    (program,) = plan.programs
    output = replace(program.outputs[0], dtype=dtype, shape=shape, strides=(shape[1], 1))
    kept = []
    with nimblert.load(replace(plan, programs=(replace(program, outputs=(output,)),)), poison=True) as model:
        for seed in range(40):
            expected = drawn(seed, shape, dtype)
            found = model(expected.view(np.uint8).reshape(program.inputs[0].shape))
            assert isinstance(found, np.ndarray)
            assert found.dtype == numpy_dtype(dtype)
            assert np.array_equal(found, expected)
            if seed % 4 == 0:
                kept.append((expected, found))
            del found
    assert all(np.array_equal(expected, found) for expected, found in kept)


def test_a_replay_repeats_such_a_call_in_the_programs_own_memory(put: object) -> None:
    del put
    plan = by_kernel(copying(SHAPE, ORDERS["contiguous"]))
    (tensor,) = plan.programs[0].outputs
    with nimblert.load(plan, poison=True) as model:
        for seed in range(12):
            found = model(drawn(seed))

        def held() -> np.ndarray:
            return model.read(tensor.pointer, tensor.span_nbytes).view(np.float32).reshape(SHAPE)

        for repeat in (model.replay, model.launch):
            found[...] = -1
            repeat()
            assert np.array_equal(held(), drawn(11))
            assert (found == -1).all()
            assert np.array_equal(model(drawn(0)), drawn(0))
            assert np.array_equal(model(drawn(11)), drawn(11))
        view = model.run({"x": drawn(5)}, reuse_outputs=True)["y"]
        model(drawn(6))
        model.replay()
        assert np.array_equal(held(), drawn(6))
        assert np.array_equal(model.run({"x": drawn(4)}, reuse_outputs=True)["y"], drawn(4))
        assert np.array_equal(view, drawn(4))


def test_outputs_beside_one_that_a_kernel_writes(put: object) -> None:
    """One that is copied, one in the same memory as another, and an input."""
    del put
    plan = by_kernel(copying(SHAPE, ORDERS["contiguous"]))
    (program,) = plan.programs
    (x,), (y,) = program.inputs, program.outputs
    other = Pointer(region=Region.OUTPUT, index=1)
    copy = Memcpy(dst=other, src=x.pointer, nbytes=x.span_nbytes, stream=0, op=0)
    outputs = (y, *(replace(y, name=name, pointer=other) for name in "zw"), replace(x, name="same"))
    program = replace(program, outputs=outputs, output_nbytes=(*program.output_nbytes, x.span_nbytes))
    kept = []
    with nimblert.load(added(replace(plan, programs=(program,)), after=[copy]), poison=True) as model:
        for seed in range(40):
            found = model(drawn(seed))
            assert all(np.array_equal(each, drawn(seed)) for each in found)
            if seed % 4 == 0:
                kept.append((seed, found))
    assert all(np.array_equal(each, drawn(seed)) for seed, found in kept for each in found)
