"""Plans of the CUDA target that copy their input, and arrays for them in every layout."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from programs import bare, planned

from nimblert.arrays.layouts import Gather, numpy_dtype
from nimblert.cuda import driver, movers
from nimblert.plan import (
    ITEM_NBYTES,
    Access,
    Kernel,
    Launch,
    Memcpy,
    Module,
    Parameter,
    Plan,
    Pointer,
    Region,
    Relocation,
    Target,
    Tensor,
)

on_gpu = pytest.mark.parametrize("put", [pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True)
on_host = pytest.mark.parametrize("put", ["host"], indirect=True)
"""For tests of `gpu_memory`'s fixtures on one driver only."""

SHAPE = (4, 3, 32, 24)
ORDERS = {"contiguous": (0, 1, 2, 3), "channels last": (0, 2, 3, 1), "odd": (3, 0, 2, 1)}


def strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense tensor whose innermost axis is ``order[-1]``."""
    found, step = [0] * len(shape), 1
    for axis in reversed(order):
        found[axis] = step
        step *= shape[axis]
    return tuple(found)


def laid_out(array: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """Return the same array in another memory layout."""
    inverse = np.argsort(order)
    return np.ascontiguousarray(array.transpose(order)).transpose(inverse)


def copying(shape: Sequence[int], order: Sequence[int], dtype: str = "float32") -> Plan:
    """Return a plan that copies its input to its output through the arena, both laid out in ``order``."""
    nbytes = prod(shape) * ITEM_NBYTES[dtype]
    places = [Pointer(region=region) for region in (Region.INPUT, Region.ARENA, Region.OUTPUT)]

    def tensor(name: str, place: Pointer) -> Tensor:
        return Tensor(name=name, dtype=dtype, shape=tuple(shape), strides=strides(shape, order), pointer=place)

    program = planned(
        *(Memcpy(dst=dst, src=src, nbytes=nbytes, stream=0, op=0) for src, dst in pairwise(places) if nbytes),
        stream_count=1,
        inputs=(tensor("x", places[0]),),
        outputs=(tensor("y", places[2]),),
        arena_nbytes=nbytes,
        input_nbytes=(nbytes,),
        output_nbytes=(nbytes,),
    )
    driver.initialise()
    return bare(program, target=Target.CUDA, device=driver.describe())


def copying_each(shapes: Sequence[Sequence[int]]) -> Plan:
    """Return a plan that copies each of its inputs to an output."""
    plans = [copying(shape, range(len(shape))) for shape in shapes]
    inputs, outputs, commands = [], [], []
    for index, plan in enumerate(plans):
        (program,) = plan.programs
        places = [Pointer(region=region, index=index) for region in (Region.INPUT, Region.OUTPUT)]
        inputs.append(replace(program.inputs[0], name=f"x{index}", pointer=places[0]))
        outputs.append(replace(program.outputs[0], name=f"y{index}", pointer=places[1]))
        commands.append(Memcpy(dst=places[1], src=places[0], nbytes=program.arena_nbytes, stream=0, op=0))
    nbytes = tuple(plan.programs[0].arena_nbytes for plan in plans)
    program = replace(
        plans[0].programs[0],
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        commands=tuple(commands),
        arena_nbytes=0,
        input_nbytes=nbytes,
        output_nbytes=nbytes,
    )
    return replace(plans[0], programs=(program,))


def by_kernel(plan: Plan) -> Plan:
    """Return a plan of `copying` whose last copy, to the output, is made by a kernel of layout.cu."""
    (program,) = plan.programs
    *before, last = program.commands
    assert isinstance(last, Memcpy)
    parameters = Gather((last.nbytes,), (1,)).parameters(0, 0)
    places = [Parameter(offset=0, nbytes=8), Parameter(offset=8, nbytes=8), Parameter(offset=16, nbytes=104)]
    assert len(parameters) == 120
    launch = Launch(
        stream=last.stream,
        op=last.op,
        kernel=0,
        params=parameters,
        relocations=(Relocation(param_offset=0, pointer=last.dst), Relocation(param_offset=8, pointer=last.src)),
        reads=(Access(pointer=last.src, nbytes=last.nbytes),),
        writes=(Access(pointer=last.dst, nbytes=last.nbytes),),
        grid=(32, 1, 1),
        block=(256, 1, 1),
    )
    return replace(
        plan,
        modules=(Module(origin="tests", code=memoryview(movers._PTX.read_bytes() + b"\0")),),
        kernels=(Kernel(module=0, symbol="gather_1", parameters=tuple(places)),),
        programs=(replace(program, commands=(*before, launch)),),
    )


def drawn(seed: int, shape: Sequence[int] = SHAPE, dtype: str = "float32") -> np.ndarray:
    bits = np.random.default_rng(seed).integers(0, 100, tuple(shape))
    return bits.astype(numpy_dtype(dtype))
