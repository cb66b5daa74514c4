"""Make the input shapes of an ONNX model static: a plan has one size for each dimension."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from shlex import quote
from typing import TypeVar

from onnx import ModelProto, TensorProto, TensorShapeProto, ValueInfoProto, shape_inference

from nimblec.base.errors import UnsupportedModelError
from nimblec.base.options import InputSpec, NamedInput
from nimblec.onnx_import import model_file
from nimblec.onnx_import.model_file import ModelTensor, is_static
from nimblert.plan import Profile

_PLACEHOLDER = re.compile(r"\s*(\?+|\*|-\d+|none|null|unk(nown)?(_+\d+)?)?\s*", re.IGNORECASE)
"""The text of exporters for a dimension without a name: Paddle "?", tf2onnx "unk__12", others "None" or "-1"."""
_NUMBERED = re.compile(r"unk(nown)?_+\d+", re.IGNORECASE)
"""The text that tells dimensions apart, by which users may give them sizes: viewers show it as a name."""

_READ_BY_INFERENCE = 64
"""Shape inference reads constants (shapes, axes) of at most this many elements."""


def fix_shapes(model: ModelProto, specs: Sequence[InputSpec], dims: Sequence[tuple[str, int]] = ()) -> ModelProto:
    """Return a copy of ``model`` in which every input has a static shape and initializers are not inputs.

    A named dimension that a spec fixes is fixed wherever the name occurs; the others get their sizes
    from ``dims``. Placeholders that exporters write, such as "?", are no names: each occurrence is a
    dimension of its own, but for a numbered one, such as "unk__12", that ``dims`` has. Raises
    UnsupportedModelError if a spec fits no input, no dimension has a name, or a dimension stays dynamic.
    """
    known = {tensor.name: tensor for tensor in model_file.inputs(model)}
    by_name = _by_name(specs, known)
    fixed = ModelProto()
    fixed.CopyFrom(model)
    graph_inputs = [value for value in fixed.graph.input if value.name in known]
    numbered = {name for name, _ in dims if _NUMBERED.fullmatch(name)}
    _forget_placeholders((*graph_inputs, *fixed.graph.value_info, *fixed.graph.output), numbered)
    sizes = _given_sizes(graph_inputs, dims) | _named_sizes(graph_inputs, by_name)
    for value in graph_inputs:
        if value.name in by_name:
            _set_shape(value, by_name[value.name].shape)
    for value in (*graph_inputs, *fixed.graph.value_info, *fixed.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    problems = [problem for value in graph_inputs for problem in _dynamic_dimensions(value)]
    if problems:
        raise UnsupportedModelError("; ".join(problems))
    del fixed.graph.input[:]
    fixed.graph.input.extend(graph_inputs)
    return fixed


def infer_shapes(model: ModelProto) -> ModelProto:
    """Return a copy of ``model`` with the types that ONNX infers. Its large constants have no data.

    ONNX copies the data of constants several times: 10 s for 500 MB. Raises UnsupportedModelError for a damaged model.
    """
    bare = ModelProto()
    bare.CopyFrom(model)
    for tensor in bare.graph.initializer:
        if prod(tensor.dims) > _READ_BY_INFERENCE:
            tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims))
    try:
        return shape_inference.infer_shapes(bare, data_prop=True)
    except shape_inference.InferenceError as exc:
        raise UnsupportedModelError(f"its shapes cannot be inferred: {' '.join(str(exc).split())}") from exc


def name_dimensions(model: ModelProto, inputs: Sequence[NamedInput]) -> None:
    """Give dimensions of ``model`` that have no names those of ``inputs``, or sizes.

    Raises UnsupportedModelError if an input does not fit, or the model has another name for a dimension.
    """
    by_name = _by_name(inputs, {tensor.name: tensor for tensor in model_file.inputs(model)})
    for value in model.graph.input:
        if value.name not in by_name:
            continue
        spec, shape = by_name[value.name], value.type.tensor_type.shape
        if not value.type.tensor_type.HasField("shape"):
            shape.dim.extend(TensorShapeProto.Dimension() for _ in spec.shape)
        _forget_placeholders([value])
        for axis, (given, dim) in enumerate(zip(spec.shape, shape.dim, strict=True)):
            if dim.dim_param not in {"", given}:
                raise UnsupportedModelError(
                    f"--input {spec.name}: {given!r} at axis {axis}, which the model calls {dim.dim_param!r}: give "
                    f"{dim.dim_param!r} there, and its size by --dim"
                )
            if isinstance(given, str):
                if _PLACEHOLDER.fullmatch(given):
                    raise UnsupportedModelError(
                        f"--input {spec.name}: {given!r} at axis {axis} stands for no name: give another one"
                    )
                dim.dim_param = given
            else:
                dim.dim_value = given


def resize(model: ModelProto, specs: Iterable[InputSpec], profile: Profile) -> tuple[InputSpec, ...]:
    """Return the specs of inputs with the sizes of ``profile`` where an input has one of its dimensions."""
    sizes = dict(profile)
    dims = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    return tuple(
        replace(spec, shape=tuple(sizes.get(d.dim_param, n) for d, n in zip(dims[spec.name], spec.shape, strict=True)))
        if dims[spec.name]
        else spec
        for spec in specs
    )


def _forget_placeholders(values: Iterable[ValueInfoProto], names: Collection[str] = ()) -> None:
    """Clear placeholders, but for those that serve as ``names``."""
    for value in values:
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param") and _PLACEHOLDER.fullmatch(dim.dim_param) and dim.dim_param not in names:
                dim.ClearField("dim_param")


_Spec = TypeVar("_Spec", InputSpec, NamedInput)


def _by_name(specs: Iterable[_Spec], inputs: Mapping[str, ModelTensor]) -> dict[str, _Spec]:
    """Return the specs by the names of inputs, which they must fit. Raises UnsupportedModelError."""
    by_name: dict[str, _Spec] = {}
    for spec in specs:
        if spec.name not in inputs:
            names = ", ".join(repr(name) for name in inputs) or "none"
            raise UnsupportedModelError(f"--input {spec.name}: the model has no such input; its inputs are {names}")
        if spec.name in by_name:
            raise UnsupportedModelError(f"--input {spec.name}: given twice; give it once")
        _check_spec(spec, inputs[spec.name])
        by_name[spec.name] = spec
    return by_name


def _check_spec(spec: InputSpec | NamedInput, tensor: ModelTensor) -> None:
    if spec.dtype is not None and spec.dtype != tensor.dtype:
        raise UnsupportedModelError(f"--input {spec.name}: dtype {spec.dtype}, the model's input has {tensor.dtype}")
    if tensor.shape is None:
        return
    shown = "x".join("?" if n is None else str(n) for n in tensor.shape)
    if len(spec.shape) != len(tensor.shape):
        raise UnsupportedModelError(
            f"--input {spec.name}: {len(spec.shape)} dimensions, the model's input has {len(tensor.shape)} ({shown})"
        )
    for axis, (given, declared) in enumerate(zip(spec.shape, tensor.shape, strict=True)):
        if declared is not None and given != declared:
            raise UnsupportedModelError(
                f"--input {spec.name}: {given!r} at axis {axis}, the model's input has {declared} there ({shown})"
            )


def _given_sizes(graph_inputs: Sequence[ValueInfoProto], dims: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Return the sizes of dimensions that were given by name."""
    known = dict.fromkeys(d.dim_param for v in graph_inputs for d in v.type.tensor_type.shape.dim if d.dim_param)
    sizes: dict[str, int] = {}
    for name, size in dims:
        if not known:
            way = _way_to_name(graph_inputs, name)
            raise UnsupportedModelError(f"--dim {name}: no dimension of the model's inputs has a name{way}")
        if name not in known:
            names = ", ".join(map(repr, known))
            raise UnsupportedModelError(f"--dim {name}: no input has a dimension of that name; the names are {names}")
        if name in sizes:
            raise UnsupportedModelError(f"--dim {name}: given twice, {sizes[name]} and {size}; give it once")
        sizes[name] = size
    return sizes


def _way_to_name(graph_inputs: Sequence[ValueInfoProto], name: str) -> str:
    """Explain how to give a dimension of the inputs a name, where none has one."""
    if _PLACEHOLDER.fullmatch(name):
        name = "n"
    for value in graph_inputs:
        if not value.type.tensor_type.HasField("shape"):
            return f": give one this name, --input {quote(f'{value.name}:{name},<sizes>')}"
        if dynamic := [axis for axis, dim in enumerate(value.type.tensor_type.shape.dim) if not is_static(dim)]:
            sizes = {axis: _example_size(axis, "") for axis in dynamic}
            return f": give one this name, {_naming(value, {**sizes, dynamic[0]: name})}"
    return ", and all have sizes: leave --dim out, or export the model with a dynamic dimension"


def _naming(value: ValueInfoProto, names: Mapping[int, str]) -> str:
    """Return the option that gives axes of an input names."""
    dims = value.type.tensor_type.shape.dim
    shape = ",".join(names.get(axis, str(dim.dim_value)) for axis, dim in enumerate(dims)) + "," * (len(dims) == 1)
    return f"--input {quote(f'{value.name}:{shape}')}"


def _named_sizes(graph_inputs: Sequence[ValueInfoProto], specs: dict[str, InputSpec]) -> dict[str, int]:
    """Return the sizes of named dimensions that follow from the specs."""
    sizes: dict[str, tuple[int, str]] = {}
    for value in graph_inputs:
        if value.name not in specs:
            continue
        for dim, size in zip(value.type.tensor_type.shape.dim, specs[value.name].shape, strict=False):
            if not dim.dim_param:
                continue
            before, where = sizes.setdefault(dim.dim_param, (size, value.name))
            if before != size:
                raise UnsupportedModelError(
                    f"--input {value.name}: dimension {dim.dim_param!r} is {size}, --input {where} makes it {before}"
                )
    return {name: size for name, (size, _) in sizes.items()}


def _set_shape(value: ValueInfoProto, shape: tuple[int, ...]) -> None:
    proto = value.type.tensor_type.shape
    del proto.dim[:]
    for size in shape:
        proto.dim.add(dim_value=size)
    proto.SetInParent()  # a scalar has a shape without dimensions


def _dynamic_dimensions(value: ValueInfoProto) -> Iterator[str]:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        yield f"input {value.name!r} has no shape: give --input {value.name}:<shape>"
        return
    dims = list(enumerate(tensor.shape.dim))
    example = "x".join(str(d.dim_value) if is_static(d) else _example_size(axis, d.dim_param) for axis, d in dims)
    dynamic = [(axis, dim.dim_param) for axis, dim in dims if not is_static(dim)]
    if not dynamic:
        return
    listed = ", ".join(f"{name!r} (axis {axis})" if name else f"of axis {axis}" for axis, name in dynamic)
    kind = "the dynamic dimension" if len(dynamic) == 1 else "the dynamic dimensions"
    flags = f"--input {value.name}:{example}"
    if all(name for _, name in dynamic):
        by_name = " ".join(f"--dim {quote(n)}={_example_size(a, n)}" for a, n in dynamic)
        flags = f"{by_name} or {flags}"
    else:
        names = {axis: name or f"dim{axis}" for axis, name in dynamic}
        sizes = " ".join(f"--dim {quote(n)}={'<sizes>' if axis else '1..16'}" for axis, n in names.items())
        flags += f", or for several sizes {_naming(value, names)} {sizes}"
    yield f"input {value.name!r} has {kind} {listed}: give {flags}"


def _example_size(axis: int, name: str) -> str:
    return "1" if axis == 0 else f"<{name or axis}>"
