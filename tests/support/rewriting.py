"""Graphs for the tests of rewrites, and checks of a rewrite's invariants."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from families import bert, inception, mobilenet, resnet, unet
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from nimblec.graph.definitions import Interpreter
from nimblec.graph.recorder import Recorder
from nimblec.graph.rewriter import Rewriter, copied
from nimblec.kernels.gpu import SM_90
from nimblec.optimize.o2 import KERNELS, first
from nimblec.optimize.pipeline import Setting
from nimblec.optimize.rewrites import REGIONS, REWRITES
from nimblec.pytorch.aten_graph import trace


def random_half(*shape: int, seed: int = 1) -> Tensor:
    """Draw numbers in half precision, the same for each shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def record(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """Record the flat graph of a function of tensors; real tensors that it uses become constants."""
    recorder = Recorder(torch.device("cpu"))
    with recorder:
        fakes = [recorder.placeholder(f"input_{i}", t.dtype, t.shape) for i, t in enumerate(inputs)]
        result = function(*fakes)
        recorder.output(result if isinstance(result, (tuple, list)) else (result,))
    recorder.graph.eliminate_dead_code()
    return fx.GraphModule(recorder.constants, recorder.graph)


def rewritten(module: fx.GraphModule, *passes: Callable[[fx.GraphModule], None]) -> fx.GraphModule:
    """Return a copy of ``module`` after these passes, each of which must leave it well formed."""
    result = fx.GraphModule(module, module.graph.__deepcopy__())
    for rewrite in passes:
        rewrite(result)
        check(result)
    return result


def check(module: fx.GraphModule, *inputs: Tensor) -> None:
    """Check that every value has its declared dtype and shape, and its strides once they are inferred again.

    By default the inputs are zeros.
    """
    module.graph.lint()
    values = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    inputs = inputs or tuple(torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).zero_() for v in values)
    _Checker(module, strides=False).run(*inputs)
    inferred = fx.GraphModule(module, module.graph.__deepcopy__())
    Rewriter(inferred).propagate()
    _Checker(inferred, strides=True).run(*inputs)


class _Checker(Interpreter):
    def __init__(self, module: fx.GraphModule, *, strides: bool) -> None:
        super().__init__(module)
        self._strides = strides

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "output" and isinstance(result, Tensor):
            said = n.meta["val"]
            assert (result.dtype, result.shape) == (said.dtype, said.shape), n.format_node()
            assert not self._strides or _order(result) == _order(said), n.format_node()
        return result


def run(module: fx.GraphModule, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Run a graph; the fused cuDNN calls by their definitions."""
    with torch.no_grad():
        outputs: tuple[Tensor, ...] = Interpreter(module).run(*inputs)
        return outputs


def optimize(module: fx.GraphModule, *, device: str, dtype: torch.dtype | None = None) -> fx.GraphModule:
    """Return a copy of a graph after all rewrites for ``device`` ("cuda" or "cpu"), in the half precision ``dtype``."""
    return REWRITES(module, Setting(device=device, dtype=dtype))


def compile_regions(module: fx.GraphModule, *, at_any_cost: bool = True) -> fx.GraphModule:
    """Return a copy in which each region is one call; without ``at_any_cost``, only if one of them saves a launch."""
    return REGIONS(module, Setting(at_any_cost=at_any_cost))


def with_triton_kernels(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of an optimised graph with Triton kernels wherever -O2 applies them."""
    return KERNELS(module, Setting(use=first(SM_90)))


def assert_same(before: fx.GraphModule, after: fx.GraphModule, *inputs: Tensor, rtol: float | None = None) -> None:
    """Check that results are equal up to rounding, relative to the largest value of each output."""
    expected, actual = run(before, *inputs), run(after, *inputs)
    assert len(expected) == len(actual) > 0
    for wanted, got in zip(expected, actual, strict=True):
        assert (wanted.dtype, wanted.shape, _order(wanted)) == (got.dtype, got.shape, _order(got))
        assert wanted.isfinite().all()
        if not wanted.dtype.is_floating_point:
            assert torch.equal(wanted, got)
            continue
        allowed = rtol if rtol is not None else 64 * torch.finfo(wanted.dtype).eps
        assert float((wanted - got).abs().max()) <= allowed * max(float(wanted.abs().max()), 1e-30)


def checked(
    function: Callable[..., Any],
    inputs: Tensor | Sequence[Tensor],
    *passes: Callable[[fx.GraphModule], None],
    rtol: float | None = None,
) -> fx.GraphModule:
    """Return the graph of a function after these passes, and check that it gives the function's results."""
    inputs = [inputs] if isinstance(inputs, Tensor) else inputs
    before = record(function, *inputs)
    after = rewritten(before, *passes)
    assert_same(before, after, *inputs, rtol=rtol)
    return after


def _order(tensor: Tensor) -> list[int]:
    """Return the strides of axes with more than one element."""
    return [stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if length != 1]


def counts(module: fx.GraphModule) -> Counter[str]:
    """Count the calls of each overload, by name without namespace and overload."""
    return Counter(
        node.target._schema.name.partition("::")[2]
        for node in module.graph.nodes
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    )


def randomize(module: nn.Module) -> nn.Module:
    """Set running statistics and affine parameters to random values."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            assert part.running_mean is not None
            assert part.running_var is not None
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
            nn.init.normal_(part.weight, 1, 0.3)
            nn.init.normal_(part.bias)
    return module


def family(name: str, dtype: torch.dtype, seed: int = 0) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    """Return the graph of a small model, to change, and random inputs."""
    module, inputs = _traced(name, dtype, seed)
    return copied(module), inputs


def eager(name: str, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Return PyTorch's results for the same inputs."""
    module, inputs = _built(name, dtype, seed)
    with torch.no_grad():
        return tree_leaves(module(*inputs))


@cache
def _traced(name: str, dtype: torch.dtype, seed: int) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    module, inputs = _built(name, dtype, seed)
    return trace(module, inputs).module, inputs


def _built(name: str, dtype: torch.dtype, seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(seed)
    module, args = NETWORKS[name]()
    return randomize(module.eval()).to(dtype), tuple(t.to(dtype) if t.is_floating_point() else t for t in args)


class DenseNet(nn.Module):
    """DenseNet-like (Huang et al. 2017): norm before convolution, every layer reads all before it."""

    def __init__(self, growth: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2 * growth, 3, 2, 1)
        widths = [growth * n for n in range(2, 2 + layers)]
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(w),
                nn.ReLU(),
                nn.Conv2d(w, 4 * growth, 1, bias=False),
                nn.BatchNorm2d(4 * growth),
                nn.ReLU(),
                nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
            )
            for w in widths
        )
        self.norm = nn.BatchNorm2d(widths[-1] + growth)
        self.head = nn.Linear(widths[-1] + growth, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to logits."""
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        y = torch.relu(self.norm(torch.cat(features, 1)))
        return self.head(y.mean((2, 3)))

    @staticmethod
    def small() -> tuple[nn.Module, Sequence[Tensor]]:
        """Build four narrow layers and an image of 16 pixels."""
        return DenseNet(growth=8, layers=4).eval(), (torch.randn(1, 3, 16, 16),)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Sequence[Tensor]]]] = {
    "resnet": lambda: (resnet.ResNet(width=16, classes=10, stages=(1, 2)), (torch.randn(1, 3, 32, 32),)),
    "mobilenet": lambda: (mobilenet.MobileNet(classes=10, depth=(1, 2, 0, 0, 0, 0, 0)), (torch.randn(1, 3, 32, 32),)),
    "inception": lambda: (inception.Inception(width=16, blocks=2, classes=10), (torch.randn(1, 3, 32, 32),)),
    "bert": bert.small,
    "unet": unet.small,
    "densenet": DenseNet.small,
}
"""The families with fewer blocks of the same kinds, of which rewrites make the same kinds of calls."""
