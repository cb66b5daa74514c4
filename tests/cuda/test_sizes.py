"""Calls of other sizes on a GPU: padded and split, from the host and on the device, in every layout.

They run on a driver of host memory, too; see test_arrays.py.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from copying import ORDERS, copying, drawn, laid_out, on_host
from host_driver import HostDriver

import nimblert
from nimblert import InputError
from nimblert.plan import Fit, Plan, Program

pytest_plugins = ("gpu_memory",)
torch = pytest.importorskip("torch")

SIZES = (2, 5)
REST = (3, 6, 4)


def sized(order: tuple[int, ...], fit: Fit, dtype: str = "float32", first: int = 0) -> Plan:
    """Return copies of (rows, 3, 6, 4), one program per number of rows; inputs are ``first`` at least."""
    plans = [copying((rows, *REST), order, dtype) for rows in SIZES]

    def program(plan: Plan, rows: int) -> Program:
        (made,) = plan.programs
        ranges = (first, 99) if dtype == "int64" else None
        return replace(
            made,
            name=f"rows={rows}",
            entry="main",
            profile=(("rows", rows),),
            fits=(fit,),
            inputs=(replace(made.inputs[0], sample_range=ranges),),
        )

    return replace(plans[0], programs=tuple(map(program, plans, SIZES)))


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_any_number_of_rows(put: Callable[[np.ndarray], Any], order: tuple[int, ...]) -> None:
    with nimblert.load(sized(order, Fit.SPLIT), poison=True) as model:
        for rows in (1, 2, 3, 5, 6, 11):
            x = drawn(rows, (rows, *REST))
            for layout in ORDERS.values():
                assert np.array_equal(model(laid_out(x, layout)), x)
            assert np.array_equal(model(np.repeat(x, 2, axis=2)[:, :, ::2]), x)
            tensor = put(x)
            for given in (tensor, tensor.to(memory_format=torch.channels_last), tensor.flip(0).flip(0)):
                assert torch.equal(torch.from_dlpack(model(given)), tensor)
            mine = put(np.zeros_like(x))
            assert model.run({"x": tensor}, out={"y": mine})["y"] is mine
            assert torch.equal(mine, tensor)
            on_host = np.zeros_like(x)
            model.run({"x": x}, out={"y": on_host})
            assert np.array_equal(on_host, x)


def test_enqueued_calls_of_other_sizes(put: Callable[[np.ndarray], Any]) -> None:
    with nimblert.load(sized(ORDERS["channels last"], Fit.SPLIT)) as model:
        tensors = [put(drawn(rows, (rows, *REST))) for rows in range(1, 12)]
        if tensors[0].is_cuda:
            torch.cuda.synchronize()
        stream = torch.cuda.Stream().cuda_stream if tensors[0].is_cuda else 0x77
        outputs = [model.run({"x": tensor}, stream=stream)["y"] for tensor in tensors]
        model.synchronize()
        assert all(torch.equal(torch.from_dlpack(y), x) for y, x in zip(outputs, tensors, strict=True))


@on_host
@pytest.mark.parametrize("rows", [5, 11])
def test_readers_on_other_streams_wait_for_what_is_enqueued(host: HostDriver, rows: int) -> None:
    """Also for a call that is several runs, and for a call of another plan."""
    plan = sized(ORDERS["contiguous"], Fit.SPLIT)
    with nimblert.load(plan) as first, nimblert.load(plan) as second:
        output: Any = first.run({"x": drawn(1, (rows, *REST))}, stream=0x77)["y"]
        host.waits.clear()
        for stream in (0x88, 1, None, 0x77, -1):
            output.__dlpack__(stream=stream)
        assert host.waits == [(0x88, 0x77), (1, 0x77), (1, 0x77)]
        assert output.__cuda_array_interface__["stream"] == 1
        assert host.waits[3:] == [(1, 0x77)]
        second(output)
        assert host.waits[-1][1] == 0x77
        first.synchronize()
        host.waits.clear()
        output.__dlpack__(stream=0x88)
    output.__dlpack__(stream=0x88)
    assert host.waits == []


@on_host
def test_caller_stream_waits_for_memory(put: Callable[[np.ndarray], Any], host: HostDriver) -> None:
    with nimblert.load(sized(ORDERS["contiguous"], Fit.SPLIT)) as model:
        x = put(drawn(0, (11, *REST)))
        torch.from_dlpack(model.run({"x": x}, stream=0x77)["y"])  # and let go
        model.synchronize()
        host.waits.clear()
        model.run({"x": x}, stream=0x88)
        assert {waiting for waiting, _ in host.waits} == {0x88}


@on_host
def test_a_reversed_array_that_the_output_lies_over_is_found(put: Callable[[np.ndarray], Any]) -> None:
    """Its first element has the highest address."""
    del put
    room = drawn(0, (12, *REST))
    for x, y in ((room[:11][::-1], room[1:]), (room[1:], room[:11][::-1])):
        given, taken = (SimpleNamespace(__cuda_array_interface__=array.__array_interface__) for array in (x, y))
        with nimblert.load(sized(ORDERS["contiguous"], Fit.SPLIT)) as model:
            with pytest.raises(InputError, match=r"out 'y': shares memory with an input, .* a call is 3 runs"):
                model.run({"x": given}, out={"y": taken})
            assert np.array_equal(room, drawn(0, (12, *REST)))


def test_what_is_padded_is_not_split(put: Callable[[np.ndarray], Any]) -> None:
    with nimblert.load(sized(ORDERS["odd"], Fit.PADDED)) as model:
        assert np.array_equal(model(drawn(1, (4, *REST))), drawn(1, (4, *REST)))
        with pytest.raises(InputError, match="'rows' is 6 at axis 0, and 'main' has programs for rows=2, 5"):
            model(put(drawn(1, (6, *REST))))


@pytest.mark.parametrize("first", [0, 7])
def test_the_rest_holds_values_of_the_input(put: Callable[[np.ndarray], Any], first: int) -> None:
    with nimblert.load(sized(ORDERS["contiguous"], Fit.SPLIT, "int64", first), poison=True) as model:
        x = drawn(3, (3, *REST), "int64") + 7
        for value in (x, put(x)):
            model.run({"x": value})
            memory = model.read(model.plan.programs[1].inputs[0].pointer, 5 * 72 * 8).view(np.int64).reshape(5, *REST)
            assert np.array_equal(memory[:3], x)
            assert (memory[3:] == first).all()


def test_what_is_bound_is_for_one_size(put: Callable[[np.ndarray], Any]) -> None:
    with nimblert.load(sized(ORDERS["contiguous"], Fit.SPLIT)) as model:
        y = put(np.zeros((5, *REST), np.float32))
        model.bind("y", y)
        x = put(drawn(1, (5, *REST)))
        assert model.run({"x": x})["y"] is y
        assert torch.equal(y, x)
        with pytest.raises(InputError, match=r"inputs have other sizes than the program for which \['y'\] are bound"):
            model.run({"x": x[:4]})
        with pytest.raises(InputError, match="bind 'x': the shape fits several programs"):
            model.bind("x", x[:2])
        model.bind("y", None)
        assert torch.equal(torch.from_dlpack(model(x[:4])), x[:4])
