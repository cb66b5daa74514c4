"""Assumptions of ONNX Runtime's CPU kernels about shapes and attributes, as rules for plans.

ONNX Runtime validates most of its inputs. Where it does not, a kernel accesses memory outside a tensor, divides by zero
or never ends. ``fuzz/operators.py`` found these cases (versions 1.24 to 1.32), and its corpus replays them. Some rules
are stricter than necessary, where that makes them simpler.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import MappingProxyType

from nimblert.check.onnx_model import Attribute, TensorValue

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A node with the shapes of its inputs and outputs: None where one is left out.

    ``constant``: the inputs whose values are part of the model, by place.
    """

    attributes: Mapping[str, Attribute]
    inputs: tuple[Shape | None, ...]
    outputs: tuple[Shape | None, ...]
    constant: Mapping[int, TensorValue]

    def input(self, index: int) -> Shape | None:
        """Return the shape of an input; None where the call leaves it out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def integer(self, name: str, default: int = 0) -> int:
        """Return an integer attribute."""
        attribute = self.attributes.get(name)
        return default if attribute is None or attribute.i is None else attribute.i

    def integers(self, name: str) -> tuple[int, ...]:
        """Return an attribute that is a list of integers, empty where it is not there."""
        return self.attributes[name].ints if name in self.attributes else ()

    def number(self, index: int) -> int | None:
        """Return the value of an input that is one integer and part of the model; else None."""
        tensor = self.constant.get(index)
        if tensor is None or tensor.data_type not in _INTEGER_NBYTES or prod(tensor.dims) != 1:
            return None
        if tensor.raw_data is not None:
            return int.from_bytes(tensor.raw_data[: _INTEGER_NBYTES[tensor.data_type]], "little", signed=True)
        return next(iter((*tensor.int64_data, *tensor.int32_data)), None)


_INTEGER_NBYTES = {6: 4, 7: 8}
"""Of int32 and int64, by TensorProto.DataType."""

Rule = Callable[[Call], Iterator[str]]

_ANY_SHAPE = """
Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast
Ceil Celu Clip Compress Concat ConcatFromSequence ConstantOfShape Cos Cosh Div Dropout Elu Equal Erf Exp
Expand Flatten Floor Gather GatherElements Gelu Gemm Greater GreaterOrEqual HardSigmoid Identity If IsInf IsNaN
LeakyRelu Less LessOrEqual Log LogSoftmax Loop MatMul Max Mean Min Mod Mul Neg NonZero Not OptionalGetElement
OptionalHasElement Or PRelu Pad Pow Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax
ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Round Scan ScatterND Selu SequenceAt
SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength Shape Sigmoid Sign Sin Sinh Size Slice
Softmax Softplus Softsign Split Sqrt Squeeze Sub Sum Tan Tanh Tile Transpose Trilu Unsqueeze Where Xor
com.microsoft.FusedGemm com.microsoft.QuickGelu
"""

ANY_SHAPE = frozenset(_ANY_SHAPE.split())
"""Operators that accept empty tensors. Most calls in bodies of loops and branches, whose shapes are not known before a
run, must be of these."""

_UNSIZED_INPUTS: Mapping[str, frozenset[int]] = {
    # It reads its axis without a look at the size.
    "CumSum": frozenset({0}),
    # Up to some version after 1.24 it takes 0 for an index in empty data.
    "GatherND": frozenset({1}),
    # It reads its limits without a look at their sizes.
    "NonMaxSuppression": frozenset(),
    # Up to some version after 1.24 it divides by the number of rows.
    "TopK": frozenset({1}),
    # It ends the process where it is given an axis of an empty tensor.
    "Unique": frozenset(),
}
"""Operators that may make values of any size, but of inputs that are not empty; those at these places may have any."""

_EMPTY_INPUTS = {"Resize": frozenset({1, 2}), "Upsample": frozenset({1})}
"""Inputs that exporters give as empty tensors instead of omitting them."""


_SIZES = dict.fromkeys(("kernel_shape", "strides", "dilations"), 1 << 20)
_SIZES |= dict.fromkeys(("blocksize", "group", "hidden_size", "output_shape"), 1 << 24)
# LRN's workspace has this many channels.
_SIZES |= {"size": 1 << 12}
_HEADS = dict.fromkeys(("num_heads", "q_num_heads", "kv_num_heads"), 1 << 24)
"""Attributes that kernels divide by or multiply unchecked, with a bound above the values of any network."""


def problems(operator: str, call: Call) -> Iterator[str]:
    """Yield a sentence for each assumption of the kernels of ``operator`` that ``call`` does not meet."""
    if operator not in ANY_SHAPE:
        may_be_empty: frozenset[int] = _EMPTY_INPUTS.get(operator, frozenset())
        for what, shapes in (("input", call.inputs), ("output", call.outputs)):
            for i, shape in enumerate(shapes):
                if shape is not None and 0 in shape and not (what == "input" and i in may_be_empty):
                    yield f"{operator}: {what} {i} is empty"
    sizes = _SIZES | _HEADS if "Attention" in operator else _SIZES
    for name in sizes.keys() & call.attributes.keys():
        numbers = call.integers(name) or (call.integer(name, 1),)
        if not 0 < min(numbers) <= max(numbers) <= sizes[name]:
            yield f"{operator}: {name} is {numbers}, expected each from 1 to {sizes[name]}"
    for rule in _RULES.get(operator, ()):
        for sentence in rule(call):
            yield f"{operator}: {sentence}"


def is_for_bodies(operator: str, attributes: Iterable[Attribute]) -> bool:
    """Return whether a call may be in the body of a loop or branch: it is safe for inputs of any shape.

    Concat is allowed, since loops build their results with it: it refuses tensors of different ranks itself, but ends
    the process where the first is empty, which cannot be foreseen in a body.
    """
    if operator == "Scan":
        return not any(axis for attribute in attributes if attribute.name in _SCAN_AXES for axis in attribute.ints)
    if operator == "Pad":
        return all(attribute.name != "mode" or attribute.s == b"constant" for attribute in attributes)
    if operator == "Unique":
        return all(attribute.name != "axis" for attribute in attributes)
    return operator in ANY_SHAPE and (operator not in _RULES or operator == "Concat")


def accepts_unsized(operator: str, attributes: Sequence[Attribute], unsized: Collection[int]) -> bool:
    """Return whether a call is safe if its inputs at the places ``unsized``, and its outputs, may have any size."""
    if is_for_bodies(operator, attributes):
        return True
    if any(attribute.name == "batch_dims" and attribute.i for attribute in attributes):
        return False
    return operator in _UNSIZED_INPUTS and _UNSIZED_INPUTS[operator].issuperset(unsized)


def _bias(weights: int, bias: int) -> Rule:
    """Require a bias of one number for each filter; ``weights`` and ``bias`` are positions of inputs."""

    def rule(call: Call) -> Iterator[str]:
        filters, given = call.input(weights), call.input(bias)
        if given is not None and filters is not None and given != filters[:1]:
            yield f"bias of shape {given}, expected {filters[:1]}"

    return rule


def _transposed_bias(call: Call) -> Iterator[str]:
    filters, given = call.input(1), call.input(2)
    if given is None or filters is None or len(filters) < 2:
        return
    if given != (filters[1] * call.integer("group", 1),):
        yield f"bias of shape {given}, expected {(filters[1] * call.integer('group', 1),)}"


def _summand(index: int) -> Rule:
    """Require the tensor that a convolution adds to its output to have the output's shape."""

    def rule(call: Call) -> Iterator[str]:
        given = call.input(index)
        if given is not None and (given,) != call.outputs[:1]:
            yield f"summand of shape {given}, expected {call.outputs[:1]}"

    return rule


def _batch_norm(call: Call) -> Iterator[str]:
    if call.integer("training_mode") and (len(call.outputs) != 3 or None in call.outputs):
        yield "training without the outputs that it writes"


def _ranks(*allowed: str) -> Rule:
    """Require each input to have as many dimensions as one of the digits given for it."""

    def rule(call: Call) -> Iterator[str]:
        for place, (shape, digits) in enumerate(zip(call.inputs, allowed, strict=False)):
            if shape is not None and str(len(shape)) not in digits:
                yield f"input {place} has the shape {shape}, expected {' or '.join(digits)} dimensions"

    return rule


def _scales(*places: int) -> Rule:
    """Require scales and zero points to be single numbers in the model: kernels make tables of them at load."""

    def rule(call: Call) -> Iterator[str]:
        for place in places:
            shape = call.input(place)
            if shape is not None and (prod(shape) != 1 or place not in call.constant):
                yield f"input {place}, a scale or zero point, is not one number that is part of the model"

    return rule


def _columns(*places: int) -> Rule:
    """Require matrices of two dimensions or more, and at ``places`` one number, or one for each column."""

    def rule(call: Call) -> Iterator[str]:
        left, right = call.input(0), call.input(1)
        if left is None or right is None or min(len(left), len(right)) < 2:
            yield f"matrices of shapes {left} and {right}"
            return
        for place in places:
            shape = call.input(place)
            if shape is not None and shape not in ((), (1,), right[-1:]):
                yield f"input {place} has the shape {shape}, expected one number or {right[-1]}"

    return rule


def _bias_of_columns(place: int) -> Rule:
    """Require a bias of one number for each column of the second matrix."""

    def rule(call: Call) -> Iterator[str]:
        right, given = call.input(1), call.input(place)
        if given is not None and right is not None and given != right[-1:]:
            yield f"bias of shape {given}, expected {right[-1:]}"

    return rule


def _batch_dims(call: Call) -> Iterator[str]:
    ranks = [len(shape) for shape in call.inputs if shape is not None]
    if not 0 <= call.integer("batch_dims") < min(ranks, default=1):
        yield f"batch_dims is {call.integer('batch_dims')}, of tensors of {ranks} dimensions"


def _one_rank(call: Call) -> Iterator[str]:
    ranks = {len(shape) for shape in call.inputs if shape is not None}
    if len(ranks) > 1:
        yield f"inputs of {min(ranks)} to {max(ranks)} dimensions, expected one number for all"


def _switches(*names: str) -> Rule:
    """Require attributes to be 0 or 1."""

    def rule(call: Call) -> Iterator[str]:
        for name in names:
            if call.integer(name) not in (0, 1):
                yield f"{name}: {call.integer(name)}, expected 0 or 1"

    return rule


def _new_axis(call: Call) -> Iterator[str]:
    """Require a constant axis in the field int32_data: ONNX Runtime reads no other from 1.24 on."""
    axis = call.constant.get(1)
    if axis is None or axis.raw_data is not None or len(axis.int32_data) != 1:
        yield "its axis is not one number in the field int32_data of the model"


_LONGEST_SIGNAL = 1 << 24
"""The most samples, since they are counted in float32."""


def _spectra(call: Call) -> Iterator[str]:
    """Require of STFT frame length and step from 1, and a window of one dimension for real signals."""
    signal, window = call.input(0), call.input(2)
    if signal is None or len(signal) < 2 or signal[1] > _LONGEST_SIGNAL:
        yield f"signal of shape {signal}, expected at most {_LONGEST_SIGNAL} samples"
    elif window is not None and (len(window) != 1 or signal[2:] not in ((), (1,))):
        yield f"window of shape {window} for a signal of shape {signal}, expected one dimension and real numbers"
    for place in (1,) if window is not None else (1, 3):
        number = call.number(place)
        if number is None or number < 1:
            yield f"input {place}, samples of a frame or between two, is not a number from 1 that is part of the model"


def _grams(call: Call) -> Iterator[str]:
    """Require of TfIdfVectorizer n-grams of numbers by length, an index each."""
    pool, counts, indexes = call.integers("pool_int64s"), call.integers("ngram_counts"), call.integers("ngram_indexes")
    ends = (*counts[1:], len(pool))
    if not pool or "pool_strings" in call.attributes or not counts or counts[0] != 0:
        yield "expected n-grams of numbers, in order of length"
        return
    if any(before > after for before, after in pairwise((*counts, len(pool)))):
        yield f"ngram_counts: {counts} is not ascending up to {len(pool)}"
        return
    if any((end - start) % length for length, (start, end) in enumerate(zip(counts, ends, strict=True), 1)):
        yield f"ngram_counts: {counts} cuts n-grams of {len(pool)} numbers"
    total = sum((end - start) // length for length, (start, end) in enumerate(zip(counts, ends, strict=True), 1))
    weights = call.attributes["weights"].floats if "weights" in call.attributes else ()
    counted = len(indexes) == total and len(weights) in (0, total)
    if not counted or not 0 <= min(indexes, default=0) <= max(indexes, default=0) < 1 << 31:
        yield f"ngram_indexes: {len(indexes)}, and {len(weights)} weights, for {total} n-grams"
    shortest, longest, skips = map(call.integer, ("min_gram_length", "max_gram_length", "max_skip_count"))
    if not 1 <= shortest <= longest <= len(counts) or not 0 <= skips <= 1 << 16:
        yield f"n-grams of {shortest} to {longest} with up to {skips} skipped"


_HIGHEST_TREE = 1024
"""The most nodes on a way from the root to a leaf: kernels read trees by recursion, at load."""


def _trees(call: Call) -> Iterator[str]:
    """Require decision trees without cycles, low enough for the recursion of kernels."""
    readers: dict[object, list[int]] = {}
    waiting = []
    for node, branches in enumerate(_branches(call)):
        waiting.append(len(branches))
        for branch in branches:
            readers.setdefault(branch, []).append(node)
    level = [node for node, count in enumerate(waiting) if not count]
    height, done = 0, 0
    while level:
        height, done, below, level = height + 1, done + len(level), level, []
        for node in (reader for branch in below for reader in readers.get(branch, ())):
            waiting[node] -= 1
            if not waiting[node]:
                level.append(node)
    if done < len(waiting) or height > _HIGHEST_TREE:
        yield f"trees with a cycle, or higher than {_HIGHEST_TREE} nodes"


def _branches(call: Call) -> Iterator[tuple[object, ...]]:
    """Yield for each node the nodes that it leads to, by their place."""
    sides = [call.integers(f"nodes_{side}nodeids") for side in ("true", "false")]
    if "tree_roots" in call.attributes:  # since version 5, where leaves are a list of their own
        leaves = [call.integers(f"nodes_{side}leafs") for side in ("true", "false")]
        for *ids, first, second in zip(*sides, *leaves, strict=False):
            yield tuple(i for i, is_leaf in zip(ids, (first, second), strict=True) if not is_leaf)
        return
    trees = call.integers("nodes_treeids")
    modes = call.attributes["nodes_modes"].strings if "nodes_modes" in call.attributes else ()
    places = {key: place for place, key in enumerate(zip(trees, call.integers("nodes_nodeids"), strict=False))}
    for tree, mode, *ids in zip(trees, modes, *sides, strict=False):
        yield () if mode == b"LEAF" else tuple(places.get((tree, i)) for i in ids)


_SCAN_AXES = ("scan_input_axes", "scan_output_axes")


def _scan(call: Call) -> Iterator[str]:
    """Refuse empty tensors scanned along axes but the first: moving these divides by the other lengths."""
    axes = tuple(axis for name in _SCAN_AXES for axis in call.integers(name))
    if any(axes) and any(0 in shape for shape in (*call.inputs, *call.outputs) if shape is not None):
        yield f"an empty tensor, and scans along the axes {axes}"


_RULES: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        "Attention": (_ranks("34", "34", "34", "1234", "4", "4", "1"),),
        "BatchNormalization": (_batch_norm,),
        "Concat": (_one_rank,),
        "Conv": (_bias(1, 2),),
        "ConvTranspose": (_transposed_bias,),
        "DFT": (_switches("inverse", "onesided"),),
        "DeformConv": (_bias(1, 3),),
        "GatherND": (_batch_dims,),
        "QLinearConv": (_bias(3, 8),),
        "STFT": (_spectra,),
        "Scan": (_scan,),
        "TfIdfVectorizer": (_grams,),
        "ai.onnx.ml.TreeEnsemble": (_trees,),
        "ai.onnx.ml.TreeEnsembleClassifier": (_trees,),
        "ai.onnx.ml.TreeEnsembleRegressor": (_trees,),
        "com.microsoft.Attention": (_ranks("3", "2", "1", "1234", "5", "4", "01"),),
        "com.microsoft.DynamicQuantizeMatMul": (_columns(2, 3, 4), _bias_of_columns(4)),
        "com.microsoft.DynamicQuantizeLSTM": (_ranks("3", "3", "3", "2", "1", "3", "3", "2", "12", "12", "12", "12"),),
        "com.microsoft.ExpandDims": (_new_axis,),
        "com.microsoft.EmbedLayerNormalization": (_ranks("2", "2", "2", "2", "2", "1", "1", "2", "2"),),
        "com.microsoft.FusedConv": (_bias(1, 2), _summand(3)),
        "com.microsoft.FusedMatMul": (_switches("transA", "transB", "transBatchA", "transBatchB"),),
        "com.microsoft.GatherND": (_batch_dims,),
        "com.microsoft.MatMulIntegerToFloat": (_columns(2, 3, 4, 5, 6), _bias_of_columns(6)),
        "com.microsoft.MatMulNBits": (_ranks("12345", "23", "123", "123", "1", "1"),),
        "com.microsoft.MultiHeadAttention": (_ranks("35", "345", "34", "1", "123", "4", "4", "4", "01", "3"),),
        "com.microsoft.QAttention": (_ranks("3", "2", "1", "01", "01", "1234", "01", "01", "5"),),
        "com.microsoft.QLinearConv": (_bias(3, 8),),
        "com.microsoft.QLinearLeakyRelu": (_scales(1, 2, 3, 4),),
        "com.microsoft.QLinearSigmoid": (_scales(1, 2, 3, 4),),
        "com.microsoft.QLinearSoftmax": (_scales(1, 2, 3, 4),),
        "com.microsoft.QLinearWhere": (_scales(2, 3, 5, 6, 7, 8),),
        "com.microsoft.RotaryEmbedding": (_ranks("34", "012", "2", "2"),),
        "com.microsoft.SkipLayerNormalization": (_ranks("23", "123", "1", "1", "1"),),
        "com.microsoft.SkipSimplifiedLayerNormalization": (_ranks("23", "123", "1", "1"),),
        "com.microsoft.nchwc.Conv": (_bias(1, 2), _summand(3)),
    }
)
