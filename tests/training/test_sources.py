"""Every call of a training step says its layer and its phase, whichever way the step goes into a plan."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from calling import place
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

import nimblec
from nimblec.base.places import Phase, places
from nimblec.inspect.layers import by_layer
from nimblec.inspect.parts import parts_of
from nimblec.optimize.pipeline import Runs, Setting
from nimblec.optimize.rewrites import FUSED_REGIONS
from nimblec.pytorch.source_tracker import SourceTracker, run_nodes
from nimblert.check.verify import read_plan
from samples.training_step import digits

FORWARD, BACKWARD, UPDATE = (phase.value for phase in Phase)
PARTS = {f"model.{n}" for n in (0, 1, 3)}
"""Those of the network below that have parameters."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))


@cache
def step(**how: Any) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = network()
    batch = torch.rand(6, 1, 8, 8), torch.randint(0, 10, (6,))
    adam = torch.optim.Adam(model.parameters(), 1e-3, weight_decay=0.1)
    module, inputs = nimblec.training_step(model, nn.functional.cross_entropy, adam, batch, **how)["train"]
    return module, inputs


def phases(sources: Sequence[str]) -> dict[str, set[str]]:
    """Return the phases of each layer."""
    found: dict[str, set[str]] = {}
    for at in (at for source in sources for at in places(source)):
        found.setdefault(at.layer, set()).add(at.phase.value)
    return found


class Seen(TorchDispatchMode):
    """The source of each call that computes, as a capture of the GPU would note it."""

    def __init__(self, tracker: SourceTracker) -> None:
        TorchDispatchMode.__init__(self)
        self.calls: list[tuple[str, str]] = []
        self._tracker = tracker

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.calls.append((func.name(), self._tracker.source()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", [{}, {"accumulate": 2, "clip_norm": 1.0}])
def test_the_framework_s_own_step_is_followed(how: dict[str, Any]) -> None:
    """As it is captured at -O0."""
    module, inputs = step(**how)
    tracker = SourceTracker(module)
    with torch.no_grad(), tracker.following_modules(), Seen(tracker) as seen:
        module(*inputs)
    found = {name: source for name, source in seen.calls if "detach" not in name}
    assert found["aten::convolution"] == "model.0"
    assert found["aten::native_batch_norm"] == "model.1"
    assert found["aten::nll_loss_forward"] == "loss"
    assert found["aten::ones_like"] == found["aten::nll_loss_backward"] == "backward of loss"
    assert found["aten::mm"] == "backward of model.3"
    assert found["aten::native_batch_norm_backward"] == "backward of model.1"
    assert found["aten::convolution_backward"] == "backward of model.0"
    assert found["aten::addcdiv_"] == UPDATE
    assert all(source for name, source in seen.calls if "detach" not in name)


def test_a_model_that_is_not_trained_has_no_phases() -> None:
    model = network().eval()
    tracker, images = SourceTracker(model), torch.rand(6, 1, 8, 8)
    with torch.no_grad(), tracker.following_modules(), Seen(tracker) as seen:
        model(images)
    assert {source for _, source in seen.calls} == {"0", "1", "2", "3"}


def traced_sources(graph: torch.fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not torch.ops.aten.detach.default:
            yield node.meta["custom"]["nimblec.base.source"] if "custom" in node.meta else ""


@pytest.mark.parametrize("how", [{}, {"accumulate": 2}, {"clip_norm": 1.0}])
def test_update_calls_name_their_layer(how: dict[str, Any]) -> None:
    module, _ = step(**how)
    graph = module._graphs["cpu"].graph
    found = phases([source for source in traced_sources(graph) if source])
    for layer in PARTS:
        assert found[layer] == {FORWARD, BACKWARD, UPDATE}, layer
    assert found["loss"] == {FORWARD, BACKWARD}
    written = {node.name: node.meta["custom"]["nimblec.base.source"] for node in graph.find_nodes(
        op="call_function", target=torch.ops.aten.addcdiv_.default)}  # fmt: skip
    assert len(written) == len(list(network().parameters()))
    assert {*written.values()} == {f"update of {layer}" for layer in PARTS}
    if "clip_norm" in how:
        (norm,) = graph.find_nodes(op="call_function", target=torch.ops.aten.stack.default)
        assert norm.meta["custom"]["nimblec.base.source"] == UPDATE  # of all layers


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11
def test_an_exported_step_keeps_its_sources_in_its_file(tmp_path: Path) -> None:
    """As a module given to nimblec.compile takes it to the capture process."""
    module, inputs = step()
    with torch.no_grad():
        torch.export.save(torch.export.export(module, inputs, strict=False), tmp_path / "step.pt2")
        loaded = torch.export.load(tmp_path / "step.pt2").module(check_guards=False)
        seen: list[str] = []
        run_nodes(loaded, inputs, seen.append)
    found = phases(seen)
    for layer in PARTS:
        assert found[layer] == {FORWARD, BACKWARD, UPDATE}, layer


def test_fused_kernels_are_of_all_that_they_compute() -> None:
    """At -O1, on the CPU."""
    module, inputs = step(clip_norm=1.0)
    with torch.no_grad():
        made = Runs(place(module, inputs), Setting(device="cpu"))(*FUSED_REGIONS).module
    calls = [node for node in made.graph.nodes if node.op == "call_function"]
    assert all(node.meta["source"] for node in calls), [node.name for node in calls if not node.meta["source"]]
    found = phases([node.meta["source"] for node in calls])
    for layer in PARTS:
        assert found[layer] == {FORWARD, BACKWARD, UPDATE}, layer
    assert not any(layer.startswith("module") for layer in found)
    regions = [node.meta["source"] for node in calls if str(node.target).startswith("nimblec.fused")]
    assert any(len({at.layer for at in places(source)}) > 1 for source in regions)


def test_a_plan_of_the_cpu_is_shown_by_layer_and_phase(tmp_path: Path) -> None:
    path = tmp_path / "train.plan"
    nimblec.compile({"train": digits()["train"]}, target="cpu", streams=2).save(path)
    plan = read_plan(path)
    program = next(program for program in plan.programs if program.name == "train")
    shares = by_layer(plan, program)
    parts = [part for _, work in program.work for part in parts_of(plan, work)]
    assert sum(share.launches + share.copies for share in shares.values()) == len(parts)
    assert len(parts) > 2 * len(list(program.work))
    assert ((), ()) not in shares
    of_one = {(layers[0], phases[0]) for layers, phases in shares if len(layers) == len(phases) == 1}
    for layer in ("features.0", "features.1", "features.4", "features.5", "classifier"):
        assert {(f"model.{layer}", phase) for phase in (FORWARD, BACKWARD, UPDATE)} <= of_one, layer
    for layer in ("features.2", "features.3", "features.6", "features.7"):  # which have no parameters
        assert {phase for of, phase in of_one if of == f"model.{layer}"} == {FORWARD, BACKWARD}, layer
    layers = [of[0] for (of, phases) in shares if len(of) == 1 and phases == (FORWARD,)]
    wanted = [f"model.features.{n}" for n in range(8)]
    assert [layer for layer in layers if layer in wanted] == wanted
    assert layers[-1] == "loss"
    joint = [phases for of, phases in shares if of == ("model.classifier",) and len(phases) > 1]
    assert joint == [(BACKWARD, UPDATE)]  # weight decay is a Gemm with the gradient of the weight
