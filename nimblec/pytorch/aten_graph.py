"""A PyTorch module as a flat fx graph of ATen calls, the form that the optimiser takes.

torch.export finds the calls behind the Python code. They are then run under the same `Recorder` as ONNX
nodes: in-place calls become functional, composite calls are decomposed, and whatever depends on
parameters alone is computed immediately.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, TensorArgument
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree

from nimblec.base.errors import CompileError, TraceError, UnsupportedModelError, data_dependent, first_line
from nimblec.graph.definitions import RECURRENT
from nimblec.graph.recorder import InPlaceError, Recorder, graph_module, is_decomposed
from nimblec.pytorch.control import CONTROL
from nimblec.pytorch.export_errors import BY_VALUE, exporting
from nimblec.pytorch.model import state_written
from nimblec.pytorch.recurrent import OF_LENGTHS, padded_sequences, run_of_lengths
from nimblec.pytorch.source_tracker import source_of

aten = torch.ops.aten

CHECKS = frozenset({aten._assert_tensor_metadata.default, aten._assert_async.msg, aten.sym_constrain_range.default})
"""Calls that compute nothing: the graph's shapes are static, and checked once here."""


class StateWrittenError(UnsupportedModelError):
    """A run writes into parameters or buffers of the module, those of these ``names``.

    ``exported`` is the program with these writes, where it was made before they were found.
    """

    def __init__(self, message: str, names: Sequence[str]) -> None:
        super().__init__(message)
        self.names = tuple(names)
        self.exported: torch.export.ExportedProgram | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AtenProgram:
    """A module as ATen calls.

    ``module`` takes the tensors among the flattened arguments, in their order, and returns a tuple
    of tensors; `nest` makes of it what the original module returns. Its constants are buffers on
    the device. ``meta["source"]`` of each fx node is the source noted for it, or the path of its innermost module,
    ``meta["val"]`` a fake tensor of its dtype, shape and strides.
    """

    module: fx.GraphModule
    output_spec: pytree.TreeSpec
    output_leaves: tuple[Any, ...]
    """The flattened result; each tensor in it is the number of an output of ``module``."""

    def nest(self, outputs: Sequence[Tensor]) -> Any:
        """Return the result of the original module, given what ``module`` returned."""
        leaves = [outputs[leaf.index] if isinstance(leaf, _Output) else leaf for leaf in self.output_leaves]
        return pytree.tree_unflatten(leaves, self.output_spec)

    def part(self, number: int) -> "AtenProgram":
        """Return the program whose result is one item of this one's, which is a tuple."""
        result = pytree.tree_unflatten(self.output_leaves, self.output_spec)[number]
        leaves, spec = pytree.tree_flatten(result)
        return replace(self, output_leaves=tuple(leaves), output_spec=spec)


@dataclass(frozen=True, slots=True)
class _Output:
    """Stands for a tensor of the result."""

    index: int


def trace(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str = "cpu",
) -> AtenProgram:
    """Trace a module on example arguments; constants and calls are on ``device``.

    Arguments that are no tensors are taken as they are. Raises TraceError where torch.export
    refuses the module, UnsupportedModelError where it draws random numbers or writes into its
    inputs, StateWrittenError where it writes into its buffers.
    """
    exported = _pure(module, lambda: torch.export.export(module, tuple(args), dict(kwargs or {}), strict=False))
    pure = exported
    if _has_autocast(exported):
        # Decomposition makes the casts explicit.
        pure = _pure(module, partial(exported.run_decompositions, {}))
    apart: dict[OpOverload, Callable[..., Any]] | None = None
    while True:
        try:
            return _recorded(pure, torch.device(device))
        except InPlaceError as exc:
            known = torch.export.default_decompositions()
            inside = {exc.composite: known[exc.composite]} if exc.composite and exc.composite in known else {}
            if apart is not None and not inside.keys() - apart.keys():
                raise TraceError(str(exc)) from exc
            apart = {**(apart or {}), **inside}
        try:
            pure = _pure(module, partial(exported.run_decompositions, apart))  # two runs of the model on fake tensors
        except StateWrittenError as exc:
            exc.exported = exported
            raise


def record_exported(
    module: torch.nn.Module, leaves: Sequence[Any], state: Sequence[tuple[Tensor, bool]], *, device: str
) -> AtenProgram | None:
    """Record a module of torch.export on flattened arguments; None where only another export makes its calls pure.

    Tensors of its ``state`` are arguments after its own. With such, the result is that of the module and, in a tuple,
    the new values of the state that is marked as written.
    """
    if not (isinstance(module, fx.GraphModule) and _is_static(module.graph)):
        return None
    recorder, numbers = StridedRecorder(torch.device(device)), count()

    def given(leaf: Any) -> Any:
        return recorder.receive(f"input_{next(numbers)}", leaf) if isinstance(leaf, Tensor) else leaf

    try:
        with recorder, torch.no_grad():
            arguments, before = [given(leaf) for leaf in leaves], [given(tensor) for tensor, _ in state]
            storages = (tensor.untyped_storage()._cdata for tensor, _ in state)
            values = {storage: value.clone() for storage, value in zip(storages, before, strict=True)}
            results = _ExportedTracer(module, recorder, values).run(*arguments, enable_io_processing=False)
            nested = module.graph.process_outputs(results)
    except InPlaceError:
        return None
    new = tuple(value for value, (_, is_written) in zip(values.values(), state, strict=True) if is_written)
    return program(recorder, *pytree.tree_flatten((nested, new) if state else nested))


def _is_static(graph: fx.Graph) -> bool:
    """Return whether a graph is one of torch.export, of ATen calls, with sizes that are numbers."""

    def is_static(node: fx.Node) -> bool:
        if node.op == "placeholder":
            value = node.meta.get("val")
            return not isinstance(value, torch.SymInt) and all(type(n) is int for n in getattr(value, "shape", ()))
        if isinstance(node.target, HigherOrderOperator):
            return node.target.name() in CONTROL
        is_call = node.target is operator.getitem or isinstance(node.target, OpOverload)
        return is_call if node.op == "call_function" else node.op in {"get_attr", "output"}

    return isinstance(graph._codegen, _PyTreeCodeGen) and all(map(is_static, graph.nodes))


def _has_autocast(exported: torch.export.ExportedProgram) -> bool:
    """Return whether a block of it runs under enabled autocast."""
    blocks = (module for module in exported.graph_module.modules() if isinstance(module, fx.GraphModule))
    nodes = (node for block in blocks for node in block.graph.nodes if isinstance(node.target, HigherOrderOperator))
    return any(node.target.name() == "wrap_with_autocast" and node.args[2] for node in nodes)


def _recorded(exported: torch.export.ExportedProgram, device: torch.device) -> AtenProgram:
    recorder = StridedRecorder(device)
    with recorder, torch.no_grad():
        values = _Tracer(exported.graph_module, recorder).run(*_inputs(exported, recorder))
    return program(recorder, pytree.tree_leaves(values), exported.call_spec.out_spec)


def program(recorder: Recorder, leaves: Sequence[Any], spec: pytree.TreeSpec) -> AtenProgram:
    """Return the recorded program, with these flattened results of this structure."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    with recorder, torch.no_grad():
        recorder.output(tensors)
    order = iter(range(len(tensors)))
    return AtenProgram(
        module=_module(recorder),
        output_spec=spec,
        output_leaves=tuple(_Output(next(order)) if isinstance(leaf, Tensor) else leaf for leaf in leaves),
    )


def _pure(module: torch.nn.Module, export: Callable[[], torch.export.ExportedProgram]) -> torch.export.ExportedProgram:
    """Return the exported program, refused if it is known to write into an input or state."""
    with torch.no_grad(), exporting(type(module).__name__, "torch.export"), padded_sequences():
        exported = export()
    name, signature = type(module).__name__, exported.graph_signature
    inputs = list(signature.user_inputs_to_mutate.values())
    if inputs:
        raise UnsupportedModelError(f"{name} writes into its input {inputs[0]!r}: give it a copy, or compile it at -O0")
    if written := state_written(signature):
        raise StateWrittenError(f"{name} writes into {written[0]!r}, which a graph of pure calls cannot do", written)
    return exported


def _inputs(exported: torch.export.ExportedProgram, recorder: "StridedRecorder") -> list[Any]:
    """Return a value for each placeholder: real tensors for parameters, fake ones for the arguments."""
    on_host: dict[tuple[Any, ...], Tensor] = {}
    fakes = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
    values: list[Any] = []
    count = 0
    for spec in exported.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT:
            values.append(_state(exported, spec, on_host, recorder))
        elif isinstance(spec.arg, TensorArgument):
            values.append(recorder.receive(f"input_{count}", fakes[spec.arg.name]))
            count += 1
        elif isinstance(spec.arg, ConstantArgument):
            values.append(spec.arg.value)
        else:
            raise UnsupportedModelError(f"argument {spec.arg.name!r}: expected a tensor or a constant")
    return values


def _state(
    exported: torch.export.ExportedProgram,
    spec: InputSpec,
    on_host: dict[tuple[Any, ...], Tensor],
    recorder: Recorder,
) -> Tensor:
    """Return a parameter, buffer or constant on the CPU; tied parameters are one tensor."""
    name = spec.target or ""
    tensor = exported.state_dict[name] if name in exported.state_dict else exported.constants.get(name)
    if not isinstance(tensor, Tensor):
        raise UnsupportedModelError(f"{name!r} is a {type(tensor).__name__}: expected a tensor")
    return _constant(tensor, name, on_host, recorder)


def _constant(tensor: Tensor, name: str, on_host: dict[tuple[Any, ...], Tensor], recorder: Recorder) -> Tensor:
    """Return the labelled copy on the host of a tensor of the module."""
    key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if key not in on_host:
        on_host[key] = tensor.detach().cpu()
        recorder.label(on_host[key], name)
    return on_host[key]


class StridedRecorder(Recorder):
    """A recorder that refuses to fold random numbers into constants."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not is_deterministic(func, args, kwargs or {}):
            where = self.source or "the model"
            raise UnsupportedModelError(f"{func} in {where} draws random numbers: call .eval() first")
        return super().__torch_dispatch__(func, types, args, kwargs)


def is_deterministic(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call that can draw random numbers draws none: attention or an RNN without dropout.

    Composite calls are decomposed, and their parts checked in turn.
    """
    if is_decomposed(func):
        return True
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if func in RECURRENT:
        return not (given["train"] and given["dropout"])
    return "dropout_p" in names and not given.get("dropout_p", 0.0)


def _mean_slope(
    _x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, **_generator: object
) -> float | None:
    """Return the slope of an RReLU below zero; None where it draws one for each element."""
    return None if training else (lower + upper) / 2


class _Tracer(fx.Interpreter):
    """Runs an exported graph under a recorder."""

    def __init__(self, module: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(module)
        self.extra_traceback = False  # an error is one sentence
        self._recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        if n.op == "call_function" and n.meta.get("nn_module_stack"):
            self._recorder.source = source_of(n)
        try:
            return super().run_node(n)
        except (RuntimeError, TypeError, ValueError, IndexError) as exc:
            where = f"{n.target} in {self._recorder.source or 'the model'}"
            if isinstance(exc, InPlaceError):
                composite = n.target if isinstance(n.target, OpOverload) and is_decomposed(n.target) else None
                raise InPlaceError(f"{where}: {exc}", composite) from exc
            depends = isinstance(exc, BY_VALUE)
            raise TraceError(data_dependent(where) if depends else f"{where}: {first_line(exc)}") from exc

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in CHECKS:
            return None
        if isinstance(target, HigherOrderOperator):
            return self._call_region(target, args)
        if target in (aten.batch_norm.default, aten.instance_norm.default):
            x, weight, bias, mean, variance, of_input, momentum, epsilon, _ = args
            if not of_input:
                return aten._native_batch_norm_legit_no_training(x, weight, bias, mean, variance, momentum, epsilon)[0]
            if mean is not None:
                raise InPlaceError(f"{target} writes into its statistics")
            # Otherwise cuDNN's batch norm for training runs, which no plan can hold.
            if target is aten.instance_norm.default:
                return aten.group_norm(x, x.shape[1], weight, bias, epsilon)
        if target is aten.rrelu.default and (slope := _mean_slope(*args, **kwargs)) is not None:
            return aten.leaky_relu(args[0], slope)
        device, moved = self._device_of((args, kwargs)), f"{self._recorder.device}:0"

        def placed(leaf: Any) -> Any:
            # `move_to_device_pass` names devices by strings.
            return device if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf == moved) else leaf

        args, kwargs = pytree.tree_map(placed, (args, kwargs))
        return super().call_function(run_of_lengths if target is OF_LENGTHS else target, args, kwargs)

    def _call_region(self, target: HigherOrderOperator, args: tuple[Any, ...]) -> Any:
        """Run a block under no_grad, or with autocast switched off, as its calls alone."""
        name = target.name()
        if name == "wrap_with_set_grad_enabled":
            return _Tracer(args[1], self._recorder).run(*args[2:])
        if name == "wrap_with_autocast" and args[2] is False:
            return _Tracer(args[4], self._recorder).run(*args[5:])
        if name not in CONTROL:
            raise UnsupportedModelError(f"{name} in {self._recorder.source or 'the model'} is not a plain ATen call")
        results = self._node.meta["val"]
        made = CONTROL[name](_trace_body, self._recorder, args, results)
        return made if isinstance(results, (list, tuple)) else made[0]

    def _device_of(self, arguments: Any) -> torch.device:
        """Return the device of a call: the host for known values, else the model's device."""
        fakes = (leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch._subclasses.FakeTensor))
        return self._recorder.device if any(True for _ in fakes) else torch.device("cpu")


class _ExportedTracer(_Tracer):
    """Runs a module of torch.export under a recorder; ``state`` are values in place of its tensors, by storage."""

    def __init__(self, module: fx.GraphModule, recorder: Recorder, state: Mapping[int, Tensor]) -> None:
        super().__init__(module, recorder)
        self._state = state
        self._on_host: dict[tuple[Any, ...], Tensor] = {}

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        held = super().get_attr(target, args, kwargs)
        if not isinstance(held, Tensor):
            return held
        value = self._state.get(held.untyped_storage()._cdata)
        return _constant(held, target, self._on_host, self._recorder) if value is None else value


def _trace_body(body: fx.GraphModule, recorder: Recorder, given: Sequence[Any]) -> Any:
    return _Tracer(body, recorder).run(*given)


def _module(recorder: Recorder) -> fx.GraphModule:
    if not any(node.op == "placeholder" for node in recorder.graph.nodes):
        raise CompileError("the model takes no tensor: there is nothing to compile")
    return graph_module(recorder, "AtenModel")
