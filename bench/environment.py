"""What a figure was measured on."""

import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "triton", "cuda-bindings", "numpy", "onnxruntime", "timm", "torchvision", "transformers")


def describe() -> dict[str, Any]:
    """GPU, driver and clocks as found (where there is a GPU), and the versions of the packages."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    cpu = platform.processor() or platform.machine()
    return {"gpu": _gpu(), "cpu": cpu, "python": platform.python_version(), **versions}


def _gpu() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "none"


def write(path: Path, figures: dict[str, Any]) -> None:
    """Write raw figures, with what they were measured on, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": describe(), **figures}, indent=1, sort_keys=True) + "\n")
