"""A real CUDA plan, made only of our own Triton kernels, on any machine.

tests/data/triton_block.plan was made on an H200 from the root of the repository by

    PYTHONPATH=tests/support nimblec compile triton_block:build -o tests/data/triton_block.plan --target cuda
"""

from collections import Counter
from pathlib import Path
from struct import unpack_from

import pytest
from plans import cuda_plan

from nimblec.cuda.capture.cubin_reading import entry_symbols
from nimblec.inspect import verification
from nimblec.inspect.verification import Result
from nimblert import golden
from nimblert.check import hazards, verify
from nimblert.check.verify import read_plan
from nimblert.cuda.graph import relocate
from nimblert.plan import Launch, Plan, Pointer, Record, Region, Target, Wait

PATH = Path(__file__).parents[1] / "data" / "triton_block.plan"
KERNELS = {"triton_layer_norm": 1, "triton_matmul": 2, "triton_gelu": 1, "triton_add": 1}
"""How often the model launches each kernel."""


class FakeMemory:
    """Regions at made-up addresses, far from one another and from 0."""

    def address(self, pointer: Pointer) -> int:
        """Return the address of a pointer."""
        return (0x7000 + 16 * pointer.region + pointer.index << 32) + pointer.offset


@pytest.fixture(scope="module")
def plan() -> Plan:
    return read_plan(PATH)


def launches(plan: Plan) -> list[Launch]:
    return [c for program in plan.programs for c in program.commands if isinstance(c, Launch)]


def test_the_plan_decodes_and_breaks_no_rule(plan: Plan) -> None:
    assert plan.target is Target.CUDA
    assert plan.device.compute_capability == (9, 0)
    assert list(verify.problems(plan)) == []
    program = plan.programs[0]
    assert list(hazards.hazards(program)) == []
    assert [(t.name, t.dtype, t.shape) for t in (*program.inputs, *program.outputs)] == [
        ("x", "float32", (32, 64)),
        ("output", "float32", (32, 64)),
    ]


def test_it_holds_our_kernels_and_nothing_else(plan: Plan) -> None:
    assert {module.origin for module in plan.modules} == {"triton"}
    assert Counter(plan.kernels[launch.kernel].symbol for launch in launches(plan)) == KERNELS
    program = plan.programs[0]
    assert all(isinstance(command, Launch | Record | Wait) for command in program.commands)
    for kernel in plan.kernels:
        assert kernel.symbol in entry_symbols(plan.modules[kernel.module].code)
    assert {name for module in plan.modules for name in entry_symbols(module.code)} == set(KERNELS)


def test_the_file_is_small_and_names_no_path() -> None:
    content = PATH.read_bytes()
    assert len(content) < 1 << 20
    for mark in (b".py", b"/home/", b"/root/", b"/work/", b"/tmp/"):
        assert mark not in content, mark


def test_its_checks_pass_and_the_run_is_left_out_where_no_gpu_is(missing_gpu: str | None) -> None:
    results = {check.name: check.result for check in verification.verify(PATH)}
    run = results.pop("golden")
    assert run is Result.SKIPPED or (run is Result.PASSED and missing_gpu is None)
    assert {"format", "rules", "hazards", "symbols"} <= results.keys()
    assert set(results.values()) <= {Result.PASSED, Result.SKIPPED}


def assert_relocated(launch: Launch) -> None:
    """Check that each relocation became its address, and that every other byte is what it was."""
    memory = FakeMemory()
    params = relocate(launch, memory)  # type: ignore[arg-type]  # only its addresses are asked for
    assert len(params) == len(launch.params)
    untouched = bytearray(params)
    for relocation in launch.relocations:
        at = relocation.param_offset
        (address,) = unpack_from("<Q", params, at)
        assert address == memory.address(relocation.pointer)
        untouched[at : at + 8] = bytes(8)
    assert bytes(untouched) == launch.params


def test_parameters_are_relocated(plan: Plan) -> None:
    for launch in launches(plan):
        assert_relocated(launch)
        regions = {r.pointer.region for r in launch.relocations}
        assert len(launch.relocations) >= 2
        assert regions <= {Region.ARENA, Region.WEIGHTS, Region.INPUT, Region.OUTPUT}


@pytest.mark.parametrize("launch", launches(cuda_plan()), ids=lambda launch: f"op{launch.op}")
def test_relocation_of_a_made_up_plan(launch: Launch) -> None:
    assert launch.relocations
    assert_relocated(launch)


@pytest.mark.gpu
def test_it_replays_its_golden_record_bit_for_bit(plan: Plan) -> None:
    import nimblert
    from nimblert.cuda import driver

    driver.initialise()
    if driver.describe().compute_capability != plan.device.compute_capability:
        pytest.skip("needs a GPU of compute capability 9.0, for which the plan was made")
    program = plan.programs[0]
    assert program.golden is not None
    assert program.golden.tolerance == 0
    with nimblert.load(plan, poison=True) as executable:
        outputs = tuple(executable.run(golden.draw_inputs(program, program.golden.seed)).values())
    assert {c.verdict for c in golden.check(program.golden, outputs)} == {golden.Verdict.BIT_EXACT}
