"""State in device memory: read, written from either side and reset; on a driver of host memory, too."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
from copying import copying, drawn, on_host
from host_driver import HostDriver

import nimblert
from nimblert import InputError
from nimblert.executable import Executable
from nimblert.plan import Memcpy, Plan, Pointer, Region, Weight

pytest_plugins = ("gpu_memory",)
torch = pytest.importorskip("torch")

SHAPE = (6, 8)
NBYTES = 6 * 8 * 4
KEPT = Pointer(region=Region.STATE, offset=512)


def keeping() -> Plan:
    """Return a plan whose output is the state "kept", which becomes the input."""
    plan = copying(SHAPE, (0, 1))
    (program,) = plan.programs
    (x,), (y,) = program.inputs, program.outputs
    commands = tuple(
        Memcpy(dst=dst, src=src, nbytes=NBYTES, stream=0, op=0) for dst, src in ((y.pointer, KEPT), (KEPT, x.pointer))
    )
    first = memoryview(drawn(0, SHAPE).tobytes())
    state = (
        Weight(name="other", dtype="int64", shape=(), offset=0, data=memoryview(np.int64(7).tobytes())),
        Weight(name="kept", dtype="float32", shape=SHAPE, offset=KEPT.offset, data=first),
    )
    programs = (replace(program, commands=commands),)
    return replace(plan, state=state, state_nbytes=KEPT.offset + NBYTES, programs=programs)


@pytest.fixture
def loaded(put: object) -> Iterator[Executable]:
    del put
    with nimblert.load(keeping()) as executable:
        yield executable


def test_state_is_read_and_reset_between_runs(loaded: Executable) -> None:
    assert loaded.state["other"] == 7
    np.testing.assert_array_equal(loaded(drawn(1, SHAPE)), drawn(0, SHAPE))
    np.testing.assert_array_equal(loaded.state["kept"], drawn(1, SHAPE))
    loaded.reset()
    np.testing.assert_array_equal(loaded(drawn(2, SHAPE)), drawn(0, SHAPE))


def test_state_is_written_from_the_host_and_the_gpu(loaded: Executable, put: Callable[[np.ndarray], Any]) -> None:
    one, two, three = (drawn(seed, SHAPE) for seed in (1, 2, 3))
    for value, wanted in (
        (one, one),
        (np.asfortranarray(two), two),
        (put(three), three),
        (put(np.ascontiguousarray(one.T)).t(), one),
    ):
        loaded.state["kept"] = value
        np.testing.assert_array_equal(loaded(one), wanted)
    assert loaded.state["other"] == 7


@on_host
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_write_comes_after_what_makes_the_array(put: object, host: HostDriver, order: Literal["C", "F"]) -> None:
    del put
    array = np.asarray(drawn(1, SHAPE), order=order)
    interface = {"version": 3, "shape": SHAPE, "typestr": "<f4", "data": (array.ctypes.data, False)}
    value = SimpleNamespace(__cuda_array_interface__={**interface, "strides": array.strides, "stream": 0x99})
    with nimblert.load(keeping()) as model:
        host.waits.clear()
        host.copies.clear()
        model.state["kept"] = value
        ((waiting, waited_for),) = host.waits
        assert (waited_for, host.copies) == (0x99, [waiting])
        np.testing.assert_array_equal(model.state["kept"], array)


def test_what_does_not_fit_changes_nothing(loaded: Executable, put: Callable[[np.ndarray], Any]) -> None:
    for array, sentence in (
        (put(np.zeros((6, 7), np.float32)), r"^state 'kept': shape \(6, 7\), expected \(6, 8\)$"),
        (put(np.zeros(SHAPE)), r"^state 'kept': dtype float64, expected float32"),
    ):
        with pytest.raises(InputError, match=sentence):
            loaded.state["kept"] = array
    np.testing.assert_array_equal(loaded.state["kept"], drawn(0, SHAPE))


def test_a_copy_on_the_gpu_is_the_callers(loaded: Executable) -> None:
    kept = torch.from_dlpack(loaded.state.on_device("kept"))
    loaded(drawn(1, SHAPE))
    loaded.close()
    np.testing.assert_array_equal(kept.cpu().numpy(), drawn(0, SHAPE))


def test_each_context_has_its_own(loaded: Executable) -> None:
    with loaded.context() as other:
        other(drawn(1, SHAPE))
        np.testing.assert_array_equal(loaded.state["kept"], drawn(0, SHAPE))
        loaded.state.update(other.state)
    np.testing.assert_array_equal(loaded.state["kept"], drawn(1, SHAPE))
    with pytest.raises(InputError, match=r"^this context is closed: make another one$"):
        other.state["kept"]
