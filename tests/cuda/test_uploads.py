"""Uploads of many arrays through page-locked memory, on a driver of host memory whose copies take their time."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
from host_driver import LateDriver

from nimblert.cuda import driver
from nimblert.cuda.copiers import PART_NBYTES
from nimblert.cuda.memory import allocate, host_bytes
from nimblert.cuda.uploads import Upload, Uploader
from nimblert.errors import CudaError

_STREAM = 0


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDriver:
    made = LateDriver()
    monkeypatch.setattr(driver, "bindings", lambda: made)
    return made


@pytest.fixture
def context(late: LateDriver) -> Iterator[driver.Context]:
    made = driver.Context()
    yield made
    made.close()
    assert not late.allocated


def drawn(*sizes: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, size, np.uint8) for size in sizes]


def placed(context: driver.Context, arrays: list[np.ndarray]) -> list[int]:
    return [allocate(context, array.nbytes) for array in arrays]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((1,), id="one byte"),
        pytest.param((PART_NBYTES,) * 40, id="parts"),
        pytest.param((50 * PART_NBYTES + 7,), id="more than both halves"),
        pytest.param((3, 9 * PART_NBYTES - 5, 4096, 2 * PART_NBYTES + 1, 1 << 18) * 5, id="all kinds"),
    ],
)
def test_all_bytes_arrive(context: driver.Context, late: LateDriver, sizes: tuple[int, ...]) -> None:
    arrays = drawn(*sizes)
    targets = placed(context, arrays)
    uploader = Uploader(context)
    for again in (0, 1):
        changed = [array ^ again for array in arrays]
        uploader.enqueue(map(Upload, targets, changed), _STREAM)
        driver.call("cuCtxSynchronize")
        for target, array in zip(targets, changed, strict=True):
            np.testing.assert_array_equal(host_bytes(target, array.nbytes), array)
    assert late.calls["cuMemHostAlloc"] == 1


def test_what_follows_an_upload_comes_between_it_and_the_next(context: driver.Context, late: LateDriver) -> None:
    arrays = drawn(5 * PART_NBYTES, 10, 12 * PART_NBYTES)
    targets = placed(context, arrays)
    enqueued: list[int] = []

    def follow() -> None:
        enqueued.append(late.calls["cuMemcpyHtoDAsync"])

    uploads = [Upload(target, array, follow) for target, array in zip(targets, arrays, strict=True)]
    Uploader(context).enqueue(uploads, _STREAM)
    assert enqueued == [5, 6, 18]


def test_page_locked_arrays_are_read_in_place(context: driver.Context, late: LateDriver) -> None:
    (array,) = drawn(20 * PART_NBYTES)
    locked = context.acquire(driver.call("cuMemHostAlloc", array.nbytes, 0), "cuMemFreeHost")
    given = host_bytes(locked, array.nbytes)
    given[:] = array
    (target,) = placed(context, [array])
    Uploader(context).enqueue([Upload(target, given)], _STREAM)
    assert late.calls["cuMemcpyHtoDAsync"] == 1
    driver.call("cuCtxSynchronize")
    np.testing.assert_array_equal(host_bytes(target, array.nbytes), array)


def test_memory_of_numpy_that_the_caller_has_registered_is_read_in_place(
    context: driver.Context, late: LateDriver
) -> None:
    (array,) = drawn(20 * PART_NBYTES)
    late.allocated[array.ctypes.data] = array
    (target,) = placed(context, [array])
    Uploader(context).enqueue([Upload(target, array)], _STREAM)
    assert late.calls["cuMemcpyHtoDAsync"] == 1
    driver.call("cuCtxSynchronize")
    del late.allocated[array.ctypes.data]


def test_no_thread_copies_on_when_an_upload_has_failed(
    context: driver.Context, late: LateDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller may change its arrays then, and the next upload takes the same page-locked memory."""
    arrays = drawn(*(PART_NBYTES,) * 40)
    targets = placed(context, arrays)
    uploader = Uploader(context)
    begun: list[int] = []
    ended: list[int] = []
    copy = np.copyto

    def slow(*given: np.ndarray) -> None:
        begun.append(0)
        time.sleep(0 if len(begun) == 1 else 0.05)
        copy(*given)
        ended.append(0)

    monkeypatch.setattr(np, "copyto", slow)
    late.failing["cuMemcpyHtoDAsync"] = late.CUresult.CUDA_ERROR_UNKNOWN
    with pytest.raises(CudaError, match="CUDA_ERROR_UNKNOWN"):
        uploader.enqueue(map(Upload, targets, arrays), _STREAM)
    assert 0 < len(begun) == len(ended) < 16
