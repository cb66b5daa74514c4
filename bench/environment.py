"""Provenance of figures (commit, machine, versions), and the files that hold them."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from nimblec.base.installation import processor

NOT_MEASURED = 3
"""Exit status of a benchmark whose table is asked for before it was measured."""

_PACKAGES = (
    *("torch", "triton", "cuda-bindings", "numpy", "timm", "torchvision", "transformers"),
    *("onnx", "onnxruntime", "onnxruntime-gpu", "jax", "jaxlib", "iree-base-runtime"),
)


def describe() -> dict[str, Any]:
    """Describe commit, processors, and versions of Python and packages; of a GPU also its driver and current clocks."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"commit": commit(), "gpu": _gpu(), "cpu": processor(), "python": platform.python_version(), **versions}


def commit() -> str:
    """Return the commit of the checkout, with "dirty" if files other than results differ from it.

    NIMBLEC_COMMIT takes precedence; "unknown" if there is neither.
    """
    if said := os.environ.get("NIMBLEC_COMMIT"):
        return said
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return f"{head} dirty" if _git("status", "--porcelain", "--", ".", ":!bench/results") else head
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"


def is_exact(commit: str) -> bool:
    """Return whether a commit identifies what was measured: two dirty checkouts may differ."""
    return commit != "unknown" and not commit.endswith("dirty")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def gpu_name(described: Mapping[str, Any]) -> str:
    """Return the GPU of an environment, such as NVIDIA H200; none where it has none."""
    name: str = described["gpu"]
    return name.split(",", maxsplit=1)[0]


def _gpu() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "none"


def provenance(results: dict[str, Any]) -> str:
    """Return the sentence under a table, with its commit and its machine.

    Ends the process where our rows are of several commits, or any of several kinds of GPUs.
    """
    found = results["environment"]
    rows = [each for modes in results.get("models", {}).values() for each in modes.items() if isinstance(each[1], dict)]
    stated = [(mode, row["commit"]) for mode, row in rows if "commit" in row]
    ours = {commit for mode, commit in stated if is_ours(mode)} | {*results.get("commits", {}).values()}
    others = {commit for _, commit in stated} - ours
    commits = ours or others or {found.get("commit", "unknown")}
    for kind, values in (("commits", commits), ("GPUs", {row["gpu"] for _, row in rows if "gpu" in row})):
        if len(values) > 1:
            raise SystemExit(f"rows of several {kind}: {', '.join(sorted(values))}: measure all of them on one (--add)")
    machine = found["cpu"] if found["gpu"] == "none" else found["gpu"].splitlines()[0]
    versions = (f"{name} {found[name]}" for name in ("torch", "onnx", "onnxruntime") if name in found)
    earlier = f" (other frameworks' rows: {', '.join(sorted(others))})" if ours and others else ""
    return f"Commit {min(commits)[:12]}{earlier}; {', '.join((machine, *versions))}."


def is_ours(mode: str) -> bool:
    """Return whether a mode is a level of nimblec: other frameworks' figures do not depend on our commit."""
    return re.fullmatch(r"-?O\d", mode) is not None


def write(path: Path, figures: dict[str, Any]) -> None:
    """Write raw figures, with what they were measured on, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": describe(), **figures}, indent=1, sort_keys=True) + "\n")


def report(facts: dict[str, Any], path: Path | None) -> None:
    """Print facts as JSON, and write them to a file."""
    text = json.dumps(facts, indent=2)
    print(text)
    if path is not None:
        path.write_text(text + "\n")


def shared_provenance(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the sentence under a table of several files: see `provenance`."""
    environments = {name: file["environment"] for name, file in files.items()}
    first = next(iter(environments.values()))
    return provenance({"environment": first, "commits": {name: e["commit"] for name, e in environments.items()}})


def read(path: Path) -> Any:
    """Return the raw figures in a file; where there is none, the process ends with `NOT_MEASURED`."""
    if not path.exists():
        sys.stderr.write(f"{path}: not measured yet\n")
        sys.exit(NOT_MEASURED)
    return json.loads(path.read_text())
