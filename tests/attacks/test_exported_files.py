"""A .pt2 file whose sizes or sample inputs run code leaves no trace of it, in a process as a user starts it."""

import io
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from subprocesses import SOURCES

torch = pytest.importorskip("torch")

Change = Callable[[bytes], bytes]


class Payload:
    """Makes a folder where it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("PWNED",)


def pickled(_: bytes) -> bytes:
    buffer = io.BytesIO()
    torch.save(Payload(), buffer)
    return buffer.getvalue()


def evaluated(content: bytes) -> bytes:
    changed, count = re.subn(rb'"expr_str": ?"[^"]*"', b"\"expr_str\": \"__import__('os').mkdir('PWNED')\"", content)
    assert count
    return changed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "change", "sentence"),
    [
        ("sample_inputs/model.pt", pickled, "is a pickle of more than tensors and plain values"),
        ("model.json", evaluated, "expected an expression of integers and symbols"),
    ],
)
def test_compile_refuses_file_that_runs_code(tmp_path: Path, ending: str, change: Change, sentence: str) -> None:
    size = torch.export.Dim("n", min=2, max=64)
    x = torch.randn(4, 4)
    program = torch.export.export(torch.nn.ReLU(), (x,), dynamic_shapes=({0: size},))
    torch.export.save(program, tmp_path / "m.pt2")
    with zipfile.ZipFile(tmp_path / "m.pt2") as old, zipfile.ZipFile(tmp_path / "evil.pt2", "w") as new:
        for entry in old.infolist():
            content = old.read(entry.filename)
            new.writestr(entry, change(content) if entry.filename.endswith(ending) else content)
    done = subprocess.run(
        [sys.executable, "-m", "nimblec", "compile", "evil.pt2", "-o", "m.plan", "--target", "cpu", "--dim", "n=4"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"m.pt2", "evil.pt2"}
