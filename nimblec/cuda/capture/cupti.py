"""Collect the machine code that the driver loads, through CUPTI's callbacks.

CUPTI hands the final cubin of every module to a resource callback; driver callbacks around it tell which CUmodule or
CUlibrary that cubin became. A process has one subscription, made before CUDA is initialised, so captures run in a
worker process. Source: CUPTI documentation, "Callback API"; cupti_callbacks.h and generated_cuda_meta.h of CUDA 13.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256

from nimblec.base.errors import CompileError

_DRIVER_API, _RESOURCE = 1, 3  # CUpti_CallbackDomain
_MODULE_LOADED = 6  # CUPTI_CBID_RESOURCE_MODULE_LOADED
_MODULE_LOADS = (18, 19, 20, 21)  # cuModuleLoad, LoadData, LoadDataEx, LoadFatBinary
_LIBRARY_LOAD_DATA = 678
_ENTER, _EXIT = 0, 1  # CUpti_ApiCallbackSite
_ELF_MAGIC = b"\x7fELF"
_ELF_HEADER_NBYTES = 64


class _CallbackData(ctypes.Structure):
    _fields_ = (
        ("site", ctypes.c_int),
        ("function_name", ctypes.c_char_p),
        ("function_params", ctypes.c_void_p),
        ("function_return_value", ctypes.c_void_p),
    )


class _ResourceData(ctypes.Structure):
    _fields_ = (
        ("context", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("descriptor", ctypes.c_void_p),
    )


class _ModuleResourceData(ctypes.Structure):
    _fields_ = (
        ("module_id", ctypes.c_uint32),
        ("cubin_nbytes", ctypes.c_size_t),
        ("cubin", ctypes.c_void_p),
    )


class _LoadParams(ctypes.Structure):
    """The first two parameters of every load function: where the handle goes, and the image."""

    _fields_ = (("handle", ctypes.POINTER(ctypes.c_void_p)), ("image", ctypes.c_void_p))


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


@dataclass(slots=True)
class CodeRecorder:
    """Every cubin loaded since `start`.

    ``images`` are by SHA-256, in loading order; ``of_module`` and ``of_library`` map the handle of a
    CUmodule or CUlibrary to the digest of its cubin, if a callback showed the pair.
    """

    images: dict[bytes, bytes] = field(default_factory=dict)
    of_module: dict[int, bytes] = field(default_factory=dict)
    of_library: dict[int, bytes] = field(default_factory=dict)
    _inside_load: list[bytes] = field(default_factory=list)
    _keep_alive: list[object] = field(default_factory=list)
    _ignores: bool = False

    def start(self) -> None:
        """Subscribe. Raises CompileError if CUPTI is missing or another tool has subscribed."""
        cupti = _load_cupti()
        callback = _Callback(self._on_callback)
        subscriber = ctypes.c_void_p()
        self._keep_alive += [cupti, callback, subscriber]
        _check("cuptiSubscribe", cupti.cuptiSubscribe(ctypes.byref(subscriber), callback, None))
        wanted = [(_RESOURCE, _MODULE_LOADED), (_DRIVER_API, _LIBRARY_LOAD_DATA)]
        wanted += [(_DRIVER_API, cbid) for cbid in _MODULE_LOADS]
        for domain, cbid in wanted:
            _check("cuptiEnableCallback", cupti.cuptiEnableCallback(1, subscriber, domain, cbid))

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Ignore code that is loaded inside the block: that of plans, which is recorded already."""
        self._ignores = True
        try:
            yield
        finally:
            self._ignores = False

    def _on_callback(self, _user: int, domain: int, cbid: int, data: int) -> None:
        if self._ignores:
            return
        if domain == _RESOURCE:
            self._on_module_loaded(data)
            return
        info = _CallbackData.from_address(data)
        if info.site == _ENTER:
            self._inside_load.clear()
        elif info.function_return_value and not ctypes.c_int.from_address(info.function_return_value).value:
            params = _LoadParams.from_address(info.function_params)
            handle = params.handle.contents.value or 0
            if cbid == _LIBRARY_LOAD_DATA:
                _pair(self.of_library, handle, self._keep_elf(params.image or 0))
            else:
                loaded = set(self._inside_load)
                _pair(self.of_module, handle, loaded.pop() if len(loaded) == 1 else None)

    def _on_module_loaded(self, data: int) -> None:
        descriptor = _ResourceData.from_address(data).descriptor
        module = _ModuleResourceData.from_address(descriptor)
        if module.cubin and module.cubin_nbytes:
            # The memory is the driver's, valid during the callback only.
            self._inside_load.append(self._keep(ctypes.string_at(module.cubin, module.cubin_nbytes)))

    def _keep_elf(self, address: int) -> bytes | None:
        nbytes = _elf_nbytes(address)
        return self._keep(ctypes.string_at(address, nbytes)) if nbytes else None

    def _keep(self, image: bytes) -> bytes:
        digest = sha256(image).digest()
        self.images.setdefault(digest, image)
        return digest


def _pair(images: dict[int, bytes], handle: int, digest: bytes | None) -> None:
    """Record the image of a handle, which may be reused after another image."""
    if digest is None:
        images.pop(handle, None)
    else:
        images[handle] = digest


def _elf_nbytes(address: int) -> int:
    """Return the size of the ELF image at ``address`` from its header tables, 0 if it is something else."""
    if not address or ctypes.string_at(address, 4) != _ELF_MAGIC:
        return 0
    header = ctypes.string_at(address, _ELF_HEADER_NBYTES)

    def number(offset: int, nbytes: int) -> int:
        return int.from_bytes(header[offset : offset + nbytes], "little")

    programs_end = number(32, 8) + number(54, 2) * number(56, 2)
    sections_end = number(40, 8) + number(58, 2) * number(60, 2)
    return max(programs_end, sections_end)


def _load_cupti() -> ctypes.CDLL:
    from cuda import pathfinder

    try:
        found = pathfinder.load_nvidia_dynamic_lib("cupti")
    except pathfinder.DynamicLibNotFoundError as exc:
        raise CompileError(
            "CUPTI is not installed, and capturing kernels needs it: pip install nvidia-cuda-cupti"
        ) from exc
    return ctypes.CDLL(found.abs_path)


def _check(api: str, result: int) -> None:
    if result:
        raise CompileError(f"{api} failed with CUPTI error {result}: is a profiler attached to this process?")
