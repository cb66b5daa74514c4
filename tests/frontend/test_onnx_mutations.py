"""Damaged ONNX files end in an error of ours, or in a model that imports; nothing else."""

from pathlib import Path

import pytest
from damaged_models import mutations

from nimblec.onnx_import import model_file, model_shapes
from nimblec.onnx_import.importer import import_model
from nimblert.errors import NimbleError


def import_file(data: bytes, path: Path) -> bool:
    """Return whether a damaged file imports; False where it is refused with an error of ours."""
    path.write_bytes(data)
    try:
        import_model(model_shapes.fix_shapes(model_file.load(path), ()))
    except NimbleError:
        return False
    return True


def check(count: int, seed: int, path: Path) -> None:
    outcomes = [import_file(data, path) for data in mutations(count, seed)]
    # Both happen, or the mutations are too mild or too wild to test anything.
    assert count // 20 < sum(outcomes) < count * 19 // 20


@pytest.mark.timeout(120)
def test_a_hundred_damaged_models(tmp_path: Path) -> None:
    check(100, 0, tmp_path / "damaged.onnx")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousands_of_damaged_models(tmp_path: Path) -> None:
    check(4000, 1, tmp_path / "damaged.onnx")
