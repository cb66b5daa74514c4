"""The benchmark of refits: a small network on the CPU, and copies with a driver of host memory."""

import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from copying import copying, on_host
from families import bert
from host_driver import HostDriver

import nimblert
from bench import peer_calls, refit_peer
from bench.models import redrawn
from nimblec.plan import encoder

pytest_plugins = ("gpu_memory",)


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make few calls: a refit on the CPU makes sessions anew, which takes long."""
    monkeypatch.setattr(peer_calls, "WARM_UPS", 1)
    monkeypatch.setattr(peer_calls, "REPEATS", 3)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("onnxscript") is None, reason="needs onnxscript")
@pytest.mark.usefixtures("few_calls")
def test_compared_detects_a_spoilt_refit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, args = bert.small()
    monkeypatch.setattr(bert, "small", lambda: (bert.Bert(vocabulary=100, width=64, heads=4, layers=1).eval(), args))
    specs = ("drawn_weights:bert_0", "drawn_weights:bert_1")
    (path, fresh), figures = refit_peer.prepared(specs, tmp_path, None)
    assert min(figures["prepare_s"], figures["fresh_s"]) > 0
    given = refit_peer.weights(specs[1])
    with nimblert.load(path) as loaded:
        assert given.keys() == loaded.weights.keys()
        spoilt = {**given, min(given): given[min(given)] * 2}
        assert not refit_peer.compared(loaded, fresh, spoilt)["equal"]
        found = refit_peer.compared(loaded, fresh, given)
        assert found == {"same_kernels": True, "equal": True, "changed": True, "difference": 0.0}
        assert not refit_peer.compared(loaded, fresh, given)["changed"]
        sampled = [sample() for sample in refit_peer.host_groups(loaded, given).values()]
    assert [(list(group), len(*group.values())) for group in sampled] == [(["refit_us"], 3), (["copy_us"], 3)]


ARRAYS = {
    "matrix": np.arange(6, dtype=np.float16).reshape(2, 3),
    "image": np.arange(48, dtype=np.float32).reshape(2, 4, 2, 3),
}


@on_host
@pytest.mark.usefixtures("few_calls")
def test_device_groups_copy_from_either_memory(put: object, host: HostDriver, tmp_path: Path) -> None:
    del put
    path = tmp_path / "copy.plan"
    encoder.write(copying((4,), (0,)), path)
    refitted: list[dict[str, np.ndarray]] = []
    with ExitStack() as opened:
        loaded = opened.enter_context(nimblert.load(path))
        loaded.refit = refitted.append  # type: ignore[method-assign, assignment]
        groups = refit_peer.device_groups(path, loaded, ARRAYS, opened)
        kinds = [f"{name}{kind}" for kind in ("", "_locked") for name in ("refit", "copies", "copy")]
        assert list(groups) == ["kernels", *kinds]
        assert list(groups["kernels"]()) == ["kernels_us", "kernels_after_us"]
        for name in kinds:
            before = host.calls.get("cuMemcpyHtoD", 0)
            assert len(groups[name]()[f"{name}_us"]) == 3
            copies = {"refit": 0, "copies": len(ARRAYS), "copy": 1}[name.removesuffix("_locked")]
            assert host.calls.get("cuMemcpyHtoD", 0) - before == 4 * copies
        for given in refitted:
            assert all(np.array_equal(given[name], array) for name, array in ARRAYS.items())
        addresses = {array.ctypes.data for given in refitted for array in given.values()}
        assert len(addresses) == 2 * len(ARRAYS)
    assert not host.allocated


def test_redrawn_changes_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("networks")
    module.network = lambda: (torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).eval(), ())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "networks", module)
    first, second = (redrawn.redrawn("networks:network")[0].state_dict() for _ in range(2))
    torch.manual_seed(0)
    plain = module.network()[0].state_dict()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        assert torch.equal(tensor, plain[name]) == (name == "1.num_batches_tracked")
    assert (first["1.running_var"] > 0).all()
