"""ONNX Runtime's own optimiser, run ahead of time: fusions, folded constants, blocked convolutions.

The level is that of a plain `InferenceSession(model)`, less the rewrites that `nimblec.cpu.agreement` leaves out. It
lays convolutions out in blocks (NCHWc) of this machine's vector width, which the runtime refuses on a machine with
other blocks. A second run folds the shape arithmetic of functions that the first inlined after it had folded.
"""

import re
import tempfile
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, TensorProto, helper

from nimblec.base.errors import CompileError, UnsupportedModelError
from nimblec.cpu import ort_process
from nimblec.cpu.canonical import canonicalize
from nimblec.cpu.constants import dense_of, read_arrays
from nimblec.cpu.ort_worker import RefusedError
from nimblec.onnx_import.model_nodes import nodes, subgraphs
from nimblert.cpu.onnx_session import onnxruntime

SHAPE_ARITHMETIC = frozenset({"Shape", "Size"})
"""Operators whose results follow from static shapes."""

_EXACT = {"session.qdq_matmulnbits_accuracy_level": "1"}
"""Settings by which products with dequantised weights are computed in float32, not with activations of 8 bits."""

_WRONG = frozenset({"DivMulFusion", "WeightBiasQuantization"})
"""Rewrites that are always left out: they change results of few inputs, perhaps of none that is compared.

DivMulFusion computes x / n for 1 / n * x, of integers, too. WeightBiasQuantization makes a float bias a multiple of the
product of two scales: where the sum is then quantised, only a sum near a tie changes.
"""

_REMOVABLE = "InsertedPrecisionFreeCast_"
"""How the names of the casts begin that ONNX Runtime adds around operators without a float16 kernel.

Every session removes such a cast to float32 together with a cast to float16 before it, and so its rounding.
"""

_RULES = {
    "Level1_RuleBasedTransformer": (
        *("EliminateIdentity", "EliminateSlice", "UnsqueezeElimination", "EliminateDropout", "ExpandElimination"),
        *("CastElimination", "CastChainElimination", "PreShapeNodeElimination", "NoopElimination", "DivMulFusion"),
        *("FuseReluClip", "GemmSumFusion", "GemmTransposeFusion", "NotWhereFusion", "ConvAddFusion", "ConvMulFusion"),
        *("ConvBNFusion", "Pad_Fusion", "MatMul_BatchNormalization_Fusion", "LabelEncoderFusion"),
    ),
    "Level2_RuleBasedTransformer": ("ClipQuantRewrite", "ReluQuantRewrite", "GemmTransposeFusion"),
}
"""The rules that ONNX Runtime applies under one name, and leaves out by their own (graph_transformer_utils.cc)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewriting:
    """How to optimise: the names of rewrites ``without`` which to do it, and whether results may be ``approximate``."""

    without: frozenset[str] = frozenset()
    approximate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizedModel:
    """A model as ONNX Runtime would run it.

    ``arrays`` are its constants by name. The large ones are external data of ``proto``, in ``folder``. ``rewrites`` are
    the names of those that changed the model.
    """

    proto: ModelProto
    arrays: Mapping[str, np.ndarray]
    folder: Path = Path("/nonexistent")
    rewrites: tuple[str, ...] = ()


class OptimizerError(UnsupportedModelError):
    """ONNX Runtime's optimiser refuses a model or crashes on it.

    ``suspects`` are the rewrites that may be at fault, the likeliest first.
    """

    def __init__(self, message: str, suspects: tuple[str, ...]) -> None:
        super().__init__(message)
        self.suspects = suspects


def optimize(model: ModelProto, folder: Path, scratch: Path, rewriting: Rewriting = Rewriting()) -> OptimizedModel:
    """Return ``model``, with static input shapes, as ONNX Runtime would run it.

    ``folder`` is where the model's external data are, if it has any. ``scratch`` is a folder with room for a copy of
    the weights, which must outlive the result. Raises OptimizerError where ONNX Runtime refuses the model or crashes.
    """
    room = Path(tempfile.mkdtemp(dir=scratch))
    optimized, rewrites = _optimize(model, folder, room / "once", "ORT_ENABLE_ALL", rewriting)
    if any(node.op_type in SHAPE_ARITHMETIC for node in optimized.graph.node):
        # The basic level adds no fusions that a plain session would lack, without this one: at the full level signed
        # pairs become unsigned after it has merged those of one type.
        # The Identities between casts have to stay.
        without = rewriting.without | {"DoubleQDQPairsRemover", "EliminateIdentity"}
        again = Rewriting(without=without, approximate=rewriting.approximate)
        optimized, more = _optimize(optimized, room, room / "twice", "ORT_ENABLE_BASIC", again)
        rewrites = tuple(dict.fromkeys((*rewrites, *more)))
    canonicalize(optimized.graph, model.graph)
    return OptimizedModel(proto=optimized, arrays=read_arrays(optimized, room), folder=room, rewrites=rewrites)


def folded(model: ModelProto, folder: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Return those of the outputs ``names`` of ``model`` that are the same in every run, as the optimiser finds out."""
    with tempfile.TemporaryDirectory(prefix="nimblec-") as scratch:
        path = Path(scratch)
        made, _ = _optimize(model, folder, path / "folded", "ORT_ENABLE_BASIC", Rewriting())
        return {name: array for name, array in read_arrays(made, path).items() if name in names}


def _optimize(
    model: ModelProto, folder: Path, path: Path, level: str, rewriting: Rewriting
) -> tuple[ModelProto, tuple[str, ...]]:
    """Return the model that ONNX Runtime's optimiser saves at ``path``, and the rewrites that changed it."""
    log = path.with_suffix(".log")
    try:
        _save(model, folder, path, level, rewriting)
    except RefusedError as exc:
        if _UNWRITTEN.search(str(exc)):
            raise CompileError(f"{path.parent}: ONNX Runtime cannot write its files there: is the disk full?") from exc
        raise OptimizerError(str(refusal(exc, model)), _suspects(log)) from exc
    except ort_process.EndedError as exc:
        raise OptimizerError(str(exc), _suspects(log)) from exc
    optimized = onnx.load(path, load_external_data=False)
    for graph in (optimized.graph, *(body for node in nodes(optimized.graph) for body in subgraphs(node))):
        _tidy_constants(graph)
        _keep_casts(graph)
    return optimized, _rules(name for name, is_changed in _logged(log) if is_changed)


_UNWRITTEN = re.compile(r"Failed to write|Protobuf serialization failed")
"""What ONNX Runtime says where it cannot write the weights, or the rest, of the model that it saves."""


def _save(model: ModelProto, folder: Path, path: Path, level: str, rewriting: Rewriting) -> None:
    """Save the optimised model at ``path``, and ONNX Runtime's log beside it."""
    ort_process.optimize(
        model.SerializeToString(),
        level=level,
        without=sorted(rewriting.without | _WRONG),
        settings={} if rewriting.approximate else _EXACT,
        folder=str(folder.resolve()),
        path=str(path.absolute()),
        log=str(path.with_suffix(".log")),
    )


_LOGGED = re.compile(r"GraphTransformer (\S+) modified: ([01])")


def _logged(log: Path) -> list[tuple[str, bool]]:
    """Return the rewrites that ONNX Runtime tried, in order, and whether each changed the model."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return [(name, changed == "1") for name, changed in _LOGGED.findall(text)]


def _rules(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names with those of rules in the place of groups of rules."""
    return tuple(dict.fromkeys(rule for name in names for rule in _RULES.get(name, (name,))))


def _suspects(log: Path) -> tuple[str, ...]:
    """Return all rewrites, beginning with the one that comes after those in the log, and those that changed the model.

    Their order is the same for each model; that of a small one shows it.
    """
    logged, order = _logged(log), list[str]()
    small = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[1] x) => (float[1] y) {y = Neg(x)}'
    )
    with tempfile.TemporaryDirectory(prefix="nimblec-") as scratch, suppress(ort_process.EndedError):
        _save(small, Path(scratch), Path(scratch, "order"), "ORT_ENABLE_ALL", Rewriting())
        order = [name for name, _ in _logged(Path(scratch, "order.log"))]
    changed = (name for name, is_changed in logged if is_changed)
    return _rules((*order[len(logged) : len(logged) + 1], *changed, *order))


_NEWEST_OPSET = re.compile(r"official support for domain (\S+) is till opset (\d+)")
"""Part of ONNX Runtime's message about a newer opset."""


def _tidy_constants(graph: GraphProto) -> None:
    """Keep one constant of each name, and make sparse ones dense: ONNX Runtime cannot read all that it saves.

    The indices of sparse ones have types that it refuses. A Constant in a body of a body stays beside its value.
    Versions 1.24 to 1.29 save the constants of a body twice, first as the file has them, perhaps with data elsewhere.
    """
    sparse = {tensor.values.name: tensor for tensor in graph.sparse_initializer}
    constants = {tensor.name: tensor for tensor in (*graph.initializer, *map(dense_of, sparse.values()))}
    if sparse or len(constants) < len(graph.initializer):
        kept = list(constants.values())
        del graph.initializer[:], graph.sparse_initializer[:]
        graph.initializer.extend(kept)
    for index, node in reversed([*enumerate(graph.node)]):
        if node.op_type == "Constant" and node.output[0] in constants:
            del graph.node[index]


def _keep_casts(graph: GraphProto) -> None:
    """Protect the casts of a saved model from the sessions that open it.

    Every session removes a cast that loses digits where the next one is to a type that the first one's type holds
    (int64 -> float32 -> int8); of several in a row, not all at once. An Identity hides two casts from each other.
    """
    types = {
        node.output[0]: helper.tensor_dtype_to_np_dtype(attribute.i)
        for node in graph.node
        if node.op_type == "Cast"
        for attribute in node.attribute
        if attribute.name == "to"
    }
    for index, node in reversed([*enumerate(graph.node)]):
        if node.op_type == "Cast":
            if node.name.startswith(_REMOVABLE):
                node.ClearField("name")
            (source,), (made,) = node.input, node.output
            if source in types and np.can_cast(types[made], types[source]):
                node.input[0] = f"{made}/source"
                graph.node.insert(index, helper.make_node("Identity", [source], [node.input[0]]))


_CODE = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : ")
_PLACE = re.compile(r"/\S+\.(?:cc|h):\d+ [^()]*\((?:[^()]|\([^()]*\))*\)(?: const)? (?:[^.]* was false\. )?")
"""The place in ONNX Runtime's source where an error was raised: a file, a function's signature, and what it tested."""
_SIZES = re.compile(r"cannot be reshaped|cannot broadcast|incompatible dimensions|dimension mismatch", re.IGNORECASE)


def plain_words(words: str) -> str:
    """Return a message of ONNX Runtime without its code and the place in its source."""
    return _PLACE.sub("", _CODE.sub("", words)).rstrip()


def size_advice(words: str) -> str:
    """Return what to do where sizes in a model do not fit each other; "" for other messages."""
    if not _SIZES.search(words):
        return ""
    return (
        "; if the exporter wrote the sizes of its example into the model, compile for these, or export it with dynamic "
        "dimensions"
    )


def refusal(error: RefusedError, model: ModelProto) -> UnsupportedModelError:
    """Return the error for a model that ONNX Runtime refuses to open, with the part of its message about the model."""
    return UnsupportedModelError(f"ONNX Runtime {onnxruntime().__version__} {_said(str(error), model)}")


def _said(words: str, model: ModelProto) -> str:
    said = plain_words(words)
    if newest := _NEWEST_OPSET.search(said):
        return f"refuses the model: it supports opsets of {newest[1]} up to {newest[2]}: export it for one of these"
    if "Could not find an implementation" not in said:
        advice = ": if an input chooses the branch, make it a constant by --constant" if "Op (If)" in said else ""
        return f"refuses the model: {said}{advice or size_advice(said)}"
    node = said.partition("implementation for ")[2] or said
    advice = ""
    values = (*model.graph.input, *model.graph.value_info)
    if any(value.type.tensor_type.elem_type == TensorProto.BFLOAT16 for value in values):
        advice = ": its CPU kernels take float32 rather than bfloat16: convert the model, or compile for --target cuda"
    return f"has no CPU kernel for {node}{advice}"
