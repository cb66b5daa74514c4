"""Plans that say they have no state, and would hand what one caller gave to the next one."""

from dataclasses import replace

import numpy as np
import pytest
from hostile_plans import over_its_operand, with_program
from programs import bare, planned

import nimblert
from nimblert.errors import PlanInvalidError
from nimblert.plan import Memcpy, Plan, Pointer, Region, Tensor, Weight

NBYTES = 16
INPUT, ARENA, STATE = (Pointer(region=region) for region in (Region.INPUT, Region.ARENA, Region.STATE))
Y, Z = (Pointer(region=Region.OUTPUT, index=index) for index in (0, 1))


def tensor(name: str, pointer: Pointer) -> Tensor:
    return Tensor(name=name, dtype="float32", shape=(1, 4), strides=(4, 1), pointer=pointer)


def copying(*steps: tuple[Pointer, Pointer], outputs: tuple[Pointer, ...] = (Y, Z)) -> Plan:
    """Return a plan that copies from one pointer to the other in each step."""
    return bare(
        planned(
            *(Memcpy(stream=0, op=0, dst=dst, src=src, nbytes=NBYTES) for src, dst in steps),
            inputs=(tensor("x", INPUT),),
            outputs=tuple(tensor(name, pointer) for name, pointer in zip("yz", outputs, strict=False)),
            input_nbytes=(NBYTES,),
            output_nbytes=(NBYTES, NBYTES),
            arena_nbytes=NBYTES,
        )
    )


def unnamed_state() -> Plan:
    kept = Weight(name="", dtype="float32", shape=(4,), offset=0, data=memoryview(bytes(NBYTES)))
    plan = copying((STATE, Y), (INPUT, STATE), (INPUT, Z))
    return replace(plan, state_nbytes=NBYTES, state=(kept,))


def two_entries() -> Plan:
    """Return a plan whose second entry returns what the first left in the arena, which they share."""
    first, second = copying((INPUT, ARENA), (ARENA, Y), (INPUT, Z)), copying((INPUT, Z), outputs=(ARENA, Z))
    return replace(first, programs=(first.programs[0], replace(second.programs[0], name="other", entry="other")))


def in_place() -> Plan:
    """Return a plan that adds to a sum in the arena, which nothing sets to zero."""
    plan = over_its_operand("Add", [(4, 8), (4, 8)], 0)
    fill, add = plan.programs[0].commands
    second = replace(fill, dst=Pointer(region=Region.ARENA, offset=1024), count=32)
    copy = Memcpy(stream=0, op=0, dst=Y, src=Pointer(region=Region.ARENA, offset=512), nbytes=128)
    return with_program(plan, commands=(second, add, copy))


LEAKS = {
    "an output that is read before it is written": (
        copying((Z, Y), (INPUT, Z)),
        r"^commands\[0\] \(memcpy of aten.add.Tensor 'layer.1'\): reads output 1 bytes 0 to 16, which nobody wrote$",
    ),
    "an arena that is read before it is written": (
        copying((ARENA, Y), (INPUT, ARENA), (INPUT, Z)),
        r"^commands\[0\] \(memcpy of aten.add.Tensor 'layer.1'\): reads arena bytes 0 to 16, which nobody wrote$",
    ),
    "a sum that is kept in place": (
        in_place(),
        r"^commands\[1\] \(launch of Add 'fuzzed'\): reads arena bytes 512 to 640, which nobody wrote$",
    ),
    "an output that another entry wrote": (
        two_entries(),
        "^output 'y': returns arena bytes 0 to 16, which nobody wrote$",
    ),
    "an output that nothing writes": (
        copying((INPUT, Z)),
        "^output 'y': returns output 0 bytes 0 to 16, which nobody wrote$",
    ),
    "state without a name": (
        unnamed_state(),
        r"^state\[0\]\.name: is empty, as only that of scratch memory of a GPU's kernels may be$",
    ),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_load_refuses_plan_that_returns_what_a_run_before_left(leak: str) -> None:
    plan, sentence = LEAKS[leak]
    with pytest.raises(PlanInvalidError, match=sentence):
        nimblert.load(plan)


def test_load_takes_plan_that_writes_before_it_reads() -> None:
    with nimblert.load(copying((INPUT, ARENA), (ARENA, Z), (Z, Y))) as model:
        for number in (424242, 0):
            x = np.full((1, 4), number, np.float32)
            assert all(np.array_equal(array, x) for array in model.run({"x": x}).values())
