"""The README's blocks of Python run as they stand."""

import re
from pathlib import Path

from subprocesses import ROOT, python

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
    first, served, entries = blocks
    saved = f"plan.save({str(tmp_path / 'model.plan')!r})"
    served = served.replace('"model.plan"', repr(str(tmp_path / "model.plan")))
    shown = "print(y, outputs, model.entries)"
    printed = python(f"{GIVEN}\n{first}\nprint(y)\n{saved}\n{served}\n{entries}\n{shown}")
    assert printed.count("[[2. 2. 2.]]") == 2
    assert "('prefill', 'decode')" in printed
