"""Outputs of a CUDA plan that a run cuts to sizes which it computed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from copying import copying, copying_each, drawn, on_host
from host_driver import HostDriver

import nimblert
from nimblert import Executable, InputError
from nimblert.plan import Crop, Memcpy, Memset, Plan, Pointer, Region, Tensor

pytest_plugins = ("gpu_memory",)
torch = pytest.importorskip("torch")

Put = Callable[[np.ndarray], Any]
BOUND = (5, 300)


def cropping(bound: tuple[int, ...] = BOUND) -> Plan:
    """A plan that copies x to y, and cuts y to the sizes in n, whose copy in the arena is overwritten afterwards."""
    plan = copying_each([bound])
    (program,) = plan.programs
    given, arena = Pointer(region=Region.INPUT, index=1), Pointer(region=Region.ARENA)
    rank, nbytes = len(bound), 8 * len(bound)
    sizes = Tensor(name="n", dtype="int64", shape=(rank,), strides=(1,), pointer=given)
    commands = (
        *program.commands,
        Memcpy(dst=arena, src=given, nbytes=nbytes, stream=0, op=0),
        Crop(stream=0, op=0, output=0, sizes=arena, rank=rank),
        Memset(dst=arena, value=0xFF, element_nbytes=1, count=nbytes, stream=0, op=0),
    )
    program = replace(
        program,
        inputs=(replace(program.inputs[0], name="x"), sizes),
        outputs=(replace(program.outputs[0], name="y"),),
        commands=commands,
        arena_nbytes=nbytes,
        input_nbytes=(*program.input_nbytes, nbytes),
    )
    return replace(plan, programs=(program,))


@pytest.fixture
def model(put: Put) -> Any:
    del put
    with nimblert.load(cropping(), poison=True) as executable:
        yield executable


def values(output: Any) -> np.ndarray:
    return output if isinstance(output, np.ndarray) else torch.from_dlpack(output).cpu().numpy()


SIZES = [(3, 200), (0, 300), (5, 300), (5, 0), (1, 1)]


@pytest.mark.parametrize("bound", [BOUND, (7, 30_000)], ids=["small", "large"])
def test_outputs_have_the_sizes_of_each_run(put: Put, bound: tuple[int, ...]) -> None:
    """The third call from the host and the sixteenth from the GPU run a graph of their own."""
    with nimblert.load(cropping(bound), poison=True) as executable:
        place, kept = put(drawn(0, bound)), []
        for seed in range(20):
            rows, columns = SIZES[seed % len(SIZES)]
            x, n = drawn(seed, bound), np.array([rows, columns])
            expected = x[:rows, :columns]
            kept += [(expected, executable(x, n)), (expected, executable(put(x), put(n)))]
            place.copy_(torch.from_numpy(x))
            kept.append((expected, executable(place, put(n))))
            assert all(isinstance(found, np.ndarray) is (i % 3 == 0) for i, (_, found) in enumerate(kept))
        for expected, found in kept:
            assert found.shape == expected.shape
            np.testing.assert_array_equal(values(found), expected, strict=True)


def test_array_of_the_caller_is_filled_as_far_as_the_sizes(model: Executable, put: Put) -> None:
    x, n = drawn(0, BOUND), np.array([2, 7])
    mine = np.full(BOUND, -1, np.float32)
    found = model.run({"x": x, "n": n}, out={"y": mine})["y"]
    np.testing.assert_array_equal(found, x[:2, :7], strict=True)
    assert np.shares_memory(found, mine)
    assert (mine[2:] == -1).all()
    theirs = put(np.full(BOUND, -1, np.float32))
    found = model.run({"x": x, "n": n}, out={"y": theirs})["y"]
    np.testing.assert_array_equal(values(found), x[:2, :7], strict=True)


def test_view_of_the_plans_memory_has_the_sizes(model: Executable) -> None:
    x = drawn(0, BOUND)
    found = model.run({"x": x, "n": np.array([2, 7])}, reuse_outputs=True)["y"]
    np.testing.assert_array_equal(found, x[:2, :7], strict=True)


@on_host
def test_call_on_a_stream_waits_for_the_sizes(model: Executable, put: Put, host: HostDriver) -> None:
    x, n = put(drawn(0, BOUND)), put(np.array([4, 9]))
    stream = int(host._cuStreamCreate(0))
    found = model.run({"x": x, "n": n}, stream=stream)["y"]
    assert found.shape == (4, 9)
    np.testing.assert_array_equal(values(found), drawn(0, BOUND)[:4, :9], strict=True)


@pytest.mark.parametrize("sizes", [(6, 1), (1, 301), (-1, 1), (1, 2**63 - 1)])
def test_size_beyond_the_bound_is_an_error(model: Executable, put: Put, sizes: tuple[int, int]) -> None:
    x = drawn(0, BOUND)
    for take in (lambda array: array, put):
        with pytest.raises(InputError, match=r"^output 'y': has the shape .* and the plan's bound is \(5, 300\)"):
            model(take(x), take(np.array(sizes)))
        found = model(take(x), take(np.array([1, 2])))
        np.testing.assert_array_equal(values(found), x[:1, :2], strict=True)


def test_profile_and_steps_take_crops(model: Executable) -> None:
    model(drawn(0, BOUND), np.array([1, 2]))
    (program,) = model.plan.programs
    steps = [*model.steps({"x": drawn(0, BOUND), "n": np.array([3, 4])})]
    assert steps == [work for _, work in program.work]


def test_plans_without_crops_have_no_sizes(put: Put) -> None:
    del put
    with nimblert.load(copying((3, 4), (0, 1))) as executable:
        assert executable(drawn(0, (3, 4))).shape == (3, 4)
