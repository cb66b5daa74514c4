"""PyTorch models: from "package.module:callable" or a saved module, ready to run."""

import importlib
import inspect
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export.graph_signature import ExportGraphSignature
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from nimblec.errors import CompileError, TraceError, UnsupportedModelError, first_line, root_cause, user_code
from nimblec.frontend.fx_graph import SetSource, run_nodes
from nimblec.frontend.torch_log import quiet_torch
from nimblec.options import InputSpec, Precision

DTYPE_NAMES = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.uint16: "uint16",
    torch.int16: "int16",
    torch.uint32: "uint32",
    torch.int32: "int32",
    torch.uint64: "uint64",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}
"""The plan's name of each torch dtype that a plan may hold."""

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchModel:
    """A model on its device with the arguments of one call.

    ``inputs`` are the tensors among the arguments by name: a run computes from what they hold.
    ``output_names`` name the outputs in order where the model's result does not; ``nest`` makes of
    them the result that the model's author meant. ``is_flat`` where ``module`` is a graph of pure
    ATen calls on tensors alone, with values inferred, as the optimiser takes it.
    """

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[tuple[str, torch.Tensor], ...]
    output_names: tuple[str, ...] = ()
    nest: Callable[[Sequence[torch.Tensor]], Any] | None = None
    is_flat: bool = False
    notes: tuple[str, ...] = ()

    @property
    def is_compiled(self) -> bool:
        """Whether it goes through torch.compile, whose kernels the dispatcher does not see."""
        modules = self.module.modules() if isinstance(self.module, torch.nn.Module) else (self.module,)
        return any(
            isinstance(m, torch._dynamo.OptimizedModule) or hasattr(m, "_torchdynamo_orig_callable") for m in modules
        )

    def run(self, set_source: SetSource) -> Any:
        """Run it, telling ``set_source`` where in the model each op is as far as its graph tells."""
        if isinstance(self.module, torch.fx.GraphModule):
            leaves = pytree.tree_leaves((self.args, self.kwargs))
            result = run_nodes(self.module, leaves, set_source)
        else:
            result = self.module(*self.args, **self.kwargs)
        if self.nest is not None:
            return self.nest(result)
        return dict(zip(self.output_names, result, strict=True)) if self.output_names else result


def set_arithmetic(precision: Precision) -> None:
    """Let tensor cores multiply float32 in this process, for "tf32", or not, for "fp32"; else as torch has it.

    By the older of torch's two ways to say so: torch.export refuses to work where the newer was used alone.
    """
    if precision in {"tf32", "fp32"}:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def import_callable(spec: str) -> tuple[Any, Any]:
    """What the callable named "package.module:callable" returns: (module, example_inputs)."""
    module_name, _, name = spec.partition(":")
    with user_code(f"{spec}: {module_name} cannot be imported"):
        module = importlib.import_module(module_name)
    builder = getattr(module, name, None)
    if not callable(builder):
        raise CompileError(f"{spec}: {module_name} has no callable {name!r}")
    with user_code(f"{spec}: cannot be called"):
        built = builder()
    if not isinstance(built, tuple) or len(built) != 2 or not callable(built[0]):
        raise CompileError(f"{spec}: returned {type(built).__name__}, expected (module, example_inputs)")
    return built


def state_written(signature: ExportGraphSignature) -> list[str]:
    """The buffers and parameters that a run of an exported module changes."""
    return [*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()]


def split_arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as (args, kwargs): one tensor, a sequence, a mapping, or (args, kwargs)."""
    match example_inputs:
        case (tuple() | list() as args, dict() as kwargs):
            return tuple(args), dict(kwargs)
        case torch.Tensor():
            return (example_inputs,), {}
        case Mapping():
            return (), dict(example_inputs)
        case tuple() | list():
            return tuple(example_inputs), {}
    raise CompileError(
        f"example inputs: got {type(example_inputs).__name__}, expected a tensor, a tuple of arguments or a dict"
    )


def place(
    module: Any,
    example_inputs: Any,
    *,
    device: str,
    specs: Iterable[InputSpec] = (),
    examples: Mapping[str, np.ndarray] | None = None,
) -> TorchModel:
    """Move a module and its example inputs to ``device``.

    ``specs`` and ``examples`` replace example inputs by name. Raises UnsupportedModelError for
    inputs that a plan cannot take, CompileError for names that are not inputs.
    """
    args, kwargs = split_arguments(example_inputs)
    flat, structure = pytree.tree_flatten((args, kwargs))
    names = _input_names(module, args, kwargs)
    replaced = _replacements(names, flat, specs, examples or {})
    leaves = [_own(replaced.get(n, leaf), device) for n, leaf in zip(names, flat, strict=True)]
    inputs = tuple((n, leaf) for n, leaf in zip(names, leaves, strict=True) if isinstance(leaf, torch.Tensor))
    for name, tensor in inputs:
        _check_dense(f"input {name!r}", tensor)
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    notes = ()
    if isinstance(module, torch.nn.Module):
        module = module.to(device)
        if module.training:
            notes = ("the module is in training mode: call .eval() first if the plan is for inference",)
    return TorchModel(module=module, args=args, kwargs=kwargs, inputs=inputs, notes=notes)


def _check_dense(what: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPE_NAMES:
        raise UnsupportedModelError(f"{what}: a plan cannot hold the dtype {tensor.dtype}")
    if tensor.layout is not torch.strided:
        raise UnsupportedModelError(f"{what}: a plan holds dense tensors, and this one is {tensor.layout}")


def _own(leaf: Any, device: str) -> Any:
    """A tensor on the device in memory of its own, as dense as it was."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().to(device, copy=True, memory_format=torch.preserve_format)


def _input_names(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The names of all leaves: the parameter's, followed by the path inside a nested argument."""
    target = getattr(module, "_orig_mod", module)  # what torch.compile wrapped
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


def join_path(name: str, path: Sequence[Any]) -> str:
    """A name and a pytree path as one dotted name."""
    parts = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path]
    return ".".join([name, *parts] if name else parts)


def _replacements(
    names: Sequence[str], flat: Sequence[Any], specs: Iterable[InputSpec], examples: Mapping[str, np.ndarray]
) -> dict[str, torch.Tensor]:
    replaced = {}
    leaves = dict(zip(names, flat, strict=True))
    for name in (*(s.name for s in specs), *examples):
        if not isinstance(leaves.get(name), torch.Tensor):
            raise CompileError(f"input {name!r} is not one of the model's inputs {list(names)}")
    for spec in specs:
        dtype = _DTYPES[spec.dtype] if spec.dtype else leaves[spec.name].dtype
        example = torch.rand if dtype.is_floating_point else torch.zeros  # zeros would hide what a model adds up
        replaced[spec.name] = example(spec.shape).to(dtype)
    for name, array in examples.items():
        replaced[name] = as_tensor(np.ascontiguousarray(array))
    return replaced


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor over the array's memory, bfloat16 too."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def name_outputs(result: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors a model returned, by name: its keys, or "output" and a number.

    Raises UnsupportedModelError for anything else among them: a plan computes tensors only.
    """
    leaves = pytree.tree_flatten_with_path(result)[0]
    outputs = []
    for path, leaf in leaves:
        if leaf is None:
            continue
        if not isinstance(leaf, torch.Tensor):
            raise UnsupportedModelError(
                f"output {join_path('', path) or 0}: a {type(leaf).__name__}; a plan returns tensors only"
            )
        _check_dense(f"output {join_path('', path) or 0}", leaf)
        outputs.append((_output_name(path, len(leaves)), leaf))
    if not outputs:
        raise UnsupportedModelError("the model returns no tensor")
    return outputs


def _output_name(path: Sequence[Any], count: int) -> str:
    name = join_path("", path)
    if not name or (count == 1 and name.isdigit()):
        return "output"
    return f"output_{name}" if name[0].isdigit() else name


def save(module: Any, example_inputs: Any, folder: Path) -> Path:
    """Save a live module for another process, in ``folder``: the file's path.

    A module whose classes can be imported there is pickled and captured as it runs; one made of
    classes of this script or of a function goes through torch.export. Raises TraceError where it
    cannot be run, or torch.export refuses it.
    """
    args, kwargs = split_arguments(example_inputs)
    if all(_is_importable(m) for m in module.modules()):
        path = folder / "model.pt"
        torch.save((module, (args, kwargs)), path)
        return path
    path = folder / "model.pt2"
    handle = module.register_forward_hook(lambda _module, _args, result: _in_plain_tuples(result))
    try:
        with quiet_torch():
            torch.export.save(torch.export.export(module, args, kwargs, strict=False), path)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as exc:
        with user_code("the model cannot be run"), torch.no_grad():
            module(*args, **kwargs)  # what it says of itself is nearer to the cause
        raise TraceError(f"{type(module).__name__}: torch.export refuses it: {export_refusal(exc)}") from exc
    finally:
        handle.remove()
    return path


def export_refusal(exc: BaseException) -> str:
    """Why torch.export refused a module that runs."""
    if isinstance(root_cause(exc), GuardOnDataDependentSymNode):
        return "what it does next depends on the values of a tensor, as by an if or .item(): use torch.where instead"
    return first_line(root_cause(exc))


def _in_plain_tuples(result: Any) -> Any:
    """Tuples instead of what torch has classes for, as `torch.topk` returns, and does not save."""
    return pytree.tree_map(lambda part: tuple(part) if _is_named(part) else part, result, is_leaf=_is_named)


def _is_named(result: Any) -> bool:
    return type(result).__module__ == "torch.return_types"


def _is_importable(module: torch.nn.Module) -> bool:
    kind = type(module)
    return kind.__module__ != "__main__" and "<locals>" not in kind.__qualname__


def load_saved(path: Path) -> tuple[Any, Any]:
    """What `save` saved."""
    with zipfile.ZipFile(path) as archive:
        pickled = any(name.endswith("/data.pkl") for name in archive.namelist())
    if not pickled:
        with quiet_torch():
            program = torch.export.load(path)  # written by `save`, so nothing in it is to be checked
        return program.module(check_guards=False), program.example_inputs
    module, example_inputs = torch.load(path, map_location="cpu", weights_only=False)
    return module, example_inputs
