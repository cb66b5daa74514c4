"""CUDA plans with faults, which are checked while a GPU starts: what is reported, and what is left behind."""

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Never

import pytest
from plans import cuda_plan

import nimblert
from nimblec.plan import encoder
from nimblert.cuda import driver
from nimblert.errors import PlanError
from nimblert.plan import Plan, Record, Wait


def _altered(image: bytes) -> bytes:
    return image[:-1] + bytes([image[-1] ^ 1])


def _without_events(plan: Plan) -> Plan:
    (program,) = plan.programs
    commands = tuple(command for command in program.commands if not isinstance(command, Record | Wait))
    return replace(plan, programs=(replace(program, commands=commands, event_count=0),))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda plan: _altered(encoder.encode_file(plan)), r"was altered after it was written"),
        (lambda plan: encoder.encode_file(replace(plan, kernels=())), r"kernel: 0 is out of range"),
        (lambda plan: encoder.encode_file(_without_events(plan)), r"nothing orders their accesses"),
    ],
    ids=["altered", "contradictory", "unordered"],
)
def test_a_fault_of_a_plan_is_reported_before_one_of_the_machine(
    change: Callable[[Plan], bytes], sentence: str
) -> None:
    strange = replace(cuda_plan().device, compute_capability=(99, 0))
    with pytest.raises(PlanError, match=sentence):
        nimblert.load(change(replace(cuda_plan(), device=strange)))


DAMAGED = [
    pytest.param(_altered(encoder.encode_file(cuda_plan())), id="altered"),
    pytest.param(encoder.encode_file(replace(cuda_plan(), kernels=())), id="contradictory"),
]


def _interrupted(*_: object) -> Never:
    raise KeyboardInterrupt


@pytest.mark.parametrize("image", DAMAGED)
def test_a_fault_of_a_plan_does_not_hide_an_interrupt(image: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "initialise", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        nimblert.load(image)


def test_a_gpu_is_released_if_its_context_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    bindings = SimpleNamespace(
        cuDeviceGet=lambda _: (0, 7),
        cuDevicePrimaryCtxRetain=lambda _: (0, 8),
        cuDevicePrimaryCtxRelease=released.append,
        cuCtxSetCurrent=_interrupted,
    )
    monkeypatch.setattr(driver, "bindings", lambda: bindings)
    with pytest.raises(KeyboardInterrupt):
        driver.Context()
    assert released == [7]


@pytest.mark.parametrize("image", DAMAGED)
def test_a_refused_file_is_unmapped_at_once(image: bytes, tmp_path: Path) -> None:
    path = tmp_path / "refused.plan"
    path.write_bytes(image)
    gc.disable()
    try:
        with suppress(PlanError):
            nimblert.load(path)
        assert str(path) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()
