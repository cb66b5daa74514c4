"""Memory for outputs: blocks that threads take and give back at the same time, while their pool is closed."""

import threading

import numpy as np
import pytest
from host_driver import HostDriver

from nimblert.cuda import driver
from nimblert.cuda.pools import DevicePool, Lent, Pools

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


def test_a_block_outlives_its_pool(host: HostDriver) -> None:
    before = len(host.allocated)
    pools = Pools(0)
    kept = pools.device.take(64, 0, is_shared=True)
    pools.device.take(64, 0, is_shared=False)
    pools.close()
    assert len(host.allocated) == before + 1
    del kept
    assert len(host.allocated) == before
