"""What a figure was measured on, and the files where figures are kept."""

import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from nimblec.cpu.timing import processor

NOT_MEASURED = 3
"""Exit status of a benchmark that is asked for the table of what nobody has measured yet."""

_PACKAGES = ("torch", "triton", "cuda-bindings", "numpy", "onnxruntime", "timm", "torchvision", "transformers")


def describe() -> dict[str, Any]:
    """GPU, driver and clocks as found (where there is a GPU), and the versions of the packages."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"gpu": _gpu(), "cpu": processor(), "python": platform.python_version(), **versions}


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


def read(path: Path) -> Any:
    """The raw figures in a file; where there is none, the process ends with `NOT_MEASURED`."""
    if not path.exists():
        sys.stderr.write(f"{path.relative_to(Path(__file__).parent.parent)}: not measured yet\n")
        sys.exit(NOT_MEASURED)
    return json.loads(path.read_text())
