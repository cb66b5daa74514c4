"""One model in IREE; prints one JSON object of figures and nothing else.

Usage: python -m bench.iree_peer compile MODEL FOLDER [--target sm_89] and, on the machine with the GPU, python -m
bench.iree_peer measure FOLDER [--turns]. MODEL is package.module:callable, as for torch, exported by torch.onnx.export;
FOLDER holds IREE's compiled module, the inputs, and the outputs in float32. Compiling needs the packages
iree-base-compiler and onnx, but no GPU; measuring needs iree-base-runtime. IREE 3.13 does not support sm_90: for sm_89
it writes PTX, which the driver compiles. The target llvm-cpu is for a machine without a GPU.

call_us: the wall clock of a synchronised call, inputs in the GPU's memory. numpy_us: the same from arrays to arrays.
kernels_us: from the start of a call's first kernel to the end of its last, in a profiler's trace; busy_us: the part of
that time in which a kernel runs.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from bench import environment, peer_calls, reference
from bench.turns import Turn

_OPSET = 17
_PROGRAM, _INPUTS, _OUTPUTS, _NOTES = "model.vmfb", "inputs.npz", "outputs.npz", "notes.json"


def compile_model(spec: str, folder: Path, target: str) -> None:
    """Write a model compiled for ``target`` to a folder, with its inputs, and torch's outputs in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    module, args, kwargs = reference.seeded(spec)
    begin = time.perf_counter()
    exported, imported = folder / "model.onnx", folder / "model.mlir"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, args, exported, kwargs=kwargs, dynamo=False, opset_version=_OPSET)
    flags = ["--iree-opt-level=O3"]
    if target == "llvm-cpu":
        flags += ["--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu"]
        flags += ["--iree-llvmcpu-target-cpu=host"]
    else:
        flags += ["--iree-hal-target-device=cuda", f"--iree-cuda-target={target}"]
    _tool("iree-import-onnx", exported, "-o", imported, "--opset-version", _OPSET)
    _tool("iree-compile", imported, "-o", folder / _PROGRAM, *flags)
    notes = {"prepare_s": time.perf_counter() - begin, "target": target, "commit": environment.commit()}
    exported.unlink()
    imported.unlink()
    np.savez(folder / _INPUTS, *reference.host_arrays((args, kwargs)))
    with torch.no_grad():
        wide = pytree.tree_map(_widened, (args, kwargs))
        np.savez(folder / _OUTPUTS, *reference.floats(module.float()(*wide[0], **wide[1])))
    (folder / _NOTES).write_text(json.dumps(notes))


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _tool(name: str, *arguments: object) -> None:
    subprocess.run([str(Path(sys.executable).with_name(name)), *map(str, arguments)], check=True)


def measure(folder: Path, turn: Turn) -> None:
    """Load a folder's model, wait for the turn, and report all figures."""
    from iree import runtime

    notes = json.loads((folder / _NOTES).read_text())
    on_gpu = notes["target"] != "llvm-cpu"
    config = runtime.Config("cuda" if on_gpu else "local-task")
    program = runtime.VmModule.mmap(config.vm_instance, str(folder / _PROGRAM))
    function = runtime.load_vm_module(program, config)["main_graph"]
    inputs, expected = (_arrays(folder / name) for name in (_INPUTS, _OUTPUTS))
    placed = [runtime.asdevicearray(config.device, array) for array in inputs]

    def call() -> Any:
        """Call the function, which returns when the outputs are computed."""
        return function(*placed)

    def call_from_host() -> list[np.ndarray]:
        found = function(*inputs)
        return [value.to_host() for value in (found if isinstance(found, tuple) else (found,))]

    figures: dict[str, Any] = {"error": reference.error(call_from_host(), expected)}
    turn.begin()
    figures |= peer_calls.quietest_calls(call, call_from_host)
    if on_gpu:
        figures |= peer_calls.figures(peer_calls.by_torch(call))
    turn.report(**figures, **notes, environment=environment.describe())


def _arrays(path: Path) -> list[np.ndarray]:
    with np.load(path) as file:
        return [file[name] for name in file.files]


def main() -> None:
    """Compile the model named ``package.module:callable``, or measure it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    compiling = commands.add_parser("compile")
    compiling.add_argument("model")
    compiling.add_argument("folder", type=Path)
    compiling.add_argument("--target", default="sm_89")
    measuring = commands.add_parser("measure")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("--turns", action="store_true", help="take turns with other processes at measuring")
    options = parser.parse_args()
    if options.command == "compile":
        compile_model(options.model, options.folder, options.target)
    else:
        turn = Turn(wait=options.turns)
        measure(options.folder, turn)
        turn.end()


if __name__ == "__main__":
    main()
