"""ONNX Runtime's own sessions of a model: the inputs that they get, how results compare, what a session rewrote."""

import hashlib
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

Inputs = dict[str, np.ndarray]

INPUT_SETS = 4
"""Times that each model is run."""
_WORD = 32
"""Bits up to which ONNX Runtime's sums of large integers are exact: those of int64 go through float64."""
_LARGE = 2
"""The number of the set of large values."""
TOLERANCE = 1e-4
"""Largest difference that rounding of float32 explains, relative to the largest magnitude of the output."""
HALF_TOLERANCE = 1e-2
"""The same where the model has float16."""
_TRIALS = 8
"""Runs of perturbed models; their largest effect counts."""
_MULTIPLE = 16
"""Differences of up to so many times a perturbation's effect are rounding."""
_APPLIED = re.compile(r"GraphTransformer (\w+) modified: \d")
_MODIFIED = re.compile(r"GraphTransformer (\w+) modified: 1")
_RULE_BASED = re.compile(r"Level\d_RuleBasedTransformer")
# fmt: off
RULES = (
    "EliminateIdentity", "EliminateSlice", "UnsqueezeElimination", "EliminateDropout", "ExpandElimination",
    "CastElimination", "CastChainElimination", "PreShapeNodeElimination", "NoopElimination", "DivMulFusion",
    "FuseReluClip", "GemmSumFusion", "GemmTransposeFusion", "NotWhereFusion", "ConvAddFusion", "ConvMulFusion",
    "ConvBNFusion", "Pad_Fusion", "MatMul_BatchNormalization_Fusion", "LabelEncoderFusion", "ClipQuantRewrite",
    "ReluQuantRewrite",
)
# fmt: on
"""Rules of the rule-based transformers, which the log does not name."""


def open_session(model: ModelProto, *, optimised: bool, without: Iterable[str] = ()) -> onnxruntime.InferenceSession:
    """Return a session of one thread, ``without`` the optimisers of these names. Raises what ONNX Runtime raises."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return _open(model, options, optimised=optimised, without=without)


def _open(
    model: ModelProto, options: onnxruntime.SessionOptions, *, optimised: bool, without: Iterable[str]
) -> onnxruntime.InferenceSession:
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimised else levels.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(
        model.SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=set(without),
        enable_fallback=0,  # which would print, and try once more
    )


def run(session: onnxruntime.InferenceSession, inputs: Inputs) -> list[np.ndarray] | None:
    """Return the outputs; None if the run fails."""
    try:
        return [np.asarray(value) for value in session.run(None, inputs)]
    except Exception:  # noqa: BLE001 - those of ONNX Runtime have no other common class
        return None


def draw_inputs(model: ModelProto) -> list[Inputs]:
    """Return the input sets of a model, which follow from its bytes.

    The kind of an input, which begins its name, bounds its values: x any, divisor not 0, bit 0 or 1, belowN 0 to N - 1.
    In the first set, integers are small, and divisors positive. No value is large in a model that has float16: it
    overflows, where an optimised session computes in float32.
    """
    seed = hashlib.sha256(model.SerializeToString(deterministic=True)).digest()
    constants = {tensor.name for tensor in model.graph.initializer}
    has_half = _has_half(model)
    sets = []
    for number in range(INPUT_SETS):
        rng = np.random.default_rng([*seed[:8], number])
        inputs = {}
        for value in model.graph.input:
            if value.name not in constants:
                tensor = value.type.tensor_type
                shape = tuple(size.dim_value for size in tensor.shape.dim)
                dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
                kind = 1 if number == _LARGE and has_half else number
                inputs[value.name] = _draw(rng, value.name.partition("_")[0], dtype, shape, kind)
        sets.append(inputs)
    return sets


def _draw(rng: np.random.Generator, kind: str, dtype: np.dtype[Any], shape: tuple[int, ...], number: int) -> np.ndarray:
    if kind.startswith("below"):
        return rng.integers(0, int(kind.removeprefix("below")), shape).astype(dtype)
    if dtype.kind == "b" or kind == "bit":
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        wide = min(int(limits.max) // 2, 1 << 30 if limits.bits <= _WORD else 1 << 25)
        low, high = ((0, 9), (-9, 9), (-wide, wide), (-1, 1))[number]
        drawn = rng.integers(max(low, limits.min if limits.min == 0 else low), high, shape, endpoint=True)
        if kind == "divisor":
            drawn = np.where(drawn == 0, rng.integers(1, 9, shape), drawn)
            drawn = np.where(drawn == -1, -2, drawn) if number == _LARGE else drawn
        return drawn.astype(dtype)
    floats = rng.standard_normal(shape) * (1, 1, 100, 0.01)[number]
    if number == 1:
        floats = np.where(rng.random(shape) < 0.2, rng.choice([0.0, -0.0, 1.0, -1.0, 0.5, 3.0], shape), floats)
    if kind == "divisor":
        floats = np.where(floats == 0, 1, floats)
    return np.asarray(floats).astype(dtype)


def difference(right: np.ndarray, other: np.ndarray) -> float:
    """Return the largest difference, relative to the largest magnitude of ``right``.

    It is infinite where shapes, dtypes, or the places of NaN and infinities differ; and for integers, any that is not 0
    counts.
    """
    if right.shape != other.shape or right.dtype != other.dtype:
        return float("inf")
    a, b = right.astype(np.float64), other.astype(np.float64)
    if right.dtype.kind in "iu" and right.dtype.itemsize == 8:  # bytes, more than a float64 holds
        exact = right - other
        return float("inf") if exact.any() and not (a - b).any() else _largest(a, b)
    finite = np.isfinite(a)
    if not np.array_equal(np.where(finite, 0, a), np.where(np.isfinite(b), 0, b), equal_nan=True):
        return float("inf")
    return _largest(np.where(finite, a, 0), np.where(finite, b, 0))


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    worst = float(np.abs(a - b).max(initial=0))
    scale = float(np.abs(a).max(initial=0))
    return worst / scale if scale else worst


def is_rounding(model: ModelProto, inputs: Inputs, right: list[np.ndarray], others: list[np.ndarray]) -> bool:
    """Return whether rounding explains how the outputs ``others`` differ from ``right``, those of the unoptimised."""
    has_half = _has_half(model)
    tolerance = HALF_TOLERANCE if has_half else TOLERANCE
    pairs = list(zip(right, others, strict=True))
    apart = [difference(a, b) for a, b in pairs]
    if all(found <= (tolerance if a.dtype.kind == "f" else 0) for found, (a, _) in zip(apart, pairs, strict=True)):
        return True
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return False
    values = _computed(model, inputs)
    effects = [0.0] * len(right)
    for trial in range(_TRIALS):
        step = 2.0 ** (-10 if has_half else -20)
        outputs = _run_perturbed(model, inputs, values, np.random.default_rng(trial), step)
        if outputs is not None:
            changes = [difference(a, b) for a, b in zip(right, outputs, strict=True)]
            effects = [max(e, c) if np.isfinite(c) else e for e, c in zip(effects, changes, strict=True)]
    return all(
        found <= max(tolerance if a.dtype.kind == "f" else 0, _MULTIPLE * effect)
        for found, effect, a in zip(apart, effects, right, strict=True)
    )


def _computed(model: ModelProto, inputs: Inputs) -> dict[str, np.ndarray]:
    """Return the tensors that the nodes of the main graph compute, by name."""
    exposed = ModelProto()
    exposed.CopyFrom(model)
    names = [name for node in model.graph.node if node.op_type != "Constant" for name in node.output if name]
    del exposed.graph.output[:]
    exposed.graph.output.extend(ValueInfoProto(name=name) for name in names)
    values = run(open_session(exposed, optimised=False), inputs) or []
    return dict(zip(names, values, strict=False))


def _run_perturbed(
    model: ModelProto, inputs: Inputs, values: Inputs, rng: np.random.Generator, step: float
) -> list[np.ndarray] | None:
    """Return what a perturbed model computes; None where a constant has to be exact."""
    changed_model, changed_inputs = _perturbed(model, inputs, values, rng, step)
    try:
        return run(open_session(changed_model, optimised=False), changed_inputs)
    except Exception:  # noqa: BLE001 - those of ONNX Runtime have no other common class
        return None


def _has_half(model: ModelProto) -> bool:
    half = TensorProto.FLOAT16
    typed = any(value.type.tensor_type.elem_type == half for value in (*model.graph.input, *model.graph.output))
    cast = any(a.name == "to" and a.i == half for node in model.graph.node for a in node.attribute)
    held = any(a.t.data_type == half for node in model.graph.node for a in node.attribute)
    return typed or cast or held or any(tensor.data_type == half for tensor in model.graph.initializer)


def _perturbed(
    model: ModelProto, inputs: Inputs, values: Inputs, rng: np.random.Generator, step: float
) -> tuple[ModelProto, Inputs]:
    """Return model and inputs with floats changed by ``step`` of themselves, up or down.

    ``values`` are those that nodes compute, which are changed, too: each operation rounds. Constants and values that
    are whole stay as they are: a power of -1 by nearly 2 is NaN.
    """

    def noise(array: np.ndarray) -> np.ndarray:
        return 1 + step * rng.choice([-1.0, 1.0], array.shape)

    def changed(array: np.ndarray) -> np.ndarray:
        if array.dtype.kind != "f":
            return array
        with np.errstate(all="ignore"):
            return np.asarray(array * noise(array)).astype(array.dtype)

    copy = ModelProto()
    copy.CopyFrom(model)
    scales = {name for node in copy.graph.node if node.op_type == "Resize" for name in node.input[1:]}
    constants = [
        (node.output[0], a.t) for node in copy.graph.node for a in node.attribute if node.op_type == "Constant"
    ]
    for used, tensor in (*((tensor.name, tensor) for tensor in copy.graph.initializer), *constants):
        if used not in scales and tensor.data_type in {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE}:
            name = tensor.name
            array = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(np.where(array % 1 == 0, array, changed(array)), name))
    nodes = list(copy.graph.node)
    del copy.graph.node[:]
    for node in nodes:
        copy.graph.node.append(node)
        for position, name in enumerate(node.output):
            if name in values and values[name].dtype.kind == "f":
                with np.errstate(all="ignore"):
                    factor = np.where(values[name] % 1 == 0, 1, noise(values[name])).astype(values[name].dtype)
                copy.graph.initializer.append(numpy_helper.from_array(factor, f"{name}_noise"))
                copy.graph.node[-1].output[position] = f"{name}_exact"
                copy.graph.node.append(helper.make_node("Mul", [f"{name}_exact", f"{name}_noise"], [name]))
    return copy, {name: changed(array) for name, array in inputs.items()}


def modified(model: ModelProto, without: Iterable[str] = ()) -> set[str]:
    """Return the names of the optimisers that change a model, the rules of rule-based ones by their own names.

    Raises what ONNX Runtime raises.
    """
    disabled = set(without)
    found = set(_MODIFIED.findall(_log(model, disabled)))
    named = {name for name in found if not _RULE_BASED.fullmatch(name)}
    if named != found:
        named.update(rule for rule in RULES if rule not in disabled and _changes_alone(model, disabled, rule))
    return named


def all_names() -> set[str]:
    """Return the names of all optimisers of this ONNX Runtime."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "one", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return {name for name in _APPLIED.findall(_log(model, set())) if not _RULE_BASED.fullmatch(name)} | {*RULES}


def _changes_alone(model: ModelProto, without: set[str], rule: str) -> bool:
    others = set(RULES) - {rule}
    return any(_RULE_BASED.fullmatch(name) for name in _MODIFIED.findall(_log(model, without | others)))


def _log(model: ModelProto, without: set[str]) -> str:
    """Return what an optimised session logs while it opens."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 1
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            _open(model, options, optimised=True, without=without)
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        return file.read().decode(errors="replace")


class CrashError(Exception):
    """A process ended by a signal."""


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a process of its own.

    Raises CrashError if the process ends, and RuntimeError for what the function raises.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            try:
                answer = (True, function(*arguments))
            except Exception as exc:  # noqa: BLE001 - the caller gets it
                answer = (False, RuntimeError(f"{type(exc).__name__}: {exc}"))
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(pickle.dumps(answer))
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not data:
        raise CrashError(f"ends with status {status}")
    is_result, value = pickle.loads(data)  # noqa: S301 - of our own process
    if is_result:
        return value
    raise value
