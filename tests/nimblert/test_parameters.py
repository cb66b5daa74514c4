"""The parameters of a cooperative kernel, one by one: its node takes no buffer of all of them."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from nimblert.cuda import driver
from nimblert.errors import PlanInvalidError

LAYOUT = ((0, 8), (8, 4), (16, 8))


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the driver know a kernel with three parameters."""

    def layout(_function: Any, index: int) -> tuple[Any, ...]:
        if index < len(LAYOUT):
            return (0, *LAYOUT[index])
        return (Refused(1), 0, 0)

    monkeypatch.setattr(driver, "bindings", lambda: SimpleNamespace(cuFuncGetParamInfo=layout))


class Refused(int):
    """A status of the driver."""

    name = "CUDA_ERROR_INVALID_VALUE"


def test_each_parameter_has_a_pointer() -> None:
    params = bytes(range(24))
    given = driver.SeparateParameters(None, params)
    pointers = (ctypes.c_void_p * 3).from_address(given.kernel_params)
    found = [ctypes.string_at(at or 0, nbytes) for at, (_, nbytes) in zip(pointers, LAYOUT, strict=True)]
    assert found == [params[offset : offset + nbytes] for offset, nbytes in LAYOUT]


def test_parameters_beyond_the_buffer_are_refused() -> None:
    with pytest.raises(PlanInvalidError, match="20 bytes of parameters, its kernel has more"):
        driver.SeparateParameters(None, bytes(20))
