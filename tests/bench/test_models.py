"""The models of the benchmarks have the dtypes and sizes that their names tell."""

from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise

import pytest
import sized_networks
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bench import peers, schedules
from bench.models import amoebanet_a, darts, sized
from bench.models.darts import DartsNetwork
from bench.models.images import settled
from bench.models.unet import UNet
from bench.reference import seeded

PACKAGES = {
    **dict.fromkeys(("bert_base", "gpt2", "t5_encoder"), "transformers"),
    **dict.fromkeys(("nasnet_a_large", "nasnet_a_mobile"), "timm"),
    **dict.fromkeys(("unet", "darts", "amoebanet_a"), "torch"),
}


def specs() -> list[str]:
    chosen = [peers.models(peers.parser().parse_args(a)) for a in ([], ["--precision", "fp32"], ["--batches"])]
    return sorted({spec for some in (*chosen, schedules.MODELS) for spec in some})


@pytest.mark.parametrize("spec", specs())
def test_model_is_what_its_name_says(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DartsNetwork.__init__.__kwdefaults__, "cells", 4)  # all of them take long
    name, _, callable_name = spec.removeprefix("bench.models.").partition(":")
    assert find_spec(f"bench.models.{name}") is not None
    package = PACKAGES.get(name, "torchvision")
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: not installed")
    with torch.device("meta"), torch.no_grad():
        module, inputs, _ = seeded(spec)
        # GPT-2's attention mask depends on values, which meta tensors lack.
        result = None if name == "gpt2" else module(*inputs)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[callable_name[:4]]
    assert not module.training
    assert {p.dtype for p in module.parameters()} == {dtype}
    assert inputs[0].shape[0] == int(callable_name.partition("_batch_")[2] or 1)
    for output in (result,) if isinstance(result, torch.Tensor) else result or ():
        assert output.shape[0] == inputs[0].shape[0]
        assert output.dtype == dtype


@pytest.mark.parametrize(
    ("name", "package"),
    [("resnet50", "torchvision"), ("bert_base", "transformers"), ("rows", "torch"), ("tokens", "torch")],
)
def test_sized_network_draws_any_size(name: str, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: not installed")
    with torch.device("meta"):
        made = getattr(sized_networks if package == "torch" else sized, name)()
    assert {p.dtype for p in made.module.parameters()} == {torch.float32 if package == "torch" else torch.float16}
    drawn = made.draw(7, 0)
    for tensor, example in zip(drawn, made.args, strict=True):
        assert tensor.shape[made.axis] == 7
        assert tensor.dtype is example.dtype
        assert tensor.ndim != 4 or tensor.is_contiguous(memory_format=torch.channels_last)
    assert drawn[0].unique().numel() > 1
    assert all((mask == 1).all() for mask in drawn[1:])


def test_unet_keeps_the_size_of_the_image() -> None:
    torch.manual_seed(0)
    module = UNet(classes=5).eval()
    assert 28e6 < sum(p.numel() for p in module.parameters()) < 33e6
    with torch.no_grad():
        assert module(torch.randn(1, 3, 32, 48)).shape == (1, 5, 32, 48)


def test_settled_keeps_a_deep_network_in_range() -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(40):
        layers += [nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)]
    image = torch.randn(1, 8, 16, 16)
    module = nn.Sequential(*layers)
    with torch.no_grad():
        assert module.eval()(image).std() < 1e-2
        result = settled(module, image)(image)
    assert result.std().item() == pytest.approx(1, rel=0.2)
    assert not module.training
    assert {m.momentum for m in layers[1::2]} == {0.1}


@pytest.mark.parametrize(
    ("build", "parameters", "multiply_adds"),
    [
        # Published: 4.7 M and 574 M (others who counted convolutions alone found 523 M to 545 M).
        (lambda: DartsNetwork(darts.NORMAL, darts.REDUCTION), 4_718_752, 529_911_552),
        # Nimble's table says 0.5 B.
        (lambda: DartsNetwork(amoebanet_a.NORMAL, amoebanet_a.REDUCTION), 4_627_360, 526_746_624),
    ],
)
def test_searched_network_has_its_published_size(
    build: Callable[[], nn.Module], parameters: int, multiply_adds: int
) -> None:
    sizes = []
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        network = build().eval()
        for cell in network.cells:
            cell.register_forward_hook(lambda _m, _args, found: sizes.append((found.shape[1], found.shape[2])))
        assert network(torch.randn(1, 3, 224, 224)).shape == (1, 1000)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert counter.get_total_flops() // 2 == multiply_adds  # two operations each
    halved = [(before[0] * 2, before[1] // 2) == now for before, now in pairwise(sizes)]
    assert len(sizes) == 14
    assert sum(halved) == 2
