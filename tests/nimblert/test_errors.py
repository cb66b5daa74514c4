"""The errors of nimblert, beside their sentences, which the tests of what raises them check."""

import pickle

import pytest

from nimblert import CudaError, DeviceMismatchError, InputError, NimbleError, PlanFormatError, PlanInvalidError


@pytest.mark.parametrize(
    "error",
    [
        InputError("input 'x': ä"), CudaError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY"), PlanFormatError("cut"),
        PlanInvalidError(["a", "b", "c", "d" * 1000]), DeviceMismatchError("no GPU"),
    ],
)  # fmt: skip
def test_error_survives_pickling(error: NimbleError) -> None:
    """An error that could not be read again would end a pool of processes, of concurrent.futures or of Ray."""
    found = pickle.loads(pickle.dumps(error))  # noqa: S301 - of this test
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
