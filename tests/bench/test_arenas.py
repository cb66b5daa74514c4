"""Memory of plans on one arena: with a driver of host memory, and in this process on the CPU target."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from copying import copying, on_host
from host_driver import HostDriver

from bench import arenas, environment
from nimblec.plan import encoder
from nimblert.executable import Executable

if TYPE_CHECKING:
    from collections.abc import Callable

pytest_plugins = ("gpu_memory",)

KIB = 1 << 10


@pytest.fixture
def paths(put: object, tmp_path: Path) -> dict[str, Path]:
    """Plans of the CUDA target that copy 1, 2 and 4 MiB by way of an arena as large."""
    del put
    found = {f"{mib} MiB": tmp_path / f"{mib}.plan" for mib in (1, 4, 2)}
    for path in found.values():
        plan = copying((int(path.stem) << 18,), (0,))
        encoder.write(replace(plan, weights_nbytes=512), path)
    return found


@on_host
def test_arenas_share_the_largest(host: HostDriver, paths: dict[str, Path]) -> None:
    found = arenas.measure(paths)
    assert found["wrong"] == []
    assert {name: plan["arena"] for name, plan in found["plans"].items()} == {
        f"{mib} MiB": mib << 20 for mib in (1, 4, 2)
    }
    arrays = sum(plan["arrays"] for plan in found["plans"].values())
    assert arrays == 14 << 20
    own, shared = found["own"], found["shared"]
    assert own["arena"] == 0
    assert shared["arena"] == 4 << 20
    slack = 3 * 16 * KIB
    assert abs(own["all"] - (arrays + (7 << 20))) <= slack
    assert abs(shared["all"] - (arrays + (4 << 20))) <= slack
    for name, plan in found["plans"].items():
        loaded = [way["plans"][name]["loaded"] for way in (own, shared)]
        assert loaded[0] - loaded[1] == plan["arena"]
        assert loaded[1] >= plan["arrays"]
    assert own["left"] == shared["left"] == 0
    assert not host.allocated


@on_host
def test_arenas_reports_a_spoilt_output(
    host: HostDriver, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del host
    run: Callable[..., Any] = Executable.run

    def spoiling(model: Executable, arrays: Any, **more: Any) -> dict[str, np.ndarray]:
        outputs: dict[str, np.ndarray] = run(model, arrays, **more)
        if model._arena is not None and model.plan.arena_nbytes == 2 << 20:
            outputs["y"][-1] += 1
        return outputs

    monkeypatch.setattr(Executable, "run", spoiling)
    file = tmp_path / "arenas.json"
    assert arenas.main([*map(str, paths.values()), "--output", str(file)]) == 1
    assert json.loads(file.read_text())["wrong"] == [str(paths["2 MiB"])]


@pytest.mark.skipif(find_spec("onnxscript") is None, reason="needs onnxscript")
def test_arenas_compiles_models_for_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIMBLEC_COMMIT", "abc")
    file, first = tmp_path / "arenas.json", "drawn_weights:resnet_0"
    assert arenas.main(["--cpu", first, "drawn_weights:bert_0", "--output", str(file)]) == 0
    results = environment.read(file)
    assert list(results["plans"]) == sorted([first, "drawn_weights:bert_0"])
    assert results["environment"]["commit"] == "abc"
    printed = capsys.readouterr().out
    assert arenas.main(["--markdown", "--output", str(file)]) == 0
    assert capsys.readouterr().out == printed
