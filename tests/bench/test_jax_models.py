"""Networks in JAX agree with the torch models whose weights they have."""

from collections.abc import Iterator
from importlib import import_module

import numpy as np
import pytest
import torch
from arithmetic import arithmetic

jax = pytest.importorskip("jax", reason="needs jax: not installed")


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with arithmetic("fp32"):
        yield


def agrees(name: str, callable_name: str, bound: float) -> None:
    """Compare a network in JAX, on two inputs, with the torch model of the same seed."""
    package = {"resnet50": "torchvision", "bert_base": "transformers"}[name]
    pytest.importorskip(package, reason=f"needs {package}: not installed")
    torch.manual_seed(0)
    module, _ = import_module(f"bench.models.{name}").fp32()
    torch.manual_seed(0)
    function, (weights, given) = getattr(import_module(f"bench.models.jax_{name}"), callable_name)(batch=2)
    inputs = torch.from_numpy(given)
    with torch.no_grad():
        expected = module(inputs.float().permute(0, 3, 1, 2) if name == "resnet50" else inputs)
    dtype = {"fp32": np.float32, "fp16": np.float16}[callable_name]
    assert {array.dtype for array in jax.tree.leaves(weights)} == {np.dtype(dtype)}
    outputs = jax.tree.leaves(jax.jit(function)(weights, given))
    for output, wanted in zip(outputs, [expected] if torch.is_tensor(expected) else expected, strict=True):
        assert output.dtype == dtype
        difference = np.abs(np.asarray(output, np.float64) - wanted.double().numpy()).max()
        assert difference / wanted.abs().max().item() <= bound


@pytest.mark.parametrize("name", ["resnet50", "bert_base"])
def test_jax_network_agrees_with_torch(name: str) -> None:
    agrees(name, "fp32", 1e-4)
