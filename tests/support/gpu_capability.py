"""Requirements of the tests marked gpu."""

import ctypes
from importlib.util import find_spec


def missing_gpu_capability() -> str | None:
    """Explain why this machine cannot run GPU tests; return None if it can.

    Only failures that are known to mean "no GPU" count: any other is a failure of the tests.
    """
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "needs cuda-bindings: not installed"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "needs an NVIDIA driver: libcuda cannot be loaded"
    from cuda.bindings import driver

    (status,) = driver.cuInit(0)
    if status == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        return "needs an NVIDIA GPU: the driver finds none"
    assert status == driver.CUresult.CUDA_SUCCESS, f"the driver cannot be used: {status.name}"
    return None
