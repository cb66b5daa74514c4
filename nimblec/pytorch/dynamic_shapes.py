"""Make the dynamic dimensions of an ExportedProgram static: a program of a plan has one size for each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from nimblec.base.errors import CompileError, UnsupportedModelError
from nimblec.base.options import Options
from nimblec.pytorch.model import ModelCall, bind, input_names
from nimblec.pytorch.tensors import resized, stand_in
from nimblert.arrays.layouts import dense_like
from nimblert.plan import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Declared:
    """An input as the program declares it.

    ``shape`` has a SymInt for each dynamic dimension. It is None for an input that is not a tensor;
    ``value`` is then its constant, or its SymInt.
    """

    name: str
    shape: tuple[int | SymInt, ...] | None
    value: Any = None

    def symbols(self) -> Iterator[tuple[str, str]]:
        """Yield the plain symbols among its dimensions, with their axes."""
        for axis, size in enumerate(self.shape or ()):
            if isinstance(size, SymInt) and size.node.expr.is_symbol:
                yield str(size.node.expr), f"axis {axis} of {self.name!r}"
        if isinstance(self.value, SymInt):
            yield str(self.value.node.expr), f"{self.name!r}"


def specialise(
    name: str,
    program: ExportedProgram,
    given: tuple[tuple[Any, ...], dict[str, Any]] | None,
    options: Options,
    *,
    labels: Mapping[str, str] | None = None,
    profile: Profile = (),
    module: torch.nn.Module | None = None,
) -> ModelCall:
    """Return the module of an exported program and static arguments for it.

    ``given`` are arguments that replace the example inputs of the export. Sizes of dynamic dimensions come
    from the ``profile``, ``inputs``, ``examples``, ``given`` and ``dims``, in this order, the first and the last
    by symbol, or by its name in ``labels``. Arrays given for inputs are repeated or cut to a profile's sizes.
    ``module`` is that of the program where it was made before. Raises UnsupportedModelError if a size stays
    open, is out of range, or fits no input.
    """
    module = program.module(check_guards=False) if module is None else module
    labels = labels or {}
    args, kwargs = given or program.example_inputs or _placeholders(program)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    if structure.num_leaves != len(user_inputs(program)):
        raise CompileError(f"{name}: takes {len(user_inputs(program))} inputs, the example inputs are {len(leaves)}")
    names = input_names(module, args, kwargs)
    declared = [_declare(n, value) for n, value in zip(names, user_inputs(program), strict=True)]
    shapes = {n: tuple(leaf.shape) for n, leaf in zip(names, leaves, strict=True) if given and isinstance(leaf, Tensor)}
    shapes |= {n: array.shape for n, array in options.examples}
    shapes |= {spec.name: spec.shape for spec in options.inputs}
    symbols = _symbols(name, declared, (*options.dims, *profile), labels)
    sizes = _sizes(declared, shapes)
    sizes = {symbols[n]: size for n, size in options.dims} | sizes | {symbols[n]: size for n, size in profile}
    examples = dict(options.examples)
    if profile:
        whole = {d.name: _shape(d, sizes) for d in declared if d.shape is not None}
        examples = {n: resized(array, whole.get(n, array.shape)) for n, array in examples.items()}
    _check_ranges(name, program, sizes, labels)
    open_sizes = _open(declared, sizes)
    if open_sizes:
        listed = "; ".join(
            f"{labels.get(s, s)} ({_range(program, s)}) is {' and '.join(where)}" for s, where in open_sizes.items()
        )
        flags = " ".join(f"--dim {labels.get(symbol, symbol)}=<size>" for symbol in open_sizes)
        by_name = ", ".join(f"{labels.get(symbol, symbol)!r}: <size>" for symbol in open_sizes)
        raise UnsupportedModelError(
            f"{name} has dynamic dimensions, and a plan is static: {listed}: give {flags}, in Python dims={{{by_name}}}"
        )
    static = [_static(d, leaf, sizes) for d, leaf in zip(declared, leaves, strict=True)]
    args, kwargs = pytree.tree_unflatten(static, structure)
    call = bind(module, args, kwargs, name=name, specs=options.inputs, examples=examples)
    _check_shapes(declared, dict(call.inputs), sizes)
    fixed = ", ".join(f"{labels.get(s, s)} = {n}" for s, n in sizes.items() if labels.get(s, s) not in dict(profile))
    notes = (f"{name} is dynamic, and the plan is for {fixed} alone",) if fixed else ()
    return ModelCall(
        name=name, module=module, args=call.args, kwargs=call.kwargs, inputs=call.inputs, notes=notes + call.notes
    )


def user_inputs(program: ExportedProgram) -> list[Any]:
    """Return the graph's value of each input: a fake tensor, a SymInt, or a constant."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    return [
        spec.arg.value if isinstance(spec.arg, ConstantArgument) else values[spec.arg.name]
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    ]


def _placeholders(program: ExportedProgram) -> Any:
    """Return stand-ins for the example inputs of a program that was saved without them."""
    return pytree.tree_unflatten(user_inputs(program), program.call_spec.in_spec)


def _declare(name: str, value: Any) -> _Declared:
    if isinstance(value, Tensor):
        return _Declared(name=name, shape=tuple(value.shape))
    return _Declared(name=name, shape=None, value=value)


def _symbols(
    name: str, declared: Sequence[_Declared], dims: Sequence[tuple[str, int]], labels: Mapping[str, str]
) -> dict[str, str]:
    """Return the symbol of each dimension that the user can name; UnsupportedModelError for ``dims`` of other names."""
    symbols = {labels.get(symbol, symbol): symbol for d in declared for symbol, _ in d.symbols()}
    for dimension, _ in dims:
        if not symbols:
            raise UnsupportedModelError(f"--dim {dimension}: {name} has no dynamic dimension: leave --dim out")
        if dimension not in symbols:
            places = _open(declared, {})
            names = ", ".join(f"{label!r} ({' and '.join(places[s])})" for label, s in symbols.items())
            whose = "" if labels else ", since torch.export does not keep those of Dims"
            raise UnsupportedModelError(
                f"--dim {dimension}: {name} has no dynamic dimension of that name; the names are {names}{whose}"
            )
    return symbols


def _sizes(declared: Sequence[_Declared], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the size of each symbol that follows from the shapes of inputs."""
    found: dict[str, tuple[int, str]] = {}
    for d in declared:
        shape = shapes.get(d.name)
        if shape is None or d.shape is None or len(shape) != len(d.shape):
            continue
        for size, dimension in zip(shape, d.shape, strict=True):
            if isinstance(dimension, SymInt) and dimension.node.expr.is_symbol:
                before, where = found.setdefault(str(dimension.node.expr), (size, d.name))
                if before != size:
                    raise UnsupportedModelError(
                        f"input {d.name!r}: {dimension} is {size}, and input {where!r} makes it {before}"
                    )
    return {symbol: size for symbol, (size, _) in found.items()}


def _open(declared: Sequence[_Declared], sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the symbols without a size, and where they occur."""
    places: dict[str, list[str]] = {}
    for d in declared:
        for symbol, where in d.symbols():
            if symbol not in sizes:
                places.setdefault(symbol, []).append(where)
    return places


def _check_ranges(
    name: str, program: ExportedProgram, sizes: Mapping[str, int], labels: Mapping[str, str]
) -> None:
    for symbol, allowed in program.range_constraints.items():
        size = sizes.get(str(symbol))
        if size is not None and not allowed.lower <= size <= allowed.upper:
            label = labels.get(str(symbol), symbol)
            raise UnsupportedModelError(
                f"{name}: {label} is {size}, and was exported for {_range(program, str(symbol))}"
            )


def _range(program: ExportedProgram, symbol: str) -> str:
    """Return the sizes that a symbol may have, in words."""
    for known, allowed in program.range_constraints.items():
        if str(known) == symbol:
            return f"{allowed.lower} to {allowed.upper}" if allowed.upper.is_Integer else f"from {allowed.lower}"
    return "of any size"


def _static(declared: _Declared, leaf: Any, sizes: Mapping[str, int]) -> Any:
    """Return the leaf in the requested sizes, its axes in the same order in memory, or a stand-in."""
    if declared.shape is None:
        return _size(declared.value, sizes) if isinstance(declared.value, SymInt) else leaf
    shape = _shape(declared, sizes)
    if isinstance(leaf, torch._subclasses.FakeTensor) or not leaf.numel():
        return stand_in(shape, leaf.dtype)
    found = resized(leaf, shape)
    return found.new_empty_strided(shape, dense_like(shape, leaf.stride())).copy_(found)


def _shape(declared: _Declared, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(_size(size, sizes) for size in declared.shape or ())


def _size(size: int | SymInt, sizes: Mapping[str, int]) -> int:
    """Return a dimension's size, given those of all symbols."""
    if not isinstance(size, SymInt):
        return size
    expression = size.node.expr
    return int(expression.subs({symbol: sizes[str(symbol)] for symbol in expression.free_symbols}))


def _check_shapes(declared: Sequence[_Declared], inputs: Mapping[str, Tensor], sizes: Mapping[str, int]) -> None:
    """Raise UnsupportedModelError for an input whose shape differs from that of the export."""
    for d in declared:
        if d.shape is None:
            continue
        expected = _shape(d, sizes)
        if tuple(inputs[d.name].shape) != expected:
            found, wanted = ("x".join(map(str, shape)) or "scalar" for shape in (inputs[d.name].shape, expected))
            raise UnsupportedModelError(f"input {d.name!r}: has the shape {found}, the model was exported for {wanted}")
