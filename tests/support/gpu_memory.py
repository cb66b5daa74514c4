"""Fixtures for tests of arrays on a GPU that also run with a driver of host memory (`host_driver`)."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from copying import ORDERS, SHAPE, copying
from host_driver import HostDriver

import nimblert
from nimblert import Executable
from nimblert.arrays import dlpack
from nimblert.cuda import driver

_HOST = 1
"""DLPack's device type of host memory."""


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def put(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[np.ndarray], Any]:
    """Return a function that makes a tensor on the GPU, or on the CPU as a stand-in."""
    if request.param == "gpu":
        return lambda array: torch.from_numpy(array.copy(order="K")).cuda()
    host = HostDriver(devices=2)
    monkeypatch.setattr(driver, "bindings", lambda: host)
    monkeypatch.setattr(dlpack, "CUDA", _HOST)
    return lambda array: torch.from_numpy(array.copy(order="K"))


@pytest.fixture
def host(put: object) -> HostDriver:
    """Return the driver of host memory."""
    del put
    found = driver.bindings()
    assert isinstance(found, HostDriver)
    return found


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """Return the order in memory of the axes of `model`'s input and output."""
    return ORDERS[request.param]


@pytest.fixture
def model(put: object, order: tuple[int, ...]) -> Iterator[Executable]:
    """Yield a program that copies its input."""
    del put
    with nimblert.load(copying(SHAPE, order), poison=True) as executable:
        yield executable
