"""Uploads of large arrays: in place from page-locked memory, else through slots that threads fill."""

import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from copying import ORDERS, copying, copying_each, drawn, laid_out, on_gpu, on_host
from host_driver import HostDriver, LateDriver

import nimblert
from nimblert import Executable, InputError
from nimblert.cuda import driver, uploader
from nimblert.cuda.driver import Context
from nimblert.cuda.memory import allocate, host_bytes
from nimblert.cuda.uploader import Upload, Uploader

pytest_plugins = ("gpu_memory",)
torch = pytest.importorskip("torch")

SHAPE = (4, 3, 256, 192)
"""Of more than 1 MiB in float32."""
SLOT_NBYTES = 1 << 12


@pytest.fixture
def copied(put: object, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes of each array that goes through the slots of the uploader."""
    del put
    found: list[int] = []
    enqueue = Uploader.enqueue

    def noting(self: Uploader, uploads: Iterable[Upload], stream: Any) -> None:
        uploads = list(uploads)
        found.extend(upload.source.nbytes for upload in uploads)
        enqueue(self, uploads, stream)

    monkeypatch.setattr(Uploader, "enqueue", noting)
    return found


@pytest.fixture
def model(copied: list[int]) -> Iterator[Executable]:
    """Yield a program that copies its input."""
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"]), poison=True) as executable:
        copied.clear()
        yield executable


def filled(model: Executable, seed: int, name: str = "x") -> np.ndarray:
    """Return new page-locked memory with an input."""
    array = model.empty_input(name)
    array[...] = drawn(seed, array.shape)
    return array


def check(model: Executable, copied: list[int], inputs: Callable[[int], np.ndarray], *, through_slots: bool) -> None:
    """Check that each call has its own input, and that all go through the uploader's slots, or none does."""
    for seed in range(6):
        x = inputs(seed)
        copied.clear()
        assert np.array_equal(model(x), drawn(seed, x.shape))
        assert copied == [x.nbytes] * through_slots


@pytest.mark.parametrize("given", ORDERS)
@pytest.mark.parametrize("own", ORDERS)
def test_page_locked_array_of_any_axes_is_read_in_place(copied: list[int], own: str, given: str) -> None:
    with nimblert.load(copying(SHAPE, ORDERS[own]), poison=True) as model:
        check(model, copied, lambda seed: laid_out(drawn(seed, SHAPE), ORDERS[given]), through_slots=True)
        with nimblert.load(copying(SHAPE, ORDERS[given])) as memory:
            check(model, copied, lambda seed: filled(memory, seed), through_slots=False)


@pytest.mark.parametrize("count", [(1 << 18) + 1, 1 << 19, (1 << 19) + 3])
def test_page_locked_array_above_a_mebibyte_is_read_in_place(copied: list[int], count: int) -> None:
    """As the docstring of `empty_input` says: by every call, the repeated ones too."""
    with nimblert.load(copying((count,), (0,)), poison=True) as model:
        x = filled(model, 0)
        copied.clear()
        for seed in range(6):
            x[...] = drawn(seed, x.shape)
            assert np.array_equal(model(x), x)
        assert copied == []


def test_output_of_a_call_is_read_in_place_by_the_next(model: Executable, copied: list[int]) -> None:
    x = filled(model, 0)
    for _ in range(6):
        x = model(x)
    assert copied == []
    assert np.array_equal(x, drawn(0, SHAPE))


def test_each_of_several_inputs_is_read_in_place_or_copied(copied: list[int]) -> None:
    shapes = [(5,), (300, 1000), (1, 7), (123, 3000)]
    with nimblert.load(copying_each(shapes), poison=True) as model:
        for seed in range(16):
            xs = [drawn(seed + index, shape) for index, shape in enumerate(shapes)]
            given = [filled(model, seed + i, f"x{i}") if seed & 1 << i else x for i, x in enumerate(xs)]
            copied.clear()
            assert all(np.array_equal(y, x) for x, y in zip(xs, model(*given), strict=True))
            assert copied == [xs[index].nbytes for index in (1, 3) if not seed & 1 << index]


def part_of(model: Executable, seed: int, cut: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return a view of a plan's memory with an input of `SHAPE`."""
    view = cut(model.empty_input("x"))
    view[...] = drawn(seed, SHAPE)
    return view


@pytest.mark.parametrize(
    "cut",
    [
        lambda whole: whole[: SHAPE[0]],
        lambda whole: whole[3 : 3 + SHAPE[0]],
        lambda whole: whole.reshape(-1)[1 : 1 + np.prod(SHAPE)].reshape(SHAPE),
    ],
    ids=["first", "other", "unaligned"],
)
def test_dense_page_locked_part_is_in_place(
    model: Executable, copied: list[int], cut: Callable[[np.ndarray], np.ndarray]
) -> None:
    with nimblert.load(copying((2 * SHAPE[0], *SHAPE[1:]), ORDERS["contiguous"])) as memory:
        check(model, copied, lambda seed: part_of(memory, seed, cut), through_slots=False)


@pytest.mark.parametrize(
    "cut",
    [
        lambda whole: whole[:, :, :, ::2],
        lambda whole: whole[::-1, :, :, : SHAPE[3]],
        lambda whole: whole[::-1, ::-1, ::-1, SHAPE[3] - 1 :: -1],
    ],
    ids=["gaps", "backwards rows", "backwards"],
)
def test_page_locked_gaps_are_copied(
    model: Executable, copied: list[int], cut: Callable[[np.ndarray], np.ndarray]
) -> None:
    """One thread copies to the staging memory of the input."""
    with nimblert.load(copying((*SHAPE[:3], 2 * SHAPE[3]), ORDERS["contiguous"])) as memory:
        check(model, copied, lambda seed: part_of(memory, seed, cut), through_slots=False)


def test_large_input_with_the_gaps_that_the_program_expects(put: object) -> None:
    del put
    rows, width, room = 600, 1000, 1040
    plan = copying((rows, room), (0, 1))
    (program,) = plan.programs
    (x,), (y,) = program.inputs, program.outputs
    x, y = (replace(tensor, shape=(rows, width)) for tensor in (x, y))
    with nimblert.load(replace(plan, programs=(replace(program, inputs=(x,), outputs=(y,)),)), poison=True) as model:
        for seed in range(6):
            array = drawn(seed, (rows, room))[:, :width]
            assert np.array_equal(model(array), array)
            assert np.array_equal(model(array.copy()), array)


def test_ordinary_memory_is_copied(model: Executable, copied: list[int]) -> None:
    def foreign(seed: int) -> np.ndarray:
        return np.frombuffer(bytearray(drawn(seed, SHAPE).tobytes()), np.float32).reshape(SHAPE)

    check(model, copied, foreign, through_slots=True)
    check(model, copied, lambda seed: drawn(seed, SHAPE), through_slots=True)


@on_host
def test_memory_known_in_part_is_copied(model: Executable, copied: list[int], host: HostDriver) -> None:
    nbytes = 4 * int(np.prod(SHAPE))
    memory = (ctypes.c_uint8 * nbytes)()
    address = ctypes.addressof(memory)

    def again(seed: int) -> np.ndarray:
        x = np.frombuffer(memory, np.float32).reshape(SHAPE)
        x[...] = drawn(seed, SHAPE)
        return x

    for known in (nbytes // 2, nbytes):
        host.allocated[address] = np.frombuffer(memory, np.uint8)[:known]
        check(model, copied, again, through_slots=known < nbytes)
        del host.allocated[address]
        check(model, copied, again, through_slots=True)


@on_gpu
def test_pinned_tensor_is_read_in_place(model: Executable, copied: list[int]) -> None:
    check(model, copied, lambda seed: torch.from_numpy(drawn(seed, SHAPE)).pin_memory().numpy(), through_slots=False)
    check(model, copied, lambda seed: torch.from_numpy(drawn(seed, SHAPE)).clone().numpy(), through_slots=True)


@pytest.mark.parametrize("shape", [(4, 3, 32, 24), SHAPE])
def test_enqueued_input_may_be_changed(put: object, copied: list[int], shape: tuple[int, ...]) -> None:
    del put
    with nimblert.load(copying(shape, ORDERS["contiguous"]), poison=True) as model:
        x = filled(model, 0)
        for seed in range(6):
            x[...] = drawn(seed, shape)
            copied.clear()
            y = model.run({"x": x}, stream=0)["y"]
            x[...] = -1
            assert copied == [x.nbytes] * (shape == SHAPE)
            model.synchronize()
            assert np.array_equal(torch.from_dlpack(y).cpu().numpy(), drawn(seed, shape))


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_empty_input_has_the_layout_of_the_plan(put: object, order: Sequence[int]) -> None:
    del put
    with nimblert.load(copying(SHAPE, order)) as model:
        (tensor,) = model.inputs
        x = model.empty_input("x")
        assert (x.shape, x.dtype.name) == (tensor.shape, tensor.dtype)
        assert [stride // x.itemsize for stride in x.strides] == list(tensor.strides)
        assert x.flags.writeable
        assert not np.shares_memory(x, model.empty_input("x"))
        with model.context() as context:
            assert context.empty_input("x", entry="main").strides == x.strides


@on_host
def test_empty_input_outlives_its_plan(put: object, host: HostDriver) -> None:
    del put
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"])) as model:
        x = filled(model, 0)
    assert np.array_equal(x, drawn(0, SHAPE))
    del x
    gc.collect()
    assert not host.allocated


def test_empty_input_is_refused_by_name_and_once_closed(put: object) -> None:
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
    model.close()
    with pytest.raises(InputError, match="this executable is closed"):
        model.empty_input("x")


# The uploader alone, on a driver whose copies take their time.


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDriver:
    made = LateDriver()
    monkeypatch.setattr(driver, "bindings", lambda: made)
    monkeypatch.setattr(uploader, "_SLOT_NBYTES", SLOT_NBYTES)
    return made


@pytest.fixture
def context(late: LateDriver) -> Iterator[Context]:
    made = Context()
    yield made
    made.close()
    assert not late.allocated


def of_sizes(*sizes: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, size, np.uint8) for size in sizes]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((1,), id="one byte"),
        pytest.param((SLOT_NBYTES,) * 40, id="slots"),
        pytest.param((50 * SLOT_NBYTES + 7,), id="more than all slots"),
        pytest.param((3, 9 * SLOT_NBYTES - 5, 128, 2 * SLOT_NBYTES + 1, 1 << 13) * 5, id="all kinds"),
    ],
)
def test_uploader_copies_all_bytes_and_lets_go_of_the_arrays(context: Context, sizes: tuple[int, ...]) -> None:
    arrays = of_sizes(*sizes)
    targets = [allocate(context, array.nbytes) for array in arrays]
    made = Uploader(context)
    for again in (0, 1):
        given = [array ^ again for array in arrays]
        made.enqueue(map(Upload, targets, given), 0)
        for array in given:
            array[...] = 0
        driver.call("cuCtxSynchronize")
        for target, array in zip(targets, arrays, strict=True):
            np.testing.assert_array_equal(host_bytes(target, array.nbytes), array ^ again)
