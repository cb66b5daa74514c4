"""Pools of memory for outputs, whose blocks threads take and return while the pool is closed."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cuda.bindings.driver import CUresult
from host_driver import HostDriver

from nimblert.cuda import driver
from nimblert.cuda.driver import Context
from nimblert.cuda.memory import BlockPool, PooledBlock
from nimblert.errors import CudaError, InputError

SIZES = 64, 128


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    made = HostDriver(devices=2)
    monkeypatch.setattr(driver, "bindings", lambda: made)
    return made


@pytest.fixture
def pool(host: HostDriver) -> BlockPool:
    del host
    return BlockPool(Context(0), on_device=True)


def shared(block: PooledBlock) -> PooledBlock:
    """Return the block, as if another library used it."""
    block.is_shared = True
    return block


def assert_freed(host: HostDriver) -> None:
    assert not host.allocated
    assert not host.references.total()


def test_pool_gives_each_block_to_one_thread_at_a_time(host: HostDriver, pool: BlockPool) -> None:
    ready = threading.Barrier(4)

    def take_and_release(seed: int) -> None:
        chance = np.random.default_rng(seed)
        held: list[PooledBlock] = []
        ready.wait()
        for _ in range(300):
            held.append(pool.take(int(chance.choice(SIZES)), 0))
            host.allocated[held[-1].address][...] = seed
            if chance.random() < 0.5:
                shared(held[-1])
            assert all((host.allocated[block.address] == seed).all() for block in held)
            if len(held) > 3:
                del held[chance.integers(len(held))]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(take_and_release, range(4)))
    assert len(host.allocated) <= 4 * 4 * len(SIZES)
    pool.close()
    assert_freed(host)


@pytest.mark.parametrize("on_device", [False, True])
def test_pool_frees_other_sizes_when_full(host: HostDriver, on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is called with ever other sizes has blocks of all of them."""
    allocate = HostDriver._allocate

    def limited(self: HostDriver, nbytes: int) -> Any:
        return allocate(self, nbytes) if len(host.allocated) < 3 else (CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)

    for name in ("_cuMemHostAlloc", "_cuMemAlloc"):
        monkeypatch.setattr(HostDriver, name, lambda self, nbytes, *_: limited(self, nbytes))
    pool = BlockPool(Context(0), on_device=on_device)
    held = [pool.take(64, 0)]
    for nbytes in range(65, 80):
        pool.take(nbytes, 0)
    held += [pool.take(nbytes, 0) for nbytes in (81, 82)]
    with pytest.raises(CudaError, match="not enough free memory"):
        pool.take(83, 0)
    held.clear()
    pool.close()
    assert_freed(host)


def test_block_outlives_its_pool(host: HostDriver, pool: BlockPool) -> None:
    kept = shared(pool.take(64, 0))
    pool.take(64, 0)
    pool.close()
    assert len(host.allocated) == 1
    del kept
    assert_freed(host)
    with pytest.raises(InputError, match="this plan is closed: load it again"):
        pool.take(64, 0)


def test_only_a_block_that_others_may_use_is_waited_for(host: HostDriver, pool: BlockPool) -> None:
    first, second = pool.take(64, 0), shared(pool.take(128, 0))
    del first, second
    host.waits.clear()
    pool.take(64, 0x77)
    assert host.waits == []
    pool.take(128, 0x77)
    pool.take(128, 0x88)
    assert host.waits == [(0x77, 0)]


def test_freed_block_leaves_another_gpu_current(host: HostDriver) -> None:
    pool = BlockPool(Context(1), on_device=True)
    kept = shared(pool.take(64, 0))
    pool.close()
    other = Context(0)
    del kept
    assert host.current_device == 0
    other.close()
    assert_freed(host)
