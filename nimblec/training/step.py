"""A training step as one graph: forward, loss, backward and update, as a function of parameters, state and a batch."""

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from nimblec.base.errors import TraceError, UnsupportedModelError, data_dependent, user_code, users_line
from nimblec.base.places import LOSS, Phase, Place
from nimblec.graph.writes import may_be_written, writers
from nimblec.pytorch.borrowed import attributes_kept, masks_as_given
from nimblec.pytorch.export_errors import BY_VALUE
from nimblec.pytorch.generator import StepGenerator
from nimblec.pytorch.source_tracker import SourceNotes, SourceTracker, within
from nimblec.training.backward import decompositions
from nimblec.training.calling import result_with
from nimblec.training.functions import OtherFunctions
from nimblec.training.ignored import ignored
from nimblec.training.random import Draws, refuse_other_draws
from nimblec.training.scaler import SCALE, TRACKER, unscale, update_scale
from nimblec.training.sources import name_updates
from nimblec.training.state import (
    CALLS,
    MODEL,
    OFFSET,
    RATE,
    SEED,
    SUM,
    Named,
    StepDefinition,
    TrainingState,
    autocasting,
)

_HALF_NBYTES = 2

_Gradients: TypeAlias = Mapping[str, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A graph of ATen calls from the tensors of a state and a batch to the loss and the tensors after the step."""

    graph: Any
    draws: bool
    """Whether it draws random numbers."""
    changes: tuple[bool, ...]
    """Whether it may change each tensor of the state."""
    ignored: frozenset[int]
    """Integers of the batch that it does not use."""


def trace(
    recipe: StepDefinition, state: TrainingState, inputs: Sequence[Tensor], targets: Sequence[Tensor], *, exported: bool
) -> Step:
    """Return the step as a graph for the device that the state is on.

    ``exported``: its gradients, fused attention and recurrent layers are written in operators that exporters know;
    else they are the framework's own.
    Raises TraceError where the code cannot be one, UnsupportedModelError for random numbers that a kernel draws.
    """
    count, draws = len(state.tensors()), False

    def step(*flat: Tensor) -> tuple[Tensor, ...]:
        nonlocal draws
        found = state.with_tensors(flat[:count])
        left = state.with_tensors([value.clone() for value in flat[:count]])
        batch = flat[count:]
        sources = SourceTracker(recipe.model, MODEL)
        with sources.following_modules(), SourceNotes(sources):
            loss, draws = take_step(recipe, found, left, batch[: len(inputs)], batch[len(inputs) :])
        return loss, *left.tensors()

    flat = (*state.tensors(), *inputs, *targets)
    table = decompositions(exported=exported)
    plainly, functions = _plain_operators() if exported else nullcontext(), OtherFunctions(exported=exported)
    refusing = user_code("training_step: the step cannot be traced")
    unchanged = attributes_kept(recipe.model)
    with refusing, unchanged, masks_as_given(), _refusing_to_read_values(), plainly, functions, preserve_node_meta():
        traced = make_fx(step, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)(*flat)
    for node in reversed(traced.graph.nodes):
        # torch.optim wraps Optimizer.step in profiler calls.
        if str(node.target).startswith("profiler."):
            traced.graph.erase_node(node)
        refuse_other_draws(node.target, node.args, node.kwargs)
    _refuse_held(recipe.model, traced)
    _refuse_written(list(state.parameters), traced.graph)
    traced.recompile()
    name_updates(traced.graph, state)
    return Step(graph=traced, draws=draws, changes=_changes(traced.graph, count), ignored=ignored(traced.graph))


def _refuse_written(parameters: Sequence[str], graph: fx.Graph) -> None:
    """Raise UnsupportedModelError where something other than the optimizer writes a parameter that it trains."""
    arguments = (node for node in graph.nodes if node.op == "placeholder")
    for name, node in zip(parameters, arguments, strict=False):
        if writers(node):
            raise UnsupportedModelError(
                f"training_step: model or loss writes into parameter {name!r}, which the step trains: "
                "do so between steps, through the state"
            )


def _changes(graph: fx.Graph, count: int) -> tuple[bool, ...]:
    """Return whether each of the first ``count`` arguments may change: not one returned as an unwritten copy."""
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    (results,) = graph.output_node().args
    _, *after = cast("tuple[fx.Node, ...]", results)
    return tuple(
        value.target is not torch.ops.aten.clone.default
        or value.args[0] is not before
        or may_be_written(value)
        for before, value in zip(arguments[:count], after, strict=True)
    )


@contextmanager
def _refusing_to_read_values() -> Iterator[None]:
    """Raise TraceError for code that reads values of tensors."""
    try:
        yield
    except BY_VALUE as exc:
        raise TraceError(f"training_step: {data_dependent(users_line(exc) or 'the step')}") from exc


def _refuse_held(model: nn.Module, traced: Any) -> None:
    """Raise UnsupportedModelError where a parameter or buffer became a constant, which the step would never change."""
    held = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    read = (getattr(traced, node.target) for node in traced.graph.nodes if node.op == "get_attr")
    for value in read:
        if isinstance(value, Tensor) and (value.requires_grad or value.untyped_storage()._cdata in held):
            raise UnsupportedModelError(
                f"training_step: model or loss reads a parameter or buffer of shape {tuple(value.shape)} that is not "
                "the model's own at this place: have the model return what the loss reads of it"
            )


@contextmanager
def _plain_operators() -> Iterator[None]:
    """Make fused attention and recurrent layers compute with operators that exporters know."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags sets other flags as well, and one of them warns
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def take_step(
    recipe: StepDefinition,
    found: TrainingState,
    left: TrainingState,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    generator: StepGenerator | None = None,
) -> tuple[Tensor, bool]:
    """Return the loss, and whether random numbers were drawn; the new state is written into ``left``.

    ``left`` starts with the values of the state ``found``. If both are the same object, the optimizer takes its step
    with those of its own kernels that a CUDA graph can hold; else as a graph of tensors. Random numbers are drawn from
    the ``generator``, or, without one, computed from the state. Raises UnsupportedModelError if the backward pass draws
    any.
    """
    parameters = {name: value.detach().requires_grad_() for name, value in found.parameters.items()}
    draws = generator or (Draws(found.own[SEED], found.own[OFFSET]) if SEED in found.own else None)
    device = next(iter(parameters.values())).device
    with torch.enable_grad(), draws or nullcontext():
        with autocasting(recipe.autocast, device):
            result = result_with(recipe.model, {**parameters, **left.buffers}, inputs)
            with within(LOSS):
                loss = _scalar(recipe.loss(result, *targets))
        used = draws.used if draws else 0
        with within(LOSS):
            mean = loss / recipe.accumulate if recipe.accumulate > 1 else loss
            scaled = mean * found.own[SCALE] if SCALE in found.own else mean
        # The gradients start at the loss; their calls have sources of their own.
        with within(str(Place(Phase.BACKWARD, LOSS))):
            gradients = torch.autograd.grad(scaled, list(parameters.values()), allow_unused=True)
    if draws and draws.used > used:
        raise UnsupportedModelError(
            "training_step: the backward pass draws random numbers, as activation checkpointing of dropout does: keep "
            "dropout out of the parts that are checkpointed"
        )
    named = dict(zip(parameters, gradients, strict=True))
    for name, gradient in named.items():
        if gradient is not None and gradient.layout is not torch.strided:
            raise UnsupportedModelError(
                f"training_step: the gradient of {name!r} is sparse: make its embedding with sparse=False"
            )
    with torch.no_grad(), within(Phase.UPDATE):
        if used:
            left.own[OFFSET].add_(used)
        if recipe.accumulate > 1:
            _accumulate(recipe, left, named, itself=left is found)
        else:
            _update(recipe, left, named, itself=left is found)
    return loss.detach(), used > 0


def _accumulate(recipe: StepDefinition, left: TrainingState, gradients: _Gradients, *, itself: bool) -> None:
    """Add to the sums of gradients, and take the optimizer's step if enough calls have: decided by the tensors."""
    known = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    sums = {name: left.own[f"{SUM}.{name}"].add_(gradient) for name, gradient in known.items()}
    calls = left.own[CALLS].add_(1)
    is_due = calls == recipe.accumulate
    means = {name: sums[name].clone() if name in sums else None for name in gradients}
    _update(recipe, left, means, is_due, itself=itself)
    for value in (*sums.values(), calls):
        value.copy_(torch.where(is_due, torch.zeros_like(value), value))


def _update(
    recipe: StepDefinition, left: TrainingState, gradients: _Gradients, is_due: Tensor | None = None, *, itself: bool
) -> None:
    """Step the optimizer by these gradients, which it may change; only if it ``is_due`` and they are finite."""
    takes, scale = is_due, left.own.get(SCALE)
    if itself:
        gradients = {name: _laid_out(gradient, left.parameters[name]) for name, gradient in gradients.items()}
    # Scaling and clipping write into the gradients.
    if scale is not None or recipe.clip_norm is not None:
        gradients = _apart(gradients)
    parameters = {name: value.detach() for name, value in left.parameters.items()}
    for name, value in parameters.items():
        value.grad = gradients[name]
    if scale is not None:
        scaled = [g for names in recipe.groups for name in names if (g := gradients[name]) is not None]
        overflow = unscale(scaled, scale, itself=itself)
        takes = overflow == 0 if is_due is None else is_due & (overflow == 0)
    if recipe.clip_norm is not None:
        nn.utils.clip_grad_norm_(list(parameters.values()), recipe.clip_norm, foreach=None if itself else False)
    _step(_stand_in(recipe, parameters, left, itself=itself), takes, left, itself=itself)
    if scale is not None:
        tracker = left.own[TRACKER]
        with _only_if(is_due, [scale, tracker]):
            update_scale(scale, tracker, overflow, itself=itself)


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UnsupportedModelError(f"training_step: the loss returns {found}, expected one number: take its mean")
    return loss


def _laid_out(gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    """Return a gradient in its parameter's memory layout, as `backward` leaves it: fused optimizers take no other.

    The rule is that of torch/csrc/autograd/functions/accumulate_grad.h: the strides of axes of one element are free.
    """
    if gradient is None:
        return None
    pairs = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    if all(stride != 0 if size == 1 else stride == wanted for size, stride, wanted in pairs):
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _apart(gradients: _Gradients) -> _Gradients:
    """Return each in its own memory, as ``grad`` is: two parameters that are added share one gradient tensor."""
    found: dict[str, Tensor | None] = {}
    held: set[int] = set()
    for name, gradient in gradients.items():
        found[name] = gradient
        if gradient is not None:
            storage = gradient.untyped_storage()
            if storage._cdata in held or storage.nbytes() < gradient.nbytes:
                found[name] = gradient.clone()
            held.add(storage._cdata)
    return found


def _step(optimizer: Optimizer, takes: Tensor | None, left: TrainingState, *, itself: bool) -> None:
    """Let the optimizer take its step if ``takes`` is true or None."""
    is_captured = itself and all(value.is_cuda for value in left.parameters.values())
    written = [*left.parameters.values(), *left.slots.values()]
    if takes is not None and all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = takes.logical_not().float()  # type: ignore[attr-defined]
        # Fused kernels check found_inf themselves, as with GradScaler.
        written = []
    with nullcontext() if is_captured else _compiling(), _only_if(takes, written), _wide_counts(optimizer):
        try:
            optimizer.step()
        except BY_VALUE as exc:
            raise UnsupportedModelError(
                f"training_step: {type(optimizer).__name__} reads numbers from tensors in its step, and a plan is "
                "static: take another optimizer"
            ) from exc


@contextmanager
def _wide_counts(optimizer: Optimizer) -> Iterator[None]:
    """Have an optimizer that takes one parameter at a time, on the CPU, count its steps in float64, as PyTorch's does.

    In float32 ``1 - beta2 ** step`` is off by 1e-5 and more, and RAdam decides by it whether it rectifies.
    """
    single = [group for group in optimizer.param_groups if not (group.get("foreach") or group.get("fused"))]
    counts = [
        (kept, count)
        for kept in (optimizer.state[parameter] for group in single for parameter in group["params"])
        if isinstance(count := kept.get("step"), Tensor)
        and (count.ndim, count.dtype, count.is_cuda) == (0, torch.float32, False)
    ]
    for kept, count in counts:
        kept["step"] = count.double()
    yield
    for kept, count in counts:
        count.copy_(kept["step"])


@contextmanager
def _only_if(takes: Tensor | None, written: Iterable[Tensor]) -> Iterator[None]:
    """Keep what the block writes into tensors if ``takes`` is true or None; else restore them."""
    if takes is None:
        yield
        return
    before = [(value, value.clone()) for value in written]
    yield
    for value, old in before:
        value.copy_(torch.where(takes, value, old))


def _stand_in(recipe: StepDefinition, parameters: Named, left: TrainingState, *, itself: bool) -> Optimizer:
    """Return the optimizer over other tensors."""
    # PyTorch 2.13's fused SGD for the CPU leaves whole vectors of halves as they are.
    is_fused = all(value.is_cuda or value.itemsize > _HALF_NBYTES for value in parameters.values())
    settings = partial(_settings, itself=itself, is_fused=is_fused)
    made = copy.copy(recipe.optimizer)
    made.state = defaultdict(dict)
    for name, constants in recipe.constants.items():
        made.state[parameters[name]] = dict(constants)
    for path, value in left.slots.items():
        name, _, slot = path.rpartition(".")
        made.state[parameters[name]][slot] = value
    made.param_groups = [
        {**group, **settings(group), RATE: rate, "params": [parameters[name] for name in names]}
        for group, names, rate in zip(recipe.optimizer.param_groups, recipe.groups, left.rates.values(), strict=True)
    ]
    for group in made.param_groups:
        # SGD would read the number on the host.
        if not itself and "capturable" not in group:
            group[RATE] = group[RATE].detach().requires_grad_()
    return made


def _settings(group: Mapping[str, Any], *, itself: bool, is_fused: bool) -> dict[str, Any]:
    """Return settings of an optimizer that reads its rate from the device: its own kernels, or one tensor at a time."""
    if not itself:
        wanted = {"foreach": False, "fused": False, "capturable": True}
    elif "capturable" in group:
        wanted = {"capturable": True}
    else:
        # Only fused SGD takes the rate from the device.
        wanted = {"foreach": False, "fused": is_fused}
    return {name: value for name, value in wanted.items() if name in group}


@contextmanager
def _compiling() -> Iterator[None]:
    """Make torch's optimizers compute with tensors where they would read numbers from them."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
