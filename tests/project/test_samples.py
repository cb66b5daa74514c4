"""Every sample runs, and does what the README says of it."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine
from cpu_plans import run_onnxruntime
from subprocesses import FRAMEWORKS, ROOT, python

SAMPLES = ROOT / "samples"
RUN = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the digits sample, compiled for the CPU in a process without torch."""
    path = tmp_path_factory.mktemp("plans") / "digits.plan"
    code = "import sys; from nimblec.cli import main; main(['compile', *sys.argv[1:], '--target', 'cpu', '-q'])"
    python(code, SAMPLES / "digits.onnx", "-o", path, without=["torch", "triton"])
    return path


def test_the_digits_model_reads_as_many_as_the_readme_says() -> None:
    train_digits = pytest.importorskip("samples.train_digits")
    _, images, _, labels = train_digits.split()
    digits, _ = run_onnxruntime(SAMPLES / "digits_batch.onnx", {"image": images.numpy()})
    right = int((digits == labels.numpy()).sum())
    assert f"It reads {right} of the {len(labels)}\ntest images correctly" in (ROOT / "README.md").read_text()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, while it exports
@pytest.mark.parametrize("epochs", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_training_the_digits_again(
    tmp_path: Path, epochs: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train_digits = pytest.importorskip("samples.train_digits")
    monkeypatch.setattr(train_digits, "EPOCHS", epochs)
    try:
        train_digits.main(tmp_path)
    finally:
        train_digits.torch.use_deterministic_algorithms(mode=False)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("test accuracy: ")
    accuracy = float(line.split()[2])
    assert accuracy > (0.98 if epochs == 40 else 0.8)  # other versions of PyTorch train to other bits
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in SAMPLES.iterdir() if path.suffix in {".npy", ".onnx"}
    )


@pytest.mark.parametrize("name", ["digits.onnx", "digits_batch.onnx"])
def test_the_digits_model_is_one_small_file_without_paths(name: str) -> None:
    content = (SAMPLES / name).read_bytes()
    assert len(content) < 200_000
    assert b"site-packages" not in content
    assert b".py" not in content


def test_the_model_for_batches_is_that_for_one_image() -> None:
    images = np.concatenate([np.load(SAMPLES / f"digit_{digit}.npy") for digit in (0, 3, 7, 9)])
    digits, probabilities = run_onnxruntime(SAMPLES / "digits_batch.onnx", {"image": images})
    assert digits.tolist() == [0, 3, 7, 9]
    for row, image in enumerate(images):
        _, expected = run_onnxruntime(SAMPLES / "digits.onnx", {"image": image[None]})
        np.testing.assert_allclose(probabilities[row : row + 1], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("digit", [0, 3, 7, 9])
def test_the_lean_server_reads_digits_without_a_framework(digits: Path, digit: int) -> None:
    out = python(
        RUN, SAMPLES / "serve_lean.py", digits, SAMPLES / f"digit_{digit}.npy", without=[*FRAMEWORKS, "nimblec"]
    )
    assert out.startswith(f"digit: [{digit}]\n")
    assert out.endswith("frameworks imported: none\n")


def test_the_lean_server_notices_a_framework(digits: Path) -> None:
    code = "import nimblec\n" + RUN
    with pytest.raises(AssertionError, match=r"the lean runtime imported \['nimblec'\]"):
        python(code, SAMPLES / "serve_lean.py", digits, SAMPLES / "digit_7.npy")


@pytest.mark.slow
def test_resnet18_compiles_from_its_name_and_agrees_with_torch(nimblec: CommandLine, tmp_path: Path) -> None:
    import torch

    import nimblert
    from samples.resnet import resnet18

    plan = tmp_path / "resnet18.plan"
    nimblec.prints("compile", "samples.resnet:resnet18", "-o", plan, "--target", "cpu")
    module, (image,) = resnet18()
    with torch.inference_mode():
        expected = module(image).numpy()
    with nimblert.load(plan) as executable:
        actual = executable(image.numpy())
    assert isinstance(actual, np.ndarray)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("cell", ["child_sum", "binary", "child_sum_by_levels", "binary_by_levels"])
def test_one_plan_serves_every_tree(cell: str, nimblec: CommandLine, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    import nimblert
    from samples import tree_lstm

    nimblec.prints("compile", f"samples.tree_lstm:{cell}", "-o", tmp_path / "tree.plan", "--target", "cpu")
    module, (words, *_) = getattr(tree_lstm, cell.removesuffix("_by_levels"))()
    leaf: tree_lstm.Tree = []
    trees = (leaf, [leaf, leaf], [[leaf, [[leaf, leaf], leaf]], [leaf]], [[[[[leaf]]]]])
    with nimblert.load(tmp_path / "tree.plan") as executable, torch.inference_mode():
        for tree in trees:
            children = tree_lstm.post_order(tree, 2)
            count = torch.tensor(int((children >= 0).sum()) + 1)
            actual = executable(words.numpy(), children.numpy(), count.numpy())
            np.testing.assert_allclose(actual, module(words, children, count).numpy(), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="a node has 3 children, expected at most 2"):
        tree_lstm.post_order([leaf, leaf, leaf], 2)


def test_adapters_are_swapped_without_compiling_again(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    runpy.run_path(str(SAMPLES / "swap_lora.py"), run_name="__main__")
    *_, formal, casual, base = capsys.readouterr().out.splitlines()
    for name, line in (("formal", formal), ("casual", casual)):
        assert line.startswith(f"{name}: swapped in ")
        assert float(line.rpartition(" ")[2]) < 1e-5
    assert base == "base again, bit for bit: True"
