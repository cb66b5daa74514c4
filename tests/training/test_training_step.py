"""A training step as a plan of the CPU: what PyTorch does, from its state and back to it."""

import copy
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_steps
from safetensors.numpy import load_file
from subprocesses import python
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import nimblec
import nimblert
from nimblec.base.errors import ArgumentError, TraceError, UnsupportedModelError
from nimblec.training.functions import OtherFunctions
from nimblert import Executable

Make = Callable[[nn.Module], torch.optim.Optimizer]
Loss = Callable[[Tensor, Tensor], Tensor]
STEPS = 6
SAMPLE = """
import runpy, sys
runpy.run_path("samples/train_lean.py", run_name="__main__")
"""
loss = functional.cross_entropy


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.GELU(), nn.MaxPool2d(2), nn.AvgPool2d(2, padding=1)),
        *(nn.Flatten(), nn.LayerNorm(32), nn.Linear(32, 10)),
    )


def layers() -> nn.Module:
    """Quickly traced: the operators of a network are not an optimizer's business."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(12, 1, 8, 8, generator=drawn), torch.randint(0, 10, (12,), generator=drawn)


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), 1e-3, eps=1e-3),
    "AdamW": lambda model: torch.optim.AdamW(
        [{"params": [p]} for p in model[0].parameters()] + [{"params": model[1:].parameters(), "lr": 1e-3}], eps=1e-3
    ),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), 1e-3, eps=1e-3, momentum=0.5),
    "RAdam": lambda model: torch.optim.RAdam(model.parameters(), 1e-2, (0.9, 0.9999), eps=1e-3),
}
"""With an eps that is no rounding: what is left of a gradient of zero is a whole step to the others."""


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, clip_norm: float | None = None) -> float:
    x, y = batch(seed)
    optimizer.zero_grad()
    value = loss(model(x), y)
    value.backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    return float(value.detach())


def close(found: Any, wanted: Any) -> bool:
    wanted = np.asarray(wanted)
    return bool(np.allclose(found, wanted, rtol=0, atol=1e-3 * max(float(np.abs(wanted).max(initial=0)), 1e-3)))


Step = Callable[[int], tuple[Any, Callable[[str], Any]]]
"""One step on a batch: the loss, and what gives a tensor of the state after it."""


def assert_trains_as(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    """Check that a step gives eager's losses, parameters and buffers, step after step."""
    for seed in range(STEPS):
        found, state = step(seed)
        assert close(found, eager_step(model, optimizer, seed, **options))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert close(state(f"model.{name}"), tensor.detach()), name


def by_plan(exe: Executable) -> Step:
    def step(seed: int) -> tuple[Any, Callable[[str], Any]]:
        given = dict(zip(inputs(exe), map(np.asarray, batch(seed)), strict=True))
        return exe.run(given, entry="train")["loss"], exe.state.__getitem__

    return step


def by_module(module: nn.Module) -> Step:
    def step(seed: int) -> tuple[Any, Callable[[str], Any]]:
        return module(*batch(seed))["loss"], module.state_dict().__getitem__

    return step


def inputs(exe: Executable) -> list[str]:
    return [tensor.name for tensor in exe.entry("train").programs[0].inputs]


def trains_as_pytorch_does(model: nn.Module, loss: Loss, inputs: Sequence[Tensor], y: Tensor, rtol: float) -> None:
    """Check that three steps of a plan for the CPU train as PyTorch does."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = nimblec.training_step(model, loss, optimizer, (tuple(inputs), y))
    with nimblert.load(nimblec.compile({"train": step["train"]}, target="cpu", streams=1)) as exe:
        for _ in range(3):
            wanted = loss(model(*inputs), y)
            wanted.backward()
            optimizer.step()
            optimizer.zero_grad()
            np.testing.assert_allclose(exe(*inputs, y, entry="train"), wanted.item(), rtol=rtol)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_the_optimizers(name: str) -> None:
    model = layers()
    optimizer = OPTIMIZERS[name](model)
    before = copy.deepcopy(model.state_dict())
    module, _ = nimblec.training_step(model, loss, optimizer, batch(0))["train"]
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert_trains_as(by_module(copy.deepcopy(module)), model, optimizer)
    module, _ = nimblec.training_step(model, loss, optimizer, batch(0))["train"]
    assert_trains_as(by_module(copy.deepcopy(module)), model, optimizer)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the plan of a step whose gradients are clipped."""
    model = network()
    step = nimblec.training_step(model, loss, OPTIMIZERS["SGD"](model), batch(0), clip_norm=0.5)
    path = tmp_path_factory.mktemp("training") / "train.plan"
    nimblec.compile(step, target="cpu", streams=2, plan_cache=None).save(path)
    return path


@pytest.fixture
def trained(plan: Path) -> Iterator[Executable]:
    with nimblert.load(plan) as executable:
        yield executable


def test_a_plan_trains_as_pytorch_does_and_pytorch_goes_on(trained: Executable) -> None:
    model = network()
    optimizer = OPTIMIZERS["SGD"](model)
    assert_trains_as(by_plan(trained), model, optimizer, clip_norm=0.5)
    model.eval()
    x, _ = batch(9)
    with torch.no_grad():
        assert close(trained(x.numpy(), entry="evaluate"), model(x))
    trained.state["optimizer.lr"] = np.float32(0.01)
    other = network()
    other_optimizer = OPTIMIZERS["SGD"](other)
    nimblec.load_state(other, trained.state, other_optimizer)
    assert other_optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert_trains_as(by_plan(trained), other, other_optimizer, clip_norm=0.5)


class Recurrent(nn.Module):
    """An LSTM, and layers whose tensors are small and of one shape: what is computed of them lies where others lay."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps = nn.LSTM(8, 4, batch_first=True)
        self.rest = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Score images by their first two rows."""
        return self.rest(self.steps(x[:, 0, :2])[0][:, -1])


class ImagesOfChannelsLast(nn.Module):
    """A convolution whose weight has gradients in the layout of its images, as those of ConvNeXt have."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Score images of four channels, their last axis."""
        return self.convolution(x.permute(0, 3, 1, 2)).mean((2, 3))


@pytest.mark.parametrize("size", [1, 2, [1, 1], (1, None), (None, 1), (3, 1)])
def test_pooling_is_pytorchs_to_any_size(size: Any) -> None:
    x = torch.randn(2, 3, 6, 6)
    with OtherFunctions(exported=False):
        found = functional.adaptive_avg_pool2d(x, size)
    torch.testing.assert_close(found, functional.adaptive_avg_pool2d(x, size))


@pytest.mark.parametrize("is_image", [True, False], ids=["images", "sequences"])
def test_channels_last_images_are_pooled_to_one_pixel(*, is_image: bool) -> None:
    """For them PyTorch's pooling sets strides, of which ONNX has no gradient."""

    class Pooled(ImagesOfChannelsLast):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.convolution(x.permute(0, 3, 1, 2)))
            if is_image:
                return functional.adaptive_avg_pool2d(input=x, output_size=1).flatten(1)
            return functional.adaptive_avg_pool1d(x.flatten(2), (1,)).flatten(1)

    torch.manual_seed(0)
    trains_as_pytorch_does(Pooled(), loss, [torch.randn(2, 8, 8, 4)], torch.arange(2), rtol=1e-5)


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_gradients_in_another_layout_are_those_of_pytorch(name: str, clip_norm: float | None) -> None:
    torch.manual_seed(0)
    model = ImagesOfChannelsLast()
    eager = copy.deepcopy(model)
    images, labels = torch.randn(2, 8, 8, 4), torch.arange(2)
    optimizer = OPTIMIZERS[name](eager)
    entries = nimblec.training_step(model, loss, OPTIMIZERS[name](model), (images, labels), clip_norm=clip_norm)
    step, _ = entries["train"]
    for _ in range(3):
        optimizer.zero_grad()
        loss(eager(images), labels).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(eager.parameters(), clip_norm)
        optimizer.step()
        step(images, labels)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


def test_a_recurrent_network_trains_by_a_rate_that_is_a_factor(tmp_path: Path) -> None:
    """RMSprop without momentum reads its rate as a number where others multiply by it."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(model.parameters(), 1e-3, eps=1e-3)

    model = Recurrent()
    step = nimblec.training_step(model, loss, make(model), batch(0))
    nimblec.compile({"train": step["train"]}, target="cpu", streams=1, plan_cache=None).save(tmp_path / "m.plan")
    with nimblert.load(tmp_path / "m.plan") as exe:
        model = Recurrent()
        assert_trains_as(by_plan(exe), model, make(model))
        exe.state["optimizer.lr"] = np.float32(0)
        before = exe.state["model.rest.2.bias"].copy()
        exe(*(tensor.numpy() for tensor in batch(0)), entry="train")
        assert np.array_equal(exe.state["model.rest.2.bias"], before)


def test_the_sample_trains_without_pytorch(plan: Path) -> None:
    pytest.importorskip("sklearn")
    done = python(SAMPLE, plan, 3)
    found = re.search(r"accuracy ([0-9.]+)", done)
    assert found is not None
    assert float(found[1]) > 0.8
    state = load_file(plan.with_suffix(".safetensors"))
    model = network()
    nimblec.load_state(model, state)
    assert np.array_equal(model[0].weight.detach().numpy(), state["model.0.weight"])


def test_adam_as_it_comes_on_biases_that_start_from_zero() -> None:
    """In float32 its correction of the second moment is off by more than the check allows."""
    module, given = training_steps.adam()["train"]
    torch.use_deterministic_algorithms(mode=False)
    model = training_steps.images().train()
    optimizer = torch.optim.Adam(model.parameters(), 1 / 128)
    value = loss(model(given[0]), given[1])
    value.backward()
    optimizer.step()
    assert float(module(*given)["loss"]) == pytest.approx(float(value.detach()), rel=1e-5)
    for name, tensor in model.named_buffers():
        assert torch.allclose(tensor, module.get_buffer(f"model.{name}"), atol=1e-5), name


def test_what_another_models_state_is(trained: Executable) -> None:
    with pytest.raises(ArgumentError, match=r"load_state: 'model\.0\.weight': shape \(8, 1, 3, 3\), expected \(4, 3\)"):
        nimblec.load_state(nn.Sequential(nn.Linear(3, 4)), trained.state)
    with pytest.raises(ArgumentError, match=r"load_state: 'model\.0\.weight' is not a parameter or buffer"):
        nimblec.load_state(nn.ReLU(), trained.state)


def test_load_state_fits_optimizer(trained: Executable) -> None:
    trained(*(tensor.numpy() for tensor in batch(0)), entry="train")
    model = network().double()
    optimizer = OPTIMIZERS["SGD"](model)
    state = {**trained.state, "memory of a library 0": np.zeros(4, np.uint8)}
    nimblec.load_state(model, state, optimizer)
    found = [slot for slots in optimizer.state.values() for slot in slots.values()]
    assert found
    assert {tensor.dtype for tensor in found} == {torch.float64}
    others = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    with pytest.raises(ArgumentError, match=r"'optimizer\.0\..*': the optimizer has no such parameter"):
        nimblec.load_state(model, state, others)


class Added(nn.Module):
    """Two parameters of which each has the other's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.linspace(low, 1.0, 6)) for low in (-1.0, 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Their sum, and ``x``."""
        return self.first + self.second + x


@pytest.mark.parametrize("options", [{"clip_norm": 0.5}, {"clip_norm": 0.5, "autocast": "fp16"}])
@pytest.mark.parametrize("reduced", [torch.sum, torch.norm])
def test_gradients_in_one_tensor_are_changed_once(reduced: Callable[[Tensor], Tensor], options: dict[str, Any]) -> None:
    def one(found: Tensor, _target: Tensor) -> Tensor:
        return reduced(found)

    model = Added()
    eager = copy.deepcopy(model)
    given = torch.zeros(6), torch.zeros(6)
    module, _ = nimblec.training_step(model, one, torch.optim.SGD(model.parameters(), 0.5), given, **options)["train"]
    module(*given)
    one(eager(given[0]), given[1]).backward()
    nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
    torch.optim.SGD(eager.parameters(), 0.5).step()
    for name, tensor in eager.named_parameters():
        torch.testing.assert_close(module.get_parameter(f"model.{name}"), tensor, msg=name)


class Reading(nn.Linear):
    """Reads a value of a tensor in Python."""

    def forward(self, x: Tensor) -> Tensor:
        """Choose one of the two by a value."""
        y = super().forward(x)
        return y if float(y.sum()) > 0 else -y


def test_what_cannot_be_a_step_is_a_sentence() -> None:
    x, y = torch.randn(4, 3), torch.randint(0, 2, (4,))
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    for example in (x, (x,), (x, "y"), (x.numpy(), y), ((), y)):
        with pytest.raises(ArgumentError, match=r"example_batch: got \w+, expected \(inputs, targets\)"):
            nimblec.training_step(model, loss, sgd, example)  # type: ignore[arg-type]
    for accumulate in (0, 1.5, True):
        with pytest.raises(ArgumentError, match=f"accumulate: {accumulate}, expected a whole number from 1"):
            nimblec.training_step(model, loss, sgd, (x, y), accumulate=accumulate)  # type: ignore[arg-type]
    for given, sentence in (
        ((loss, loss, sgd), r"model: got function, expected a torch\.nn\.Module"),
        ((model, None, sgd), "loss: got NoneType, expected a function of tensors"),
        ((model, nn.MSELoss, sgd), "loss: got the class MSELoss, expected a function of tensors, or such a module"),
        ((model, loss, torch.optim.SGD), r"optimizer: got type, expected a torch\.optim\.Optimizer"),
    ):
        with pytest.raises(ArgumentError, match=sentence):
            nimblec.training_step(*given, (x, y))  # type: ignore[arg-type]
    for clip_norm in ("a", 0, -1.0, float("nan")):
        with pytest.raises(ArgumentError, match=f"clip_norm: {clip_norm!r}, expected a number above 0, or None"):
            nimblec.training_step(model, loss, sgd, (x, y), clip_norm=clip_norm)  # type: ignore[arg-type]
    for other, found in ((lambda s, _: s, r"a tensor of shape \(4, 2\)"), (lambda s, y: (s, y), "tuple")):
        with pytest.raises(UnsupportedModelError, match=f"the loss returns {found}, expected one number: take its"):
            nimblec.training_step(model, other, sgd, (x, y))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="the loss of call 1 on the example batch is nan, which tells"):
        nimblec.training_step(model, loss, sgd, (torch.full_like(x, torch.nan), y))
    reading = Reading(3, 2)
    with pytest.raises(TraceError, match=r"^training_step: line \d+ of .*: its result decides what runs next"):
        nimblec.training_step(reading, loss, torch.optim.SGD(reading.parameters(), 0.1), (x, y))
    with pytest.raises(UnsupportedModelError, match="Adafactor reads numbers from tensors in its step, and a plan is"):
        nimblec.training_step(model, loss, torch.optim.Adafactor(model.parameters()), (x, y))
    with pytest.raises(UnsupportedModelError, match="the optimizer updates a parameter that the model does not have"):
        nimblec.training_step(nn.Linear(3, 2), loss, sgd, (x, y))
    words = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Flatten())
    with pytest.raises(UnsupportedModelError, match=r"the gradient of '0\.weight' is sparse: make its embedding with"):
        nimblec.training_step(words, loss, torch.optim.SGD(words.parameters(), 0.1), (y[:, None], y * 0))
    keeping = Keeping(3, 2)
    keeping(x)
    with pytest.raises(UnsupportedModelError, match="what it keeps from one to the next has to be a buffer"):
        nimblec.training_step(keeping, loss, torch.optim.SGD(keeping.parameters(), 0.1), (x, y))
    holding = nn.Linear(3, 2)
    holding.lock = threading.Lock()  # of which no copy can be made
    with pytest.raises(TraceError, match="model and optimizer cannot be copied"):
        nimblec.training_step(holding, loss, torch.optim.SGD(holding.parameters(), 0.1), (x, y))
    clipped = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with pytest.raises(ArgumentError, match=r"clip_norm: '0\.bias' has a gradient, which counts in the norm, and the"):
        nimblec.training_step(clipped, loss, torch.optim.SGD(clipped[1].parameters(), 0.1), (x, y), clip_norm=1.0)
    nadam = torch.optim.NAdam(model.parameters(), 0.1)
    with pytest.raises(UnsupportedModelError, match="NAdam keeps something that is not zero before the first step"):
        nimblec.training_step(model, loss, nadam, (x, y))


class Keeping(nn.Linear):
    """Adds its result of the call before."""

    last: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        last, self.last = self.last, super().forward(x)
        return self.last + (last.detach() if isinstance(last, Tensor) else last)


def test_what_a_model_keeps_for_others_to_see_stays_its_own() -> None:
    """Results in attributes: before the step they are copied, after it they are no fake tensors."""
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    for called in (False, True):
        model = Seen(3, 2)
        kept = model(x) if called else None
        training = nimblec.training_step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), (x, y))
        assert model.seen is kept
        with nimblert.load(nimblec.compile(training, target="cpu", plan_cache=None)) as exe:
            expected = nn.functional.mse_loss(model(x), y).item()
            assert exe(x.numpy(), y.numpy(), entry="train") == pytest.approx(expected, rel=1e-5)


class Seen(nn.Linear):
    """Keeps its last result."""

    seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the result."""
        self.seen = super().forward(x)
        return self.seen


class FromZeros(nn.Module):
    """A recurrent layer that begins with zeros, and scores of which a tensor that is no buffer masks one."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = layer(3, 4, batch_first=True)
        self.mask = torch.tensor([1.0, 0.0, 1.0, 1.0])

    def forward(self, x: Tensor) -> Tensor:
        """Score rows of three numbers."""
        scores: Tensor = self.layer(x[:, None], torch.zeros(1, len(x), 4))[0][:, 0]
        return scores * self.mask


class Attended(nn.Module):
    """Attention of tokens to one another, whose keys have a bias that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.scores = nn.Embedding(7, 8), nn.Linear(8, 7)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Seven scores of each row."""
        x = self.tokens(tokens)
        scores: Tensor = self.scores((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))
        return scores


def test_a_bias_of_which_a_part_is_rounding_alone() -> None:
    """Adam divides the gradient of the keys' bias by itself: ONNX Runtime's is rounded otherwise."""
    torch.manual_seed(3)
    model = Attended()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    tokens, y = torch.randint(0, 7, (5, 3)), torch.arange(5)
    step = nimblec.training_step(model, loss, optimizer, (tokens, y))
    with nimblert.load(nimblec.compile({"train": step["train"]}, target="cpu", streams=1)) as exe:
        wanted = loss(model(tokens), y).item()
        np.testing.assert_allclose(exe(tokens.numpy(), y.numpy(), entry="train"), wanted, rtol=1e-5)


WEIGHT = torch.tensor([0.1, 0.2, 0.3, 0.4])
LOSSES: dict[str, Loss] = {
    "a buffer": nn.CrossEntropyLoss(weight=WEIGHT),
    "cast": lambda scores, y: functional.cross_entropy(scores, y, weight=WEIGHT.to(scores.dtype)),
    "made": lambda scores, y: functional.cross_entropy(scores, y, weight=torch.tensor([0.1, 0.2, 0.3, 0.4])),
    "held": lambda scores, y: functional.cross_entropy(scores, y, weight=WEIGHT),
}


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("made", nn.RNN),
        ("held", nn.RNN),
        pytest.param("cast", nn.RNN, marks=pytest.mark.slow),
        pytest.param("a buffer", nn.GRU, marks=pytest.mark.slow),
    ],
)
def test_tensors_that_are_no_part_of_the_model(name: str, layer: type[nn.RNNBase]) -> None:
    """They are in float32, and the step is checked in float64."""
    torch.manual_seed(0)
    trains_as_pytorch_does(FromZeros(layer), LOSSES[name], [torch.randn(5, 3)], torch.arange(5) % 4, rtol=1e-5)


class Bytes(nn.Module):
    """Scores of an image of bytes, and of what tokens it is, through casts and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 3)
        self.table = torch.linspace(-1.0, 1.0, 15).reshape(5, 3)

    def forward(self, image: Tensor, token: Tensor) -> Tensor:
        """Map images (n x 3 x 4) and tokens (n)."""
        known = functional.one_hot(token, 5).to(torch.float32) @ self.table
        scores: Tensor = self.linear(image.flatten(1).float() / 255) + known
        scores += torch.ones(3, dtype=torch.float32)
        return scores


class Rounding(torch.autograd.Function):
    """A product in float32, whose backward pass casts as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product."""
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Those of both."""
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        return (gradient @ weight.float().T).to(x.dtype), (x.float().T @ gradient).to(weight.dtype)


class Casting(nn.Module):
    """Casts that work in float64 as they are, but not if they become casts to float64."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.weight, self.how = nn.Linear(4, 3), nn.Parameter(torch.eye(3)), how

    def __setattr__(self, name: str, value: Any) -> None:
        assert name != "forward"
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows of four numbers."""
        scores: Tensor = self.linear(x)
        if self.how == "checkpointed":
            again: Tensor = checkpoint(lambda t: functional.gelu(t.float() * 2), scores, use_reentrant=False)
            return again
        if self.how == "a function":
            product: Tensor = Rounding.apply(scores, self.weight)
            return product
        assert scores.float().dtype == torch.float32
        return scores


def test_batches_of_uint16() -> None:
    torch.manual_seed(0)
    model, y = nn.Linear(4, 3), torch.tensor([0, 1, 1, 2, 1], dtype=torch.uint16)
    optimizer, batch = torch.optim.SGD(model.parameters()), (torch.ones(5, 4), y)
    step = nimblec.training_step(model, lambda s, t: functional.cross_entropy(s, t.long()), optimizer, batch)
    assert step["train"][1][1].equal(y)


def test_what_fails_in_float64_is_a_sentence() -> None:
    model = nn.Linear(3, 4)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TraceError, match=r"fail on the example batch, in float64, .*: line \d+ of .* raised .* Long"):
        nimblec.training_step(
            model, lambda s, y: functional.cross_entropy(s, y.int()), sgd, (torch.randn(5, 3), torch.arange(5) % 4)
        )


class Causal(nn.Module):
    """A decoder, and an encoder before it, whose tokens see those before them."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, batch_first=True, dropout=0.0)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5))

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (n x 5 x 8)."""
        result: Tensor = self.transformer(x, x, src_mask=self.mask, tgt_mask=self.mask)
        return result


ROWS, CLASSES = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.arange(5) % 3
IMAGES = torch.randint(0, 256, (5, 3, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
TRAINED: dict[str, Callable[[], tuple[nn.Module, Loss, Sequence[Tensor], Tensor]]] = {
    "casts in float64": lambda: (Bytes(), loss, (IMAGES, torch.arange(5)), CLASSES),
    "casts of a checkpoint": lambda: (Casting("checkpointed"), loss, [ROWS], CLASSES),
    "casts of a function": lambda: (Casting("a function"), loss, [ROWS], CLASSES),
    "casts known": lambda: (Casting("known"), loss, [ROWS], CLASSES),
    "causal mask": lambda: (Causal(), functional.mse_loss, [torch.randn(2, 5, 8)], torch.randn(2, 5, 8)),
    "ignored -100": lambda: (nn.Linear(4, 4), ignoring(-100), [ROWS], torch.tensor([0, -100, 2, 1, 2])),
    "ignored 255": lambda: (nn.Linear(4, 4), ignoring(255), [ROWS], torch.tensor([0, 255, 2, 1, 2])),
    # PyTorch's fused SGD for the CPU updates no whole vector of halves.
    "float16": lambda: (nn.Linear(4, 3).half(), functional.mse_loss, [ROWS.half()], torch.randn(5, 3).half()),
}


def ignoring(index: int) -> nn.CrossEntropyLoss:
    return nn.CrossEntropyLoss(ignore_index=index, label_smoothing=0.1)


@pytest.mark.parametrize("name", TRAINED)
def test_step_trains_as_pytorch(name: str) -> None:
    torch.manual_seed(0)
    trains_as_pytorch_does(*TRAINED[name](), rtol={"float16": 2e-3, "causal mask": 1e-4}.get(name, 1e-5))


@pytest.mark.parametrize("held", ["weight", "running_mean"])
def test_a_loss_that_reads_the_model_past_its_result(held: str) -> None:
    """As a constant, a penalty of weights would be no part of the gradient."""
    model = nn.BatchNorm1d(3)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UnsupportedModelError, match=r"reads a parameter or buffer of shape \(3,\)"):
        nimblec.training_step(
            model,
            lambda scores, y: functional.cross_entropy(scores, y) + getattr(model, held).square().sum(),
            sgd,
            (torch.randn(5, 3), torch.arange(5) % 3),
        )


class Attention(nn.Module):
    """Rows of images as tokens, by the fused attention of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.scores = nn.Linear(8, 24), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Ten scores of each image."""
        q, k, v = self.project(x).chunk(3, dim=-1)
        scores: Tensor = self.scores(functional.scaled_dot_product_attention(q, k, v).flatten(1))
        return scores


def test_fused_attention_trains_on_the_cpu() -> None:
    torch.manual_seed(0)
    model = Attention()
    optimizer = OPTIMIZERS["SGD"](model)
    step = nimblec.training_step(model, loss, optimizer, batch(0))
    with nimblert.load(nimblec.compile({"train": step["train"]}, target="cpu", streams=1, plan_cache=None)) as exe:
        assert_trains_as(by_plan(exe), model, optimizer)
