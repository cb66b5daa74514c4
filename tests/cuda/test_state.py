"""State on the GPU: a decoder's cache is written in place at every level, of which no more than the new rows."""

from typing import TYPE_CHECKING

import numpy as np
import pytest
import stateful_models
import torch

import nimblert
from nimblec.base.difference import difference
from nimblert.errors import InputError
from nimblert.plan import Access, Launch, Memcpy, Plan, Region

if TYPE_CHECKING:
    from gpu_compile import GpuCompiler

pytest_plugins = ("gpu_compile",)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

DECODING, STATISTICS = "stateful_models:one_token", "stateful_models:statistics"
NORMALISING = "stateful_models:normalising"
LEVELS = (0, 1, 2)
STEPS = 200


@pytest.fixture(scope="module", autouse=True)
def _compiling(gpu_compiler: "GpuCompiler") -> None:
    for level in LEVELS:
        gpu_compiler.start(DECODING, STATISTICS, NORMALISING, level=level)


def touched(plan: Plan) -> list[tuple[str, Access]]:
    """Return what each command writes of the state, by the op it came from."""
    (program,) = plan.programs
    found = []
    for command in program.commands:
        if isinstance(command, Launch):
            writes = command.writes
        elif isinstance(command, Memcpy):
            writes = (Access(pointer=command.dst, nbytes=command.nbytes),)
        else:
            continue
        found += [(program.ops[command.op].name, access) for access in writes if access.pointer.region is Region.STATE]
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_a_decoder_generates_what_eager_does(gpu_compiler: "GpuCompiler", level: int) -> None:
    plan = gpu_compiler.plan(DECODING, level=level)
    assert {tensor.name for tensor in plan.state} == set(stateful_models.CACHES)
    model = stateful_models.Decoder().eval().cuda()
    token = 1
    with nimblert.load(plan, poison=True) as executable, torch.no_grad():
        for position in range(STEPS):
            wanted = model(torch.tensor([token]).cuda(), torch.tensor([position]).cuda()).cpu().numpy()
            found = executable(np.array([token]), np.array([position]))
            assert difference(wanted, found).relative < 1e-3
            token = int(wanted.argmax())
            assert int(found.argmax()) == token
        for name in stateful_models.CACHES:
            kept = model.get_buffer(name).cpu().numpy()
            assert difference(kept, executable.state[name]).relative < 1e-3


@pytest.mark.parametrize("level", [1, 2])
def test_no_copy_of_a_cache_is_made(gpu_compiler: "GpuCompiler", level: int) -> None:
    plan = gpu_compiler.plan(DECODING, level=level)
    assert ("level", f"-O{level}, torch.compile") not in plan.versions
    (program,) = plan.programs
    names = {program.ops[command.op].name for command in program.commands if isinstance(command, Launch | Memcpy)}
    assert not any("clone" in name or "slice_scatter" in name for name in names), names
    written = {1: {"aten.index_copy_.default", "aten.index_put_.default"}, 2: {"nimblec.cached_attention.default"}}
    assert {name for name, _ in touched(plan)} == written[level]


@pytest.mark.parametrize("level", LEVELS)
def test_state_is_read_written_and_reset_by_name(gpu_compiler: "GpuCompiler", level: int) -> None:
    x = np.ones(4, np.float32)
    with nimblert.load(gpu_compiler.plan(STATISTICS, level=level), poison=True) as executable:
        first = executable(x)
        assert executable.state["count"] == 1
        np.testing.assert_array_equal(executable.state["last"], x)
        executable.state["count"] = np.array(41)
        executable(x)
        assert executable.state["count"] == 42
        executable.reset()
        for found, wanted in zip(executable(x), first, strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_norm_in_training_keeps_its_statistics(gpu_compiler: "GpuCompiler", level: int) -> None:
    """CuDNN's reports overflows through memory of the host, of which a plan has none."""
    module, x = stateful_models.normalising()
    module.cuda()
    with nimblert.load(gpu_compiler.plan(NORMALISING, level=level), poison=True) as executable, torch.no_grad():
        for factor in (1, 2, 3):
            found, expected = executable(factor * x.numpy()), module(factor * x.cuda())
            torch.testing.assert_close(torch.from_numpy(found), expected.cpu(), rtol=1e-5, atol=1e-5)
        for name, kept in module.named_buffers():
            torch.testing.assert_close(torch.from_numpy(executable.state[name]), kept.cpu(), rtol=1e-5, atol=1e-5)


def test_state_comes_from_the_gpu_and_each_context_has_its_own(gpu_compiler: "GpuCompiler") -> None:
    with nimblert.load(gpu_compiler.plan(STATISTICS)) as executable, executable.context() as other:
        executable.state["mean"] = torch.arange(4.0, device="cuda")
        assert executable.state["mean"].tolist() == [0, 1, 2, 3]
        assert other.state["mean"].tolist() == [0.5] * 4
        with pytest.raises(InputError, match=r"^state 'mean': shape \(2,\), expected \(4,\)$"):
            executable.state["mean"] = torch.ones(2, device="cuda")
        strided = torch.arange(12.0, device="cuda").reshape(3, 4)
        executable.state["history"] = strided.t().contiguous().t()
        np.testing.assert_array_equal(executable.state["history"], strided.cpu().numpy())
