"""Fuzz every operator that a plan may call with hostile nodes, each in a plan of its own.

Half of the cases are ONNX's own examples with damaged dtypes, shapes, attributes, inputs or values. The others are
drawn from the table of operators.
"""

import os
import random
import sys
from collections.abc import Callable
from functools import cache
from math import prod

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, helper, numpy_helper
from onnx.backend.test import loader

from fuzz import guarded, wrapped
from fuzz.campaign import Fuzzer, main
from fuzz.corpus import judge as judge_file
from nimblec.plan import encoder
from nimblert._generated.onnx_operators import OPERATORS, OPSETS
from nimblert.arrays.layouts import numpy_dtype
from nimblert.check import onnx_operators, onnx_rules
from nimblert.check.onnx_model import ELEMENT_TYPES
from nimblert.check.protobuf import Budget
from nimblert.cpu.onnx_session import open_session, ort_value, runtime_errors
from nimblert.plan import ITEM_NBYTES, Tensor
from nimblert.plan.records import DEFAULT_LIMITS

_DTYPES = {number: dtype for dtype, number in ELEMENT_TYPES.items()}
_SMALL = (0, 1, 2, 3, 4, 8, -1, -2)
_INTS = (*_SMALL, -3, 7, 16, 31, 64, 255, 1000, 1 << 31, (1 << 31) - 1, 1 << 40, (1 << 63) - 1, -(1 << 63))
_FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"), 3.0, -0.0)
_WORDS = """
NOTSET SAME_UPPER SAME_LOWER VALID linear cubic nearest reflect edge wrap constant add mul max min none avg sum
ij,jk->ik ...i->i ii->i i,,j->k -> iiii-> DCR CRD forward reverse bidirectional LEFT Tanh Sigmoid Relu half_pixel
align_corners asymmetric tf_crop_and_resize bilinear BRANCH_LEQ LEAF SUM NONE SOFTMAX LOGISTIC exact tanh silu swiglu
"""
_STRINGS = (*map(str.encode, _WORDS.split()), b"", b"\xff\xfe")
_MOST_NBYTES = 16 << 20

Rng = random.Random


class Case:
    """A node, its input arrays by name, and its opset; damaged in place."""

    def __init__(self, node: NodeProto, opset: int, arrays: dict[str, np.ndarray]) -> None:
        self.node = node
        self.opset = opset
        self.arrays = arrays


@cache
def examples() -> tuple[Case, ...]:
    """Return ONNX's backend cases of one node on tensors, with their inputs."""
    found = []
    for case in loader.load_model_tests(kind="node"):
        (model, data) = (case.model, case.data_sets)
        if model is None or not data or len(model.graph.node) != 1 or model.functions:
            continue
        (node,) = model.graph.node
        opsets = {entry.domain: entry.version for entry in model.opset_import}
        opset = min(opsets.get(node.domain, 1), OPSETS.get(node.domain, 0))
        arrays = dict(zip((value.name for value in model.graph.input), data[0][0], strict=False))
        known = onnx_operators.find(node.domain, node.op_type, opset) is not None
        if known and all(isinstance(a, np.ndarray) and a.dtype.name in ITEM_NBYTES for a in arrays.values()):
            found.append(Case(node, opset, arrays))
    wanted = set(_wanted())
    return tuple(case for case in found if f"{case.node.domain}:{case.node.op_type}" in wanted)


@cache
def _wanted() -> list[str]:
    """Return the operators to try, as domain:name: those of the variable FUZZ_OPERATORS, or all."""
    return os.environ.get("FUZZ_OPERATORS", "").split() or list(OPERATORS)


def build(seed: int, number: int, note: Callable[[bytes], object]) -> bytes:
    """Return the plan file of a case, with the outputs that ONNX Runtime gives for the node."""
    rng = Rng(f"{seed} {number}")
    case = _damaged(rng) if examples() and rng.random() < 0.5 else _drawn(rng)
    names = {name: f"i{i}" for i, name in enumerate(dict.fromkeys(filter(None, case.node.input)))}
    names |= {name: f"o{i}" for i, name in enumerate(dict.fromkeys(filter(None, case.node.output)))}
    node = NodeProto(op_type=case.node.op_type, domain=case.node.domain, overload="")
    node.input.extend(names.get(name, "") for name in case.node.input)
    node.output.extend(names.get(name, "") for name in case.node.output)
    node.attribute.extend(sorted(case.node.attribute, key=lambda attribute: attribute.name))
    for attribute in node.attribute:
        attribute.ClearField("doc_string")
    arrays = {new: case.arrays[old] for old, new in names.items() if old in case.arrays}
    kinds = {name: rng.choice(wrapped.KINDS) for name in arrays}
    outputs = _outputs(Case(node, case.opset, arrays), kinds, rng, note)
    return encoder.encode_file(wrapped.plan_of(node, case.opset, arrays, kinds, outputs))


def _outputs(case: Case, kinds: dict[str, str], rng: Rng, note: Callable[[bytes], object]) -> list[Tensor]:
    """Return the outputs as a run of the node gives them; guesses if it fails."""
    node, opset, arrays = case.node, case.opset, case.arrays
    made = [name for name in node.output if name]
    guess = [wrapped.output(i, name, "float32", (rng.choice((1, 2, 3)),)) for i, name in enumerate(made)]
    plan = wrapped.plan_of(node, opset, arrays, kinds, guess)
    kernel, module = plan.kernels[0], plan.modules[0]
    refused = [
        sentence
        for sentence in onnx_rules.problems(kernel, module, Budget(DEFAULT_LIMITS.model_fields))
        if not any(f"'{name}' has element type" in sentence for name in made)
    ]
    if refused:
        return guess
    note(encoder.encode_file(plan))
    model = onnx.ModelProto.FromString(bytes(module.code))
    for value in model.graph.output:
        value.ClearField("type")
    del model.graph.initializer[:]
    for name, array in arrays.items():
        if kinds[name] != "input":
            model.graph.initializer.append(numpy_helper.from_array(array, name))
    failures: tuple[type[Exception], ...] = (*runtime_errors(), MemoryError, TypeError)
    try:
        session = open_session(model.SerializeToString())
        binding = session.io_binding()
        for name, array in arrays.items():
            if kinds[name] == "input":
                kept = guarded._allocate(array.nbytes).view(array.dtype).reshape(array.shape)  # noqa: SLF001
                kept[...] = array
                binding.bind_ortvalue_input(name, ort_value(kept, array.dtype.name))
        for name in made:
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        values = binding.get_outputs()
        types = [(_dtype(value.element_type()), tuple(value.shape())) for value in values]
    except failures:
        return guess
    if any(dtype is None or _is_too_large(shape) for dtype, shape in types):
        return guess
    return [wrapped.output(i, name, str(t[0]), t[1]) for i, (name, t) in enumerate(zip(made, types, strict=True))]


def _is_too_large(shape: tuple[int, ...]) -> bool:
    """Return whether it has too many elements; or none, but strides that no file can hold."""
    return prod(shape) > _MOST_NBYTES or prod(size or 1 for size in shape) >= 1 << 63


def _dtype(element_type: int) -> str | None:
    return _DTYPES.get(element_type)


def _damaged(rng: Rng) -> Case:
    source = rng.choice(examples())
    node = NodeProto()
    node.CopyFrom(source.node)
    case = Case(node, source.opset, dict(source.arrays))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        rng.choice(_DAMAGES)(case, rng)
    return case


def _drawn(rng: Rng) -> Case:
    domain, name = rng.choice(_wanted()).split(":")
    newest = OPSETS[domain]
    opset = newest if rng.random() < 0.7 else rng.randint(1, newest)
    operator = onnx_operators.find(domain, name, opset)
    if operator is None:
        opset = newest
        operator = onnx_operators.find(domain, name, opset)
    assert operator is not None
    inputs: list[str] = []
    arrays = {}
    count = len(operator.inputs) + (rng.randint(0, 3) if operator.inputs and operator.inputs[-1].variadic else 0)
    dims = _dims(rng, rng.choice((0, 1, 2, 3, 4, 4, 5)))
    dtype = ""
    for i in range(count):
        formal = operator.inputs[min(i, len(operator.inputs) - 1)]
        absent = (formal.optional and rng.random() < 0.4) or rng.random() < 0.02
        allowed = [d for d, number in ELEMENT_TYPES.items() if formal.types >> number & 1] or ["float32"]
        dtype = dtype if dtype in allowed and rng.random() < 0.8 else rng.choice(allowed)
        if rng.random() < 0.03:
            dtype = rng.choice(list(ELEMENT_TYPES))
        shape = dims if rng.random() < 0.5 else _dims(rng, rng.choice((len(dims), len(dims), 0, 1, 2, 3, 4)))
        inputs.append("" if absent else f"x{i}")
        if not absent:
            arrays[f"x{i}"] = _array(rng, dtype, shape)
    outputs = [f"y{i}" if rng.random() < 0.9 or i == 0 else "" for i in range(max(1, len(operator.outputs)))]
    node = NodeProto(op_type=name, domain=domain)
    node.input.extend(inputs)
    node.output.extend(outputs[: rng.randint(max(1, operator.least_outputs), max(1, len(outputs)))])
    for attribute, (kind, required) in operator.attributes.items():
        if required or rng.random() < 0.5:
            made = _value(rng, attribute, kind)
            if made is not None:
                node.attribute.append(made)
    return Case(node, opset, arrays)


def _dims(rng: Rng, rank: int) -> tuple[int, ...]:
    return tuple(rng.choice((1, 1, 2, 2, 3, 4, 4, 5, 8, 8, 16, 0, 17)) for _ in range(rank))


def _array(rng: Rng, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw small values of a dtype, sometimes with hostile ones among them."""
    stream = np.random.default_rng(rng.getrandbits(32))
    kind = numpy_dtype(dtype)
    if dtype == "bool":
        return stream.integers(0, 2, shape).astype(bool)
    if np.issubdtype(kind, np.integer):
        low, high = rng.choice(((0, 2), (0, 5), (-3, 4), (1, 9), (0, 100)))
        values = np.asarray(stream.integers(low, high, shape)).astype(kind)
        hostile = [np.array(n % (1 << 8 * kind.itemsize), np.uint64).astype(kind) for n in _INTS]
    else:
        values = np.asarray(stream.standard_normal(shape)).astype(kind)
        hostile = [np.asarray(x).astype(kind) for x in _FLOATS]
    if rng.random() < 0.4 and values.size:
        flat = values.reshape(-1)
        for _ in range(rng.randint(1, 3)):
            flat[rng.randrange(flat.size)] = rng.choice(hostile)
    return values


def _value(rng: Rng, name: str, kind: int) -> AttributeProto | None:
    """Return an attribute of a type; None for types that are not drawn, such as graphs."""
    size = rng.choice((0, 1, 2, 2, 3, 4, 5, 8))
    integers = rng.choice((_SMALL, _SMALL, _SMALL, range(20), _INTS))
    dtype, dims = rng.choice(list(ELEMENT_TYPES)), _dims(rng, rng.choice((0, 1, 1, 2)))
    single: dict[int, Callable[[], object]] = {
        AttributeProto.FLOAT: lambda: rng.choice(_FLOATS),
        AttributeProto.INT: lambda: rng.choice(integers),
        AttributeProto.STRING: lambda: rng.choice(_STRINGS),
        AttributeProto.TENSOR: lambda: numpy_helper.from_array(_array(rng, dtype, dims)),
    }
    lists: dict[int, int] = {
        AttributeProto.FLOATS: AttributeProto.FLOAT,
        AttributeProto.INTS: AttributeProto.INT,
        AttributeProto.STRINGS: AttributeProto.STRING,
    }
    if kind in single:
        return helper.make_attribute(name, single[kind]())
    if kind in lists:
        return helper.make_attribute(name, [single[lists[kind]]() for _ in range(size)], attr_type=kind)
    return None


def _pick(case: Case, rng: Rng) -> str | None:
    return rng.choice(list(case.arrays)) if case.arrays else None


def _shape(case: Case, rng: Rng) -> None:
    """Change the size of a dimension, or add or drop one."""
    name = _pick(case, rng)
    if name is None:
        return
    shape = list(case.arrays[name].shape)
    action = rng.randrange(4)
    if action == 0 and shape:
        del shape[rng.randrange(len(shape))]
    elif action == 1:
        shape.insert(rng.randint(0, len(shape)), rng.choice((0, 1, 2, 3)))
    elif shape:
        axis = rng.randrange(len(shape))
        shape[axis] = rng.choice((0, 1, 2, shape[axis] + 1, max(0, shape[axis] - 1), shape[axis] * 2, 17, 1000))
    if prod(shape) * 16 > _MOST_NBYTES:
        return
    case.arrays[name] = _resized(case.arrays[name], tuple(shape))


def _resized(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)


def _values(case: Case, rng: Rng) -> None:
    name = _pick(case, rng)
    if name is not None and (array := case.arrays[name]).size:
        changed = array.copy()
        drawn = _array(rng, array.dtype.name, array.shape)
        mask = np.random.default_rng(rng.getrandbits(32)).random(array.shape) < rng.choice((0.05, 0.3, 1.0))
        case.arrays[name] = np.where(mask, drawn, changed).astype(array.dtype)


def _retype(case: Case, rng: Rng) -> None:
    name = _pick(case, rng)
    if name is not None:
        with np.errstate(all="ignore"):
            case.arrays[name] = case.arrays[name].astype(numpy_dtype(rng.choice(list(ELEMENT_TYPES))))


def _attribute(case: Case, rng: Rng) -> None:
    """Change, add or drop an attribute."""
    operator = onnx_operators.find(case.node.domain, case.node.op_type, case.opset)
    known = dict(operator.attributes) if operator else {}
    if not known:
        return
    name = rng.choice(list(known))
    kept = [attribute for attribute in case.node.attribute if attribute.name != name]
    changed = next((attribute for attribute in case.node.attribute if attribute.name == name), None)
    if changed is not None and changed.ints and rng.random() < 0.7:
        changed.ints[rng.randrange(len(changed.ints))] = rng.choice(_INTS)
        return
    made = _value(rng, name, known[name][0])
    del case.node.attribute[:]
    case.node.attribute.extend([*kept, made] if made is not None and rng.random() < 0.85 else kept)


def _input(case: Case, rng: Rng) -> None:
    """Leave an input empty, drop one, or pass one twice."""
    inputs = list(case.node.input)
    if not inputs:
        return
    at, action = rng.randrange(len(inputs)), rng.randrange(4)
    if action == 0:
        inputs.pop()
    elif action == 1:
        inputs.append(inputs[at])
    else:
        inputs[at] = "" if action == 2 else inputs[0]
    del case.node.input[:]
    case.node.input.extend(inputs)
    case.arrays = {name: array for name, array in case.arrays.items() if name in inputs}


def _output(case: Case, rng: Rng) -> None:
    operator = onnx_operators.find(case.node.domain, case.node.op_type, case.opset)
    if operator and len(case.node.output) < len(operator.outputs):
        case.node.output.append(f"more{len(case.node.output)}")
    elif len(case.node.output) > 1:
        case.node.output[rng.randrange(len(case.node.output))] = ""


def _opset(case: Case, rng: Rng) -> None:
    case.opset = rng.randint(1, OPSETS[case.node.domain])


_DAMAGES = (_shape, _shape, _values, _values, _retype, _attribute, _attribute, _attribute, _input, _output, _opset)


def start() -> None:
    """Prepare a child."""
    guarded.install()
    np.seterr(all="ignore")


if __name__ == "__main__":
    examples()
    sys.exit(main(Fuzzer(name="operators", build=build, judge=judge_file, start=start)))
