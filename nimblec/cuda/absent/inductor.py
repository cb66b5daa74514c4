"""Inductor for a GPU that is not there: it asks for the GPU's properties, and never launches what it compiles.

It is a part of torch that was not made for that, so some functions of torch are replaced for the rest of the process.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from nimblec.kernels.compiling import pretend_target
from nimblec.kernels.gpu import GPU
from nimblec.kernels.launch import is_unaligned
from nimblert.plan import Dim3

Launched = Callable[[str, Any, dict[str, Any], Dim3, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
"""Takes a launch: name, Triton's compiled kernel, arguments by name, grid, and the tensors read and written."""


def pretend(gpu: GPU) -> None:
    """Have torch describe ``gpu`` as the only device, before Inductor is imported, and launch nothing."""
    pretend_target(gpu.architecture)
    for owner, replacements in _replacements(gpu):
        for name, value in replacements.items():
            setattr(owner, name, value)
    from torch._inductor import config

    config.use_static_cuda_launcher = False
    # A product of two computed matrices would be cuBLAS's otherwise.
    config.triton.native_matmul = True


def _replacements(gpu: GPU) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield modules of torch, each with its functions to replace; those of Inductor come last."""
    from torch._C._dynamo import guards
    from torch.utils import _triton

    properties = SimpleNamespace(
        name=f"sm_{gpu.architecture}",
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=gpu.multiprocessors,
        regs_per_multiprocessor=1 << 16,
        max_threads_per_multi_processor=2048 if gpu.capability in {(8, 0), (9, 0), (10, 0)} else 1536,
        max_threads_per_block=1024,
        warp_size=32,
        L2_cache_size=gpu.l2,
        shared_memory_per_block_optin=gpu.shared_per_block,
        gcnArchName="",
    )
    yield (
        torch.cuda,
        {
            "get_device_properties": _always(properties),
            "get_device_capability": _always(gpu.capability),
            "is_bf16_supported": _always(True),
            "current_device": _always(0),
            "device_count": _always(1),
            "set_device": _always(None),
            "_DeviceGuard": nullcontext,
        },
    )
    yield torch._C, {"_cuda_getCurrentRawStream": _always(0)}
    yield guards, {"_empty_strided_cuda": _empty_strided, "_reinterpret_tensor": _reinterpret}
    yield _triton, {"has_triton": _always(True)}
    from torch._inductor import utils
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime import triton_helpers

    yield utils, {"copy_misaligned_inputs": _copy_misaligned}
    yield triton_helpers, {"set_driver_to_gpu": _always(None)}
    yield AsyncCompile, {"triton": _load}


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _load(_self: Any, name: str, source: str, device_str: str = "cuda") -> Any:  # noqa: ARG001 - the name is torch's
    """Return a generated kernel that is not compiled yet."""
    from torch._inductor import async_compile

    load: Any = async_compile._load_triton_kernel_from_source  # type: ignore[attr-defined]
    return load(name, source)


def _empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


def _reinterpret(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, shape, strides, tensor.storage_offset() + offset)


def _copy_misaligned(
    inputs: list[Any], places: Sequence[int], written: Collection[int] | None = None
) -> tuple[list[Any], list[Any]]:
    """Copy the inputs at these places that do not start on 16 bytes, as code was generated for those that do.

    Returns the ``written`` ones, and their copies.
    """
    from torch._inductor.utils import clone_preserve_strides

    found = [place for place in places if is_unaligned(inputs[place])]
    given = {place: inputs[place] for place in found}
    for place in found:
        inputs[place] = clone_preserve_strides(given[place])
    pairs = [(given[place], inputs[place]) for place in found if place in (written or ())]
    return [old for old, _ in pairs], [new for _, new in pairs]


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


def _grid(meta: Any, tiling: Any, given: dict[str, Any]) -> Dim3:
    """Return the grid that Inductor's launcher computes from a kernel's arguments."""
    from torch._inductor.runtime.triton_heuristics import GridExpr

    grid = GridExpr.from_meta(meta, tiling)
    names = {**given, "max": max, "min": min}
    for line in grid.prefix:
        exec(line, names)  # noqa: S102 - Inductor's own text
    x, y, z = (int(eval(str(size), names)) for size in (grid.x_grid, grid.y_grid, grid.z_grid))  # noqa: S307
    return x, y, z
