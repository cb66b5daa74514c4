"""Training steps whose bits are compared with eager's.

NAME_deterministic uses PyTorch's deterministic algorithms, NAME_default does not. The names are those of `NETWORKS`:
the paper's networks on batches of 32 (SGD with momentum), a small GPT (4 layers of 256, no dropout) and BERT-small (4
layers of 512, with dropout) on 8 texts of 64 tokens (AdamW), and two small layers for tests. Weights and data are
random.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import nimblec
from bench.models import training_networks

_DETERMINISTIC, _DEFAULT = "_deterministic", "_default"
_RATES = {torch.optim.SGD: 2.0**-6, torch.optim.AdamW: 2.0**-11}
"""Learning rates, exact in float32, the dtype in a plan."""

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Attention and a feed-forward network: pre-norm, fused and causal as in GPT-2, or post-norm as in BERT."""

    def __init__(self, width: int, heads: int, dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inside, self.outside = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, tokens, width) to the same."""
        for norm, part in zip(self.norms, (self._attended, self._product), strict=True):
            x = x + part(norm(x)) if self.causal else norm(x + part(x))
        return x

    def _attended(self, x: Tensor) -> Tensor:
        count, tokens, width = x.shape
        split = self.inside(x).view(count, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        if self.causal:
            found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(2, 3) * (width // self.heads) ** -0.5
            found = self.dropout(scores.softmax(-1)) @ value
        result: Tensor = self.dropout(self.outside(found.transpose(1, 2).reshape(count, tokens, width)))
        return result

    def _product(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.narrow(functional.gelu(self.wide(x))))
        return result


class Transformer(nn.Module):
    """A transformer that scores each token (n, tokens, classes) if ``causal``, else the text (n, classes)."""

    def __init__(
        self, *, vocabulary: int, tokens: int, width: int, heads: int, dropout: float, classes: int, causal: bool
    ) -> None:
        super().__init__()
        self.causal = causal
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout, causal=causal) for _ in range(4)))
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score (n, tokens) token ids."""
        x = self.norm(self.blocks(self.dropout(self.words(tokens) + self.positions)))
        result: Tensor = self.scores(x if self.causal else x[:, 0])
        return result


def loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy over the last axis."""
    return functional.cross_entropy(scores.flatten(0, -2), labels.flatten())


def _images(network: str, count: int) -> tuple[nn.Module, Callable[[torch.Generator], Batch]]:
    def batch(drawn: torch.Generator) -> Batch:
        labels = torch.randint(training_networks.CLASSES, (count,), generator=drawn)
        return torch.randn(count, 3, 32, 32, generator=drawn), labels

    return training_networks.parts(network, count)[0], batch


def _gpt() -> tuple[nn.Module, Callable[[torch.Generator], Batch]]:
    def batch(drawn: torch.Generator) -> Batch:
        text = torch.randint(1000, (8, 65), generator=drawn)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    sizes = {"vocabulary": 1000, "tokens": 64, "width": 256, "heads": 4, "classes": 1000}
    return Transformer(**sizes, dropout=0.0, causal=True), batch


def _bert() -> tuple[nn.Module, Callable[[torch.Generator], Batch]]:
    def batch(drawn: torch.Generator) -> Batch:
        return torch.randint(30522, (8, 64), generator=drawn), torch.randint(10, (8,), generator=drawn)

    sizes = {"vocabulary": 30522, "tokens": 64, "width": 512, "heads": 8, "classes": 10}
    return Transformer(**sizes, dropout=0.1, causal=False), batch


def _small() -> tuple[nn.Module, Callable[[torch.Generator], Batch]]:
    def batch(drawn: torch.Generator) -> Batch:
        return torch.randn(4, 6, generator=drawn), torch.randint(3, (4,), generator=drawn)

    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)), batch


NETWORKS: dict[str, tuple[Callable[[], tuple[nn.Module, Callable[[torch.Generator], Batch]]], Any]] = {
    **{
        name: (partial(_images, name, 32), torch.optim.SGD) for name in ("efficientnet_b0", "resnet50", "mobilenet_v2")
    },
    "bert": (_bert, torch.optim.AdamW),
    "gpt": (_gpt, torch.optim.AdamW),
    "small": (_small, torch.optim.AdamW),
}


def make_deterministic() -> None:
    """Make steps deterministic in this process."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.deterministic = True


def parts(network: str) -> tuple[nn.Module, Callable[[int], Batch]]:
    """Return the model on the CPU, the same at each call, and a function from numbers to batches."""
    torch.manual_seed(0)
    model, batch = NETWORKS[network][0]()
    return model.train(), lambda number: batch(torch.Generator().manual_seed(number))


def optimizer(network: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with a plan's kernels: other SGD rounds differently, other AdamW reads from the host."""
    made = NETWORKS[network][1]
    parameters, rate = list(model.parameters()), _RATES[made]
    if made is torch.optim.SGD:
        return torch.optim.SGD(parameters, rate, momentum=0.9, fused=True)
    return torch.optim.AdamW(parameters, rate, capturable=parameters[0].is_cuda)


def step(network: str, *, deterministic: bool) -> Any:
    """Return the entries of a plan for a training step."""
    if deterministic:
        make_deterministic()
    model, batch = parts(network)
    return nimblec.training_step(model, loss, optimizer(network, model), batch(0))


def __getattr__(name: str) -> Callable[[], Any]:
    """Return the step of this name, as a callable without arguments."""
    for suffix in (_DETERMINISTIC, _DEFAULT):
        if name.endswith(suffix) and name.removesuffix(suffix) in NETWORKS:
            return partial(step, name.removesuffix(suffix), deterministic=suffix == _DETERMINISTIC)
    raise AttributeError(name)
