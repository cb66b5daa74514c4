"""Small models for the tests that need a GPU: each builder returns (module, example_inputs).

The capture process imports them by name; with torch's seed set, it builds the same weights.
"""

import os
import signal
from typing import Any
from unittest.mock import patch

import torch
from calling import Calling
from torch import nn
from torch.nn import functional

Built = tuple[Any, ...]


class TransformerBlock(nn.Module):
    """Pre-norm causal self-attention and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, width) to the same."""
        batch, tokens, width = x.shape
        y = self.norm1(x)
        split = (batch, tokens, self.heads, width // self.heads)
        query, key, value = (project(y).view(split).transpose(1, 2) for project in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def transformer() -> Built:
    """Build a transformer in bfloat16 with two heads of 64, for 64 tokens."""
    return TransformerBlock(128, 2).eval().bfloat16(), (torch.randn(1, 64, 128).bfloat16(),)


class Perceptron(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, 32) to (n, 8)."""
        return self.down(torch.tanh(self.up(x)))


def perceptron() -> Built:
    """Build a perceptron, and four rows."""
    return Perceptron().eval(), (torch.randn(4, 32),)


def pooled() -> Built:
    """Build a norm of pooled images, whose 65 * 7 * 7 elements are no multiple of a cache line."""
    layers = nn.Conv2d(4, 65, 1), nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.LayerNorm(65 * 7 * 7)
    return nn.Sequential(*layers).eval(), (torch.randn(3, 4, 8, 8),)


class Tied(nn.Module):
    """A language model's ends: the embedding's weight is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.output = nn.Linear(32, 50, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        """Map (2, 8) int64 to outputs of several types, some of them nested."""
        logits = self.output(self.embedding(ids))
        return {"logits": logits, "found": {"token": logits.argmax(-1), "positive": logits > 0}, "mean": logits.mean()}


def tied() -> Built:
    """Build a model with tied weights, and ids from 20 to 35."""
    return Tied().eval(), (torch.arange(20, 36).view(2, 8),)


class Stateful(nn.Module):
    """Counts its calls, and keeps running statistics."""

    calls: torch.Tensor
    mean: torch.Tensor
    variance: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map (n, 4, h, w) to the same, and the number of calls so far."""
        self.calls.add_(1)
        self.mean.mul_(0.9).add_(x.mean((0, 2, 3)), alpha=0.1)
        self.variance.lerp_(x.var((0, 2, 3)), 0.1)
        centred = x - self.mean.view(1, 4, 1, 1)
        return centred * (self.scale / self.variance).view(1, 4, 1, 1) * self.calls, self.calls.clone()


def stateful() -> Built:
    """Build a model with state, and two small images."""
    return Stateful().eval(), (torch.randn(2, 4, 8, 8),)


class Secluded(Stateful):
    """Writes into its input as well, and disables torch.compile."""

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the parent with twice the images."""
        return super().forward(x.mul_(2))


def secluded() -> Built:
    """Build a model that disables torch.compile, and two small images."""
    return Secluded().eval(), (torch.randn(2, 4, 8, 8),)


class Aliases(nn.Module):
    """Works in place on its input, and returns aliases."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Map (6, 8) to the input, a view of it, one result twice, that transposed, and a weight."""
        x.mul_(2)
        y = torch.relu(x) * self.scale
        return x, x[1:, ::2], y, y, y.t(), self.scale


def aliases() -> Built:
    """Build a model whose outputs alias, and a matrix."""
    return Aliases().eval(), (torch.randn(6, 8),)


class Layouts(nn.Module):
    """An image with its channels last, and keyword arguments, one of them a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1)

    def forward(
        self, image: torch.Tensor, *, scale: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map (n, 8, h, w) to (n, 16, h, w), channels last as well, and to (n, w, h, 16) in half precision."""
        gain, shift = pair
        y = self.conv(image) * scale * gain + shift
        return y, y.half().transpose(1, 3)


def layouts() -> Built:
    """Build a model of several layouts, and two images of 12 by 10 pixels."""
    module: Any = Layouts().eval()  # torch's annotations lack memory_format
    module = module.to(memory_format=torch.channels_last)
    image = torch.randn(2, 8, 12, 10).to(memory_format=torch.channels_last)
    pair = (torch.randn(16, 1, 1), torch.randn(1, 16, 1, 1))
    return module, (image,), {"scale": torch.randn(()), "pair": pair}


def lstm() -> Built:
    """Build an LSTM of two layers in half precision, and 20 steps."""
    return nn.LSTM(512, 512, 2, batch_first=True).eval().half(), (torch.randn(1, 20, 512).half(),)


class PastTheDispatcher(nn.Module):
    """Triton kernels on both sides of an ATen call that has nothing to do with their results."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n,) to (n,)."""
        from triton_block import add, gelu  # needs Triton

        y = gelu(x)
        z = torch.cos(x)
        return add(y, z)


def past_the_dispatcher() -> Built:
    """Build a model with Triton kernels that bypass the dispatcher, and a vector."""
    return PastTheDispatcher().eval(), (torch.randn(3000),)


# --- what cannot be compiled


class Refused(nn.Module):
    """A linear layer, then a head that no plan can hold."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (3, 4) to the head's result."""
        return self.head(self.body(x))


def _refused(head: nn.Module) -> Built:
    return Refused(head), (torch.randn(3, 4),)


def item() -> Built:
    """Build a model whose host reads a number of the device."""
    return _refused(Calling(lambda x: x * x.sum().item()))


def nonzero() -> Built:
    """Build a model whose result has a size that depends on the data."""
    return _refused(Calling(torch.nonzero))


def mask() -> Built:
    """Build a model whose mask makes the size of its result depend on the data."""
    return _refused(Calling(lambda x: x[x > 0]))


class LazyTable(nn.Module):
    """Makes a table in its first run, as rotary embeddings do, and keeps its last result."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (4, 8) to the same."""
        if self.table is None:
            self.table = torch.linspace(0, 1, 8, device=x.device).cos()
        self.last = x * self.table
        return self.last + 1


def lazy_table() -> Built:
    """Build a model that makes a table in its first run, and rows to scale."""
    return LazyTable().eval(), (torch.randn(4, 8),)


class _LazyCounter(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "calls"):
            self.calls = torch.zeros(1, device=x.device)
        return x + self.calls.add_(1)


def lazy_counter() -> Built:
    """State that the first run creates."""
    return _refused(_LazyCounter())


class _Assigning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.zeros(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = x + self.cache.to(x.device)
        return self.cache * 2


def assigning() -> Built:
    """State in an attribute, which each run replaces."""
    return _refused(_Assigning())


def breaking() -> Built:
    """Build a model on which the optimiser fails, which the builder makes sure of."""
    from nimblec.optimize.pipeline import Pipeline

    def optimized(*_: object) -> None:
        raise IndexError("vector::_M_range_check")

    patch.object(Pipeline, "__call__", optimized).start()
    return perceptron()


class AsksForCapture(nn.Module):
    """Takes a shortcut unless it is being captured, as transformers do with attention masks.

    The results are as good, but differ in bits. With ``looks``, the shortcut depends on a value: only the other path
    can be captured.
    """

    def __init__(self, *, looks: bool) -> None:
        super().__init__()
        self.looks = looks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (4, 8) to the same."""
        if not torch.cuda.is_current_stream_capturing() and (not self.looks or bool((x > 100).all())):
            return x * 3
        return x / 7 * 21


def shortcut() -> Built:
    """Build a model whose shortcut eager takes always."""
    return AsksForCapture(looks=False).eval(), (torch.randn(4, 8),)


def shortcut_by_value() -> Built:
    """Build a model whose shortcut eager takes for large inputs."""
    return AsksForCapture(looks=True).eval(), (torch.randn(4, 8),)


class _Concatenating(nn.Module):
    """A dense block of two layers, then three concatenated branches, whose first layers have the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.first = nn.Conv2d(16, 16, 3, padding=1)
        self.second = nn.Conv2d(32, 16, 3, padding=1)
        self.branches = nn.ModuleList(nn.Conv2d(48, n, 1) for n in (8, 24, 16))
        self.ends = nn.ModuleList(nn.Conv2d(n, 16, k, padding=k // 2) for n, k in ((24, 3), (16, 5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.relu(self.stem(x))]
        parts.append(self.first(parts[0]))
        parts.append(self.second(torch.cat(parts, 1)))
        x = torch.relu(torch.cat(parts, 1))
        first, *others = (torch.relu(branch(x)) for branch in self.branches)
        ends = [torch.relu(end(other)) for end, other in zip(self.ends, others, strict=True)]
        return torch.cat([first, *ends], 1).mean((2, 3))


def concatenating() -> Built:
    """Build a model that writes parts of channels one by one, in half precision."""
    module: Any = _Concatenating().eval().half()  # as in `layouts`
    return module.to(memory_format=torch.channels_last), (torch.randn(1, 3, 24, 24).half(),)


def host_constant() -> Built:
    """Build a model that copies from host memory at each run."""
    return _refused(Calling(lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)))


def to_host() -> Built:
    """Build a model that copies to host memory in the middle."""
    return _refused(Calling(lambda x: x.cpu() + 1))


def dropout() -> Built:
    """Build a model that draws random numbers, in training mode."""
    return _refused(nn.Dropout(0.5).train())


class _Raising(nn.Module):
    def forward(self, _x: torch.Tensor) -> torch.Tensor:
        raise ValueError("this model only ever fails")


def raising() -> Built:
    """Build a model with a mistake."""
    return _refused(_Raising())


class _Killed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return x


def killed() -> Built:
    """Build a model whose process is killed half way, as when memory runs out."""
    return _refused(_Killed())
