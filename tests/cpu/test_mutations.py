"""Damaged ONNX files through ``nimblec compile --target cpu``: a plan or one sentence; no crash, no hang."""

import multiprocessing
from pathlib import Path

import pytest
from damaged_models import compile_for_cpu, mutations
from lean_checks import fork_lean_processes

WORKERS = 2
ANSWER_S = 60


def check(count: int, seed: int, folder: Path) -> None:
    """Compile mutations in processes, which give no answer if they crash or hang."""
    context = multiprocessing.get_context("forkserver")
    # The server imports both packages once for all workers.
    context.set_forkserver_preload(["onnx", "onnxruntime"])
    with context.Pool(WORKERS, fork_lean_processes) as pool:
        files = enumerate(mutations(count, seed))
        jobs = [pool.apply_async(compile_for_cpu, (data, folder / f"{index}.onnx")) for index, data in files]
        outcomes = [job.get(timeout=ANSWER_S) for job in jobs]
    for index, (status, errors) in enumerate(outcomes):
        if status:
            assert status == 2, (index, errors)
            assert errors.startswith("nimblec: "), (index, errors)
            assert errors.count("\n") == 1, (index, errors)
        else:
            assert (folder / f"{index}.plan").stat().st_size > 0
    # Both happen, or the mutations are too mild or too wild to test anything.
    assert count // 20 < sum(status == 0 for status, _ in outcomes) < count * 19 // 20


@pytest.mark.timeout(150)
def test_some_damaged_models(tmp_path: Path) -> None:
    check(25, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_hundred_damaged_models(tmp_path: Path) -> None:
    check(500, 3, tmp_path)
