"""The README's blocks of Python run as they stand."""

import re
from pathlib import Path

from forked import ROOT, python

GIVEN = """
import torch

class Doubled(torch.nn.Module):
    def forward(self, image):
        return 2 * image

module, step = Doubled(), Doubled()
example = prompt = token = torch.ones(1, 3)
x = example.numpy()
"""
"""The names that a reader has."""


def test_the_readmes_python_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    first, served, entries = (block.replace('"model.plan"', repr(str(tmp_path / "model.plan"))) for block in blocks)
    shown = "print(y, outputs, model.entries)"
    printed = python(f"{GIVEN}\n{first}\nprint(y)\n{served}\n{entries}\n{shown}")
    assert printed.count("[[2. 2. 2.]]") == 2
    assert "('prefill', 'decode')" in printed


def test_readme_starts_the_server_of_serving() -> None:
    """CI runs the commands of docs/serving.md."""
    *_, block = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    serving = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    for command in block.splitlines():
        assert command.replace("model.plan", "digits.plan") in serving


TRAINED = """
import numpy, torch
import nimblec, nimblert

model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
images, labels = torch.randn(8, 1, 4, 4), torch.arange(8) % 4
first = model[1].weight.detach().clone()
"""


def test_the_training_step_of_the_guide_runs(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "training_step" in block)
    moved = block.replace('"train.plan"', repr(str(tmp_path / "train.plan")))
    assert moved.count(str(tmp_path)) == 2
    shown = "print(loss.shape, scores.shape, torch.equal(model[1].weight, first))"
    printed = python(f"{TRAINED}\n{moved}\n{shown}")
    assert printed.splitlines()[-1] == "() (8, 4) False"
