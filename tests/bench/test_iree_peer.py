"""A model compiled by IREE for the CPU is measured, and agrees with torch."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from subprocesses import python

pytestmark = pytest.mark.skipif(
    not find_spec("iree") or not find_spec("iree.compiler") or not find_spec("iree.runtime"),
    reason="needs iree-base-compiler and iree-base-runtime: not installed",
)

PEER = """
import sys
import types
import torch

def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).eval(), (torch.randn(1, 3, 8, 8),)

sys.modules["networks"] = types.ModuleType("networks")
sys.modules["networks"].network = network
from bench.iree_peer import main
for arguments in (["compile", "networks:network", folder, "--target", "llvm-cpu"], ["measure", folder]):
    sys.argv[1:] = arguments
    main()
"""


def test_iree_peer_measures_a_compiled_folder(tmp_path: Path) -> None:
    found = json.loads(python(f"folder = {str(tmp_path)!r}\n{PEER}"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inputs.npz", "model.vmfb", "notes.json", "outputs.npz"]
    assert found["error"] < 1e-5
    assert found["target"] == "llvm-cpu"
    assert 0 < found["call_us"]["p5"] <= found["numpy_us"]["p95"]
    assert {"commit", "iree-base-runtime"} <= found["environment"].keys()
