"""What `nimblec doctor` reports: versions, GPUs, caches, and which optional packages are missing for what."""

import os
import platform
import re
import stat
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import nimblert
from nimblec.base.errors import first_line
from nimblec.base.installation import VERSION, processor
from nimblec.base.options import OWN_PLAN_CACHE, OWN_TIMING_CACHE
from nimblec.plan import ownership
from nimblert.cuda import driver
from nimblert.errors import CudaError, DeviceMismatchError

Json: TypeAlias = dict[str, Any]


class Extra(NamedTuple):
    """An extra of nimblec: what it is for, and its requirements, as pyproject.toml writes them."""

    purpose: str
    requirements: tuple[str, ...]


EXTRAS = {
    "cpu": Extra("compile ONNX files for the CPU, run CPU plans", ("onnx>=1.17", "onnxruntime>=1.24.4", "scipy>=1.15")),
    "cuda": Extra("run CUDA plans", ("cuda-bindings>=13.0.3,<14", "cuda-pathfinder>=1.2")),
    "compile": Extra("compile PyTorch models, compile for CUDA", ("torch>=2.11,<2.16", "onnxscript>=0.7.1")),
    "signing": Extra("sign plans, verify signatures", ("cryptography>=42",)),
    "safetensors": Extra("read and write weights and state as safetensors files", ("safetensors>=0.5",)),
}

_ALWAYS = ("numpy", "zstandard", "flatbuffers", "click", "rich", "ml_dtypes")
_ALSO = ("triton", "torchvision")
"""Packages that no extra requires by themselves, and whose versions a report of a fault needs."""


def examine() -> Json:
    """Return all facts, as `nimblec doctor --json` prints them. Imports the packages of the CPU target."""
    required = [_name(text) for extra in EXTRAS.values() for text in extra.requirements]
    versions = {name: _version(name) for name in dict.fromkeys((*_ALWAYS, *required, *_ALSO))}
    return {
        "versions": {
            "nimblec": VERSION,
            "nimblert": nimblert.__version__,
            "python": platform.python_version(),
            **versions,
        },
        "cpu": {"processor": processor(), "problem": _cpu_problem()},
        "gpu": _gpu(),
        "caches": [_cache("plans", OWN_PLAN_CACHE), _cache("timings", OWN_TIMING_CACHE)],
        "extras": [_extra(name, extra) for name, extra in EXTRAS.items()],
    }


def _cpu_problem() -> str | None:
    """Return why the CPU target cannot work, or None: packages that are there may still fail to load."""
    for name in ("onnxruntime", "onnx"):
        try:
            import_module(name)
        except Exception as exc:  # noqa: BLE001 - whatever a broken installation raises is the answer
            return f"{name} cannot be imported: {first_line(exc)}: pip install 'nimblec[cpu]'"
    return None


def _gpu() -> Json:
    """Return the GPUs, the newest CUDA version and the version of the driver, and why there is no GPU, if so."""
    found: Json = {"devices": [], "cuda": None, "driver": None, "problem": None}
    with suppress(OSError):
        version = re.search(r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text())
        found["driver"] = version and version[0]
    try:
        driver.initialise()
        devices = [driver.describe(ordinal) for ordinal in range(driver.count())]
    except (DeviceMismatchError, CudaError) as exc:
        return found | {"problem": str(exc).removeprefix("this plan needs a GPU, and ")}
    newest = devices[0].driver_version
    return found | {
        "cuda": f"{newest // 1000}.{newest % 1000 // 10}",
        "devices": [
            {
                "name": device.name,
                "compute_capability": ".".join(map(str, device.compute_capability)),
                "multiprocessor_count": device.multiprocessor_count,
            }
            for device in devices
        ],
    }


def _cache(name: str, path: str) -> Json:
    """Return where a cache is, its size and permissions, and why it cannot be used, if so."""
    try:
        place = Path(path).expanduser()
    except RuntimeError:
        return {"name": name, "path": path, "nbytes": 0, "mode": None, "problem": "set HOME: its value is not known"}
    found: Json = {"name": name, "path": str(place), "nbytes": 0, "mode": None}
    problem: str | None
    try:
        nearest = next(path for path in (place, *place.parents) if path.exists())
        unwritable = None if os.access(nearest, os.W_OK) else f"{nearest} cannot be written"
        problem = ownership.problem(place.parent) or ownership.problem(place) or unwritable
        if place.exists():
            files = [place] if place.is_file() else [file for file in place.iterdir() if file.is_file()]
            found["mode"] = stat.filemode(place.stat().st_mode)
            found["nbytes"] = sum(file.stat().st_size for file in files)
    except OSError as exc:
        problem = exc.strerror
    return found | {"problem": problem}


def _extra(name: str, extra: Extra) -> Json:
    missing, problems = [], []
    for requirement in extra.requirements:
        package = _name(requirement)
        found = _version(package)
        if found is None:
            missing.append(package)
        elif not _satisfies(found, requirement):
            problems.append(f"{package} {found} is installed, {requirement} is needed")
    torch = _version("torch") or ""
    if name == "compile" and "+cpu" in torch:
        problems.append(f"torch {torch} is built without CUDA, and compiles for the CPU alone")
    return {"name": name, "for": extra.purpose, "missing": missing, "problems": problems}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _name(requirement: str) -> str:
    return re.split(r"[<>=]", requirement)[0]


def _satisfies(found: str, requirement: str) -> bool:
    """Return whether a version is within the bounds, >= and <, of a requirement."""
    bounds = re.findall(r"(>=|<)([\d.]+)", requirement)
    return all((_numbers(found) >= _numbers(bound)) == (operator == ">=") for operator, bound in bounds)


def _numbers(text: str) -> tuple[int, ...]:
    """Return the release numbers of a version: (2, 11, 0) of "2.11.0+cu130", (2, 11) of "2.11rc1"."""
    release = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, release[0].split("."))) if release else ()
