"""State on the CPU target: what a module writes is kept from call to call, written in place, one for each context."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stateful_models
import torch

import nimblec
import nimblert
from nimblec.base.errors import UnsupportedModelError
from nimblec.inspect.inspection import describe
from nimblec.onnx_export import export as onnx_export
from nimblec.pytorch.model import bind
from nimblert.executable import Executable
from nimblert.plan import Launch, Memcpy, Plan, Region

STEPS = 200


def compiled(*model: Any) -> Plan:
    return nimblec.compile(*model, target="cpu", plan_cache=None)


def copied(plan: Plan) -> set[str]:
    """Return the state that a run copies."""
    copies = [c for p in plan.programs for c in p.commands if isinstance(c, Memcpy) and c.dst.region is Region.STATE]
    return {tensor.name for tensor in plan.state for c in copies if tensor.offset == c.dst.offset}


def close(found: np.ndarray, wanted: torch.Tensor) -> None:
    np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def statistics() -> Plan:
    return compiled(stateful_models.Statistics(), torch.ones(4))


@pytest.fixture(scope="module")
def decoding() -> Plan:
    return compiled(stateful_models.decoder())


def test_every_call_goes_on_from_the_one_before(statistics: Plan) -> None:
    model = stateful_models.Statistics()
    with nimblert.load(statistics) as executable, torch.no_grad():
        for _ in range(STEPS):
            x = torch.randn(4)
            for found, wanted in zip(executable(x.numpy()), model(x), strict=True):
                close(found, wanted)
        assert executable.state["count"] == STEPS
        for name, buffer in model.named_buffers():
            close(executable.state[name], buffer)


def test_nodes_write_the_state_itself(statistics: Plan) -> None:
    assert [tensor.name for tensor in statistics.state] == ["count", "mean", "history", "last"]
    assert copied(statistics) == set()


def check_some_steps(plan: Plan, model: torch.nn.Module, shape: tuple[int, ...]) -> None:
    with nimblert.load(plan) as executable, torch.no_grad():
        for _ in range(3):
            x = torch.randn(shape)
            results = model(x)
            for found, wanted in zip(executable.run({"x": x.numpy()}).values(), results, strict=True):
                close(found, wanted)
            for name, buffer in model.named_buffers():
                close(executable.state[name], buffer)


def test_what_is_read_after_it_was_overwritten_is_copied() -> None:
    plan = compiled(stateful_models.Exchange(), torch.ones(4))
    assert copied(plan) == {"right"}
    check_some_steps(plan, stateful_models.Exchange(), (4,))


@pytest.mark.parametrize("made", [stateful_models.Assigning, stateful_models.Returning])
def test_a_buffer_may_be_assigned_and_returned(made: type[torch.nn.Module]) -> None:
    check_some_steps(compiled(made(), torch.ones(4)), made(), (4,))


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_in_training_mode_keeps_its_statistics(affine: bool) -> None:
    model = stateful_models.Normalised(affine=affine)
    plan = compiled(copy.deepcopy(model), torch.randn(5, 3, 4))
    assert {"norm.running_mean", "norm.running_var"} < {tensor.name for tensor in plan.state}
    check_some_steps(plan, model, (5, 3, 4))


@pytest.fixture
def loaded(decoding: Plan) -> Iterator[Executable]:
    with nimblert.load(decoding) as executable:
        yield executable


def test_a_decoder_generates_what_eager_does(loaded: Executable) -> None:
    model = stateful_models.Decoder().eval()
    prompt = np.arange(8) * 5
    with torch.no_grad():
        wanted = model(torch.from_numpy(prompt), torch.arange(8))
        found = loaded(prompt, np.arange(8), entry="prefill")
        close(found, wanted)
        for position in range(8, 8 + STEPS):
            token = int(wanted[-1].argmax())
            assert int(found[-1].argmax()) == token
            wanted = model(torch.tensor([token]), torch.tensor([position]))
            found = loaded(np.array([token]), np.array([position]), entry="decode")
            close(found, wanted)
    buffers = dict(model.named_buffers())
    for name in stateful_models.CACHES:
        close(loaded.state[name], buffers[name])


def test_of_a_cache_only_the_new_rows_are_written(decoding: Plan) -> None:
    assert [tensor.name for tensor in decoding.state] == stateful_models.CACHES
    assert copied(decoding) == set()
    for program in decoding.programs:
        launches = [command for command in program.commands if isinstance(command, Launch)]
        writers = [c for c in launches if any(a.pointer.region is Region.STATE for a in c.writes)]
        assert {decoding.kernels[c.kernel].symbol for c in writers} == {"ScatterND"}
        assert all(set(c.writes) <= set(c.reads) for c in writers)  # in place


def test_inspect_says_what_a_run_does_with_the_state(decoding: Plan) -> None:
    facts = describe(decoding, file_nbytes=0)
    assert [(row["name"], row["uses"]) for row in facts["state"]] == [
        (name, {"prefill": "in place", "decode": "in place"}) for name in stateful_models.CACHES
    ]
    exchanging = compiled(stateful_models.Exchange(), torch.ones(4))
    uses = {row["name"]: row["uses"]["main"] for row in describe(exchanging, file_nbytes=0)["state"]}
    assert uses == {"left": "in place", "right": "copied", "kept": "in place"}


def test_what_is_known_to_have_state_is_exported_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That there is any shows the first entry's export, which ends there; with it, the files of both are made."""
    export, exported = torch.onnx.export, []
    converted: list[Any] = []

    def counting(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        exported.append(type(module).__name__)
        return export(module, *args, **kwargs)

    monkeypatch.setattr(torch.onnx, "export", counting)
    monkeypatch.setattr(onnx_export, "keep_sources", converted.append)
    model, x = stateful_models.Exchange(), torch.ones(4)
    files = onnx_export.export({"one": bind(model, (x,)), "other": bind(model, (x,))}, tmp_path)
    assert exported == ["Exchange", "WithState", "WithState"]
    assert len(converted) == 2
    assert [*files] == ["one", "other"]
    for file in files.values():
        assert {tensor.name for tensor in file.state if tensor.output} == {"left", "right", "kept"}


def test_reset_gives_the_first_state(statistics: Plan) -> None:
    x = np.ones(4, np.float32)
    with nimblert.load(statistics) as executable:
        first = executable(x)
        assert not np.array_equal(executable(x)[1], first[1])
        executable.reset()
        np.testing.assert_array_equal(executable.state["mean"], np.full(4, 0.5, np.float32))
        for found, wanted in zip(executable(x), first, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_each_context_has_a_state_of_its_own(loaded: Executable) -> None:
    with loaded.context() as other:
        other(np.arange(8), np.arange(8), entry="prefill")
        assert not loaded.state[stateful_models.CACHES[0]].any()
        assert other.state[stateful_models.CACHES[0]][:, :, :8].all()
        other.state.update(loaded.state)
        assert not other.state[stateful_models.CACHES[0]].any()


def test_a_conversation_goes_on_in_another_context(loaded: Executable) -> None:
    loaded(np.arange(8), np.arange(8), entry="prefill")
    with loaded.context() as other:
        other.state.update(loaded.state)
        for context in (loaded, other):
            context(np.array([3]), np.array([8]), entry="decode")
        for name in stateful_models.CACHES:
            np.testing.assert_array_equal(other.state[name], loaded.state[name])


def test_a_saved_plan_has_its_state(statistics: Plan, tmp_path: Path) -> None:
    statistics.save(tmp_path / "statistics.plan")
    with nimblert.load(tmp_path / "statistics.plan") as executable:
        executable(np.ones(4, np.float32))
        assert executable.state["count"] == 1


class Counted(torch.nn.Module):
    """Rows of a table, filled one by one: it has no more than it is called for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(4, 3))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of the rows of x (1, 3)."""
        self.rows: torch.Tensor
        self.rows.index_copy_(0, self.count, x)
        self.count += 1
        return self.rows.mean(0)


def test_timing_begins_with_the_first_state_each_time() -> None:
    """A counter that went on would leave the table."""
    model = Counted()
    with nimblert.load(compiled(model, torch.ones(1, 3))) as executable:
        for i in range(4):
            x = torch.full((1, 3), float(i))
            close(executable(x.numpy()), model(x))


@pytest.mark.parametrize("other", ["tensor", "view"])
def test_buffers_in_the_same_memory_are_named(other: str) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(2, 3))
            self.register_buffer("row", self.total if other == "tensor" else self.total[0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(x)
            return self.row * 2

    with pytest.raises(UnsupportedModelError, match=r"^the module has 'total' and 'row' in the same memory, "):
        compiled(Module(), torch.ones(3))
