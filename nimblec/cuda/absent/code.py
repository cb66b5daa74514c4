"""Kernels that Triton compiles for a GPU that is not there, as a plan holds them."""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nimblec.base.errors import UnsupportedModelError
from nimblec.base.ir import KernelWork, Reference
from nimblec.cuda.capture.cubin_reading import parameters
from nimblec.cuda.capture.modules import cut_or_whole
from nimblec.kernels.compiling import Job, compile_job
from nimblec.kernels.gpu import GPU
from nimblert.plan import Dim3, Kernel, Module

_WARP = 32
_FORMATS = {"i1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q"}
_FORMATS |= {"fp32": "f", "fp64": "d"}
"""How scalars of Triton's types are packed."""

Locate = Callable[[torch.Tensor], tuple[int, int]]
"""Returns the buffer of a tensor, and its offset there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """One compiled kernel: ``types`` are those of its parameters by name, without its constants."""

    kernel: int
    types: Mapping[str, str]
    warps: int
    shared_nbytes: int
    is_programmatic: bool
    cooperative: bool


class CodeTable:
    """The kernels of a graph and their cubins, numbered in order of first use."""

    def __init__(self, gpu: GPU) -> None:
        self._gpu = gpu
        self._jobs: dict[str, Code] = {}
        self._numbers: dict[bytes, int] = {}
        self.kernels: list[Kernel] = []
        self.modules: list[Module] = []

    def of_job(self, job: Job) -> Code:
        """Return the kernel of a job, which is compiled once."""
        key = repr(job)
        if key not in self._jobs:
            self._jobs[key] = self.add(compile_job(job, architecture=self._gpu.architecture))
        return self._jobs[key]

    def add(self, compiled: Any) -> Code:
        """Add Triton's compiled kernel. Raises UnsupportedModelError if the GPU cannot run it."""
        metadata = compiled.metadata
        if metadata.shared > self._gpu.shared_per_block:
            raise UnsupportedModelError(
                f"kernel {metadata.name} takes {metadata.shared} bytes of shared memory, a block of this GPU has "
                f"{self._gpu.shared_per_block}"
            )
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise UnsupportedModelError(f"kernel {metadata.name} takes scratch memory from Triton's launcher")
        cubin = cut_or_whole(compiled.asm["cubin"], metadata.name)
        if cubin not in self._numbers:
            self._numbers[cubin] = len(self.kernels)
            self.modules.append(Module(origin="triton", code=memoryview(cubin)))
            self.kernels.append(
                Kernel(
                    module=len(self.kernels),
                    symbol=metadata.name,
                    parameters=parameters(cubin, metadata.name),
                    max_dynamic_smem_nbytes=metadata.shared,
                )
            )
        types = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
        assert len(types) <= len(self.kernels[self._numbers[cubin]].parameters), metadata.name
        return Code(
            kernel=self._numbers[cubin],
            types=types,
            warps=metadata.num_warps,
            shared_nbytes=metadata.shared,
            is_programmatic=bool(getattr(metadata, "launch_pdl", False)),
            cooperative=bool(metadata.launch_cooperative_grid),
        )

    def work(self, code: Code, given: Mapping[str, Any], grid: Dim3, locate: Locate) -> KernelWork:
        """Return the launch of a kernel on arguments by name; Triton's own parameters behind them are null."""
        layout = self.kernels[code.kernel].parameters
        packed = bytearray(max((p.offset + p.nbytes for p in layout), default=0))
        references = []
        for parameter, (name, kind) in zip(layout, code.types.items(), strict=False):
            value = given[name]
            if kind.startswith("*"):
                buffer, offset = locate(value)
                references.append(Reference(param_offset=parameter.offset, buffer=buffer, offset=offset))
            else:
                struct.pack_into(f"<{_FORMATS[kind]}", packed, parameter.offset, value)
        return KernelWork(
            kernel=code.kernel,
            params=bytes(packed),
            references=tuple(references),
            grid=grid,
            block=(code.warps * _WARP, 1, 1),
            dynamic_smem_nbytes=code.shared_nbytes,
            cooperative=code.cooperative,
        )
