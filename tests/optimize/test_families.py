"""The whole optimiser on small models of several families: equal results, fewer calls."""

from pathlib import Path

import onnx
import pytest
import torch
from families import FAMILIES, export
from rewriting import assert_same, check, counts, family, optimize, run

from nimblec.onnx_import.importer import import_model


@pytest.mark.parametrize(
    ("name", "device"), [*((name, "cuda") for name in (*FAMILIES, "densenet")), ("resnet", "cpu"), ("bert", "cpu")]
)
def test_a_family_in_double_and_single_precision(name: str, device: str) -> None:
    for dtype, rtol in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        before, inputs = family(name, dtype)
        graph = before.code
        after = optimize(before, device=device)
        check(after)
        assert before.code == graph
        assert sum(counts(after).values()) < sum(counts(before).values())
        assert_same(before, after, *inputs, rtol=rtol)


@pytest.mark.parametrize("name", [*FAMILIES, "densenet"])
def test_half_precision_is_as_near_to_the_truth_as_before(name: str) -> None:
    before, inputs = family(name, torch.float16)
    after = optimize(before, device="cuda")
    check(after)
    exact, exact_inputs = family(name, torch.float64)
    truth = run(exact, *exact_inputs)
    for wanted, old, new in zip(truth, run(before, *inputs), run(after, *inputs), strict=True):
        assert (old.dtype, old.shape, old.stride()) == (new.dtype, new.shape, new.stride())
        error_before, error_after = ((t.double() - wanted).norm() / wanted.norm() for t in (old, new))
        assert float(error_after) <= max(2 * float(error_before), 2e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_onnx_file_of_a_family(tmp_path: Path, name: str) -> None:
    model = onnx.load(export(name, tmp_path / "model.onnx", dynamo=False))
    before = import_model(model).module
    torch.manual_seed(1)
    values = [n.meta["val"] for n in before.graph.nodes if n.op == "placeholder"]
    inputs = [
        torch.rand(v.shape).to(v.dtype) if v.dtype.is_floating_point else torch.ones(v.shape, dtype=v.dtype)
        for v in values
    ]
    after = optimize(before, device="cuda")
    check(after)
    assert_same(before, after, *inputs, rtol=2e-5)


def test_no_transposes_are_left_inside_an_image_network() -> None:
    for name, borders in (("resnet", 1), ("mobilenet", 1), ("inception", 1), ("densenet", 1)):
        after = optimize(family(name, torch.float16)[0], device="cuda")
        assert counts(after)["clone"] == borders, name


def test_a_resnet_is_its_convolutions() -> None:
    names = counts(optimize(family("resnet", torch.float16)[0], device="cuda"))
    assert names["cudnn_convolution_relu"] + names["cudnn_convolution_add_relu"] + names["convolution"] == 8
    assert names["convolution"] == 1  # the shortcut, which the residual call adds
    assert sum(names.values()) <= 13
