"""compile(refittable=True) on a GPU: a refit of all weights equals a fresh compile with them, bit for bit.

Both compilations choose the same kernels (`drawn_times`), as other kernels may give other bits.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nimblert
from nimblec.base.options import Options, Precision
from nimblert.golden import draw_inputs
from nimblert.plan import Launch, Plan

if TYPE_CHECKING:
    from concurrent.futures import Future

pytestmark = pytest.mark.gpu

DIGITS = Path(__file__).parents[2] / "samples" / "digits.onnx"


@dataclass(frozen=True, slots=True)
class Case:
    """A model, by the name of its weights, and how it is compiled."""

    model: str
    precision: Precision
    level: int

    def __str__(self) -> str:
        return f"{self.model}-{self.precision}-{self.level}"


CASES = (
    Case("resnet", "keep", 2),
    Case("resnet", "fp16", 1),
    Case("resnet", "fp16", 2),
    Case("bert", "keep", 2),
    Case("bert", "fp16", 2),
    Case("digits", "keep", 0),
    Case("digits", "keep", 2),
)


def other_digits(path: Path) -> dict[str, np.ndarray]:
    """Return the weights of digits.onnx drawn anew, and in the file of this path a model that has them."""
    onnx = pytest.importorskip("onnx")
    model, random = onnx.load(DIGITS), np.random.default_rng(1)
    weights = {}
    for tensor in model.graph.initializer:
        old = onnx.numpy_helper.to_array(tensor)
        if old.dtype == np.float32 and old.ndim:
            weights[tensor.name] = old * random.uniform(0.5, 1.5, old.shape).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(weights[tensor.name], tensor.name))
    onnx.save(model, path)
    return weights


def state(model: str) -> dict[str, np.ndarray]:
    """Return the weights of a model of `drawn_weights`."""
    module, _ = getattr(import_module("drawn_weights"), model)()
    return {name: each.numpy() for name, each in module.state_dict().items() if each.is_floating_point()}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, str, Mapping[str, np.ndarray]]]:
    """Return the names of a model with some weights and with others, and the others."""
    digits = tmp_path_factory.mktemp("digits") / "fresh.onnx"
    found = {"digits": (str(DIGITS), str(digits), other_digits(digits))}
    for name in ("resnet", "bert"):
        found[name] = f"drawn_weights:{name}_0", f"drawn_weights:{name}_1", state(f"{name}_1")
    return found.__getitem__


@pytest.fixture(scope="module")
def plans(weights: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Case], list[Plan]]]:
    """Yield the plans of a case with some weights and with others; all are compiled side by side."""
    import drawn_times
    from concurrency import compilations

    from nimblec.compiler import compile_model

    def compiled(case: Case, number: int, output: Path) -> Plan:
        options = Options(
            target="cuda", level=case.level, precision=case.precision, streams="1", plan_cache=None, refittable=True
        )
        model = weights(case.model)[number]
        return compile_model(model, options=options, output=output, observer=lambda *_: None).plan

    folder = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor(compilations()) as pool:
        patched.setenv("TORCHINDUCTOR_COMPILE_THREADS", "4")
        drawn_times.begin(patched)
        jobs: dict[Case, list[Future[Plan]]] = {
            case: [pool.submit(compiled, case, n, folder / f"{case}-{n}.plan") for n in (0, 1)] for case in CASES
        }
        yield lambda case: [job.result() for job in jobs[case]]


def launches(plan: Plan) -> list[tuple[object, ...]]:
    """Return what a run launches."""
    commands = (command for command in plan.programs[0].commands if isinstance(command, Launch))
    return [(plan.kernels[each.kernel].symbol, each.grid, each.block) for each in commands]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_refit_equals_a_fresh_compile(case: Case, plans: Callable[[Case], list[Plan]], weights: Any) -> None:
    plan, fresh = plans(case)
    assert launches(plan) == launches(fresh)
    *_, others = weights(case.model)
    inputs = draw_inputs(plan.programs[0], 3)
    with nimblert.load(plan) as loaded, nimblert.load(fresh) as other:
        before, wanted = loaded.run(inputs), other.run(inputs)
        assert set(loaded.weights) == set(others)
        loaded.refit(others)
        after = loaded.run(inputs)
    for name, array in wanted.items():
        assert np.isfinite(array).all()
        np.testing.assert_array_equal(after[name], array)
    assert any(not np.array_equal(before[name], array) for name, array in wanted.items())
