"""The entries of a plan that trains: "train", which updates the parameters, and "evaluate", which reads them."""

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import Interpreter
from torch.fx.traceback import preserve_node_meta
from torch.optim import Optimizer

from nimblec.base.errors import ArgumentError
from nimblec.base.places import Phase
from nimblec.pytorch.generator import GeneratorState, StepGenerator
from nimblec.pytorch.objects import refuse_script_within
from nimblec.pytorch.source_tracker import within
from nimblec.pytorch.state import Writing
from nimblec.training.check import refuse_another_step
from nimblec.training.ignored import without
from nimblec.training.state import (
    MODEL,
    OFFSET,
    OPTIMIZER,
    SEED,
    StepDefinition,
    TrainingState,
    autocasting,
    group_names,
    initial_state,
    trained,
)
from nimblec.training.step import take_step, trace

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Train(Writing):
    """One step: writes the parameters and buffers of ``model`` and the state of the optimizer, and returns the loss.

    It runs as in PyTorch, and is exported as the graph. ``optimizer`` holds its state and the learning rate
    ("optimizer.lr") as buffers; all else that the step keeps is in buffers, too.
    """

    def __init__(self, recipe: StepDefinition, state: TrainingState, batch: Sequence[Tensor]) -> None:
        super().__init__()
        self.training = False  # the effect of the mode is in the graph
        self.model, self.autocast = recipe.model, recipe.autocast
        self.optimizer = nn.Module()
        for name, tensor in {**state.slots, **state.rates}.items():
            _register(self.optimizer, name, tensor)
        for name, tensor in state.own.items():
            _register(self, name, tensor)
        self._recipe = recipe
        self._state = state
        self._batch = [tensor.to("meta") for tensor in batch]
        self.settable = (*(f"{OPTIMIZER}.{rate}" for rate in state.rates), *({SEED} & state.own.keys()))
        self.writes = self.settable
        self._graphs: dict[str, Any] = {}  # not submodules: they take the same tensors as inputs
        self._trace()

    def forward(self, *batch: Tensor) -> dict[str, Tensor]:
        """Return the loss of a batch, before the step."""
        state, count = self._found(), self._recipe.inputs
        if not torch.compiler.is_exporting():
            loss, _ = take_step(self._recipe, state, state, batch[:count], batch[count:], self.draws)
            return {"loss": loss}
        tensors = [tensor.detach() for tensor in state.tensors()]  # no_grad would lose the metadata of nodes
        with preserve_node_meta():
            loss, *after = Interpreter(self._graphs[batch[0].device.type]).run(*tensors, *batch)
            with within(Phase.UPDATE):
                written = {*self.writes}
                for name, tensor, value in zip(self._names(), tensors, after, strict=True):
                    if name in written:
                        tensor.copy_(value)
        return {"loss": loss}

    def let_torch_draw(self) -> None:
        """See `Writing`. An exported graph computes its random numbers all the same."""
        if SEED in self._state.own:
            self.draws = StepGenerator(lambda: GeneratorState(seed=_find(self, SEED), offset=_find(self, OFFSET)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move, and trace again for a new device, whose graph has calls and constants of its own."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._trace()
        return self

    def _trace(self) -> None:
        state, count = self._found(), self._recipe.inputs
        device = state.tensors()[0].device
        if device.type not in self._graphs:
            batch = [torch.zeros_like(tensor, device=device) for tensor in self._batch]
            parts = batch[:count], batch[count:]
            step = trace(self._recipe, state, *parts, exported=device.type == "cpu")
            self._graphs[device.type] = step.graph
            names = zip(self._names(), step.changes, strict=True)
            self.writes = tuple(name for name, changes in names if changes or name in self.writes)

    def _found(self) -> TrainingState:
        """Return the state, as a call finds it."""
        return self._state.with_tensors(self._tensors())

    def _tensors(self) -> list[Tensor]:
        """Return all of the state, as a call finds it."""
        return [_find(self, name) for name in self._names()]

    def _names(self) -> list[str]:
        """Return the names of all of the state in this module."""
        state = self._state
        model = [f"{MODEL}.{name}" for name in (*state.parameters, *state.buffers)]
        return [*model, *(f"{OPTIMIZER}.{name}" for name in (*state.slots, *state.rates)), *state.own]


class Evaluate(nn.Module):
    """The model in evaluation mode, whatever mode it is in, under torch.autocast to ``autocast`` if that is a type."""

    def __init__(self, model: nn.Module, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.training = False
        self.model = model
        self._autocast = autocast

    def forward(self, *inputs: Tensor) -> Any:
        """Return the result of the model in evaluation mode."""
        was_training = [module for module in self.model.modules() if module.training]
        for module in was_training:
            module.training = False
        try:
            with autocasting(self._autocast, inputs[0].device):
                return self.model(*inputs)
        finally:
            for module in was_training:
                module.training = True


def entries(
    model: nn.Module,
    loss: Callable[..., Tensor],
    optimizer: Optimizer,
    example_batch: tuple[Any, Any],
    *,
    clip_norm: float | None = None,
    accumulate: int = 1,
    autocast: torch.dtype | str | None = None,
) -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """See `nimblec.training_step`."""
    _check_kind("model", model, nn.Module)
    refuse_script_within(model)
    _check_kind("optimizer", optimizer, Optimizer)
    _check_loss(loss)
    inputs, targets = _batch(example_batch)
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ArgumentError(f"training_step: accumulate: {accumulate!r}, expected a whole number from 1")
    if clip_norm is not None and not (_is_number(clip_norm) and clip_norm > 0):
        raise ArgumentError(f"training_step: clip_norm: {clip_norm!r}, expected a number above 0, or None")
    groups = group_names(model, optimizer)
    idle = trained(model).keys() - {name for group in groups for name in group}
    if clip_norm is not None and idle:
        raise ArgumentError(
            f"training_step: clip_norm: {min(idle)!r} has a gradient, which counts in the norm, and the optimizer does "
            "not update it: freeze it (requires_grad_(False)), or give it to the optimizer"
        )
    recipe = StepDefinition(
        model=model,
        loss=loss,
        optimizer=optimizer,
        inputs=len(inputs),
        groups=groups,
        clip_norm=clip_norm,
        accumulate=accumulate,
        autocast=_half(autocast),
    )
    # In a model that trains, parts in evaluation mode are meant to be.
    if not model.training:
        model.train()
    checked = refuse_another_step(recipe, inputs, targets)
    state = initial_state(recipe, draws=checked.draws)
    batch = without((*inputs, *targets), checked.ignored)
    evaluate = Evaluate(model, recipe.autocast)
    return {"train": (Train(recipe, state, batch), batch), "evaluate": (evaluate, batch[: len(inputs)])}


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        expected = f"torch.{kind.__module__.split('.')[1]}.{kind.__name__}"
        raise ArgumentError(f"training_step: {name}: got {type(value).__name__}, expected a {expected}")


def _check_loss(loss: object) -> None:
    if not callable(loss) or isinstance(loss, type):
        found = f"the class {loss.__name__}" if isinstance(loss, type) else type(loss).__name__
        raise ArgumentError(f"training_step: loss: got {found}, expected a function of tensors, or such a module")


def _half(autocast: Any) -> torch.dtype | None:
    """Return a type for autocast by its own name, or that of ``precision``."""
    for name, dtype in _HALVES.items():
        if autocast is dtype or autocast == name:
            return dtype
    if autocast is not None:
        raise ArgumentError(
            f'training_step: autocast: {autocast!r}, expected torch.bfloat16 ("bf16"), torch.float16 ("fp16") or None'
        )
    return None


def _batch(example: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    def tensors(part: Any) -> tuple[Tensor, ...]:
        found = tuple(part) if isinstance(part, tuple | list) else (part,)
        others = [type(item).__name__ for item in found if not isinstance(item, Tensor)]
        if others or not found:
            raise ArgumentError(f"training_step: example_batch: got {others[0] if others else 'nothing'}, {expected}")
        return found

    expected = "expected (inputs, targets), each a torch.Tensor or several"
    if not isinstance(example, tuple | list) or len(example) != 2:
        raise ArgumentError(f"training_step: example_batch: got {type(example).__name__}, {expected}")
    return tensors(example[0]), tensors(example[1])


def _register(root: nn.Module, path: str, tensor: Tensor) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = getattr(root, parent)
    root.register_buffer(name, tensor)


def _find(root: nn.Module, path: str) -> Tensor:
    *parents, name = path.split(".")
    for parent in parents:
        root = getattr(root, parent)
    found: Tensor = getattr(root, name)
    return found
