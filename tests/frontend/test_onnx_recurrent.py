"""RNN, GRU and LSTM against ONNX Runtime: directions, lengths, states, clips, activations, peepholes."""

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper

from nimblec.base.errors import UnsupportedModelError
from nimblec.onnx_import.importer import import_model

STEPS, BATCH, SIZE, HIDDEN = 5, 3, 4, 6
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def model_of(op: str, *, options: set[str], attributes: dict[str, Any]) -> tuple[ModelProto, np.ndarray]:
    """Return a node whose weights are known; ``options`` are the optional inputs that it has."""
    rng = np.random.default_rng(3)
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    gates = GATES[op]

    def real(*shape: int) -> np.ndarray:
        return rng.uniform(-0.7, 0.7, shape).astype(np.float32)

    inputs = {
        "w": real(directions, gates * HIDDEN, SIZE),
        "r": real(directions, gates * HIDDEN, HIDDEN),
        "b": real(directions, 2 * gates * HIDDEN),
        "lengths": np.array([5, 2, 4], np.int32),
        "h": real(directions, BATCH, HIDDEN),
        "c": real(directions, BATCH, HIDDEN),
        "p": real(directions, 3 * HIDDEN),
    }
    names = ["x", *(name if name in options | {"w", "r"} else "" for name in inputs)]
    names = names if op == "LSTM" else names[:6]
    outputs = ["y", "y_h", "y_c"][: 3 if op == "LSTM" else 2]
    node = helper.make_node(op, names, outputs, hidden_size=HIDDEN, **attributes)
    graph = helper.make_graph(
        [node],
        "recurrent",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (STEPS, BATCH, SIZE))],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in inputs.items() if name in names],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    return model, real(STEPS, BATCH, SIZE) * 3


SCALED = {"activation_alpha": [1.2, 0.8], "activation_beta": [0.7]}
CASES = [
    ("RNN", {"b"}, {}),
    ("RNN", {"b", "h", "lengths"}, {"direction": "bidirectional", "activations": ["Relu", "Tanh"]}),
    ("RNN", {"b"}, {"direction": "reverse", "clip": 0.4, "activations": ["Affine"], "activation_alpha": [0.5]}),
    ("GRU", set(), {}),
    ("GRU", {"b", "h"}, {"linear_before_reset": 1, "direction": "reverse"}),
    ("GRU", {"b", "h", "lengths"}, {"direction": "bidirectional"}),
    ("GRU", {"b"}, {"clip": 0.5, "activations": ["HardSigmoid", "Softsign"]}),
    ("LSTM", set(), {}),
    ("LSTM", {"b", "h", "c"}, {"direction": "reverse"}),
    ("LSTM", {"b", "h", "c", "lengths"}, {"direction": "bidirectional"}),
    ("LSTM", {"lengths"}, {"direction": "reverse"}),
    ("RNN", {"b", "lengths"}, {"activations": ["Relu"]}),
    ("GRU", {"b", "h", "lengths"}, {"linear_before_reset": 1, "direction": "bidirectional"}),
    ("LSTM", {"b", "p"}, {"clip": 0.3}),
    ("LSTM", {"b", "h", "c"}, {"input_forget": 1}),
    ("LSTM", {"b", "p"}, {"clip": 0.3, "input_forget": 1}),
    ("LSTM", {"b"}, {"clip": 0.3, "activations": ["Sigmoid", "ScaledTanh", "Elu"], **SCALED}),
]


def test_an_activation_without_defaults_needs_its_numbers() -> None:
    model, _ = model_of("RNN", options=set(), attributes={"activations": ["ScaledTanh"]})
    with pytest.raises(UnsupportedModelError, match="'scaledtanh' has no defaults"):
        import_model(model)


def _id(value: object) -> str:
    """Return an id that is the same in every process, unlike the order of a set."""
    return "-".join(sorted(value)) if isinstance(value, set) else str(value)[:40]


@pytest.mark.parametrize(("op", "options", "attributes"), CASES, ids=_id)
def test_gives_what_onnx_runtime_gives(op: str, options: set[str], attributes: dict[str, Any]) -> None:
    model, x = model_of(op, options=options, attributes=attributes)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = import_model(model).module(torch.from_numpy(x))
    for left, right in zip(found, session.run(None, {"x": x}), strict=True):
        np.testing.assert_allclose(left.numpy(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_lengths_beyond_the_steps_are_all_of_them(direction: str) -> None:
    """On a GPU an index beyond the end would stop the process."""
    attributes = {"direction": direction}
    model, x = model_of("LSTM", options={"b", "lengths"}, attributes=attributes)
    (lengths,) = (tensor for tensor in model.graph.initializer if tensor.name == "lengths")
    model.graph.initializer.remove(lengths)
    model.graph.input.append(helper.make_tensor_value_info("lengths", TensorProto.INT32, (BATCH,)))
    run = import_model(model).module
    found, expected = (run(torch.from_numpy(x), torch.tensor(n, dtype=torch.int32)) for n in ([9, 0, 5], [5, 0, 5]))
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left, right)
