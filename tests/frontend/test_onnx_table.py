"""The table of operators against the schemas of the onnx package."""

from collections.abc import Iterator
from typing import Any

import onnx
import pytest
from onnx.defs import OpSchema
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from nimblec import onnx_ops  # noqa: F401 - fills the table
from nimblec.onnx_ops.table import LATEST_OPSET, MICROSOFT, Operator, find, op, operators

OLDEST_OPSET = 7

HISTORY: dict[str, list[OpSchema]] = {}
for _schema in onnx.defs.get_all_schemas_with_history():
    if _schema.domain == "":
        HISTORY.setdefault(_schema.name, []).append(_schema)

NOT_TAKEN = {
    ("Constant", "sparse_value"),
    ("Constant", "value_string"),
    ("Constant", "value_strings"),
    ("TfIdfVectorizer", "pool_strings"),
}
"""Attributes that a node is refused for."""


def _rows_and_schemas() -> Iterator[tuple[Operator, OpSchema]]:
    for schemas in HISTORY.values():
        for schema in schemas:
            later = [other.since_version for other in schemas if other.since_version > schema.since_version]
            last = min(later, default=LATEST_OPSET + 1) - 1
            row = find("", schema.name, schema.since_version)
            if last >= OLDEST_OPSET and row is not None and not schema.deprecated:
                yield row, schema


PAIRS = list(_rows_and_schemas())


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_plain(item) for item in value)
    return value.decode() if isinstance(value, bytes) else value


def _label(pair: tuple[Operator, OpSchema]) -> str:
    return f"{pair[1].name}-{pair[1].since_version}"


def test_table_is_of_a_known_opset() -> None:
    assert OLDEST_OPSET < LATEST_OPSET <= onnx.defs.onnx_opset_version()


def test_every_row_names_an_operator_of_onnx() -> None:
    unknown = {row.name for row in operators() if row.domain == ""} - HISTORY.keys()
    assert unknown == {"SimplifiedLayerNormalization"}  # ONNX Runtime's, in ONNX's domain


@pytest.mark.parametrize("pair", PAIRS, ids=_label)
def test_attributes_are_those_of_the_schema_with_its_defaults(pair: tuple[Operator, OpSchema]) -> None:
    row, schema = pair
    refused = {name for op_name, name in NOT_TAKEN if op_name == row.name}
    newer = [other for other in HISTORY[schema.name] if other.since_version > schema.since_version]
    later = {name for other in newer for name in other.attributes}
    assert schema.attributes.keys() - refused <= row.attributes.keys() <= schema.attributes.keys() | later
    for name in row.attributes.keys() & schema.attributes.keys():
        parameter, declared = row.attributes[name], schema.attributes[name]
        assert parameter.optional or declared.required, name
        default = declared.default_value
        if default.name:
            assert parameter.default == _plain(onnx.helper.get_attribute_value(default)), name


@pytest.mark.parametrize("pair", PAIRS, ids=_label)
def test_inputs_are_those_of_the_schema(pair: tuple[Operator, OpSchema]) -> None:
    row, schema = pair
    variadic = [p for p in schema.inputs if p.option == OpSchema.FormalParameterOption.Variadic]
    single = [p for p in schema.inputs if p.option != OpSchema.FormalParameterOption.Variadic]
    assert len(row.inputs) == len(single)
    assert (row.variadic is not None) == bool(variadic)
    for parameter, declared in zip(row.inputs, single, strict=True):
        # The tensor that an operator is about may be called x throughout.
        assert parameter.name in ("x", declared.name.lower())
        assert parameter.optional or declared.option != OpSchema.FormalParameterOption.Optional, parameter.name


def test_a_later_row_holds_from_its_opset_on() -> None:
    softmax = [find("", "Softmax", opset) for opset in (7, 12, 13, 28)]
    assert softmax[0] is softmax[1]
    assert softmax[2] is softmax[3]
    assert softmax[1] is not softmax[2]
    assert find("", "Gelu", 19) is None
    assert find("", "NoSuchOperator", 20) is None
    assert callable(op("NoSuchOperator"))


RUNTIME_SCHEMAS = {schema.name: schema for schema in get_all_operator_schema() if schema.domain == MICROSOFT}
MICROSOFT_ROWS = [row for row in operators() if row.domain == MICROSOFT]
UNUSED_INPUTS = {"MultiHeadAttention": 2, "Attention": 1}
"""How many inputs at the end, for sharing buffers, are not taken."""


@pytest.mark.parametrize("row", MICROSOFT_ROWS, ids=lambda row: row.name)
def test_rows_of_onnx_runtime_take_what_its_schemas_have(row: Operator) -> None:
    schema = RUNTIME_SCHEMAS[row.name]
    inputs = [p.name for p in schema.inputs if "Variadic" not in str(p.option)]
    taken = inputs[: len(inputs) - UNUSED_INPUTS.get(row.name, 0)]
    assert [p.name for p in row.inputs if p.name != "x"] == [
        name.lower() for name, p in zip(taken, row.inputs, strict=True) if p.name != "x"
    ]
    assert row.attributes.keys() == schema.attributes.keys()
