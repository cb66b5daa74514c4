"""ONNX's backend cases: models of one or a few nodes, with inputs and expected outputs.

The onnx package generates the node cases in memory and ships the others; nothing is downloaded.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper
from onnx.backend.test import loader
from onnx.backend.test.case import base
from onnx.backend.test.case.test_case import TestCase
from onnx.reference.ops import op_pool_common

KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted")
RTOL, ATOL = 1e-3, 1e-5
HALF_RTOL = {"bfloat16": 2**-6, "float16": 2**-9}
"""Two units in the last place: the expected values of half dtypes were computed in them."""
SUM_RTOL = 1e-6
"""What rounding adds to a sum, relative to the largest magnitude of an output: transforms have elements near 0."""

ORDINARY = {
    TensorProto.FLOAT16,
    TensorProto.FLOAT,
    TensorProto.DOUBLE,
    TensorProto.INT8,
    TensorProto.INT16,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.UINT8,
    TensorProto.UINT16,
    TensorProto.UINT32,
    TensorProto.UINT64,
    TensorProto.BOOL,
}
CONTROL_FLOW = {"If", "Loop", "Scan", "SequenceMap"}
RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Inputs in the model's order, and the expected outputs."""

    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A backend case; ``operators`` are its own, without those of a function's body."""

    name: str
    kind: str
    model: ModelProto
    data: TestCase
    operators: tuple[str, ...]
    core: bool

    def data_sets(self) -> tuple[DataSet, ...]:
        """Read the inputs and outputs."""
        if self.data.model_dir is None:
            return tuple(
                DataSet(inputs=_arrays(inputs), outputs=_arrays(outputs))
                for inputs, outputs in self.data.data_sets or ()
            )
        folders = sorted(Path(self.data.model_dir).glob("test_data_set_*"))
        return tuple(DataSet(inputs=_read(folder, "input"), outputs=_read(folder, "output")) for folder in folders)


@functools.cache
def cases() -> tuple[Case, ...]:
    """Return every case, in the loader's order of kinds and by name."""
    with warnings.catch_warnings(), made_quickly():
        # The generators of the node cases overflow casts on purpose.
        warnings.simplefilter("ignore")
        loaded = [(kind, case) for kind in KINDS for case in loader.load_model_tests(kind=kind)]
    loaded.sort(key=lambda item: (KINDS.index(item[0]), item[1].name))
    return tuple(_case(kind, case) for kind, case in loaded)


@contextmanager
def made_quickly() -> Iterator[None]:
    """Have onnx make the same node cases in a fraction of the time: most of it went into a few of pooling."""
    with (
        patch.object(base, "process_snippet", lambda *_: ("", "")),  # the source of each case, for onnx's own pages
        patch.object(op_pool_common, "pool", functools.partial(_pool, op_pool_common.pool)),
    ):
        yield


_REDUCED: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "AVG": lambda windows, _: np.average(windows, axis=-1),
    "MAX": lambda windows, _: np.max(windows, axis=-1),
    "LPPOOL": lambda windows, p: np.sum(np.abs(windows) ** p, axis=-1) ** (1.0 / p),
}


def _pool(
    slowly: Callable[..., np.ndarray],
    padded: np.ndarray,
    shape: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    pooled: Sequence[int],
    kind: str,
    *args: Any,
    **options: Any,
) -> np.ndarray:
    """Pool as onnx's ``pool`` does, one window after the other, but plain windows all at once."""
    if args or options.keys() - {"p"} or any(stride != 1 for stride in strides) or padded.shape != tuple(shape):
        return slowly(padded, shape, kernel, strides, pooled, kind, *args, **options)
    axes = tuple(range(2, padded.ndim))
    windows = np.lib.stride_tricks.sliding_window_view(padded, tuple(kernel), axis=axes)
    apart = np.ascontiguousarray(windows).reshape(*windows.shape[: padded.ndim], -1)
    return _REDUCED[kind](apart, options.get("p", 1)).astype(padded.dtype)


def _case(kind: str, case: TestCase) -> Case:
    model = case.model or onnx.load(str(Path(case.model_dir or "") / "model.onnx"))
    names = {(node.domain + "." if node.domain else "") + node.op_type for node in model.graph.node}
    return Case(
        name=case.name,
        kind=kind,
        model=model,
        data=case,
        operators=tuple(sorted(names)),
        core=_is_core(case.name, model),
    )


def _is_core(name: str, model: ModelProto) -> bool:
    """Return whether a case is deterministic inference in the default domain, on tensors of ordinary dtypes."""
    values = (*model.graph.input, *model.graph.output)
    operators = {node.op_type for node in _nodes(model.graph)}
    return (
        all(entry.domain in ("", "ai.onnx") for entry in model.opset_import)
        and all(value.type.tensor_type.elem_type in ORDINARY for value in values)
        and not operators & (CONTROL_FLOW | RANDOM | {"ImageDecoder"})
        and not any("Optional" in op or ("Sequence" in op and op != "ReverseSequence") for op in operators)
        and "train" not in name
    )


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _nodes(attribute.g)


def _arrays(values: Sequence[object]) -> tuple[np.ndarray, ...]:
    return tuple(numpy_helper.to_array(value) if isinstance(value, TensorProto) else _array(value) for value in values)


def _array(value: object) -> np.ndarray:
    """Return an array; sequences and None become arrays of one object."""
    if isinstance(value, (list, tuple)) or value is None:
        boxed = np.empty((), dtype=object)
        boxed[()] = value
        return boxed
    return np.asarray(value)


def _read(folder: Path, what: str) -> tuple[np.ndarray, ...]:
    files = sorted(folder.glob(f"{what}_*.pb"), key=lambda path: int(path.stem.split("_")[-1]))
    return tuple(_read_value(path) for path in files)


def _read_value(path: Path) -> np.ndarray:
    proto = TensorProto.FromString(path.read_bytes())
    # Files of sequences parse as tensors without a dtype.
    return numpy_helper.to_array(proto) if proto.data_type else _array(None)


def static_form(model: ModelProto, inputs: Sequence[np.ndarray]) -> tuple[ModelProto, tuple[np.ndarray, ...]]:
    """Return the model with a static first input and the others as initializers, and the arrays to feed."""
    given = {tensor.name for tensor in model.graph.initializer}
    values = list(model.graph.input)
    if len(inputs) < len(values):
        values = [value for value in values if value.name not in given]
    fixed = ModelProto()
    fixed.CopyFrom(model)
    fed = dict(zip((value.name for value in values), inputs, strict=True))
    for name, array in list(fed.items())[1:]:
        for old in [tensor for tensor in fixed.graph.initializer if tensor.name == name]:
            fixed.graph.initializer.remove(old)
        if array.dtype != object:
            fixed.graph.initializer.append(numpy_helper.from_array(array, name))
    del fixed.graph.input[:]
    for value in values[:1]:
        kept = fixed.graph.input.add()
        kept.CopyFrom(value)
        if kept.type.HasField("tensor_type"):
            kept.type.tensor_type.shape.Clear()
            kept.type.tensor_type.shape.SetInParent()
            for length in fed[value.name].shape:
                kept.type.tensor_type.shape.dim.add().dim_value = length
    for value in values[1:]:
        if fed[value.name].dtype == object:
            fixed.graph.input.add().CopyFrom(value)
    return fixed, tuple(inputs[:1])


def difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> str:
    """Return the first mistake in the outputs; empty if they are right."""
    if len(found) < len(expected):
        return f"{len(found)} outputs; expected {len(expected)}"
    for i, (left, right) in enumerate(zip(found, expected, strict=False)):
        if left.shape != right.shape or left.dtype != right.dtype:
            return f"output {i} is {left.dtype}{left.shape}; expected {right.dtype}{right.shape}"
        rtol = HALF_RTOL.get(left.dtype.name, RTOL)
        if left.dtype.name in HALF_RTOL:
            left, right = left.astype(np.float32), right.astype(np.float32)  # noqa: PLW2901 - in a wider dtype
        largest = np.abs(right[np.isfinite(right)]).max(initial=0) if right.dtype.kind in "fc" else 0
        close = np.isclose(left, right, rtol=rtol, atol=max(ATOL, SUM_RTOL * largest), equal_nan=True)
        if not close.all():
            worst = np.abs(np.where(close, 0, left.astype(np.float64) - right)).max()
            return f"output {i} differs in {np.count_nonzero(~close)} of {close.size} elements, by up to {worst:.3g}"
    return ""
