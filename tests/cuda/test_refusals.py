"""What no plan can hold is refused by name, and the file that was there stays; detours by the host are not."""

import re
from typing import TYPE_CHECKING

import pytest

from nimblec.base.errors import CompileError
from nimblert.plan import Launch

if TYPE_CHECKING:
    from gpu_compile import GpuCompiler

pytest_plugins = ("gpu_compile",)
pytestmark = pytest.mark.gpu

REFUSALS = {
    "item": r"aten\._local_scalar_dense\.default in head: .*\.item\(\)",
    "nonzero": r"aten\.nonzero\.default in head: .*data-dependent",
    "mask": r"aten\.index\.Tensor in head: ",
    "dropout": r"",
    "raising": r"this model only ever fails",
    "lazy_counter": r"two runs on equal inputs differ in output 'output'",
    "killed": r"was killed by SIGKILL in the stage 'warm up'",
}
"""Each model, and what its refusal says."""
ON_HOST = ("host_constant", "to_host")
"""Models that use host memory on their way, which a graph of theirs does not."""


@pytest.fixture(scope="module", autouse=True)
def _compiling(gpu_compiler: "GpuCompiler") -> None:
    gpu_compiler.start(*(f"gpu_models:{name}" for name in (*REFUSALS, *ON_HOST)))


@pytest.mark.parametrize("name", REFUSALS)
def test_a_model_is_refused_in_one_sentence(gpu_compiler: "GpuCompiler", name: str) -> None:
    with pytest.raises(CompileError) as refusal:
        gpu_compiler.plan(f"gpu_models:{name}")
    message = str(refusal.value)
    assert re.search(REFUSALS[name], message), message
    assert message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("name", REFUSALS)
def test_the_old_file_is_as_it_was_and_alone(gpu_compiler: "GpuCompiler", name: str) -> None:
    path = gpu_compiler.path(f"gpu_models:{name}")
    assert path.read_bytes() == gpu_compiler.OLD
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", ON_HOST)
def test_memory_of_the_host_becomes_memory_of_the_gpu(gpu_compiler: "GpuCompiler", name: str) -> None:
    """The compiler compares the outputs with those of the model as it runs."""
    (program,) = gpu_compiler.plan(f"gpu_models:{name}").programs
    assert any(isinstance(command, Launch) for command in program.commands)
