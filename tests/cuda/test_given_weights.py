"""Which weights of a captured module a refit may replace: those that its kernels read where they are."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch

import nimblec
import nimblert
from nimblec.base.ir import Buffer, BufferKind, Graph
from nimblec.cuda.given_weights import with_weights
from nimblec.pytorch.model import TorchModel
from nimblert.errors import InputError
from nimblert.golden import draw_inputs


class Module(torch.nn.Module):
    """Parameters that fill their storage and ones that do not, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = torch.nn.Parameter(torch.zeros(4, 3))
        self.part = torch.nn.Parameter(torch.zeros(4, 3)[:2])
        self.turned = torch.nn.Parameter(torch.zeros(4, 3).t())
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("written", torch.zeros(2))


def captured(module: Module) -> Graph:
    """Return a graph that has the storages of the module as the capture process describes them."""
    buffers = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        storage = tensor.untyped_storage()
        kind = BufferKind.STATE if name == "written" else BufferKind.CONSTANT
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape, nbytes = tuple(tensor.shape), storage.nbytes()
        buffers.append(Buffer(kind=kind, nbytes=nbytes, name=name, dtype=dtype, shape=shape, storage=storage._cdata))
    return Graph(modules=(), kernels=(), buffers=tuple(buffers), ops=(), tasks=(), inputs=(), outputs=())


def model(module: torch.nn.Module) -> TorchModel:
    return TorchModel(module=module, args=(), kwargs={}, inputs=())


def test_given_weights_are_dense_tensors() -> None:
    module = Module()
    graph = with_weights(captured(module), model(module), as_it_runs=True)
    assert graph.weights == (("whole", 0), ("count", 3))
    assert graph.folded == {"part", "turned", "written"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_given_weights_need_a_plain_module() -> None:
    module = Module()
    every = {"whole", "part", "turned", "count", "written"}
    for original, as_it_runs in (
        (model(module), False),
        (replace(model(module), is_flat=True), True),
        (model(torch.compile(module)), True),
    ):
        graph = with_weights(captured(module), original, as_it_runs=as_it_runs)
        assert graph.weights == ()
        assert every <= {name.removeprefix("_orig_mod.") for name in graph.folded}


def test_a_weight_in_another_dtype_or_storage_is_another_one() -> None:
    module = Module()
    graph = captured(module)
    half, moved = (replace(graph.buffers[0], **change) for change in ({"dtype": "float16"}, {"storage": 1}))
    for changed in (half, moved):
        found = with_weights(replace(graph, buffers=(changed, *graph.buffers[1:])), model(module), as_it_runs=True)
        assert found.weights == (("count", 3),)


def drawn(family: str, seed: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Build a network with parameters and statistics of its own, and an input."""
    module, args = import_module(f"families.{family}").small()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator) / 10)
    return module, args


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["resnet", "bert"])
def test_a_refit_at_level_0_equals_a_fresh_compile(family: str) -> None:
    (module, args), (other, _) = drawn(family, 0), drawn(family, 1)
    options = {"target": "cuda", "level": 0, "streams": "1", "plan_cache": None}
    plan, fresh = (nimblec.compile(one, args, **options) for one in (module, other))
    with nimblert.load(plan) as model, nimblert.load(fresh) as expected:
        state = other.state_dict()
        model.refit({name: state[name].numpy() for name in model.weights})
        assert {name for name, tensor in state.items() if tensor.is_floating_point()} <= model.weights.keys()
        inputs = draw_inputs(plan.programs[0], 3)
        for name, array in expected.run(inputs).items():
            np.testing.assert_array_equal(model.run(inputs)[name], array)


@pytest.mark.gpu
def test_what_was_rewritten_is_refused() -> None:
    module, args = drawn("resnet", 0)
    plan = nimblec.compile(module, args, target="cuda", level=1, plan_cache=None)
    with nimblert.load(plan) as model, pytest.raises(InputError, match="compile with --refittable"):
        model.refit({"head.2.weight": module.state_dict()["head.2.weight"].numpy()})
