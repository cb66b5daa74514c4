"""A PyTorch model with the arguments of one call, on its device, and names for its inputs and outputs."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any

import numpy as np
import torch
from torch.export.graph_signature import ExportGraphSignature
from torch.utils import _pytree as pytree

from nimblec.base.errors import CompileError, UnsupportedModelError
from nimblec.base.options import InputSpec, Precision
from nimblec.pytorch.borrowed import masks_as_given
from nimblec.pytorch.outputs import join_path
from nimblec.pytorch.source_tracker import SetSource, run_nodes
from nimblec.pytorch.tensors import DTYPES, as_tensor, check_dense, stand_in


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchModel:
    """A model on its device with the arguments of one call.

    ``inputs`` are the tensors among the arguments, by name; a run reads their current contents.
    ``output_names`` name the outputs in order if the model's result does not; ``nest`` restores the
    structure of the original result. ``is_flat`` marks a ``module`` that is a graph of pure ATen calls
    on tensors alone, with values inferred, as the optimiser takes it. ``writes`` names the parameters and buffers that
    its runs write, where that is known without a trace, ``written_elsewhere`` are storages that other entries write.
    ``cropped`` are the indices of outputs whose sizes depend on values; the sizes follow them, in the same order.
    """

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[tuple[str, torch.Tensor], ...]
    output_names: tuple[str, ...] = ()
    nest: Callable[[Sequence[torch.Tensor]], Any] | None = None
    is_flat: bool = False
    notes: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    written_elsewhere: frozenset[int] = frozenset()
    cropped: tuple[int, ...] = ()

    @property
    def is_compiled(self) -> bool:
        """Whether it goes through torch.compile, whose kernels the dispatcher does not see."""
        return is_compiled(self.module)

    def run(self, set_source: SetSource) -> Any:
        """Run it, passing ``set_source`` the place of each op in the model, if its graph has that."""
        if isinstance(self.module, torch.fx.GraphModule):
            leaves = pytree.tree_leaves((self.args, self.kwargs))
            result = run_nodes(self.module, leaves, set_source)
        else:
            with masks_as_given():
                result = self.module(*self.args, **self.kwargs)
        if self.nest is not None:
            return self.nest(result)
        return dict(zip(self.output_names, result, strict=True)) if self.output_names else result


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A model and the arguments of one call.

    ``name`` is used in error messages; ``inputs`` are the tensors among the arguments, by name.
    """

    name: str
    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[tuple[str, torch.Tensor], ...]
    notes: tuple[str, ...] = ()


def uncompiled(model: Any) -> Any:
    """Return what torch.compile wrapped, or the model itself."""
    return getattr(model, "_orig_mod", model)


def is_compiled(model: Any) -> bool:
    """Return whether a module, a part of it, or a function is what torch.compile returned."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else (model,)
    return any(
        isinstance(m, torch._dynamo.OptimizedModule) or hasattr(m, "_torchdynamo_orig_callable") for m in modules
    )


def as_module(model: Any) -> torch.nn.Module:
    """Wrap a function as a module: exporters take only modules, and of a builtin they want a signature."""
    if isinstance(model, torch.nn.Module):
        return model
    module = torch.nn.Module()
    module.forward = model if _has_signature(model) else _with_signature(model)
    return module


def _with_signature(builtin: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return builtin(*args, **kwargs)

    return call


def _has_signature(function: Any) -> bool:
    """Return whether Python knows the parameters of a function, as it does not of most builtins."""
    try:
        inspect.signature(function)
    except ValueError:
        return False
    return True


def set_arithmetic(precision: Precision) -> None:
    """Allow tensor cores for float32 in this process ("tf32"), forbid them ("fp32"), or keep torch's settings.

    Uses the older of torch's two interfaces: torch.export fails if only the newer one was used.
    """
    if precision in {"tf32", "fp32"}:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def state_written(signature: ExportGraphSignature) -> list[str]:
    """Return the buffers and parameters that a run of an exported module changes."""
    return [*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()]


def bind(
    module: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str = "the module",
    specs: Iterable[InputSpec] = (),
    examples: Mapping[str, np.ndarray] | None = None,
) -> ModelCall:
    """Return one call of a module, with names for its inputs.

    ``specs`` and ``examples`` replace example inputs by name. Raises UnsupportedModelError for
    inputs that a plan cannot take, CompileError for names that are not inputs.
    """
    _refuse_without_values(name, module)
    positional, keywords = tuple(args), dict(kwargs or {})
    flat, structure = pytree.tree_flatten((positional, keywords))
    names = input_names(module, positional, keywords)
    replaced = _replacements(names, flat, specs, examples or {})
    leaves = [replaced.get(n, leaf) for n, leaf in zip(names, flat, strict=True)]
    inputs = tuple((n, leaf) for n, leaf in zip(names, leaves, strict=True) if isinstance(leaf, torch.Tensor))
    for input_name, tensor in inputs:
        check_dense(f"input {input_name!r}", tensor)
    notes = tuple(_fixed(n, leaf) for n, leaf in zip(names, leaves, strict=True) if not isinstance(leaf, torch.Tensor))
    positional, keywords = pytree.tree_unflatten(leaves, structure)
    return ModelCall(name=name, module=module, args=positional, kwargs=keywords, inputs=inputs, notes=notes)


def _refuse_without_values(name: str, module: Any) -> None:
    """Raise UnsupportedModelError for parameters and buffers that a lazy module or the device meta leaves open."""
    if not isinstance(module, torch.nn.Module):
        return
    for held, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
            raise UnsupportedModelError(
                f"{name}: {held!r} has no values yet: load the weights, or call a module with lazy layers once"
            )


def _fixed(name: str, leaf: Any) -> str:
    """Return the note for an argument that is not a tensor, and so is not an input of the plan."""
    if isinstance(leaf, np.ndarray | np.generic):
        raise UnsupportedModelError(f"argument {name!r} is a numpy array: give torch.from_numpy of it")
    return f"argument {name!r} is fixed to {shortened(leaf)}: only tensors are inputs of a plan"


def place_call(call: ModelCall, *, device: str) -> TorchModel:
    """Return a call with module and inputs moved to ``device``."""
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    args, kwargs = pytree.tree_unflatten([_own(leaf, device) for leaf in leaves], structure)
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    inputs = tuple(zip((name for name, _ in call.inputs), tensors, strict=True))
    module, notes = call.module, call.notes
    if isinstance(module, torch.nn.Module):
        module = module.to(device)
        # The flag of a GraphModule has no meaning.
        if module.training and not isinstance(module, torch.fx.GraphModule):
            notes += ("the module is in training mode: call .eval() first if the plan is for inference",)
    return TorchModel(module=module, args=args, kwargs=kwargs, inputs=inputs, notes=notes)


def _own(leaf: Any, device: str) -> Any:
    """Return a copy of a tensor on the device, with the same memory format."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().to(device, copy=True, memory_format=torch.preserve_format)


def input_names(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return the names of all leaves: the parameter's, followed by the path inside a nested argument."""
    target = uncompiled(module)
    forward = target.forward if isinstance(target, torch.nn.Module) else target
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs)
        named_args = _positional_names(bound, len(args))
    except (TypeError, ValueError) as exc:
        if isinstance(exc, TypeError) and isinstance(target, torch.nn.Module):
            raise CompileError(f"the example inputs do not fit {type(target).__name__}.forward: {exc}") from exc
        named_args = [f"input_{i}" for i in range(len(args))]  # builtins have no signature
    names = []
    for name, value in (*zip(named_args, args, strict=True), *kwargs.items()):
        names += [join_path(name, path) for path, _ in pytree.tree_flatten_with_path(value)[0]]
    return names


def _positional_names(bound: inspect.BoundArguments, count: int) -> list[str]:
    names: list[str] = []
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}_{i}" for i in range(len(value))]
        elif kind is not inspect.Parameter.VAR_KEYWORD:
            names.append(name)
    return names[:count]


def _replacements(
    names: Sequence[str], flat: Sequence[Any], specs: Iterable[InputSpec], examples: Mapping[str, np.ndarray]
) -> dict[str, torch.Tensor]:
    replaced = {}
    leaves = dict(zip(names, flat, strict=True))
    for name in (*(s.name for s in specs), *examples):
        if not isinstance(leaves.get(name), torch.Tensor):
            raise CompileError(f"input {name!r} is not one of the model's inputs {list(names)}")
    for spec in specs:
        dtype = DTYPES[spec.dtype] if spec.dtype else leaves[spec.name].dtype
        replaced[spec.name] = stand_in(spec.shape, dtype)
    for name, array in examples.items():
        replaced[name] = as_tensor(np.asarray(array, order="C"))
    return replaced
