"""The table of operators is what the installed onnx says, and what ONNX Runtime has kernels of."""

import runpy
from pathlib import Path

import onnx
import onnxruntime
import pytest

from nimblert import onnx_operators, onnx_trust
from nimblert._generated.onnx_operators import OPERATORS

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
    """A line without types, of which ONNX Runtime knows fewer than the latest onnx."""
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


def test_rules_are_about_operators_that_there_are() -> None:
    known = {key.replace(":", ".").removeprefix(".") for key in OPERATORS}
    assert set(onnx_trust.ANY_SHAPE) <= known
    assert set(onnx_trust._RULES) <= known
