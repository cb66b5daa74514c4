"""A plan that keeps its input of 4 or 2 numbers in the state, and returns the state."""

from functools import partial

import plans
from programs import bare, planned

from nimblert.plan import Memcpy, Plan, Pointer, Profile, Program, Region, Tensor


def copying(entry: str, count: int, copies: tuple[tuple[Pointer, Pointer], ...], profile: Profile = ()) -> Program:
    """Return a program of copies, with an input x and an output y of ``count`` float32."""
    nbytes = 4 * count
    tensor = partial(Tensor, dtype="float32", shape=(count,), strides=(1,))
    takes = any(source.region is Region.INPUT for _, source in copies)
    return planned(
        *(Memcpy(stream=0, op=0, dst=dst, src=src, nbytes=nbytes) for dst, src in copies),
        name=entry + "".join(f"[{name}={size}]" for name, size in profile),
        inputs=(tensor(name="x", pointer=plans.pointer(Region.INPUT)),) if takes else (),
        outputs=(tensor(name="y", pointer=plans.pointer(Region.OUTPUT)),),
        input_nbytes=(nbytes,) if takes else (),
        output_nbytes=(nbytes,),
        entry=entry,
        profile=profile,
    )


INPUT, OUTPUT, STATE, ARENA = map(plans.pointer, (Region.INPUT, Region.OUTPUT, Region.STATE, Region.ARENA))
KEEP = ((ARENA, INPUT), (STATE, ARENA), (OUTPUT, ARENA))


def keeping() -> Plan:
    """Return a plan for the CPU with four numbers of state, "kept": "write" takes 4 or 2 of them, "read" gives all."""
    return bare(
        copying("write", 4, KEEP, (("count", 4),)),
        copying("write", 2, KEEP, (("count", 2),)),
        copying("read", 4, ((OUTPUT, STATE),)),
        state_nbytes=16,
        state=(plans.weight("kept", (1.0, 2.0, 3.0, 4.0), 0),),
    )
