"""What torch says while it exports a model that it refuses: one sentence of ours, and nothing beside it."""

from pathlib import Path

import forked

from nimblec.base.installation import environment

MODELS = """
import torch

class Branching(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x * 2
        return x + 1

class Misshapen(torch.nn.Module):
    def forward(self, x):
        return x @ torch.zeros(7, 7)

def branching():
    return Branching().eval(), (torch.ones(3, 4),)

def misshapen():
    return Misshapen().eval(), (torch.ones(3, 4),)
"""

COMPILE = """
import sys
import nimblec
exec(sys.argv[1], globals())
for name in sys.argv[2:]:
    try:
        nimblec.compile(*globals()[name](), target="cpu")
    except nimblec.TraceError as exc:
        print(exc)
"""

BRANCHES = "makes control flow or a size depend on the value of a tensor, and a plan is static: use torch.where"
MISSHAPEN = "mat1 and mat2 shapes cannot be multiplied (3x4 and 7x7)"


def test_modules_that_torch_refuses() -> None:
    done = forked.run(COMPILE, MODELS, "branching", "misshapen", environment=environment(), modules=forked.COMPILER)
    assert (done.returncode, done.stderr) == (0, "")
    branching, misshapen = done.stdout.splitlines()
    assert BRANCHES in branching
    assert MISSHAPEN in misshapen
    assert "module file" not in done.stdout  # would not help


def test_a_callable_that_torch_refuses(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODELS)
    command = ["compile", "mine:branching", "-o", "m.plan", "--target", "cpu", "-q"]
    code = "import sys; from nimblec.cli import main; main(sys.argv[1:])"
    done = forked.run(code, *command, environment=environment(), folder=tmp_path, modules=forked.COMPILER)
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = done.stderr.splitlines()
    assert BRANCHES in sentence
