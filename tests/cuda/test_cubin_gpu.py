"""The driver takes cut cubins, and their kernels are and do what they were and did.

Besides our own kernels, built by nvcc for the GPU at hand, the cubins (*.cubin) of the directory that the environment
variable NIMBLEC_CUBINS names are cut to single kernels: for captures of the frameworks' libraries.
"""

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nimblec.cuda.capture.cubin_cut import cut
from nimblec.cuda.capture.cubin_reading import entry_symbols
from nimblec.cuda.capture.elf import UnfamiliarCubinError

pytestmark = pytest.mark.gpu

Floats = npt.NDArray[np.float32]
SOURCE = Path(__file__).parents[1] / "data" / "kernels.cu"
CAPTURED = sorted(Path(os.environ["NIMBLEC_CUBINS"]).glob("*.cubin")) if "NIMBLEC_CUBINS" in os.environ else []
SINGLES = 4  # kernels to cut out of each captured cubin, spread over its names
ATTRIBUTES = (
    "NUM_REGS",
    "SHARED_SIZE_BYTES",
    "LOCAL_SIZE_BYTES",
    "CONST_SIZE_BYTES",
    "MAX_THREADS_PER_BLOCK",
    "MAX_DYNAMIC_SHARED_SIZE_BYTES",
    "BINARY_VERSION",
    "PTX_VERSION",
    "REQUIRED_CLUSTER_WIDTH",
    "REQUIRED_CLUSTER_HEIGHT",
    "REQUIRED_CLUSTER_DEPTH",
)

X = np.linspace(-1, 1, 128, dtype=np.float32)
TABLE = np.array([0, 1, 2, 3], dtype=np.float32)


def local(x: Floats, shift: int) -> Floats:
    copy = np.roll(x[:8], shift)
    return np.concatenate([copy[[i * shift & 7 for i in range(8)]], x[8:]])


# kernel: (arguments after x, dynamic shared memory in bytes, what becomes of x)
LAUNCHES: dict[str, tuple[tuple[int, ...], int, Callable[[Floats], Floats]]] = {
    "scale": ((), 0, lambda x: x * 2 + 3),
    "nested": ((), 0, lambda x: x * 2 + 3 + 2),
    "indirect": ((1,), 0, lambda x: x * 2 + 3 + 2),
    "reverse": ((), 0, lambda x: x[::-1]),
    "reverse_dynamic": ((128,), 512, lambda x: x[::-1]),
    "visit": ((), 0, lambda x: np.tile(TABLE, len(x) // 4)),
    "local": ((3,), 0, lambda x: local(x, 3)),
    "_Z8increaseIfEvPT_": ((), 0, lambda x: x + 1),
}


def call(api: str, *args: object) -> Any:
    from nimblert.cuda.driver import call as checked

    return checked(api, *args)


@pytest.fixture(scope="module")
def architecture() -> Iterator[str]:
    """Return the GPU's architecture, as in sm_90a, its primary context current meanwhile."""
    from cuda.bindings.driver import CUdevice_attribute as Attribute

    call("cuInit", 0)
    device = call("cuDeviceGet", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", device))
    major = call("cuDeviceGetAttribute", Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    minor = call("cuDeviceGetAttribute", Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    yield f"sm_{major}{minor}" + ("a" if major == 9 else "")
    call("cuDevicePrimaryCtxRelease", device)


@pytest.fixture(scope="module", params=["whole", "linked"])
def cubin(request: pytest.FixtureRequest, architecture: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return our kernels for this GPU, functions inside the kernels (whole) or called by them (linked)."""
    if int(architecture.strip("sm_a")) > 90:
        pytest.skip(f"needs a GPU up to sm_90: for {architecture}, cubins have sections that are not cut")
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc, for cubins of this GPU: it is not on PATH")
    output = tmp_path_factory.mktemp("cubin") / f"{request.param}.cubin"
    linked = ["-rdc=true", "-dlink"] if request.param == "linked" else []
    subprocess.run([nvcc, *linked, "-cubin", f"-arch={architecture}", "-o", output, SOURCE], check=True)
    return output.read_bytes()


@contextmanager
def loaded(cubin: bytes) -> Iterator[Any]:
    module = call("cuModuleLoadData", cubin)
    try:
        yield module
    finally:
        call("cuModuleUnload", module)


def attributes(cubin: bytes, kernels: list[str]) -> dict[str, dict[str, int]]:
    """Return ATTRIBUTES of each kernel."""
    from cuda.bindings.driver import CUfunction_attribute as Attribute

    with loaded(cubin) as module:
        functions = {kernel: call("cuModuleGetFunction", module, kernel.encode()) for kernel in kernels}
        return {
            kernel: {
                name: call("cuFuncGetAttribute", getattr(Attribute, f"CU_FUNC_ATTRIBUTE_{name}"), function)
                for name in ATTRIBUTES
            }
            for kernel, function in functions.items()
        }


def launched(cubin: bytes, kernel: str) -> Floats:
    """Return X after one launch of ``kernel`` on it: one block of 128 threads."""
    arguments, dynamic_smem_bytes, _ = LAUNCHES[kernel]
    result = np.empty_like(X)
    with loaded(cubin) as module:
        function = call("cuModuleGetFunction", module, kernel.encode())
        x = call("cuMemAlloc", X.nbytes)
        try:
            call("cuMemcpyHtoD", x, X.ctypes.data, X.nbytes)
            parameters = ((x, *arguments), (None, *(c_int for _ in arguments)))
            call("cuLaunchKernel", function, 1, 1, 1, len(X), 1, 1, dynamic_smem_bytes, 0, parameters, 0)
            call("cuMemcpyDtoH", result.ctypes.data, x, X.nbytes)
        finally:
            call("cuMemFree", x)
    return result


@pytest.mark.parametrize("kernel", LAUNCHES)
def test_a_kernel_cut_out_computes_what_it_did(cubin: bytes, kernel: str) -> None:
    before = launched(cubin, kernel)
    np.testing.assert_allclose(before, LAUNCHES[kernel][2](X), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(launched(cut(cubin, {kernel}), kernel), before)


@pytest.mark.parametrize("keep", [["scale", "reverse"], ["nested", "visit", "local"], sorted(LAUNCHES)], ids=len)
def test_several_kernels_cut_out_compute_what_they_did(cubin: bytes, keep: list[str]) -> None:
    part = cut(cubin, keep)
    for kernel in keep:
        np.testing.assert_array_equal(launched(part, kernel), launched(cubin, kernel))


def test_every_pair_of_kernels_loads_with_the_attributes_it_had(cubin: bytes) -> None:
    kernels = sorted(entry_symbols(cubin))
    before = attributes(cubin, kernels)
    for pair in itertools.combinations(kernels, 2):
        assert attributes(cut(cubin, pair), list(pair)) == {kernel: before[kernel] for kernel in pair}, pair
    assert attributes(cut(cubin, kernels), kernels) == before


def test_a_kernel_that_was_cut_away_is_gone(cubin: bytes) -> None:
    from nimblert.errors import CudaError

    with loaded(cut(cubin, {"scale"})) as module, pytest.raises(CudaError, match="cuModuleGetFunction"):
        call("cuModuleGetFunction", module, b"reverse")


def test_the_kernel_that_prints_loads_and_runs(cubin: bytes) -> None:
    with loaded(cut(cubin, {"say"})) as module:
        function = call("cuModuleGetFunction", module, b"say")
        call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, ((7,), (c_int,)), 0)
        call("cuCtxSynchronize")


@pytest.mark.skipif(not CAPTURED, reason="needs captured cubins: NIMBLEC_CUBINS names no directory with any")
@pytest.mark.parametrize("path", CAPTURED, ids=lambda path: path.name)
@pytest.mark.usefixtures("architecture")
def test_cubin_cut_kernels_load(path: Path, record_property: Callable[[str, object], None]) -> None:
    whole = path.read_bytes()
    kernels = sorted(entry_symbols(whole))
    if not kernels:
        pytest.skip("needs a cubin with kernels: this one has none")
    chosen = kernels[:: -(-len(kernels) // SINGLES)]
    before = attributes(whole, chosen)
    for kernel in chosen:
        try:
            part = cut(whole, {kernel})
        except UnfamiliarCubinError as exc:
            pytest.skip(f"needs a cubin that can be cut: {exc}")
        assert attributes(part, [kernel])[kernel] == before[kernel], kernel
        record_property(kernel, f"{len(whole)} -> {len(part)} bytes")
