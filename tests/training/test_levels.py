"""The passes of -O1 hold for training: on tensors of the CPU, what they make of a step is what PyTorch does."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from calling import place
from torch import Tensor, nn

import nimblec
from nimblec.optimize.pipeline import Runs, Setting
from nimblec.optimize.rewrites import FUSED_REGIONS
from nimblec.pytorch.flat import written_storages
from nimblec.training.random import Draws

loss = nn.functional.cross_entropy
STEPS = 4
Make = Callable[[nn.Module], torch.optim.Optimizer]
Batch = Callable[[int], tuple[Tensor, Tensor]]


def images() -> nn.Module:
    """Chain convolutions and norms, which passes fold for inference."""
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4), nn.Hardswish(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(36, 5)),
    )


class Tokens(nn.Module):
    """Attention, norms and a GELU; most parameters have equal shapes, whose updates are one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False)
        self.mixed, self.read = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
        self.wide, self.narrow = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score each sequence."""
        x = self.embedding(tokens)
        parts = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.mixed(self.first(x)).chunk(3, -1))
        x = x + nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        scores: Tensor = self.read((x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))).mean(1))
        return scores


def image_batch(seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(6, 1, 6, 6, generator=drawn), torch.randint(0, 5, (6,), generator=drawn)


def token_batch(seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(0, 8, (6, 7), generator=drawn), torch.randint(0, 5, (6,), generator=drawn)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1 / 16, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-2, eps=1e-2)


@pytest.mark.parametrize(
    ("make", "build", "batch"),
    [
        (adam, Tokens, token_batch),
        pytest.param(sgd, images, image_batch, marks=pytest.mark.slow),
        pytest.param(adam, images, image_batch, marks=pytest.mark.slow),
        pytest.param(sgd, Tokens, token_batch, marks=pytest.mark.slow),
    ],
)
def test_a_fused_step_is_pytorchs(make: Make, build: Callable[[], nn.Module], batch: Batch) -> None:
    torch.manual_seed(0)
    model = build()
    eager = copy.deepcopy(model).train()
    optimizer, offset = make(eager), 0
    step = nimblec.training_step(model, loss, make(model), batch(0), clip_norm=1.0)
    calls = {name: place(module, inputs) for name, (module, inputs) in step.items()}
    written = frozenset().union(*map(written_storages, calls.values()))
    assert {tensor.untyped_storage()._cdata for tensor in model.parameters()} <= written
    with torch.no_grad():
        made = {
            name: Runs(replace(call, written_elsewhere=written), Setting(device="cpu"))(*FUSED_REGIONS)
            for name, call in calls.items()
        }
    for seed in range(STEPS):
        x, y = batch(seed)
        with Draws(torch.tensor(torch.initial_seed()), torch.tensor(offset)) as draws:
            value = loss(eager(x), y)
        offset += draws.used
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for (_, tensor), given in zip(made["train"].inputs, (x, y), strict=True):
                tensor.copy_(given)
            found = made["train"].run(lambda _source: None)["loss"]
        torch.testing.assert_close(found, value.detach(), rtol=1e-4, atol=1e-5)
    for name, tensor in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
    with torch.no_grad():
        for (_, tensor), given in zip(made["evaluate"].inputs, (x,), strict=True):
            tensor.copy_(given)
        wanted = eager.eval()(x)
        torch.testing.assert_close(made["evaluate"].run(lambda _source: None), wanted, rtol=1e-3, atol=1e-3)


def test_on_another_device_the_step_has_its_own_graph() -> None:
    """That of a GPU has the framework's calls, and nothing of the CPU; here on a device without memory."""
    model = images()
    module, _ = nimblec.training_step(model, loss, sgd(model), image_batch(0))["train"]
    before = str(module._graphs["cpu"].graph)
    assert "convolution_backward" not in before
    graph = str(module.to("meta")._graphs["meta"].graph)
    assert "convolution_backward" in graph
    assert "device: cpu" in before
    assert "cpu" not in graph
