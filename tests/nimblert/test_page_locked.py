"""Inputs in page-locked memory, which are uploaded from where they are."""

import ctypes
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("torch")  # for the fixtures, too
import torch
from copying import ORDERS, by_kernel, copying, copying_each, drawn, on_gpu, on_host
from host_driver import HostDriver

import nimblert
from nimblert import Executable, InputError
from nimblert.cuda.backend import CudaBackend
from nimblert.cuda.early import StagedArrays
from nimblert.cuda.transfers import _IN_PLACE_NBYTES
from nimblert.plan import Plan

pytest_plugins = ("gpu_memory",)
pytestmark = pytest.mark.usefixtures("patient")

SHAPE = (4, 3, 128, 96)
"""Of several parts in float32, the last of which is shorter."""
LARGE = (5, 1 << 17)
"""Of more bytes than a graph of a whole call uploads."""


def staged(model: Executable) -> list[np.ndarray]:
    """The bytes of the memory that arrays of the host are copied to."""
    backend = model.backend
    assert isinstance(backend, CudaBackend)
    memory = backend._staged_inputs
    return [memory.bytes_of(index)[0] for index in range(len(model.inputs))]


def mark(model: Executable) -> None:
    """Fill that memory, so that it can be seen whether a call copies anything there."""
    for each in staged(model):
        each[:] = 0xA5


def untouched(model: Executable) -> list[bool]:
    """Whether a call has left the memory of each input as `mark` did."""
    return [bool((each == 0xA5).all()) for each in staged(model)]


def filled(model: Executable, seed: int, name: str = "x") -> np.ndarray:
    """New page-locked memory with an input."""
    array = model.empty_input(name)
    array[...] = drawn(seed, array.shape)
    return array


def check(model: Executable, inputs: Callable[[int], np.ndarray], *, in_place: bool, count: int = 12) -> None:
    """Each call has its own input; all but the first, which have no graph yet, are ``in_place`` or are not."""
    for seed in range(count):
        x = inputs(seed)
        mark(model)
        assert np.array_equal(model(x), drawn(seed, x.shape))
        if seed >= 4:
            assert untouched(model) == [in_place]


@pytest.mark.parametrize("plan", [copying, lambda *given: by_kernel(copying(*given))])
@pytest.mark.parametrize("shape", [SHAPE, (_IN_PLACE_NBYTES // 4,), ((1 << 19) - 1,), LARGE])
def test_an_array_of_the_plan_s_is_not_copied(
    put: object, shape: tuple[int, ...], plan: Callable[..., Plan]
) -> None:
    del put
    with nimblert.load(plan(shape, range(len(shape))), poison=True) as model:
        check(model, lambda seed: filled(model, seed), in_place=True)
        x = filled(model, 0)
        for seed in range(12):  # the same memory again
            x[...] = drawn(seed, shape)
            mark(model)
            assert np.array_equal(model(x), drawn(seed, shape))
            assert untouched(model) == [True]


@pytest.mark.parametrize("given", ORDERS)
@pytest.mark.parametrize("own", ORDERS)
def test_axes_may_be_in_any_order(put: object, own: str, given: str) -> None:
    del put
    with nimblert.load(copying(SHAPE, ORDERS[own]), poison=True) as model:
        other = copying(SHAPE, ORDERS[given])
        with nimblert.load(other) as memory:
            check(model, lambda seed: filled(memory, seed), in_place=True)


def test_calls_of_other_memory_come_between(put: object) -> None:
    del put
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"]), poison=True) as model:
        check(model, lambda seed: filled(model, seed), in_place=True)
        for seed in range(40):
            x = filled(model, seed) if seed % 3 else drawn(seed, SHAPE)[...]
            mark(model)
            assert np.array_equal(model(x), drawn(seed, SHAPE))
            assert untouched(model) == [bool(seed % 3)]


def test_what_a_call_returns_is_not_copied_by_the_next(put: object) -> None:
    del put
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"]), poison=True) as model:
        x = filled(model, 0)
        for _ in range(12):
            x = model(x)
        mark(model)
        assert np.array_equal(model(x), drawn(0, SHAPE))
        assert untouched(model) == [True]


def test_some_of_several_inputs(put: object) -> None:
    del put
    shapes = [(5,), (300, 250), (1, 7), (123, 600)]
    with nimblert.load(copying_each(shapes), poison=True) as model:
        for seed in range(24):
            given = [seed & 1 << index for index in range(len(shapes))]
            expected = [drawn(seed + index, shape) for index, shape in enumerate(shapes)]
            xs = list(expected)
            for index, there in enumerate(given):
                if there:
                    xs[index] = model.empty_input(f"x{index}")
                    xs[index][...] = expected[index]
            mark(model)
            found = model(*xs)
            assert all(np.array_equal(y, x) for x, y in zip(expected, found, strict=True))
            if seed >= 4:
                large = [shape for shape in shapes if np.prod(shape) * 4 >= _IN_PLACE_NBYTES]
                assert untouched(model) == [
                    bool(there) and shape in large for there, shape in zip(given, shapes, strict=True)
                ]


def test_more_than_a_graph_uploads_in_several_inputs(put: object) -> None:
    del put
    shapes = [(1 << 18,), (70, 1000), (1 << 18,), (100,)]
    with nimblert.load(copying_each(shapes), poison=True) as model:
        for seed in range(8):
            xs = [filled(model, seed + index, f"x{index}") for index in range(len(shapes))]
            xs[2] = xs[2].copy()
            mark(model)
            assert all(np.array_equal(y, x) for x, y in zip(xs, model(*xs), strict=True))
            assert untouched(model) == [True, True, False, False]


def part_of(model: Executable, seed: int, cut: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """A view of a plan's memory with an input of `SHAPE`."""
    view = cut(model.empty_input("x"))
    assert view.shape == SHAPE
    view[...] = drawn(seed, SHAPE)
    return view


def test_a_dense_part_is_not_copied(put: object) -> None:
    del put
    longer = copying((2 * SHAPE[0], *SHAPE[1:]), ORDERS["contiguous"])
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"]), poison=True) as model, nimblert.load(longer) as memory:
        check(model, lambda seed: part_of(memory, seed, lambda whole: whole[: SHAPE[0]]), in_place=True)
        check(model, lambda seed: part_of(memory, seed, lambda whole: whole[3 : 3 + SHAPE[0]]), in_place=True)


@pytest.mark.parametrize(
    "cut",
    [
        lambda whole: whole[: SHAPE[0], :, :, ::2],  # with gaps
        lambda whole: whole[SHAPE[0] - 1 :: -1, :, :, : SHAPE[3]],
        lambda whole: whole.reshape(-1)[1 : 1 + np.prod(SHAPE)].reshape(SHAPE),  # not aligned
    ],
)
def test_what_cannot_be_read_in_place_is_copied(
    put: object, cut: Callable[[np.ndarray], np.ndarray]
) -> None:
    del put
    larger = copying((2 * SHAPE[0], *SHAPE[1:3], 2 * SHAPE[3]), ORDERS["contiguous"])
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"]), poison=True) as model, nimblert.load(larger) as memory:
        check(model, lambda seed: part_of(memory, seed, cut), in_place=False)


def test_a_whole_array_read_backwards_is_copied(put: object) -> None:
    del put
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"]), poison=True) as model:
        check(model, lambda seed: part_of(model, seed, lambda whole: whole[::-1, ::-1, ::-1, ::-1]), in_place=False)


@pytest.mark.parametrize("shape", [SHAPE, LARGE])
def test_ordinary_memory_of_others_is_copied(put: object, shape: tuple[int, ...]) -> None:
    del put

    def foreign(seed: int) -> np.ndarray:
        return np.frombuffer(bytearray(drawn(seed, shape).tobytes()), np.float32).reshape(shape)

    with nimblert.load(copying(shape, range(len(shape))), poison=True) as model:
        check(model, foreign, in_place=False)


@on_host
def test_the_driver_is_asked_once_about_ordinary_memory_and_never_about_a_plan_s(
    put: object, host: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    del put
    asked = []
    ask = host.cuPointerGetAttribute
    monkeypatch.setattr(host, "cuPointerGetAttribute", lambda *given: asked.append(given[1]) or ask(*given))
    memory = (ctypes.c_float * int(np.prod(SHAPE)))()
    ordinary = np.frombuffer(memory, np.float32).reshape(SHAPE)
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"]), poison=True) as model:
        check(model, lambda seed: filled(model, seed), in_place=True)
        received = [drawn(seed, SHAPE).tobytes() for seed in range(12)]
        check(model, lambda seed: np.frombuffer(received[seed], np.float32).reshape(SHAPE), in_place=False)
        assert not asked
        for seed in range(5):
            ordinary[...] = drawn(seed, SHAPE)
            assert np.array_equal(model(ordinary), drawn(seed, SHAPE))
        assert asked == [ctypes.addressof(memory)]
        for _ in range(200):  # others
            model(np.frombuffer((ctypes.c_float * ordinary.size)(), np.float32).reshape(SHAPE))
        assert len(model.backend._inlet._page_locked._ordinary) <= 64  # type: ignore[attr-defined]


def test_an_input_may_be_where_another_is_copied_to(put: object) -> None:
    del put
    shapes = [(300, 250), (300, 250)]
    with nimblert.load(copying_each(shapes), poison=True) as model:
        _, x = model.backend.inputs
        for seed in range(12):
            x[...] = drawn(seed, shapes[0])
            found = model(x, drawn(seed + 1, shapes[1]))
            assert np.array_equal(found[0], drawn(seed, shapes[0]))
            assert np.array_equal(found[1], drawn(seed + 1, shapes[1]))


@on_host
def test_memory_that_cuda_knows_only_the_start_of_is_copied(put: object, host: HostDriver) -> None:
    del put
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"]), poison=True) as model:
        nbytes = 4 * int(np.prod(SHAPE))
        memory = (ctypes.c_uint8 * nbytes)()
        host.allocated[ctypes.addressof(memory)] = np.frombuffer(memory, np.uint8)[: nbytes // 2]

        def half(seed: int) -> np.ndarray:
            x = np.frombuffer(memory, np.float32).reshape(SHAPE)
            x[...] = drawn(seed, SHAPE)
            return x

        check(model, half, in_place=False)
        del host.allocated[ctypes.addressof(memory)]


@on_host
def test_memory_that_was_freed_is_ordinary_again(put: object, host: HostDriver) -> None:
    del put
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"]), poison=True) as model:
        memory = np.frombuffer(bytearray(4 * int(np.prod(SHAPE)) + 64), np.uint8)
        start = -memory.ctypes.data % 64
        x = memory[start : start + 4 * int(np.prod(SHAPE))].view(np.float32).reshape(SHAPE)

        def again(seed: int) -> np.ndarray:
            x[...] = drawn(seed, SHAPE)
            return x

        host.allocated[x.ctypes.data] = x.reshape(-1).view(np.uint8)
        check(model, again, in_place=True)
        del host.allocated[x.ctypes.data]
        check(model, again, in_place=False)


@on_host
def test_a_late_call_reads_the_same_memory_again(put: object, host: HostDriver) -> None:
    del put
    host.patience_s = 0.0
    shapes = [SHAPE, (300, 250)]
    with nimblert.load(copying_each(shapes), poison=True) as model:
        for seed in range(12):
            xs = [filled(model, seed, "x0"), drawn(seed + 1, shapes[1])]
            for made in (*model.backend._calls._arriving.values(), *model.backend._calls._whole.values()):  # type: ignore[attr-defined]
                made.staged.rest = 0
            mark(model)
            assert all(np.array_equal(y, x) for x, y in zip(xs, model(*xs), strict=True))
            if seed >= 4:
                assert untouched(model) == [True, False]
        assert host.late


def test_a_call_that_nobody_waits_for_copies_its_input(put: object) -> None:
    del put
    with nimblert.load(copying(LARGE, (0, 1)), poison=True) as model:
        x = filled(model, 0)
        for seed in range(6):
            x[...] = drawn(seed, LARGE)
            mark(model)
            y = model.run({"x": x}, stream=0)["y"]
            x[...] = -1
            model.synchronize()
            assert np.array_equal(torch.from_dlpack(y).cpu().numpy(), drawn(seed, LARGE))
            assert untouched(model) == [False]


@on_gpu
@pytest.mark.parametrize("shape", [SHAPE, LARGE])
def test_pinned_tensors_are_not_copied(put: object, shape: tuple[int, ...]) -> None:
    del put
    with nimblert.load(copying(shape, range(len(shape))), poison=True) as model:
        check(model, lambda seed: torch.from_numpy(drawn(seed, shape)).pin_memory().numpy(), in_place=True)
        check(model, lambda seed: torch.from_numpy(drawn(seed, shape)).clone().numpy(), in_place=False)


@pytest.mark.parametrize("order", ORDERS, indirect=True)
def test_an_empty_input_is_like_the_plan_s(put: object, model: Executable, order: Sequence[int]) -> None:
    del put, order
    (tensor,) = model.inputs
    x = model.empty_input("x")
    assert (x.shape, x.dtype.name) == (tensor.shape, tensor.dtype)
    assert [stride // x.itemsize for stride in x.strides] == list(tensor.strides)
    assert x.flags.writeable
    assert not np.shares_memory(x, model.empty_input("x"))
    with model.context() as context:
        assert context.empty_input("x", entry="main").strides == x.strides


@on_host
def test_an_empty_input_outlives_its_plan(put: object, host: HostDriver) -> None:
    del put
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"])) as model:
        x = filled(model, 0)
    assert np.array_equal(x, drawn(0, SHAPE))
    del x
    gc.collect()
    assert not host.allocated


def test_other_threads_make_inputs_during_a_call(put: object, monkeypatch: pytest.MonkeyPatch) -> None:
    del put
    with (
        nimblert.load(copying(SHAPE, ORDERS["contiguous"])) as model,
        model.context() as context,
        ThreadPoolExecutor(1) as thread,
    ):
        x = filled(model, 0)
        made = []
        fill = StagedArrays.fill

        def filling(self: StagedArrays, arrays: Sequence[np.ndarray]) -> None:
            made.extend(thread.submit(each.empty_input, "x").result(20) for each in (model, context))
            fill(self, arrays)

        for _ in range(5):
            model(x)
        with monkeypatch.context() as patch:
            patch.setattr(StagedArrays, "fill", filling)
            assert np.array_equal(model(x), x)
        assert [array.shape for array in made] == [SHAPE, SHAPE]


def test_an_empty_input_that_cannot_be_had(put: object) -> None:
    del put
    model = nimblert.load(copying(SHAPE, ORDERS["contiguous"]))
    with pytest.raises(InputError, match=r"input 'z': not found, the entry has \['x'\]"):
        model.empty_input("z")
    with pytest.raises(InputError, match="entry 'other': not found"):
        model.empty_input("x", entry="other")
    context = model.context()
    context.close()
    with pytest.raises(InputError, match="this context is closed"):
        context.empty_input("x")
    resident = model._resident
    model.close()
    with pytest.raises(InputError, match="this executable is closed"):
        model.empty_input("x")
    with pytest.raises(InputError, match="this plan is closed"):  # as if it were closed just now
        resident.empty_input(model.inputs[0])
