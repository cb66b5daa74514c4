"""ONNX models as text, compiled for the CPU target and compared with ONNX Runtime."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
from numpy.typing import ArrayLike
from onnx import ModelProto, numpy_helper

import nimblec
import nimblert
from nimblert.plan import Plan

Feed = Mapping[str, np.ndarray]


def parse(text: str, opset: int = 20, **constants: ArrayLike) -> ModelProto:
    """Parse the model of a graph in ONNX's textual syntax, without its name."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {text}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), name) for name, a in constants.items())
    return model


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Draw standard normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def compiled(model: Any, *args: Any, **options: Any) -> Plan:
    """Compile a model to a plan that does not depend on the load of the machine."""
    return nimblec.compile(model, *args, target="cpu", plan_cache=None, reproducible=True, **options)


def check(model: ModelProto, feeds: Sequence[Feed], **options: Any) -> Plan:
    """Compile a model, and compare its plan with ONNX Runtime on each of ``feeds``."""
    plan = compiled(model, **options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with nimblert.load(plan) as executable:
        for feed in feeds:
            for wanted, got in zip(session.run(None, feed), executable.run(feed).values(), strict=True):
                assert got.dtype == wanted.dtype
                np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    return plan
