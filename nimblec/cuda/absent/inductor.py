"""Inductor for a GPU that is not there: it asks for the GPU's properties, and never launches what it compiles.

It is a part of torch that was not made for that, so some functions of torch are replaced for the rest of the process.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from nimblec.kernels.compiling import pretend_target
from nimblec.kernels.gpu import GPU
from nimblert.plan import Dim3

Launched = Callable[[str, Any, dict[str, Any], Dim3, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
"""Takes a launch: name, Triton's compiled kernel, arguments by name, grid, and the tensors read and written."""


def pretend(gpu: GPU) -> None:
    """Have torch describe ``gpu`` as the only device, before Inductor is imported."""
    from torch._C._dynamo import guards
    from torch.utils import _triton

    major, minor = gpu.capability
    threads = 2048 if gpu.capability in {(8, 0), (9, 0), (10, 0)} else 1536
    properties = SimpleNamespace(
        name=f"sm_{gpu.architecture}",
        major=major,
        minor=minor,
        multi_processor_count=gpu.multiprocessors,
        regs_per_multiprocessor=1 << 16,
        max_threads_per_multi_processor=threads,
        max_threads_per_block=1024,
        warp_size=32,
        L2_cache_size=gpu.l2,
        shared_memory_per_block_optin=gpu.shared_per_block,
        gcnArchName="",
    )
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda device=None: properties  # noqa: ARG005 - the signature is torch's
    cuda.get_device_capability = lambda device=None: gpu.capability  # noqa: ARG005
    cuda.is_bf16_supported = lambda including_emulation=True: True  # noqa: ARG005
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.set_device = lambda device: None  # noqa: ARG005
    cuda._DeviceGuard = nullcontext
    binding: Any = torch._C
    binding._cuda_getCurrentRawStream = lambda device: 0  # noqa: ARG005
    guards._empty_strided_cuda = _empty_strided
    guards._reinterpret_tensor = _reinterpret
    _triton.has_triton = lambda: True
    pretend_target(gpu.architecture)
    from torch._inductor import config, utils
    from torch._inductor.async_compile import AsyncCompile, _load_triton_kernel_from_source
    from torch._inductor.runtime import triton_helpers

    config.use_static_cuda_launcher = False
    utils.copy_misaligned_inputs = _copy_misaligned
    triton_helpers.set_driver_to_gpu = lambda: None

    def load(_self: AsyncCompile, name: str, source: str, device_str: str = "cuda") -> Any:  # noqa: ARG001
        return _load_triton_kernel_from_source(name, source)

    AsyncCompile.triton = load  # type: ignore[method-assign]


def _empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


def _reinterpret(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, shape, strides, tensor.storage_offset() + offset)


def _copy_misaligned(inputs: list[Any], places: Sequence[int], _pairs: Any = None) -> tuple[list[Any], list[Any]]:
    """Copy the inputs at these places that do not start on 16 bytes, as code was generated for those that do."""
    for place in places:
        tensor = inputs[place]
        if tensor.storage_offset() * tensor.element_size() % 16:
            inputs[place] = tensor.clone()
    return [], []


@contextmanager
def seeing_launches(launched: Launched) -> Iterator[None]:
    """Pass what generated code launches inside the block to a function instead of to a GPU."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    from nimblec.cuda.capture.inductor import accesses

    compiled: dict[int, tuple[Any, Any]] = {}

    def seen(kernel: Any, *args: Any, **_how: Any) -> None:
        tiling = kernel.configs[0]
        if id(kernel) not in compiled:
            compiled[id(kernel)] = kernel, kernel._precompile_config(tiling).kernel
        names = [name for name in kernel.fn.arg_names if name not in tiling.kwargs]
        given = dict(zip(names, args, strict=False)) | tiling.kwargs
        reads, writes = accesses(kernel.fn.arg_names, set(kernel.mutated_arg_names), args)
        grid = _grid(kernel.inductor_meta, tiling, given)
        launched(kernel.fn.__name__, compiled[id(kernel)][1], given, grid, reads, writes)

    with patch.object(CachingAutotuner, "run", seen):
        yield


def _grid(meta: dict[str, Any], tiling: Any, given: dict[str, Any]) -> Dim3:
    """Return the grid that Inductor's launcher computes from a kernel's arguments."""
    from torch._inductor.runtime.triton_heuristics import GridExpr

    grid = GridExpr.from_meta(meta, tiling)
    values = dict(given)
    for line in grid.prefix:
        exec(line, {"__builtins__": {"max": max, "min": min}}, values)  # noqa: S102 - Inductor's own text
    x, y, z = (int(eval(str(size), {"max": max, "min": min}, values)) for size in (grid.x_grid, grid.y_grid, grid.z_grid))  # noqa: S307, E501
    return x, y, z
