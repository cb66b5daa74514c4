"""A second compilation with the times of the first gives the same file, which names no folder of this machine."""

from pathlib import Path

import pytest

import nimblec
from nimblec.compiler import compile_model
from nimblec.options import read_options
from nimblert.files import container

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("level", [1, 2])
def test_a_second_compilation_gives_the_same_bytes(
    level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caches of Inductor and Triton are empty in the first, and full in the second."""
    support = Path(__file__).parents[1] / "support"
    monkeypatch.setenv("PYTHONPATH", str(support), prepend=":")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    options = read_options(target="cuda", level=level, timing_cache=tmp_path / "times.json", plan_cache=None)
    plans = [tmp_path / f"{number}.plan" for number in range(2)]
    for plan in plans:
        compile_model("drawn_weights:resnet_0", options=options, output=plan, observer=lambda *_: None)
    first, second = (plan.read_bytes() for plan in plans)
    assert first == second
    code = [bytes(module.code) for module in container.read(plans[0]).modules]
    assert code
    folders = support.parents[1], Path(nimblec.__file__).parent, tmp_path
    assert not any(str(folder).encode() in each for folder in folders for each in code)
