"""What a model does to memory, and what it takes and returns, means the same in a plan."""

from math import prod
from typing import TYPE_CHECKING

import eager
import numpy as np
import pytest

import nimblert
from nimblert import golden
from nimblert.plan import Region

if TYPE_CHECKING:
    from gpu_compile import GpuCompiler

pytest_plugins = ("gpu_compile",)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

MODELS = (
    *("tied", "stateful", "aliases", "layouts", "past_the_dispatcher"),
    *("shortcut", "shortcut_by_value", "lazy_table"),
)


@pytest.fixture(scope="module", autouse=True)
def _compiling(gpu_compiler: "GpuCompiler") -> None:
    gpu_compiler.start(*(f"gpu_models:{name}" for name in MODELS))


@pytest.mark.parametrize("name", [m for m in MODELS if m != "stateful"])
def test_outputs_are_what_torch_computes_at_each_call(gpu_compiler: "GpuCompiler", name: str) -> None:
    plan = gpu_compiler.plan(f"gpu_models:{name}")
    reference = eager.build(f"gpu_models:{name}")
    with nimblert.load(plan, poison=True) as executable:
        for seed in (1, 2, 1):
            inputs = golden.draw_inputs(executable.program, seed)
            expected = reference(list(inputs.values()))
            eager.assert_equal(plan, executable.run(inputs), expected)


def test_a_tied_weight_is_stored_once(gpu_compiler: "GpuCompiler") -> None:
    plan = gpu_compiler.plan("gpu_models:tied")
    (weight,) = plan.weights
    assert (weight.name, weight.dtype, weight.shape) == ("embedding.weight", "float32", (50, 32))
    assert plan.state == ()


def test_nested_outputs_have_names_and_types(gpu_compiler: "GpuCompiler") -> None:
    program = gpu_compiler.plan("gpu_models:tied").programs[0]
    assert {t.name: (t.dtype, t.shape) for t in program.outputs} == {
        "logits": ("float32", (2, 8, 50)),
        "found.token": ("int64", (2, 8)),
        "found.positive": ("bool", (2, 8, 50)),
        "mean": ("float32", ()),
    }


def test_integers_are_drawn_from_the_range_of_the_example(gpu_compiler: "GpuCompiler") -> None:
    program = gpu_compiler.plan("gpu_models:tied").programs[0]
    (ids,) = program.inputs
    assert (ids.name, ids.dtype, ids.sample_range) == ("ids", "int64", (20, 35))
    drawn = golden.draw_inputs(program, 5)["ids"]
    assert drawn.min() >= 20
    assert drawn.max() <= 35


def test_state_goes_from_call_to_call(gpu_compiler: "GpuCompiler") -> None:
    plan = gpu_compiler.plan("gpu_models:stateful")
    assert {w.name for w in plan.state} == {"calls", "mean", "variance"}
    assert {w.name for w in plan.weights} == {"scale"}
    reference = eager.build("gpu_models:stateful")
    calls = [golden.draw_inputs(plan.programs[0], seed) for seed in (1, 2, 3)]
    expected = [reference(list(inputs.values())) for inputs in calls]
    for _ in range(2):  # a plan loaded again starts anew
        with nimblert.load(plan, poison=True) as executable:
            for count, (inputs, wanted) in enumerate(zip(calls, expected, strict=True), start=1):
                outputs = executable.run(inputs)
                assert outputs["output_1"] == count
                eager.assert_equal(plan, outputs, wanted)


def test_result_may_be_memory_of_another(gpu_compiler: "GpuCompiler") -> None:
    program = gpu_compiler.plan("gpu_models:aliases").programs[0]
    (x,) = program.inputs
    same, view, y, again, transposed, scale = program.outputs
    assert same.pointer == x.pointer
    assert (view.pointer.region, view.pointer.offset, view.strides) == (Region.INPUT, 32, (8, 2))
    assert y.pointer == again.pointer == transposed.pointer
    assert (y.strides, transposed.strides) == ((8, 1), (1, 8))
    assert scale.pointer.region is Region.WEIGHTS


def test_the_callers_array_is_not_worked_on_in_place(gpu_compiler: "GpuCompiler") -> None:
    x = np.linspace(-1, 1, 48, dtype=np.float32).reshape(6, 8)
    kept = x.copy()
    with nimblert.load(gpu_compiler.plan("gpu_models:aliases")) as executable:
        doubled, *_ = executable(x)
        again, *_ = executable(x)
    np.testing.assert_array_equal(x, kept)
    np.testing.assert_array_equal(doubled, 2 * x)
    np.testing.assert_array_equal(again, 2 * x)


def test_layouts_are_kept(gpu_compiler: "GpuCompiler") -> None:
    program = gpu_compiler.plan("gpu_models:layouts").programs[0]
    inputs = {t.name: (t.shape, t.strides) for t in program.inputs}
    assert inputs == {
        "image": ((2, 8, 12, 10), (960, 1, 80, 8)),
        "scale": ((), ()),
        "pair.0": ((16, 1, 1), (1, 1, 1)),
        "pair.1": ((1, 16, 1, 1), (16, 1, 1, 1)),
    }
    full, half = program.outputs
    assert (full.shape, full.strides) == ((2, 16, 12, 10), (1920, 1, 160, 16))
    assert (half.dtype, half.shape) == ("float16", (2, 10, 12, 16))


def test_arrays_may_come_in_any_layout_and_by_keyword(gpu_compiler: "GpuCompiler") -> None:
    plan = gpu_compiler.plan("gpu_models:layouts")
    inputs = golden.draw_inputs(plan.programs[0], 7)
    turned = np.ascontiguousarray(inputs["image"].transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    keywords = {name: array for name, array in inputs.items() if name != "image"}
    with nimblert.load(plan) as executable:
        first = executable(inputs["image"], **keywords)
        second = executable(turned, **keywords)
    assert [a.tobytes() for a in first] == [a.tobytes() for a in second]
    assert [a.nbytes for a in first] == [prod((2, 16, 12, 10)) * 4, prod((2, 16, 12, 10)) * 2]
