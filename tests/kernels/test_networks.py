"""Triton kernels in small networks of the kinds that they are made for, chosen everywhere, and chosen again."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from choosing import Pool
from rewriting import DenseNet, assert_same, counts, optimize, randomize, rewritten
from torch import Tensor, fx, nn
from torch.nn import functional

from nimblec.graph.definitions import DEFINITIONS
from nimblec.kernels import selector as kernel_selector
from nimblec.kernels.choosing import key_of
from nimblec.kernels.gpu import SM_80, SM_90
from nimblec.kernels.launch import ops
from nimblec.kernels.products.gemm_match import ProductRequest, requests
from nimblec.kernels.products.gemm_rewrite import GEMM, tilings, use_triton_kernels
from nimblec.kernels.selector import FRAMEWORK, Selector
from nimblec.pytorch.aten_graph import trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from nimblec.kernels.call import Pool as PoolOfWeights
    from nimblec.kernels.compiling import Job
    from nimblec.kernels.products.gemm_rewrite import AnyTiling
    from nimblec.kernels.selector import Family, Timed


class Excited(nn.Module):
    """An inverted bottleneck with squeeze and excitation (Tan & Le 2019; MobileNetV3 with its activations)."""

    def __init__(self, channels: int, activation: type[nn.Module], gate: type[nn.Module]) -> None:
        super().__init__()
        wide = 4 * channels
        self.widen = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), activation(),
            nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), activation(),
        )  # fmt: skip
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 8, 1), nn.ReLU(), nn.Conv2d(8, wide, 1), gate()
        )
        self.project = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map images to images."""
        y = self.widen(x)
        return x + self.project(self.squeeze(y) * y)


class Separable(nn.Sequential):
    """ReLU, depthwise, pointwise, norm, twice (Zoph et al. 2018)."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__(*(
            layer
            for _ in range(2)
            for layer in (
                nn.ReLU(),
                nn.Conv2d(channels, channels, size, 1, size // 2, groups=channels, bias=False),
                nn.Conv2d(channels, channels, 1, bias=False),
                nn.BatchNorm2d(channels),
            )
        ))  # fmt: skip


class Cell(nn.Module):
    """A NASNet-A cell of five sums."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, 1, 1)
        self.squeezes = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels))
            for _ in range(2)
        )
        self.branches = nn.ModuleList(Separable(channels, size) for size in (5, 3, 5, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Map images to images of six times the channels."""
        stem = self.stem(x)
        now, before = (squeeze(stem) for squeeze in self.squeezes)
        a, b, c, d, e = (branch(y) for branch, y in zip(self.branches, (now, *[before] * 3, now), strict=True))
        pools = [functional.avg_pool2d(y, 3, 1, 1, count_include_pad=False) for y in (now, before)]
        sums = [a + b, c + d, pools[0] + before, pools[1] + pools[1], e + now]
        return torch.cat([before, *sums], 1)


class Preactivated(nn.Module):
    """Norm and ReLU before each convolution, a projection reading the same (He et al. 2016, ResNet v2)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, channels, 3, 1, 1), nn.BatchNorm2d(channels)
        self.first, self.last = nn.Conv2d(channels, channels, 3, 2, 1), nn.Conv2d(channels, channels, 1)
        self.skip = nn.Conv2d(channels, channels, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to images of half the size."""
        x = self.stem(x)
        y = torch.relu(self.norm(x))
        return self.last(functional.silu(self.first(y))) + self.skip(y) + functional.max_pool2d(x, 3, 2, 1)


class ConvNext(nn.Module):
    """Blocks that norm, widen, and scale each channel, channels last (Liu et al. 2022)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, channels, 4, 4), nn.LayerNorm(channels)
        self.depthwise = nn.Conv2d(channels, channels, 7, 1, 3, groups=channels)
        self.widen, self.narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.linspace(-0.1, 1, channels).reshape(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map images to images of a quarter of the size."""
        x = self.stem(x)
        for _ in range(2):
            y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
            y = self.narrow(functional.gelu(self.widen(y)))
            x = x + self.scale * y.permute(0, 3, 1, 2)
        return x


NETWORKS: "dict[str, tuple[Callable[[], nn.Module], set[str]]]" = {
    "EfficientNet": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), Excited(16, nn.SiLU, nn.Sigmoid)), {"mul", "sigmoid", "add"}
    ),
    "MobileNetV3": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), Excited(16, nn.Hardswish, nn.Hardsigmoid)),
        {"mul", "hardswish", "hardsigmoid"},
    ),
    "DenseNet": (lambda: DenseNet.small()[0], set()),
    "NASNet": (lambda: Cell(16), {"relu", "cudnn_convolution_relu"}),
    "ConvNeXt": (lambda: ConvNext(16), {"mul", "add", "gelu"}),
    "ResNet v2": (lambda: Preactivated(16), {"relu", "_native_batch_norm_legit_no_training", "silu"}),
}  # fmt: skip
"""And what is left of none of them."""


def _network(name: str) -> tuple[fx.GraphModule, Tensor]:
    torch.manual_seed(0)
    module, x = randomize(NETWORKS[name][0]()).eval().half(), torch.randn(2, 3, 16, 16).half()
    return optimize(trace(module, (x,)).module, device="cuda"), x


class _Clock:
    """Triton kernels take a microsecond, the framework's two; cuDNN's fused calls are not called on the CPU."""

    def __init__(self) -> None:
        self.count = 0
        self._time = 1.0

    def __call__(self, call: "Callable[[int], object]") -> float:
        self.count += 1
        self._time = 1.0
        call(0)
        call(1)
        return self._time

    def framework(self, request: ProductRequest, pool: "PoolOfWeights", length: int) -> "Timed":
        """Return GEMM's call of the framework."""
        given = GEMM.framework(request, pool, length)
        exists = given is not None and not any(node.target in DEFINITIONS for node in request.nodes)

        def call(n: int) -> None:
            if exists and given is not None:
                given(n)
            self._time = 2.0

        return call

    @property
    def family(self) -> "Family[ProductRequest, AnyTiling]":
        """With the framework's calls so."""
        return replace(GEMM, framework=self.framework)


def _selector(times: dict[str, int], **how: Any) -> "tuple[Selector[Any, Any], list[Job], _Clock]":
    jobs: list[Job] = []
    clock = _Clock()
    given = {"gpu": SM_90, "times": times, "compile_jobs": jobs.extend, **how}
    return Selector(clock.family, timer=clock, pool=Pool(), length=2, **given), jobs, clock


def _chosen(module: fx.GraphModule, selector: "Selector[Any, Any]") -> fx.GraphModule:
    selector.prepare(requests(module))
    return rewritten(module, lambda m: use_triton_kernels(m, selector))


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_with_all_kernels_ours(name: str) -> None:
    module, x = _network(name)
    own = _chosen(module, _selector({})[0])
    left = counts(own)
    assert not NETWORKS[name][1] & set(left), left
    assert not {"convolution.default", "cudnn_convolution_relu", "addmm"} & set(left)
    assert_same(module, own, x, rtol=5e-3)


def test_selector_measures_once() -> None:
    module, _ = _network("EfficientNet")
    times: dict[str, int] = {}
    first, jobs, timer = _selector(times)
    chosen = _chosen(module, first)
    again, later, silent = _selector(times)
    assert counts(_chosen(module, again)) == counts(chosen)
    assert timer.count > silent.count == 0
    assert len(later) == len(again.choices) < len(jobs)
    assert again.choices == first.choices
    assert all(isinstance(time, int) for time in times.values())


def test_times_of_another_machine_or_trigger_are_not_taken() -> None:
    module, _ = _network("EfficientNet")
    times: dict[str, int] = {}
    _chosen(module, _selector(times)[0])
    known = dict(times)
    for other in ({"fingerprint": "another"}, {"gpu": SM_80}):
        again, _, clock = _selector(times, **other)
        _chosen(module, again)
        assert clock.count > 0
    assert known.items() < times.items()


def test_known_times_choose_tilings_of_an_absent_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_selector, "timing_fingerprint", lambda _templates, device: device)
    module, _ = _network("EfficientNet")

    def tilings_of(times: dict[str, int]) -> list[Any]:
        own = rewritten(module, lambda m: GEMM.use_first(m, SM_90, times))
        return [node.args[-2] for node in own.graph.nodes if node.target in ops()]

    request = max(requests(module), key=lambda r: len(tilings(r, SM_90)))
    slower, faster = list(GEMM.named(request, SM_90))[1:3]
    times = {}
    for name, nanoseconds in ((slower, 2000), (faster, 1000), (FRAMEWORK, 10)):
        times[key_of((SM_90.names[-1], SM_90.trigger, request.signature, name))] = nanoseconds
    first, known = tilings_of({}), tilings_of(times)
    assert first != known
    changed = [numbers for before, numbers in zip(first, known, strict=True) if before != numbers]
    assert all(numbers == GEMM.named(request, SM_90)[faster].numbers for numbers in changed)


def test_a_short_look_sorts_the_candidates_out() -> None:
    request = max(requests(_network("EfficientNet")[0]), key=lambda r: (r.kind != "depthwise", len(tilings(r, SM_90))))
    short: list[float] = []
    long: list[int] = []

    def screen(call: "Callable[[int], object]") -> float:
        call(1)
        short.append(9.0 - len(short))
        return short[-1]

    def timer(_: object) -> float:
        long.append(len(long))
        return 5.0 - len(long)

    choose = Selector(GEMM, SM_90, timer, Pool(), length=2, screen=screen, compile_jobs=lambda _: None)
    assert choose(request) == tilings(request, SM_90)[-3]
    (choice,) = choose.choices.values()
    assert len(short) == len(tilings(request, SM_90)) > len(long) == len(choice.microseconds) == 4
    assert FRAMEWORK in choice.microseconds
