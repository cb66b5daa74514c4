"""ONNX files with damaged bytes or damaged meaning, from backend cases of many kinds."""

import contextlib
import importlib
import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from onnx import ModelProto
from onnx.backend.test.case import node
from onnx.backend.test.case.test_case import TestCase
from onnx_cases import made_quickly, static_form

from nimblec import cli

SEEDS = {
    "test_resize_upsample_scales_linear": "resize",
    "test_lstm_with_peepholes": "lstm",
    "test_basic_conv_with_padding": "conv",
    "test_batchnorm_example": "batch_normalization",
    "test_attention_3d_gqa_expanded": "attention",
    "test_loop13_seq": "loop",
    "test_maxpool_2d_ceil": "maxpool",
    "test_sce_mean_weight": "softmax_cross_entropy_loss",
    "test_split_variable_parts_2d_opset18": "split",
    "test_scatternd_add": "scatternd",
    "test_affine_grid_2d_expanded": "affinegrid",
}
"""Backend cases to damage, each with the module of onnx that makes it: making all of them takes much longer.

They cover convolution, recurrence, control flow, shape arithmetic and indices.
"""


def models() -> list[ModelProto]:
    with made_quickly():
        for module in SEEDS.values():
            importlib.import_module(f"{node.__name__}.{module}")
    made = {case.name: case for case in node._NodeTestCases}
    return [_model(made[name]) for name in SEEDS]


def _model(case: TestCase) -> ModelProto:
    assert case.model is not None
    assert case.data_sets is not None
    inputs, _ = case.data_sets[0]
    return static_form(case.model, [np.asarray(value) for value in inputs])[0]


def damaged_bytes(model: ModelProto, rng: random.Random) -> bytes:
    """Flip, drop, repeat or cut bytes of the file."""
    data = bytearray(model.SerializeToString())
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data))
        action = rng.randrange(4)
        if action == 0:
            data[place] = rng.randrange(256)
        elif action == 1:
            del data[place : place + rng.randint(1, 8)]
        elif action == 2:
            data[place:place] = data[place : place + rng.randint(1, 8)]
        else:
            data = data[:place]
        if not data:
            break
    return bytes(data)


def damaged_meaning(model: ModelProto, rng: random.Random) -> bytes:
    """Change names, attributes, shapes, dtypes and data so that the file still parses."""
    changed = ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    for _ in range(rng.randint(1, 3)):
        node = rng.choice(graph.node)
        rng.choice([_rename, _attribute, _shape, _initializer, _drop, _opset])(changed, node, rng)
    serialized: bytes = changed.SerializeToString()
    return serialized


def _rename(model: ModelProto, node: object, rng: random.Random) -> None:
    names = [name for other in model.graph.node for name in (*other.input, *other.output)] + ["", "nowhere"]
    if node.input:  # type: ignore[attr-defined]
        node.input[rng.randrange(len(node.input))] = rng.choice(names)  # type: ignore[attr-defined]


def _attribute(_: ModelProto, node: object, rng: random.Random) -> None:
    for attribute in node.attribute:  # type: ignore[attr-defined]
        number = rng.choice([-(1 << 62), -7, -1, 0, 1, 3, 1 << 40])
        attribute.i = number
        attribute.f = float(number)
        attribute.s = rng.choice([b"", b"SAME_UPPER", b"cubic", b"\xff"])
        if attribute.ints:
            attribute.ints[rng.randrange(len(attribute.ints))] = number


def _shape(model: ModelProto, _: object, rng: random.Random) -> None:
    tensor = rng.choice(model.graph.input).type.tensor_type
    if tensor.shape.dim:
        rng.choice(tensor.shape.dim).dim_value = rng.choice([-3, 0, 1, 2, 5, 1 << 10, 1 << 62])
    tensor.elem_type = rng.choice([tensor.elem_type, 1, 7, 9, 10, 16, 99])


def _initializer(model: ModelProto, _: object, rng: random.Random) -> None:
    if model.graph.initializer:
        tensor = rng.choice(model.graph.initializer)
        tensor.data_type = rng.choice([tensor.data_type, 0, 1, 6, 7, 13, 200])
        if tensor.dims:
            tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice([-1, 0, 1, 3, 1 << 40])


def _drop(model: ModelProto, _: object, rng: random.Random) -> None:
    if len(model.graph.node) > 1:
        del model.graph.node[rng.randrange(len(model.graph.node))]


def _opset(model: ModelProto, _: object, rng: random.Random) -> None:
    model.opset_import[0].version = rng.choice([-1, 0, 1, 6, 7, 12, 13, 18, 1 << 40])


def mutations(count: int, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    sources = models()
    damages: list[Callable[[ModelProto, random.Random], bytes]] = [damaged_bytes, damaged_meaning, damaged_meaning]
    for _ in range(count):
        yield rng.choice(damages)(rng.choice(sources), rng)


def compile_for_cpu(data: bytes, path: Path) -> tuple[int, str]:
    """Exit status of ``nimblec compile --target cpu`` on a file of these bytes, and its standard error."""
    path.write_bytes(data)
    errors = io.StringIO()
    arguments = ["compile", str(path), "--target", "cpu", "-o", str(path.with_suffix(".plan"))]
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.main(arguments)
        except SystemExit as done:
            return int(done.code or 0), errors.getvalue()
    return 0, errors.getvalue()
