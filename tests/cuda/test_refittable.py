"""compile(refittable=True) for the CUDA target: recipes of constants, on the host."""

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calling import place
from drawn_weights import drawn, randomised
from families import bert, inception, mobilenet, resnet
from rewriting import counts, run
from torch import Tensor, nn

import nimblert
from nimblec.base.errors import CompileError
from nimblec.base.ir import Access, Buffer, BufferKind, CopyWork, Graph, Op, Part, Task, TensorView
from nimblec.cuda.derivation import Derivations
from nimblec.cuda.refit_programs import Given, Recipes, assemble_refittable, recipes
from nimblec.cuda.refittable import Refittable, make_refittable, of_files, of_modules, whole
from nimblec.graph import recorder as graph_recorder
from nimblec.kernels.gpu import SM_90
from nimblec.onnx_import.importer import Weigh
from nimblec.onnx_import.torch_model import load_onnx
from nimblec.optimize.o2 import TRITON, first
from nimblec.optimize.passes.aligned_weights import LARGE, align_weights
from nimblec.optimize.passes.cast import cast
from nimblec.optimize.passes.channels_last import propagate_channels_last
from nimblec.optimize.passes.linears import join_linears
from nimblec.optimize.pipeline import Pass, Phase, Pipeline, Runs, Setting
from nimblec.optimize.rewrites import FUSED_REGIONS
from nimblec.optimize.torch_compile import compiled
from nimblec.optimize.variants import Variant, as_it_runs
from nimblec.plan.assembly import Provenance
from nimblec.pytorch.model import TorchModel
from nimblec.schedule.dependencies import dependencies
from nimblec.schedule.memory import layout
from nimblec.schedule.streams import serial
from nimblert.arrays.layouts import dense_strides
from nimblert.check.verify import problems
from nimblert.cuda import driver
from nimblert.errors import InputError
from nimblert.plan import Target

pytest_plugins = ("gpu_memory",)

DIGITS = Path(__file__).parents[2] / "samples" / "digits.onnx"
ON_HOST = Setting(device="cpu", at_any_cost=False)


Level = Callable[[TorchModel], list[Variant]]


def by(*pipelines: Pipeline, setting: Setting = ON_HOST) -> Level:
    """Return the one variant of a model that pipelines make."""

    def variants(model: TorchModel) -> list[Variant]:
        runs = Runs(model, setting)
        return [Variant(name="rewritten", make=lambda: runs(*pipelines))]

    return variants


level_1 = by(*FUSED_REGIONS)


def level_2(dtype: torch.dtype | None) -> Level:
    """Return -O2 with all its kernels, as for a GPU; the kernels' definitions run on the host."""
    setting = Setting(device="cuda", dtype=dtype, use=first(SM_90))
    return by(*TRITON[:-1], setting=setting)


def assert_remade(found: Refittable[str], weights: Any, fresh: TorchModel, args: Sequence[Tensor]) -> None:
    """Check that the recipes make of these weights the model that is made of them afresh."""
    (made,) = found.variants["main"]
    recipe = found.derivations.recipe(made.constants)
    given = {name: weights[name].contiguous() for name in recipe.sources}
    for tensor, value in zip(made.constants, recipe(given), strict=True):
        whole(tensor).copy_(value)
    for one, two in zip(run(made.model.module, *args), run(fresh.module, *args), strict=True):
        assert torch.equal(one, two)
        assert one.isfinite().all()


def remade(make: Callable[[int], nn.Module], args: Sequence[Tensor], level: Level) -> Refittable[str]:
    """Make the network of one seed refittable, checked with the weights of another."""
    module, other = make(0), make(1)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    found = make_refittable(of_modules({"main": place(module, tuple(args))}), level)
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())
    assert not found.kept
    assert set(found.weights) == {key for key, tensor in before.items() if tensor.is_floating_point()}
    (fresh,) = level(place(other, tuple(args)))
    assert_remade(found, other.state_dict(), fresh.make(), args)
    return found


LEVELS = {"-O1": level_1, "-O2": level_2(None), "-O2 fp16": level_2(torch.float16)}


IMAGE = torch.randn(1, 3, 32, 32)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "resnet": (lambda: resnet.ResNet(width=8, classes=10, stages=(1, 2)), (IMAGE,)),
    "mobilenet": (lambda: mobilenet.MobileNet(classes=10, depth=(1, 2, 0, 0, 0, 0, 0)), (IMAGE,)),
    "inception": (lambda: inception.Inception(width=16, blocks=2, classes=10), (IMAGE,)),
    "bert": (lambda: bert.Bert(vocabulary=100, width=64, heads=4, layers=1), bert.small()[1]),
}
"""Smaller than those of `families`, of the same kinds of blocks: each level makes the same kinds of calls of them."""


def test_a_weight_is_known_after_its_move_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one device here, so a clone stands for the move."""
    monkeypatch.setattr(graph_recorder, "on_device", lambda held, _device: {k: v.clone() for k, v in held.items()})
    recorder, weight = graph_recorder.Recorder(torch.device("cpu")), torch.ones(4)
    derivations = Derivations()
    derivations.add("weight", weight)
    with derivations:
        with recorder:
            recorder.output([recorder.placeholder("x", torch.float32, (4,)) * weight])
        module = graph_recorder.graph_module(recorder, "Model")
    assert derivations.sources(module.constant_0) == {"weight"}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("bert", "-O1"),
        pytest.param("resnet", "-O1", marks=pytest.mark.slow),
        *((name, "-O2") for name in ("resnet", "mobilenet", "inception", "bert")),
        ("bert", "-O2 fp16"),
        pytest.param("resnet", "-O2 fp16", marks=pytest.mark.slow),
    ],
)
def test_recipes_make_what_a_fresh_compile_does(name: str, how: str) -> None:
    remade(lambda seed: randomised(NETWORKS[name][0](), seed), NETWORKS[name][1], LEVELS[how])


@pytest.mark.parametrize("how", ["-O2", "-O2 fp16"])
def test_weights_that_lie_channels_last(how: str) -> None:
    make, (image,) = NETWORKS["resnet"]
    last: Any = torch.channels_last
    args = (image.to(memory_format=last),)
    found = remade(lambda seed: randomised(make(), seed).to(memory_format=last), args, LEVELS[how])
    assert all(tensor.is_contiguous() for tensor in found.weights.values())


@pytest.mark.parametrize("how", ["-O1", "-O2"])
def test_weights_of_an_onnx_file(how: str) -> None:
    level = LEVELS[how]

    def load(weigh: Weigh) -> dict[str, TorchModel]:
        return {"main": load_onnx(DIGITS, device="cpu", weigh=weigh)}

    found = make_refittable(of_files(load), level)
    other: dict[str, Tensor] = {}

    def weigh(name: str, tensor: Tensor) -> Tensor:
        other[name] = drawn(name, tensor.shape, torch.Generator().manual_seed(len(other)))
        return other[name]

    (fresh,) = level(load(weigh)["main"])
    assert set(found.weights) == set(other)
    assert_remade(found, other, fresh.make(), [torch.rand(1, 1, 8, 8)])


class Projections(nn.Module):
    """Three linears on one input, and one that is wide and ends odd."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 8) for _ in range(3))
        self.wide = nn.Linear(32, LARGE // 32 + 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return all four."""
        return self.query(x), self.key(x), self.value(x), self.wide(torch.relu(x))


def passes(*runs: Callable[..., object], takes: tuple[str, ...] = ()) -> Pipeline:
    every = (Pass(run=run, reason="it is tested", takes=takes) for run in runs)
    return Pipeline(Phase(name="tested", passes=tuple(every)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_joined_padded_and_cast_weights(dtype: torch.dtype) -> None:
    setting = Setting(device="cpu", dtype=dtype)
    level = by(passes(cast, takes=("dtype",)), passes(join_linears, align_weights), setting=setting)
    remade(lambda seed: randomised(Projections(), seed), [torch.rand(2, 32)], level)


def test_norms_that_go_into_products() -> None:
    def network(seed: int) -> nn.Module:
        return randomised(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)), seed).half()

    (made,) = remade(network, [torch.randn(32, 64).half()], LEVELS["-O2"]).variants["main"]
    assert counts(made.model.module)["linear_and_moments"] == 1


class Transposed(nn.Module):
    """Products with weights that lie as (inputs, outputs), both sizes odd: zeros are appended to a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.empty(1027, LARGE // 1024 + 3))
        self.outer = nn.Parameter(torch.empty(LARGE // 1024 + 3, 1027))

    def forward(self, x: Tensor) -> Tensor:
        """Apply one after the other."""
        return torch.relu(x @ self.inner) @ self.outer


def test_weights_that_a_pass_writes_into_larger_ones() -> None:
    x = torch.rand(1, 1027).half()
    found = remade(lambda seed: randomised(Transposed(), seed).half(), [x], by(passes(align_weights)))
    assert any(tensor.numel() > 1027 * (LARGE // 1024 + 3) for tensor in found.variants["main"][0].constants)


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "a part": lambda w: _written(w.new_zeros(5, 8), lambda t: t[1:5, :6].copy_(w)),
    "parts, one after another": lambda w: _written(w.new_zeros(8, 6), lambda t: (t[:4].copy_(w), t[4:].copy_(2 * w))),
    "in another order": lambda w: _written(w.new_ones(6, 4).t(), lambda t: t[:, 1:].mul_(w[:, 1:])),
    "of another dtype": lambda w: _written(w.new_zeros(4, 6, dtype=torch.float64), lambda t: t.copy_(w)),
    "numbers": lambda w: _written(2 * w, lambda t: t[0].fill_(3)),
    "read before": lambda w: _written(w.exp(), lambda t: t.add_(t.sum())),
    "as an out argument": lambda w: _written(torch.empty_like(w), lambda t: torch.add(w, w, out=t)),
}


def _written(tensor: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    write(tensor)
    return tensor


@pytest.mark.parametrize("how", WRITES)
def test_recipes_write_as_the_calls_did(how: str) -> None:
    weight, other = torch.rand(4, 6), torch.rand(4, 6)
    derivations = Derivations()
    derivations.add("w", weight)
    with derivations:
        made = WRITES[how](weight)
    assert derivations.is_told(made)
    kept = weight.clone()
    for value in (weight, other):
        (remade,) = derivations.recipe([made])({"w": value})
        assert torch.equal(remade, whole(WRITES[how](value)))
    assert torch.equal(weight, kept)


UNTOLD: dict[str, Callable[[Tensor], Tensor]] = {
    "into what is not known": lambda w: _written(torch.zeros(8, 6), lambda t: t[:4].copy_(w)),
    "into a memory with gaps": lambda w: _written(w.new_empty_strided((4, 6), (8, 1)), lambda t: t.copy_(w)),
    "without returning it": lambda w: _written(2 * w, lambda t: torch._foreach_add_([t], 1)),
    "after that": lambda w: _written(2 * w, lambda t: (torch._foreach_add_([t], 1), t.add_(1))),
    "into the bits": lambda w: _written(2 * w, lambda t: t.view(torch.int32).bitwise_and_(-2)),
}


@pytest.mark.parametrize("how", UNTOLD)
def test_what_else_is_written_is_said_to_be_untold(how: str) -> None:
    weight = torch.rand(4, 6)
    derivations = Derivations()
    derivations.add("w", weight)
    with derivations:
        made = UNTOLD[how](weight)
    assert derivations.sources(made) == {"w"}
    assert not derivations.is_told(made)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_weight_that_is_laid_otherwise_is_given_as_it_is(memory_format: torch.memory_format) -> None:
    x = torch.rand(1, 4, 5, 5)
    module = randomised(nn.Sequential(nn.Conv2d(4, 6, 3)), 0)
    module.to(memory_format=memory_format)  # type: ignore[call-overload]
    variants = by(passes(lambda graph: propagate_channels_last(graph, {torch.float32})))
    found = make_refittable(of_modules({"main": place(module, (x,))}), variants)
    given = recipes(found, [made.model for made in found.variants["main"]], "cpu")
    assert given.made == ()
    assert set(given.given.values()) == {
        Given(name="0.weight", dtype="float32", shape=(6, 4, 3, 3), strides=(36, 1, 12, 4)),
        Given(name="0.bias", dtype="float32", shape=(6,), strides=(1,)),
    }


class Scaled(nn.Module):
    """A linear, and a scale of which a pass takes one number into the program."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the linear, scaled."""
        return self.linear(x) * self.scale[1]


def test_a_weight_whose_number_is_in_the_program_keeps_its_value() -> None:
    x = torch.rand(2, 4)
    found = make_refittable(of_modules({"main": place(Scaled().eval(), (x,))}), level_1)
    assert found.kept == {"scale"}
    assert set(found.weights) == {"linear.weight", "linear.bias"}
    (made,) = found.variants["main"]
    other = Scaled()
    other.load_state_dict({**other.state_dict(), **found.weights})
    torch.testing.assert_close(made.model.module(x)[0], other(x))


def test_a_model_of_torch_compile_is_refused() -> None:
    x = torch.rand(2, 4)
    model = place(nn.Linear(4, 4).eval(), (x,))
    for variants in (lambda m: [as_it_runs(compiled(m))], lambda m: [as_it_runs(m)]):
        with pytest.raises(CompileError, match=r"--refittable: the model cannot become a graph .* with -O0"):
            make_refittable(of_modules({"main": model}), variants)


# A plan whose constants are made by copies alone, which the driver of host memory runs, too.

SHAPE = (4, 6)
NBYTES = prod(SHAPE) * 4


def view(name: str, buffer: int, shape: tuple[int, ...] = SHAPE) -> TensorView:
    return TensorView(name=name, dtype="float32", shape=shape, strides=dense_strides(shape), buffer=buffer)


def copies(*pairs: tuple[Access, Access]) -> tuple[Task, ...]:
    return tuple(Task(op=0, work=CopyWork(dst=d, src=s), reads=(s,), writes=(d,)) for d, s in pairs)


def graph(buffers: Sequence[Buffer], tasks: tuple[Task, ...], inputs: Sequence[int], outputs: Sequence[int]) -> Graph:
    def views(numbers: Sequence[int]) -> tuple[TensorView, ...]:
        return tuple(view(buffers[n].name, n, buffers[n].shape) for n in numbers)

    return Graph(
        modules=(),
        kernels=(),
        buffers=tuple(buffers),
        ops=(Op(name="copy", source=""),),
        tasks=tasks,
        inputs=views(inputs),
        outputs=views(outputs),
    )


def buffer(kind: BufferKind, name: str, rows: int, storage: int = 0) -> Buffer:
    shape = (rows, SHAPE[1])
    data = memoryview(bytes(prod(shape) * 4)) if kind is BufferKind.CONSTANT else None
    nbytes = prod(shape) * 4
    return Buffer(kind=kind, nbytes=nbytes, name=name, dtype="float32", shape=shape, data=data, storage=storage)


def test_recipes_are_programs_of_the_plan(put: Callable[[np.ndarray], Any]) -> None:
    constants = [buffer(BufferKind.CONSTANT, "folded", rows, storage) for storage, rows in ((7, 8), (8, 4), (9, 4))]
    results = [buffer(BufferKind.OUTPUT, name, c.shape[0]) for name, c in zip("abc", constants, strict=True)]
    main = graph(
        [buffer(BufferKind.INPUT, "x", 4), *constants, *results],
        copies(
            *(
                (Access(buffer=n + 3, offset=0, nbytes=b.nbytes), Access(buffer=n, offset=0, nbytes=b.nbytes))
                for n, b in enumerate(constants, 1)
            )
        ),
        [0],
        [4, 5, 6],
    )
    joins = graph(
        [
            *(buffer(BufferKind.INPUT, name, 4) for name in ("query", "key", "alone")),
            buffer(BufferKind.OUTPUT, "output_0", 8),
            buffer(BufferKind.OUTPUT, "output_1", 4),
            buffer(BufferKind.TEMPORARY, "joined", 8),
        ],
        copies(
            (Access(buffer=5, offset=0, nbytes=NBYTES), Access(buffer=0, offset=0, nbytes=NBYTES)),
            (Access(buffer=4, offset=0, nbytes=NBYTES), Access(buffer=2, offset=0, nbytes=NBYTES)),
            (Access(buffer=5, offset=NBYTES, nbytes=NBYTES), Access(buffer=1, offset=0, nbytes=NBYTES)),
            (Access(buffer=3, offset=0, nbytes=2 * NBYTES), Access(buffer=5, offset=0, nbytes=2 * NBYTES)),
        ),
        [0, 1, 2],
        [3, 4],
    )
    model = TorchModel(module=None, args=(), kwargs={}, inputs=(), is_flat=True)
    found = Recipes(
        names={7: "query 1", 8: "alone 2", 9: "turned 3"},
        given={"turned 3": Given(name="turned", dtype="float32", shape=(6, 4), strides=(1, 6))},
        made=("query 1", "alone 2"),
        model=model,
    )
    named = found.named(main)
    schedule = serial(dependencies(named))
    part = Part(graph=named, schedule=schedule, memory=layout(named, schedule))
    driver.initialise()
    provenance = Provenance(target=Target.CUDA, device=driver.describe(), versions=())
    plan = assemble_refittable([part], provenance, found, joins)
    assert not list(problems(plan))
    arrays = {name: np.random.default_rng(n).random(SHAPE, np.float32) for n, name in enumerate(("query", "key"))}
    turned, alone = (np.random.default_rng(n).random(s, np.float32) for n, s in ((5, (6, 4)), (6, SHAPE)))
    with nimblert.load(plan) as loaded:
        assert set(loaded.weights) == {"query", "key", "alone", "turned"}
        x = np.zeros(SHAPE, np.float32)
        with pytest.raises(InputError, match="weight 'key': the plan holds it folded with 'query': give these, too"):
            loaded.refit({"key": arrays["key"]})
        loaded.refit({**arrays, "turned": put(turned)})
        joined, before, other = loaded(x)
        np.testing.assert_array_equal(joined, np.concatenate([arrays["query"], arrays["key"]]))
        np.testing.assert_array_equal(other, turned.T)
        assert not before.any()
        loaded.refit({"alone": put(alone)})
        np.testing.assert_array_equal(loaded(x)[1], alone)
