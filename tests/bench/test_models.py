"""The models of the benchmarks have the dtypes and sizes that their names tell."""

from importlib.util import find_spec

import pytest
import torch

from bench import peers, schedules
from bench.models.amoebanet_a import AmoebaNetA
from bench.models.batch_statistics import settled
from bench.models.darts import DartsNetwork
from bench.models.unet import UNet
from nimblec.pytorch.sources import import_callable

PACKAGES = {
    **dict.fromkeys(("bert_base", "gpt2", "t5_encoder"), "transformers"),
    **dict.fromkeys(("nasnet_a_large", "nasnet_a_mobile"), "timm"),
    **dict.fromkeys(("unet", "darts", "amoebanet_a"), "torch"),
}


def specs() -> list[str]:
    chosen = [peers.models(peers.parser().parse_args(a)) for a in ([], ["--precision", "fp32"], ["--batches"])]
    return sorted({spec for some in (*chosen, schedules.MODELS) for spec in some})


READS_VALUES = ("gpt2",)  # as its attention mask depends on them, it cannot run without


@pytest.mark.parametrize("spec", specs())
def test_a_model_is_what_its_name_says(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DartsNetwork.__init__.__kwdefaults__, "cells", 4)  # all of them take long
    monkeypatch.setitem(AmoebaNetA.__init__.__kwdefaults__, "stack", 1)
    name, _, callable_name = spec.removeprefix("bench.models.").partition(":")
    package = PACKAGES.get(name, "torchvision")
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: not installed")
    with torch.device("meta"), torch.no_grad():
        module, inputs, _ = import_callable(spec)
        result = None if name in READS_VALUES else module(*inputs)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[callable_name[:4]]
    assert not module.training
    assert {p.dtype for p in module.parameters()} == {dtype}
    assert inputs[0].shape[0] == int(callable_name.partition("_batch_")[2] or 1)
    for output in (result,) if isinstance(result, torch.Tensor) else result or ():
        assert output.shape[0] == inputs[0].shape[0]
        assert output.dtype == dtype


def test_every_model_that_is_measured_has_a_file() -> None:
    modules = {spec.partition(":")[0] for spec in specs()}
    assert not [name for name in modules if find_spec(name) is None]


def test_a_unet_keeps_the_size_of_the_image() -> None:
    torch.manual_seed(0)
    module = UNet(classes=5).eval()
    assert 28e6 < sum(p.numel() for p in module.parameters()) < 33e6
    with torch.no_grad():
        assert module(torch.randn(1, 3, 32, 48)).shape == (1, 5, 32, 48)


def test_settled_batch_norms_keep_a_deep_network_in_range() -> None:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(40):
        layers += [torch.nn.Conv2d(8, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8)]
    image = torch.randn(1, 8, 16, 16)
    module = torch.nn.Sequential(*layers)
    with torch.no_grad():
        assert module.eval()(image).std() < 1e-2
        result = settled(module, image)(image)
    assert result.std().item() == pytest.approx(1, rel=0.2)
    assert not module.training
    assert {m.momentum for m in layers[1::2]} == {0.1}
