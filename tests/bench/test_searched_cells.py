"""DARTS and AmoebaNet-A have the published sizes, and rewrites keep their results."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from arithmetic import arithmetic
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bench import model_zoo
from bench.models import amoebanet_a, darts
from bench.models.searched_cells import OPERATIONS, Cell, FactorizedReduce, Genotype
from nimblec.pytorch.sources import import_callable


def darts_network() -> nn.Module:
    return darts.DartsNetwork(darts.NORMAL, darts.REDUCTION)


def nimbles_amoebanet() -> nn.Module:
    return darts.DartsNetwork(amoebanet_a.NIMBLE_NORMAL, amoebanet_a.NIMBLE_REDUCTION)


@cache
def run(build: Callable[[], nn.Module]) -> tuple[nn.Module, int, list[tuple[int, ...]]]:
    """A whole network, the operations for an image, and channels and height of each cell's output."""
    network, sizes = build().eval(), []
    for module in network.modules():
        if isinstance(module, Cell):
            module.register_forward_hook(lambda _, __, output: sizes.append(tuple(output.shape[1:3])))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        assert network(torch.randn(1, 3, 224, 224)).shape == (1, 1000)
    return network, counter.get_total_flops(), sizes


@pytest.mark.parametrize(
    ("build", "parameters", "multiply_adds", "cells"),
    [
        # Published: 4.7 M and 574 M (others who counted convolutions alone found 523 M to 545 M).
        (darts_network, 4_718_752, 529_911_552, 14),
        # Published: 5.1 M and 555 M.
        (amoebanet_a.AmoebaNetA, 4_982_986, 575_695_984, 16),
        # Nimble's table says 0.5 B.
        (nimbles_amoebanet, 4_627_360, 526_746_624, 14),
    ],
)
def test_a_network_has_its_parameters_multiply_adds_and_cells(
    build: Callable[[], nn.Module], parameters: int, multiply_adds: int, cells: int
) -> None:
    network, operations, sizes = run(build)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert operations // 2 == multiply_adds  # two operations each
    assert len(sizes) == cells


def test_cells_double_the_channels_wherever_they_halve_the_size() -> None:
    assert run(darts_network)[2] == [(192, 28)] * 4 + [(384, 14)] * 5 + [(768, 7)] * 5
    assert run(amoebanet_a.AmoebaNetA)[2] == [
        *((36, 56), (75, 28)),
        *[(150, 28)] * 4,
        *[(300, 14)] * 5,
        *[(600, 7)] * 5,
    ]


@pytest.mark.parametrize("size", [8, 7])
def test_a_factorized_reduction_reads_pixels_of_even_and_of_odd_index(size: int) -> None:
    torch.manual_seed(0)
    reduce = FactorizedReduce(3, 5).eval()
    image = torch.randn(2, 3, size, size)
    with torch.no_grad():
        found = reduce.norm(
            torch.cat(
                [
                    nn.functional.conv2d(pixels, convolution.weight)
                    for pixels, convolution in (
                        (image.relu()[:, :, ::2, ::2], reduce.even),
                        (nn.functional.pad(image.relu(), (0, 1, 0, 1))[:, :, 1::2, 1::2], reduce.odd),
                    )
                ],
                dim=1,
            )
        )
        torch.testing.assert_close(reduce(image), found)
    assert found.shape == (2, 5, (size + 1) // 2, (size + 1) // 2)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("stride", [1, 2])
def test_an_operation_keeps_the_channels_and_has_its_stride(name: str, stride: int) -> None:
    with torch.device("meta"):
        found = OPERATIONS[name](6, stride)(torch.randn(1, 6, 15, 14))
    assert found.shape == (1, 6, -(-15 // stride), 14 // stride)


def test_a_cell_adds_two_edges_a_state_and_concatenates_those_that_it_returns() -> None:
    torch.manual_seed(0)
    genotype = Genotype(
        edges=(("skip_connect", 0), ("skip_connect", 1), ("skip_connect", 2), ("skip_connect", 0)), outputs=(3, 2)
    )
    cell = Cell(genotype, (4, 4), 4, reduces=False, shrinks_first=False).eval()
    one, two = torch.randn(2, 1, 4, 5, 5)
    with torch.no_grad():
        first, second = cell.first(one), cell.second(two)
        expected = torch.cat([2 * first + second, first + second], dim=1)
        torch.testing.assert_close(cell(one, two), expected)
        other = Cell(replace(genotype, outputs=(2,)), (4, 4), 4, reduces=False, shrinks_first=False)
    assert (cell.out_channels, other.out_channels) == (8, 4)


@pytest.fixture
def _exact() -> Iterator[None]:
    with arithmetic("fp32"):
        yield


SMALL: dict[str, Callable[[], nn.Module]] = {
    "darts": lambda: darts.DartsNetwork(darts.NORMAL, darts.REDUCTION, channels=8, cells=4),
    "amoebanet_a": lambda: amoebanet_a.AmoebaNetA(channels=16, stack=1),
    "amoebanet_a as in Nimble": lambda: darts.DartsNetwork(
        amoebanet_a.NIMBLE_NORMAL, amoebanet_a.NIMBLE_REDUCTION, channels=8, cells=4
    ),
}
"""Each has every cell of the whole network, at a lesser width and once or twice."""


@pytest.mark.slow
@pytest.mark.usefixtures("_exact")
@pytest.mark.parametrize("name", SMALL)
def test_rewriting_the_cells_keeps_what_they_compute(name: str) -> None:
    result = model_zoo.run(name, lambda: (SMALL[name](), (torch.randn(1, 3, 64, 64),)))
    assert result is not None
    assert (result.status, result.message) == ("pass", "")
    traced, rewritten, _ = result.calls
    assert rewritten < traced


def test_the_features_of_a_settled_network_are_more_than_rounding_errors() -> None:
    torch.manual_seed(0)
    network, (image,) = darts.settled_on_others(SMALL["darts"]())
    network.classifier = nn.Identity()
    with torch.no_grad():
        features = network(image)
    assert features.square().mean().sqrt() > 1e-2


@pytest.mark.parametrize("model", ["darts:fp16", "amoebanet_a:fp32"])
def test_a_callable_returns_an_inference_network(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(darts.DartsNetwork.__init__.__kwdefaults__, "cells", 4)
    monkeypatch.setitem(amoebanet_a.AmoebaNetA.__init__.__kwdefaults__, "stack", 1)
    with torch.device("meta"), torch.no_grad():
        module, (image,), _ = import_callable(f"bench.models.{model}")
        found = module(image)
    assert not module.training
    assert {p.dtype for p in module.parameters()} == {found.dtype}
    assert found.shape == (1, 1000)
