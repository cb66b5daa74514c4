"""Scratch memory of kernels, which they leave as they found it: state without a name, that callers never see."""

from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import nimblert
from nimblec.base.ir import LIBRARY_MEMORY, BufferKind
from nimblec.cuda.capture.buffers import Allocation, BufferTable, Content, Place
from nimblert import golden
from nimblert.check.program_rules import keeps_state

if TYPE_CHECKING:
    from gpu_compile import GpuCompiler


def test_what_kernels_of_ours_count_in_has_no_name() -> None:
    zone = SimpleNamespace(addresses=[0x100, 0x200], sizes=[16, 16])
    library = SimpleNamespace(content=lambda _: memoryview(bytes(32)), addresses=[0x900], sizes=[32])
    one = {"dtype": "int32", "shape": (4,), "data": memoryview(bytes(16))}
    contents = {
        Allocation(0): Content(name="cache", **one),  # type: ignore[arg-type]
        Allocation(1): Content(name="folded_0", is_scratch=True, **one),  # type: ignore[arg-type]
    }
    table = BufferTable(zone, None, library, contents)  # type: ignore[arg-type]
    numbers = [table.number(allocation) for allocation in (*contents, Allocation(0, Place.FOREIGN))]
    buffers = table.buffers(numbers)
    assert {buffer.kind for buffer in buffers} == {BufferKind.STATE}
    assert [buffer.name for buffer in buffers] == ["cache", "", f"{LIBRARY_MEMORY} 0"]


@pytest.mark.gpu
def test_a_plan_with_split_sums_has_no_state(gpu_compiler: "GpuCompiler") -> None:
    path = gpu_compiler.path("bench.models.resnet50:fp16", level=2)
    plan = gpu_compiler.plan("bench.models.resnet50:fp16", level=2)
    assert plan.state, "no kernel with scratch memory was chosen: take another model"
    assert not keeps_state(plan)
    arrays = golden.draw_inputs(plan.programs[0], 0)
    with nimblert.load(path) as executable:
        assert not executable.state
        (expected,) = executable.run(arrays).values()
    with nimblert.load_pool(path, devices=[0]) as pool:
        for _ in range(3):
            (found,) = pool.run(arrays).values()
            assert np.array_equal(found, expected)
