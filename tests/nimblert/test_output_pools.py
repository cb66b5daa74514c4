"""Memory for outputs: blocks that threads take and give back at the same time, while their pool is closed."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from cuda.bindings.driver import CUresult
from host_driver import HostDriver

from nimblert.cuda import driver
from nimblert.cuda.driver import Context
from nimblert.cuda.pools import DevicePool, Lent, Pools
from nimblert.errors import CudaError

SIZES = 64, 128


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    made = HostDriver(devices=1)
    monkeypatch.setattr(driver, "bindings", lambda: made)
    return made


def take_and_release(pool: DevicePool, seed: int, ready: threading.Barrier) -> None:
    chance = np.random.default_rng(seed)
    held: list[Lent] = []
    ready.wait()
    for _ in range(50):
        held.append(pool.take(int(chance.choice(SIZES)), 0, is_shared=chance.random() < 0.5))
        if len(held) > 3:
            del held[chance.integers(len(held))]
        assert len({lent.address for lent in held}) == len(held)


@pytest.mark.parametrize("seed", range(10))
def test_no_block_is_lost_or_lent_twice(host: HostDriver, seed: int) -> None:
    before = len(host.allocated)
    pools = Pools(0)
    ready = threading.Barrier(4)
    threads = [threading.Thread(target=take_and_release, args=(pools.device, 4 * seed + i, ready)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(host.allocated) > before
    pools.close()
    assert len(host.allocated) == before


def test_where_memory_ends_free_blocks_of_other_sizes_are_given_up(
    host: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that is called with ever other sizes has blocks of all of them."""
    pools = Pools(0)
    before, allocate = len(host.allocated), HostDriver._allocate

    def limited(self: HostDriver, nbytes: int) -> Any:
        return allocate(self, nbytes) if len(host.allocated) < before + 3 else (CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)

    monkeypatch.setattr(HostDriver, "_allocate", limited)
    monkeypatch.setattr(HostDriver, "_cuMemAlloc", limited)
    for pool in (pools.device, pools.host):
        kept = pool.take(64, 0, is_shared=False)
        for nbytes in range(65, 80):
            pool.take(nbytes, 0, is_shared=False)
        held = [kept, pool.take(81, 0, is_shared=False), pool.take(82, 0, is_shared=False)]
        with pytest.raises(CudaError, match="not enough free memory"):
            pool.take(83, 0, is_shared=False)
        held.clear()
        del kept
        pool.close()
        assert len(host.allocated) == before


def test_a_block_outlives_its_pool(host: HostDriver) -> None:
    before = len(host.allocated)
    pools = Pools(0)
    kept = pools.device.take(64, 0, is_shared=True)
    pools.device.take(64, 0, is_shared=False)
    pools.close()
    assert len(host.allocated) == before + 1
    del kept
    assert len(host.allocated) == before


def test_a_block_that_is_freed_leaves_another_gpu_current(host: HostDriver) -> None:
    pools = Pools(1)
    kept = pools.device.take(64, 0, is_shared=True)
    pools.close()
    Context(0).make_current()
    del kept
    assert host.current_device == 0
    assert not host.allocated


def test_a_block_may_end_in_a_forked_process(host: HostDriver) -> None:
    """Where CUDA refuses every call."""
    pools = Pools(0)
    kept = pools.device.take(64, 0, is_shared=True)
    for name in ("cuCtxGetCurrent", "cuCtxSetCurrent", "cuCtxRecordEvent", "cuMemFree", "cuEventDestroy"):
        host.failing[name] = CUresult.CUDA_ERROR_NOT_INITIALIZED
    failed: list[object] = []
    with patch("sys.unraisablehook", failed.append):
        del kept
    assert failed == []


class Closing(list[Any]):
    """Free blocks of a pool that is closed as soon as one is given back."""

    def __init__(self, pool: DevicePool) -> None:
        super().__init__()
        self.pool = pool

    def append(self, block: Any) -> None:
        """Close the pool at once, as another thread may."""
        super().append(block)
        self.pool.close()


def test_the_context_lives_as_long_as_it_is_used(host: HostDriver) -> None:
    """Where the pool is closed while its last block is given back, and where the event of that cannot be recorded."""
    for event in (True, False):
        pools = Pools(0)
        pools.host.close()
        pools.device._free[64] = Closing(pools.device)
        kept = pools.device.take(64, 0, is_shared=not event)
        if not event:
            pools.device.close()
            host.failing["cuCtxRecordEvent"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        del kept
        assert not host.references[0]
        assert not host.allocated


def test_closing_meets_threads_that_give_back(host: HostDriver) -> None:
    for _ in range(100):
        pools = Pools(0)
        pools.host.close()
        held = [[pools.device.take(64, 0, is_shared=False) for _ in range(2)] for _ in range(3)]
        with ThreadPoolExecutor(4) as threads:
            ended = [threads.submit(end) for end in (*(lent.clear for lent in held), pools.device.close)]
        for each in ended:
            each.result()
        assert not host.references[0]
        assert not host.allocated
