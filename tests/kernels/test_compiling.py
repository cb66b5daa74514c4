"""The process that compiles kernels, where Triton can be imported."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton_process import needs_triton

from nimblec.base.errors import CompileError
from nimblec.kernels.compiling import Compiler, Job
from nimblec.kernels.gpu import SM_90
from nimblec.kernels.launch import launch_of
from nimblec.kernels.reductions.norm_op import layer_norm

pytestmark = needs_triton


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    """Start a compiler with an empty cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with closing(Compiler()) as made:
        yield made


def jobs() -> list[Job]:
    x, weight = (torch.empty(shape, dtype=torch.float16, device="meta") for shape in ((8, 64), (64,)))
    given = x, weight, weight, 1e-5, False, torch.float16
    return [launch_of(layer_norm, *given, [rows, 1], "late").job for rows in (1, 2, 4)]


def test_compiler_compiles_each_job_once(compiler: Compiler, tmp_path: Path) -> None:
    for _ in range(2):
        compiler.begin(jobs(), gpu=SM_90)
        compiler.finish(jobs(), gpu=SM_90)
    assert compiler.count == len(jobs())
    assert len([*tmp_path.rglob("*.cubin")]) == len(jobs())


def test_compiler_reports_an_error_of_its_job_alone(compiler: Compiler) -> None:
    good = jobs()
    bad = replace(good[0], template="nimblec.kernels.nothing:kernel")
    compiler.begin([*good, bad], gpu=SM_90)
    with pytest.raises(CompileError, match="No module named"):
        compiler.finish([bad], gpu=SM_90)
    compiler.finish(good, gpu=SM_90)


def test_compiler_that_dies_is_an_error(compiler: Compiler) -> None:
    compiler._process.kill()
    compiler._process.wait()
    compiler.begin(jobs(), gpu=SM_90)
    with pytest.raises(CompileError, match="status -9"):
        compiler.finish(jobs(), gpu=SM_90)
