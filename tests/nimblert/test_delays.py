"""Delays change when commands run, and nothing else."""

from dataclasses import replace

import pytest
from delays import CUBIN, with_delays, with_delays_before
from plans import cuda_plan, large_plan

from nimblec.cuda.capture.cubin_reading import entry_symbols
from nimblert.check import verify
from nimblert.check.hazards import hazards
from nimblert.plan import Command, Launch, Plan, Record, Wait

CODE = CUBIN.read_bytes()


def is_delay(plan: Plan, command: Command) -> bool:
    return isinstance(command, Launch) and plan.kernels[command.kernel].symbol == "delay"


def as_before(command: Command) -> Command:
    """A command as it is where no delay changes its edge."""
    return replace(command, programmatic=False) if isinstance(command, Launch) else command


def test_the_cubin_holds_the_kernel_and_no_path() -> None:
    assert entry_symbols(CODE) == {"delay"}
    assert b"delay.cu" not in CODE


@pytest.mark.parametrize("plan", [cuda_plan(), large_plan(100)], ids=["small", "large"])
@pytest.mark.parametrize("seed", range(5))
def test_the_other_commands_stay_as_they_are(plan: Plan, seed: int) -> None:
    delayed = with_delays(plan, seed, CODE)
    assert list(verify.problems(delayed)) == []
    kept = [c for c in delayed.programs[0].commands if not is_delay(delayed, c)]
    assert [as_before(c) for c in kept] == [as_before(c) for c in plan.programs[0].commands]
    added = len(delayed.programs[0].commands) - len(kept)
    assert 0.2 * len(kept) < added < 0.8 * len(kept)


def test_delays_come_by_their_seed_and_are_short() -> None:
    plan = large_plan(100)
    one, again, other = (with_delays(plan, seed, CODE) for seed in (1, 1, 2))
    assert one == again != other
    lengths = [
        int.from_bytes(c.params, "little")
        for c in one.programs[0].commands
        if isinstance(c, Launch) and is_delay(one, c)
    ]
    assert 0 < min(lengths) < 100
    assert 5_000 < max(lengths) <= 50_000


def test_order_is_kept() -> None:
    plan = cuda_plan()
    program = plan.programs[0]
    everywhere = dict.fromkeys(range(len(program.commands)), 10)
    assert list(hazards(with_delays_before(plan, everywhere, CODE).programs[0])) == []
    unmet = tuple(c for c in program.commands if not (isinstance(c, Wait) and c.stream == 0))
    racy = replace(plan, programs=(replace(program, commands=unmet),))
    (known,) = hazards(racy.programs[0])
    (found,) = hazards(with_delays_before(racy, dict.fromkeys(range(len(unmet)), 10), CODE).programs[0])
    assert known.split("nothing orders")[1] == found.split("nothing orders")[1]


def test_a_delay_stands_before_its_command_on_its_stream() -> None:
    plan = cuda_plan()
    wait = next(i for i, c in enumerate(plan.programs[0].commands) if isinstance(c, Wait))
    delayed = with_delays_before(plan, {wait: 5_000_000}, CODE)
    commands = delayed.programs[0].commands
    assert is_delay(delayed, commands[wait])
    assert commands[wait].stream == commands[wait + 1].stream == plan.programs[0].commands[wait].stream
    assert commands[:wait] == plan.programs[0].commands[:wait]
    assert isinstance(commands[wait - 1], Record)


def test_an_edge_that_a_delay_breaks_is_no_longer_programmatic() -> None:
    plan = cuda_plan()
    commands = plan.programs[0].commands
    early = next(i for i, c in enumerate(commands) if isinstance(c, Launch) and c.programmatic)
    last = with_delays_before(plan, {early: 10}, CODE).programs[0].commands[-1]
    assert isinstance(last, Launch)
    assert not last.programmatic
    first = with_delays_before(plan, {0: 10}, CODE).programs[0].commands[-1]
    assert isinstance(first, Launch)
    assert first.programmatic
