"""Exported families on the GPU, as they are and rewritten: what ONNX Runtime computes.

Each compilation compares its plan with torch's run of the same graph, bit for bit.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from concurrency import compilations
from exported_models import FAMILIES, export

from nimblec.base.options import Options
from nimblec.compiler import compile_model
from nimblert import Plan, load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

_LEVELS = (0, 1)
_TOLERANCE = 1e-3  # of the largest magnitude: other kernels, another order of sums


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    file: Path
    inputs: dict[str, np.ndarray]
    plans: dict[int, Future[Plan]]
    """By level of optimisation."""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, _Family]]:
    """Yield every family, exported one after another and compiled several at a time."""
    folder = tmp_path_factory.mktemp("families")
    with ThreadPoolExecutor(compilations()) as pool:
        made = {}
        for name in FAMILIES:
            file = folder / f"{name}.onnx"
            inputs = export(name, 17, file)
            plans = {level: pool.submit(_compile, file, inputs, level) for level in _LEVELS}
            made[name] = _Family(file=file, inputs=inputs, plans=plans)
        yield made


def _compile(file: Path, inputs: dict[str, np.ndarray], level: int) -> Plan:
    options = Options(target="cuda", level=level, precision="fp32", examples=tuple(inputs.items()))
    return compile_model(file, options=options, observer=lambda _stage, _seconds: None).plan


@pytest.mark.parametrize("level", _LEVELS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_what_onnx_runtime_gives(families: dict[str, _Family], name: str, level: int) -> None:
    family = families[name]
    plan = family.plans[level].result()
    golden = plan.programs[0].golden
    assert golden is not None
    session = onnxruntime.InferenceSession(family.file, providers=["CPUExecutionProvider"])
    with load(plan) as loaded:
        found = loaded.run(family.inputs)
    for left, right in zip(found.values(), session.run(None, family.inputs), strict=True):
        assert left.shape == right.shape
        scale = max(float(np.abs(right).max()), 1e-6)
        assert float(np.abs(left.astype(np.float64) - right).max()) / scale <= _TOLERANCE
