"""Integer kernels on a GPU: every bit of the reference, and a quantised network from its file to its plan."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from quantized_models import PRODUCTS, SETTINGS, image, quantized_network
from rewriting import optimize
from torch import Tensor

import nimblec
import nimblert
from nimblec.graph.rewriter import fake
from nimblec.kernels.call import Leaf, Made
from nimblec.kernels.gpu import GPU
from nimblec.kernels.products.quantized_match import requests
from nimblec.kernels.products.quantized_rewrite import QUANTIZED
from nimblec.onnx_import.importer import import_model
from nimblert.plan import Launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper"), pytest.mark.timeout(300)]

NAME = "unsigned, by channel"


def test_every_candidate_gives_every_bit_of_the_reference(tmp_path: Path) -> None:
    module = optimize(import_model(quantized_network(SETTINGS[NAME], tmp_path)).module, device="cuda")
    found = list(requests(module))
    assert (len(found), sum(request.residual is not None for request in found)) == (PRODUCTS, 1)
    for request in found:
        read = [request.given["x"], *([] if request.residual is None else [request.residual])]
        values = {node: _drawn(fake(node)) for node in read}
        values[request.given["factors"]] = request.constants["factors"]

        def value(leaf: Leaf, values: dict[Any, Tensor] = values) -> Tensor:
            return leaf.value if isinstance(leaf, Made) else values[leaf]

        for tiling in QUANTIZED.tilings(request, GPU.current()):
            made = QUANTIZED.call(request, tiling, "late")
            args, kwargs = made.arguments(value)
            expected = made.op(*args, **kwargs)
            for _ in range(3):
                args, kwargs = made.arguments(lambda leaf: value(leaf).cuda())
                assert torch.equal(made.op(*args, **kwargs).cpu(), expected), (request.signature, tiling)


def _drawn(like: Tensor) -> Tensor:
    """Draw integers of a dtype, shape and strides."""
    limits = torch.iinfo(like.dtype)
    numbers = torch.randint(limits.min, limits.max + 1, like.shape, dtype=like.dtype)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(numbers)


@pytest.mark.parametrize("level", [0, 2])
def test_a_plan_agrees_with_onnxruntime(tmp_path: Path, level: int) -> None:
    model = quantized_network(SETTINGS[NAME], tmp_path)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, {"x": image(9)})
    plan = nimblec.compile(model, target="cuda", level=level, plan_cache=None)
    launches = [command for command in plan.programs[0].commands if isinstance(command, Launch)]
    names = [plan.kernels[launch.kernel].symbol for launch in launches]
    assert sum(name.startswith("quantized_convolution") for name in names) == (PRODUCTS if level == 2 else 0)
    with nimblert.load(plan) as executable:
        (found,) = executable.run({"x": image(9)}).values()
    step = np.diff(np.unique(wanted)).min()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1.001 * step)
