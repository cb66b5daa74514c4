"""The table of operators is what the installed onnx says, and what ONNX Runtime has kernels of."""

import re
import runpy
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from nimblec.cpu import kernels
from nimblec.cpu.constants import TensorType
from nimblert._generated.onnx_operators import OPERATORS
from nimblert.check import onnx_model, onnx_operators, onnx_trust

SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[2] / "schema" / "onnx_operators.py"))
NOT_ONNX = {"Affine", "Crop", "DynamicSlice", "ImageScaler", "ParametricSoftplus", "Scale", "ScaledTanh"}
"""What only ONNX Runtime has in ONNX's own domain: experiments of ONNX 1.0."""


def test_the_table_is_what_onnx_says() -> None:
    compared = 0
    for key, text in OPERATORS.items():
        domain, name = key.split(":")
        for line in text.splitlines():
            since = int(line.split("/")[0])
            if domain in ("", "ai.onnx.ml") and since <= onnx.defs.onnx_opset_version() and name not in NOT_ONNX:
                try:
                    schema = onnx.defs.get_schema(name, since, domain)
                except onnx.defs.SchemaError:
                    continue  # ONNX Runtime had it before ONNX: LayerNormalization, SimplifiedLayerNormalization
                if schema.since_version == since:
                    compared += 1
                    assert shape_of(SCRIPT["line"](schema)) == shape_of(line), key
    assert compared > 400


def shape_of(line: str) -> list[object]:
    """Return a line without types, of which ONNX Runtime knows fewer than the latest onnx."""
    since, least_in, inputs, least_out, outputs, attributes = line.split("/")
    names = sorted(attribute.split("=")[0] for attribute in attributes.split())
    return [since, least_in, [f[0] for f in inputs.split()], least_out, [f[0] for f in outputs.split()], names]


@pytest.mark.skipif(onnxruntime.__version__ != "1.32.0", reason="the table was written with ONNX Runtime 1.32.0")
def test_the_file_is_what_the_script_writes() -> None:
    assert SCRIPT["TARGET"].read_text() == SCRIPT["text"]()


def test_the_version_that_an_opset_has_is_found() -> None:
    softmax = [onnx_operators.find("", "Softmax", opset) for opset in (1, 11, 13)]
    assert all(operator is not None and set(operator.attributes) == {"axis"} for operator in softmax)
    split = onnx_operators.find("", "Split", 18)
    assert split is not None
    assert [formal.optional for formal in split.inputs] == [False, True]
    assert split.outputs[0].variadic
    assert onnx_operators.find("", "Split", 10**6) is None
    assert onnx_operators.find("", "Mish", 18) is None
    assert onnx_operators.find("", "Gelu", 19) is None
    assert onnx_operators.find("", "Scan", 8) is None  # leaves outputs of an empty batch unwritten
    assert onnx_operators.find("", "Scan", 9) is not None


def test_rules_are_about_operators_that_there_are() -> None:
    known = {key.replace(":", ".").removeprefix(".") for key in OPERATORS}
    assert set(onnx_trust.ANY_SHAPE) <= known
    assert set(onnx_trust._RULES) <= known


_OF_RANK = [st.sampled_from([*product(range(4), repeat=rank)]) for rank in range(6)]
_SHAPES = st.lists(st.one_of(st.none(), *_OF_RANK), max_size=10).map(tuple)
_NAMES = re.findall(r'"([a-z][a-zA-Z0-9_]+)"', Path(onnx_trust.__file__).read_text(encoding="utf-8"))
_ATTRIBUTES = st.builds(
    onnx_model.Attribute,
    i=st.none() | st.integers(-2, 4),
    ints=st.lists(st.integers(-1, 4), max_size=4).map(tuple),
    floats=st.lists(st.floats(), max_size=3).map(tuple),
)
_CONSTANTS = st.builds(onnx_model.TensorValue, data_type=st.sampled_from([1, 6, 7]), raw_data=st.none() | st.binary())


@pytest.mark.parametrize("operator", sorted(onnx_trust._RULES))
@settings(max_examples=30, deadline=None)
@given(
    inputs=_SHAPES,
    outputs=_SHAPES,
    attributes=st.dictionaries(st.sampled_from(_NAMES), _ATTRIBUTES),
    constant=st.dictionaries(st.integers(0, 9), _CONSTANTS),
)
def test_rules_are_about_whatever_a_file_says(operator: str, **parts: Any) -> None:
    """Too few inputs, too, which is another rule's to tell."""
    for sentence in onnx_trust.problems(operator, onnx_trust.Call(**parts)):
        assert sentence.startswith(operator)


def chain(operator: str, height: int, end: int | None = None) -> list[str]:
    """Return what the rules say of a tree of which each node has a leaf and the next node.

    ``end`` is the node that the last of them leads to instead of a second leaf.
    """
    nodes = [*range(height if operator == "TreeEnsemble" else height - 1)]
    leaf, last = (0, 0 if end is None else end) if operator == "TreeEnsemble" else (height - 1, end or height - 1)
    lists = {"nodes_truenodeids": [*nodes[1:], last], "nodes_falsenodeids": [leaf] * len(nodes)}
    if operator == "TreeEnsemble":
        lists |= {"nodes_trueleafs": [0] * (height - 1) + [end is None], "nodes_falseleafs": [1] * height}
        lists["tree_roots"] = [0]
    else:
        lists = {name: [*ids, 0] for name, ids in lists.items()}
        lists |= {"nodes_treeids": [7] * height, "nodes_nodeids": [*nodes, leaf]}
    attributes = {name: onnx_model.Attribute(ints=tuple(ints)) for name, ints in lists.items()}
    attributes["nodes_modes"] = onnx_model.Attribute(strings=(*[b"BRANCH_LEQ"] * len(nodes), b"LEAF"))
    call = onnx_trust.Call(attributes=attributes, inputs=((1, 1),), outputs=((1, 1),), constant={})
    return list(onnx_trust.problems(f"ai.onnx.ml.{operator}", call))


@pytest.mark.parametrize("operator", ["TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"])
def test_trees_that_would_exhaust_the_stack_are_refused(operator: str) -> None:
    """ONNX Runtime reads them by recursion: 60,000 nodes, each below the one before, ended the process."""
    most = onnx_trust._HIGHEST_TREE
    assert chain(operator, most) == []
    for tree in ((most + 1, None), (60_000, None), (5, 1), (5, -1), (5, 5)):
        (said,) = chain(operator, *tree)
        assert said.endswith("trees with a cycle, or higher than 1024 nodes")


def test_grams_of_which_none_is_whole_are_refused() -> None:
    given = {"pool_int64s": (1,), "ngram_counts": (0, 0), "ngram_indexes": ()}
    attributes = {name: onnx_model.Attribute(ints=ints) for name, ints in given.items()}
    call = onnx_trust.Call(attributes=attributes, inputs=((1,),), outputs=((1,),), constant={})
    first = next(onnx_trust.problems("TfIdfVectorizer", call))
    assert first == "TfIdfVectorizer: ngram_counts: (0, 0) cuts n-grams of 1 numbers"
    assert len(list(onnx_trust.problems("TfIdfVectorizer", call))) > 1


@pytest.mark.parametrize(
    ("axis", "refused"),
    [
        (onnx_model.TensorValue(data_type=6, int32_data=(1,)), False),
        (onnx_model.TensorValue(data_type=6, raw_data=bytes(4)), True),
        (onnx_model.TensorValue(data_type=6), True),
        (onnx_model.TensorValue(data_type=6, int32_data=(1, 1)), True),
        (None, True),
    ],
)
def test_an_axis_is_where_onnx_runtime_looks_for_it(axis: onnx_model.TensorValue | None, *, refused: bool) -> None:
    """Version 1.24 takes the first of the field's numbers, even where there is none, and the process ends."""
    constant = {} if axis is None else {1: axis}
    call = onnx_trust.Call(attributes={}, inputs=((4,), ()), outputs=((4, 1),), constant=constant)
    assert bool(list(onnx_trust.problems("com.microsoft.ExpandDims", call))) is refused


def test_the_compiler_writes_an_axis_there() -> None:
    node = helper.make_node("ExpandDims", ["x", "axis"], ["y"], domain="com.microsoft")
    axis = numpy_helper.from_array(np.array(1, np.int32), "axis")
    types = {"x": TensorType(dtype="float32", shape=(4,)), "y": TensorType(dtype="float32", shape=(4, 1))}
    header = kernels.Header(ir_version=9, opsets={"": 18, "com.microsoft": 1}, functions=())
    made = kernels.build([node], types, {"axis": axis}, header)
    (initializer,) = onnx.ModelProto.FromString(bytes(made.module.code)).graph.initializer
    assert axis.raw_data
    assert list(initializer.int32_data) == [1]
