"""The key of a plan in the plan cache: a digest of all that the plan's bytes depend on.

Nothing here imports torch. An omission could return the plan of another model, so everything goes in:
every byte of the model, every source file of nimblec, every installed package.
"""

import hashlib
import json
import os
import platform
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import metadata
from pathlib import Path

from nimblec.base.errors import CompileError
from nimblec.base.installation import package_folders, processor
from nimblec.base.options import Options
from nimblec.base.source import Source
from nimblert.cuda import driver
from nimblert.plan import Target

_ARRAYS = ("constants", "examples")

_NOT_THE_PLANS = frozenset({"target", *_ARRAYS, "timing_cache", "plan_cache"})
"""Options that only say where something is kept, and those that the key has in another form."""

_STEERING = (
    "AOT", "ATEN", "CC", "CPLUS_", "CUBLAS", "CUDA", "CUDNN", "CUTE", "CUTLASS", "CXX", "DISABLE_", "ENABLE_", "FAKE_",
    "FX_", "INDUCTOR", "KMP_", "LD_", "LLVM", "MKL", "NVIDIA", "NVPTX", "OMP_", "ONNX", "OPENBLAS", "ORT_",
    "PARTITIONER", "PT2", "PTXAS", "PYTORCH", "TENSORIFY", "TORCH", "TRITON", "USE_",
)  # fmt: skip
"""Prefixes of environment variables that steer the frameworks, their compilers and libraries."""

_NEUTRAL = frozenset(
    {
        "CUDA_CACHE_MAXSIZE",
        "CUDA_CACHE_PATH",
        "ORT_DISABLE_TELEMETRY",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_EXTENSIONS_DIR",
        "TORCH_HOME",
        "TRITON_CACHE_DIR",
        "TRITON_DUMP_DIR",
    }
)
"""Variables among them that only say where something is kept, or that importing ONNX Runtime sets: these would give
another key after a compilation than before."""

_INSTRUCTION_SETS = ("flags", "Features")
"""Their keys in /proc/cpuinfo, on x86 and on Arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKey:
    """``digest`` names the plan; ``files`` shows whether a file of the model has changed since.

    Equal keys before and after a compilation prove what was compiled. ``inputs`` are those of `find_inputs`.
    """

    digest: str
    files: tuple[tuple[int, ...], ...]
    inputs: dict[str, str] = field(default_factory=dict, compare=False)


def find_key(source: Source, target: Target, options: Options, also: Sequence[Path] = ()) -> PlanKey | None:
    """Return the key of the plan of a model that its files determine, ``also`` among them; None if there is none.

    There is none if a file cannot be read, which the compiler reports better, or if packages were replaced since this
    process imported them.
    """
    try:
        first, now = _software_at_first(), _software()
        files = _files(source, also)
        found = tuple(map(_status, files.values()))
        inputs = _inputs(source, options, files)
        parts = {
            "inputs": inputs,
            "software": now,
            "environment": {k: v for k, v in os.environ.items() if k.startswith(_STEERING) and k not in _NEUTRAL},
            "machine": _machine(target, options),
        }
    except (CompileError, OSError, UnicodeDecodeError, MemoryError):
        return None
    return PlanKey(digest=_digest(parts), files=found, inputs=inputs) if now == first else None


def find_inputs(source: Source, options: Options, also: Sequence[Path] = ()) -> dict[str, str]:
    """Return digests of what determines a plan on any machine: the model's files and the options.

    Raises OSError or CompileError for a file that cannot be read.
    """
    return _inputs(source, options, _files(source, also))


def _inputs(source: Source, options: Options, paths: Mapping[str, Path]) -> dict[str, str]:
    files = {name: digest_of(path) for name, path in paths.items()}
    settings = {f.name: repr(getattr(options, f.name)) for f in fields(options) if f.name not in _NOT_THE_PLANS}
    arrays = {
        option: [
            (name, array.dtype.name, array.shape, hashlib.sha256(array.tobytes()).hexdigest())
            for name, array in getattr(options, option)
        ]
        for option in _ARRAYS
    }
    return {"model": _digest([source.kind, files]), "options": _digest([settings, arrays])}


def _files(source: Source, also: Sequence[Path]) -> dict[str, Path]:
    """Return the files of a model by name: "" is its own, and its data files have the names that it calls them by."""
    files = {f"also {path}": path for path in also}
    if source.kind == "callable" and also:
        return files
    path = Path(source.model)
    _status(path)  # refuses a pipe before anything reads it
    files[""] = path
    if source.kind == "onnx":
        from nimblec.onnx_import.external_data import data_files

        files |= {str(name): path.parent / name for name in data_files(path)}
    return files


def _status(path: Path) -> tuple[int, ...]:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CompileError(f"{path}: not a regular file, which could be read forever")
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _software() -> str:
    """Return a digest of nimblec's source, of Python, and of every package that can be imported."""
    return _digest([sys.version, _sources(), _packages()])


_software_at_first = cache(_software)


def _sources() -> dict[str, str]:
    """Return the digests of the files of both packages."""
    return {
        str(path.relative_to(root.parent)): digest_of(path)
        for root in package_folders()
        for path in root.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def _packages() -> list[list[str]]:
    """Return the path of each installed package, and its metadata, which list the digests of its files."""
    found = []
    for folder in _folders():
        found += sorted(
            [
                str(package.locate_file("")),
                *(package.read_text(name) or "" for name in ("METADATA", "PKG-INFO", "RECORD")),
            ]
            for package in metadata.distributions(path=[folder])
        )
    return found


@cache
def _folders() -> tuple[str, ...]:
    """Return the folders of packages as they were at first: importing setuptools adds one to the path.

    Of two versions of a package Python imports the first on the path.
    """
    return tuple(dict.fromkeys(sys.path))


def _machine(target: Target, options: Options) -> list[object]:
    """Return the processor, which computes constants too, and the GPU with its driver, or the name of an absent one."""
    about: list[object] = [target.name, platform.machine(), processor()]
    about += sorted({line for line in _lines(Path("/proc/cpuinfo")) if line.startswith(_INSTRUCTION_SETS)})
    if options.is_for_absent:
        about.append(options.target)
    elif target is Target.CUDA:
        about += [asdict(driver.describe()), *_lines(Path("/proc/driver/nvidia/version"))]
    return about


def _lines(path: Path) -> Iterable[str]:
    return path.read_text().splitlines() if path.exists() else ()


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(parts: object) -> str:
    """Return the digest of a value's JSON text, which is different for different values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
