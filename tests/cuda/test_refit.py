"""Weights replaced on a GPU, where programs read them; on a driver of host memory, too."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from copying import copying, drawn, on_host
from host_driver import HostDriver

import nimblert
from nimblert import InputError
from nimblert.plan import Memcpy, Plan, Pointer, Program, Region, Role, Tensor, Weight

pytest_plugins = ("gpu_memory",)
torch = pytest.importorskip("torch")

SHAPE = (6, 8)
NBYTES = 6 * 8 * 4
MADE = 512
"""Where the weight lies that is made of the one that is given."""


def weighted() -> Plan:
    """Return a plan whose y is the weight "w", whatever x is; z is a copy of it, which a refit makes."""
    plan = copying(SHAPE, (0, 1))
    (program,) = plan.programs
    (x,), (y,) = program.inputs, program.outputs
    z = replace(y, name="z", pointer=Pointer(region=Region.OUTPUT, index=1))
    commands = tuple(
        Memcpy(dst=tensor.pointer, src=Pointer(region=Region.WEIGHTS, offset=offset), nbytes=NBYTES, stream=0, op=0)
        for tensor, offset in ((y, 0), (z, MADE))
    )
    content = memoryview(drawn(0, SHAPE).tobytes())
    weights = tuple(
        Weight(name=name, dtype="float32", shape=SHAPE, offset=offset, data=content)
        for name, offset in (("w", 0), ("made", MADE))
    )
    return replace(
        plan,
        weights=weights,
        weights_nbytes=MADE + NBYTES,
        programs=(replace(program, outputs=(y, z), output_nbytes=(NBYTES, NBYTES), commands=commands),),
        refits=(refit(program, x),),
    )


def refit(program: Program, x: Tensor) -> Program:
    given = replace(x, name="w", pointer=Pointer(region=Region.WEIGHTS))
    copy = Memcpy(dst=Pointer(region=Region.WEIGHTS, offset=MADE), src=given.pointer, nbytes=NBYTES, stream=0, op=0)
    return replace(
        program,
        name="weights",
        entry="weights",
        role=Role.REFIT,
        inputs=(given,),
        outputs=(),
        input_nbytes=(),
        output_nbytes=(),
        arena_nbytes=0,
        commands=(copy,),
    )


def test_weights_are_replaced_between_runs(put: Callable[[np.ndarray], Any]) -> None:
    with nimblert.load(weighted()) as model, model.context() as context:
        x = drawn(9, SHAPE)
        bound = put(np.zeros(SHAPE, np.float32))
        context.bind("z", bound)
        for seed in (1, 2, 3):
            w = drawn(seed, SHAPE)
            given = w if seed == 1 else put(w) if seed == 2 else put(np.ascontiguousarray(w.T)).t()
            model.refit({"w": given})
            assert all(np.array_equal(array, w) for array in model(x))
            assert np.array_equal(context.run({"x": x})["y"], w)
            assert np.array_equal(bound.cpu().numpy(), w)


def test_what_does_not_fit_changes_nothing(put: Callable[[np.ndarray], Any]) -> None:
    with nimblert.load(weighted()) as model:
        for name, array, sentence in (
            ("w", put(np.zeros((6, 7), np.float32)), r"weight 'w': shape \(6, 7\), expected \(6, 8\)"),
            ("w", put(np.zeros(SHAPE)), "weight 'w': dtype float64, expected float32"),
            ("made", put(np.zeros(SHAPE, np.float32)), "weight 'made': not one of the 1"),
        ):
            with pytest.raises(InputError, match=sentence):
                model.refit({name: array})
        assert all(np.array_equal(array, drawn(0, SHAPE)) for array in model(drawn(1, SHAPE)))


@on_host
def test_a_graph_is_kept_for_the_next_refit_of_the_same_weights(host: HostDriver) -> None:
    with nimblert.load(weighted()) as model:
        model.refit({"w": drawn(1, SHAPE)})
        made = host.calls["cuGraphInstantiate"]
        for seed in (2, 3):
            w, held = drawn(seed, SHAPE), len(host.allocated)
            model.refit({"w": w})
            assert len(host.allocated) == held
            assert all(np.array_equal(array, w) for array in model(drawn(9, SHAPE)))
        assert host.calls["cuGraphInstantiate"] == made
    assert not host.allocated


@on_host
def test_arrays_are_permuted_on_the_device(host: HostDriver) -> None:
    """In a first refit and in later ones, which know the way of this layout."""
    with nimblert.load(weighted()) as model:
        for seed in (1, 2, 3, 4, 5, 6):
            w = drawn(seed, SHAPE)
            given = (np.asfortranarray(w), np.repeat(w, 2, axis=1)[:, ::2], w)[seed % 3]
            launched = host.calls.get("cuLaunchKernel", 0)
            model.refit({"w": given})
            assert all(np.array_equal(array, w) for array in model(drawn(9, SHAPE)))
            assert host.calls.get("cuLaunchKernel", 0) - launched == (given.flags.f_contiguous)
