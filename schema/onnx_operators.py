# ruff: noqa: INP001 (a script)
"""Write the table of operators that a CPU plan may call: runtime/nimblert/_generated/onnx_operators.py.

    python schema/onnx_operators.py --write    # for a newer ONNX Runtime

The table has every operator for which ONNX Runtime has a schema and a CPU kernel, except those in LEFT_OUT and
VERSIONS_LEFT_OUT. The runtime checks each node of a plan against it, without the onnx package or a session.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from onnx import TensorProto
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime

TARGET = Path(__file__).resolve().parents[1] / "runtime" / "nimblert" / "_generated" / "onnx_operators.py"

DOMAINS = ("", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc")

MICROSOFT = """
    Attention BiasGelu DequantizeLinear DynamicQuantizeLSTM DynamicQuantizeMatMul EmbedLayerNormalization ExpandDims
    FastGelu FusedConv FusedGemm FusedMatMul GatherND Gelu GridSample Inverse MatMulIntegerToFloat
    MatMulNBits MultiHeadAttention NhwcMaxPool Pad QAttention QGemm QLinearAdd QLinearAveragePool QLinearConcat
    QLinearConv QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearSigmoid QLinearSoftmax QLinearWhere
    QuantizeLinear QuickGelu RotaryEmbedding SkipLayerNormalization SkipSimplifiedLayerNormalization Trilu
"""
"""Operators of com.microsoft that ONNX Runtime's optimiser and quantizer, and exporters for it, write. The rest of the
domain is experiments and text generation, whose kernels check little. GroupQueryAttention does not check the sequence
lengths among its inputs."""

LEFT_OUT = {
    "two runs differ": """
        Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike SampleOp
    """,
    "of strings and maps, which a plan cannot hold": """
        CastMap CategoryMapper DictVectorizer RegexFullMatch StringConcat StringNormalizer StringSplit Tokenizer ZipMap
    """,
    "text generation, whole models as attributes": "BeamSearch GreedySearch Sampling WhisperBeamSearch",
    "between devices": "MemcpyFromHost MemcpyToHost",
    "its attribute is a type": "Optional",
    "gives sequences of sizes that it divides by without looking": "SplitToSequence",
    "a kernel reads what its inputs point to, unchecked": "MaxRoiPool",
}
"""Operators that no plan may have, by reason."""

VERSIONS_LEFT_OUT = {("Scan", 8)}
"""Of an empty batch or sequence the kernel leaves the outputs as their memory was."""

ELEMENT_TYPES = {name.lower(): number for name, number in TensorProto.DataType.items()}
"""ONNX's element types by their names in type constraints, the "float" of "tensor(float)"."""

HEADER = '''"""Written by schema/onnx_operators.py: the operators that a CPU plan may call.

For each "domain:name" a line for each of its versions, ascending:
since / least inputs / inputs / least outputs / outputs / attributes.
An input or output is an option, "1" must be there, "?" may be left out, "*" any number, and the types
that it may have: bit n of the hexadecimal number is ONNX's element type n. An attribute is name=type, the
number of AttributeProto.AttributeType, with a "!" where it must be there.
"""

'''


def operators() -> dict[str, list[str]]:
    """The table, from the schemas and kernels of the installed ONNX Runtime."""
    left_out = {name for names in LEFT_OUT.values() for name in names.split()}
    kernels = {(k.domain, k.op_name) for k in onnxruntime.get_all_opkernel_def() if "CPU" in k.provider}
    versions: dict[str, dict[int, str]] = defaultdict(dict)
    for schema in onnxruntime.get_all_operator_schema():
        known = schema.domain in DOMAINS and (schema.domain, schema.name) in kernels
        listed = schema.domain != "com.microsoft" or schema.name in MICROSOFT.split()
        allowed = schema.name not in left_out and (schema.name, schema.since_version) not in VERSIONS_LEFT_OUT
        if known and listed and allowed and not schema.deprecated:
            versions[f"{schema.domain}:{schema.name}"][schema.since_version] = line(schema)
    return {key: [versions[key][since] for since in sorted(versions[key])] for key in sorted(versions)}


def opsets() -> dict[str, int]:
    """The newest version of each domain."""
    newest: dict[str, int] = dict.fromkeys(DOMAINS, 1)
    for schema in onnxruntime.get_all_operator_schema():
        if schema.domain in newest:
            newest[schema.domain] = max(newest[schema.domain], schema.since_version)
    return newest


def line(schema: Any) -> str:
    """The line of one version of an operator; ``schema`` is ONNX Runtime's or ONNX's."""
    attributes = (
        f"{name}={int(attribute.type)}{'!' if attribute.required else ''}"
        for name, attribute in sorted(schema.attributes.items())
    )
    inputs, outputs = (" ".join(map(_formal, formals)) for formals in (schema.inputs, schema.outputs))
    parts = (schema.since_version, schema.min_input, inputs, schema.min_output, outputs, " ".join(attributes))
    return "/".join(map(str, parts))


def _formal(formal: Any) -> str:
    option = {"Single": "1", "Optional": "?", "Variadic": "*"}[formal.option.name]
    return f"{option}{sum(1 << number for number in _element_types(formal.types)):x}"


def _element_types(names: Iterable[str]) -> Iterator[int]:
    for name in names:
        inner = name.removeprefix("tensor(").removesuffix(")")
        if name.startswith("tensor(") and inner in ELEMENT_TYPES:
            yield ELEMENT_TYPES[inner]


def text() -> str:
    """The contents of the generated file."""
    entries = (f'    "{key}": """\\\n' + "\n".join(lines) + '""",\n' for key, lines in operators().items())
    return f"{HEADER}OPSETS = {opsets()!r}\n\nOPERATORS = {{\n{''.join(entries)}}}\n"


def main() -> None:
    """Print the file, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the file instead of printing it")
    if parser.parse_args().write:
        TARGET.write_text(text())
    else:
        print(text())  # noqa: T201 - what the script is for


if __name__ == "__main__":
    main()
