"""A view of the caller's memory that is bound, whose rows have other bytes between them."""

import numpy as np
import pytest
from hostile_plans import refusal
from programs import bare

import nimblert
from nimblert.errors import InputError
from nimblert.plan import Memcpy, Memset, Op, Plan, Pointer, Program, Region, Tensor

INPUT, OUTPUT = (Pointer(region=region) for region in (Region.INPUT, Region.OUTPUT))
ALL = Pointer(region=Region.OUTPUT, index=1)


def two_rows(room: int, given: tuple[int, ...], taken: tuple[int, ...]) -> Plan:
    """Return a plan that fills all memory of y and copies all memory of x to z; ``room`` is the bytes of each."""
    x, y = (
        Tensor(name=name, dtype="float32", shape=(2, 4), strides=strides, pointer=pointer)
        for name, strides, pointer in (("x", given, INPUT), ("y", taken, OUTPUT))
    )
    z = Tensor(name="z", dtype="float32", shape=(room // 4,), strides=(1,), pointer=ALL)
    program = Program(
        name="main",
        inputs=(x,),
        outputs=(y, z),
        input_nbytes=(room,),
        output_nbytes=(room, room),
        arena_nbytes=0,
        stream_count=1,
        event_count=0,
        ops=(Op(name="copy", source="test"),),
        commands=(
            Memset(stream=0, op=0, dst=OUTPUT, value=0x41, element_nbytes=1, count=room),
            Memcpy(stream=0, op=0, dst=ALL, src=INPUT, nbytes=room),
        ),
    )
    return bare(program)


@pytest.mark.parametrize(
    ("given", "taken", "side"), [((8, 1), (4, 1), "inputs"), ((4, 1), (8, 1), "outputs"), ((4, 1), (1, 3), "outputs")]
)
def test_verify_refuses_layouts_with_gaps(given: tuple[int, ...], taken: tuple[int, ...], side: str) -> None:
    strides = given if side == "inputs" else taken
    assert refusal(two_rows(48, given, taken)) == (
        f"programs[0].{side}[0].strides: {strides} leave gaps or overlap, expected a dense tensor on the CPU target"
    )


def test_bind_leaves_bytes_around_a_view_alone() -> None:
    wide, rows = np.zeros((2, 8), np.float32), np.zeros((4, 4), np.float32)
    with nimblert.load(two_rows(32, (4, 1), (4, 1))) as model:
        for name in "xy":
            with pytest.raises(InputError, match=rf"^bind '{name}': strides \(32, 4\) in bytes, expected \(16, 4\)$"):
                model.bind(name, wide[:, :4])
        model.bind("y", rows[1:3])
        model.run({"x": np.ones((2, 4), np.float32)})
    assert not rows[[0, 3]].any()
    assert rows[1:3].all()
