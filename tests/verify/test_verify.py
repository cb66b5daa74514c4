"""Rules of `verify.problems`: a sound plan breaks none, each planted mistake breaks the rule that it is meant for."""

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan

import plans
import pytest
from any_plan import any_plan
from examples import examples
from hypothesis import given

from nimblert.check import verify
from nimblert.plan import (
    Candidate,
    Command,
    GoldenOutput,
    Kernel,
    Module,
    Parameter,
    ParameterKind,
    Plan,
    Record,
    Region,
    Role,
    Target,
    Wait,
)
from nimblert.plan.records import Limits

Change = Callable[[Plan], Plan]


def plan_with(**changes: object) -> Change:
    return lambda plan: replace(plan, **changes)


def item(field: str, index: int, **changes: object) -> Change:
    """Fields of one record of a tuple of the plan."""

    def change(plan: Plan) -> Plan:
        records = list(getattr(plan, field))
        records[index] = replace(records[index], **changes)
        return replace(plan, **{field: tuple(records)})

    return change


def program(**changes: object) -> Change:
    """Fields of the program."""
    return item("programs", 0, **changes)


def in_program(field: str, index: int, **changes: object) -> Change:
    """Fields of one record of a tuple of the program: a command, an input ..."""

    def change(plan: Plan) -> Plan:
        records = list(getattr(plan.programs[0], field))
        records[index] = replace(records[index], **changes)
        return program(**{field: tuple(records)})(plan)

    return change


def command(index: int, **changes: object) -> Change:
    return in_program("commands", index, **changes)


def pointed(launch: int, relocation: int, param_offset: int, region: Region, **where: int) -> Change:
    """Replace a relocation of a launch by another."""

    def change(plan: Plan) -> Plan:
        relocations = list(plan.programs[0].commands[launch].relocations)
        relocations[relocation] = plans.relocation(param_offset, region, **where)
        return command(launch, relocations=tuple(relocations))(plan)

    return change


def golden(**changes: object) -> Change:
    return lambda plan: program(golden=replace(plan.programs[0].golden, **changes))(plan)


def schedule(**changes: object) -> Change:
    return lambda plan: program(schedule=replace(plan.programs[0].schedule, **changes))(plan)


def candidate(**changes: object) -> Change:
    """Return the only schedule that was tried, a sound one but for the changes."""
    sound = Candidate(policy="1", stream_count=1, sync_count=0, arena_nbytes=0)
    return schedule(candidates=(replace(sound, **changes),))


def inserted(index: int, new: Command) -> Change:
    """Insert one more command."""

    def change(plan: Plan) -> Plan:
        commands = list(plan.programs[0].commands)
        commands.insert(index, new)
        return program(commands=tuple(commands))(plan)

    return change


P = "programs[0]."
C = "programs[0].commands"
IN_ORDER = "expected integers in order"
WORD = Parameter(offset=0, nbytes=8, kind=ParameterKind.INPUT)

BOUNDLESS = Limits(**dict.fromkeys(Limits.__dataclass_fields__, 1 << 70))

CUDA_MISTAKES = [
    (plan_with(programs=()), ["programs: the plan has none"]),
    (
        lambda p: replace(p, programs=p.programs * 2),
        [
            "programs: two have the same name",
            "programs[1].profile: none, as programs[0] of the same entry",
            "programs[1].inputs: have the shapes of programs[0], which is of the same entry",
        ],
    ),
    (program(role=Role.BODY), ["programs[0].role: BODY, expected ENTRY"]),
    (
        program(profile=(("batch", 1), ("batch", 2))),
        ["programs[0].profile: ['batch', 'batch'], expected a name for each dimension, no two the same"],
    ),
    (program(profile=(("", 1),)), ["programs[0].profile: [''], expected a name for each dimension, no two the same"]),
    (program(profile=(("batch", 1 << 63),)), [f"programs[0].profile: batch={1 << 63}, expected sizes below {1 << 63}"]),
    (
        program(profile=tuple((f"d{n}", 1) for n in range(65))),
        ["programs[0].profile: 65 dimensions, expected at most 64"],
    ),
    (item("modules", 1, code=memoryview(b"")), ["modules[1].code: is empty or not contiguous"]),
    (
        lambda p: replace(p, modules=(*p.modules, Module(origin="x", code=memoryview(b"abcd")[::2]))),
        ["modules[2].code: is empty or not contiguous"],
    ),
    (item("kernels", 2, module=2), ["kernels[2].module: 2 is out of range (there are 2 modules)"]),
    (item("kernels", 2, symbol=""), ["kernels[2].symbol: '' is not a name"]),
    (item("kernels", 2, symbol="a\0b"), ["kernels[2].symbol: 'a\\x00b' is not a name"]),
    (
        lambda p: replace(
            p, kernels=(*p.kernels, Kernel(module=0, symbol="k", parameters=(Parameter(offset=0, nbytes=32768),)))
        ),
        ["kernels[3].parameters: 32768 bytes, expected at most 32764"],
    ),
    (
        item("kernels", 2, max_dynamic_smem_nbytes=232449),
        ["kernels[2].max_dynamic_smem_nbytes: 232449 is more than a device has"],
    ),
    (
        item("kernels", 2, parameters=(WORD, Parameter(offset=8, nbytes=8))),
        ["kernels[2].parameters[0].kind: INPUT, expected VALUE on the CUDA target"],
    ),
    (
        item("weights", 0, dtype="float12"),
        [
            "weights[0].dtype: 'float12' is not one that a plan may name",
            "weights[0].data: 16 bytes, expected 0, contiguous",
        ],
    ),
    (item("weights", 0, shape=(2, 3)), ["weights[0].data: 16 bytes, expected 24, contiguous"]),
    (item("weights", 1, offset=12), ["weights[1].offset: 12 lies in the tensor before it, which ends at 16"]),
    (item("weights", 1, offset=1020), ["weights[1]: ends at 1028, outside the region (1024 bytes)"]),
    (
        plan_with(state_nbytes=1 << 48),
        [
            f"state_nbytes: {1 << 48}, expected less than {1 << 48}",
            f"programs[0].STATE(0): {1 << 48} bytes, expected less than {1 << 48}",
        ],
    ),
    (program(arena_nbytes=1 << 48), [f"{P}ARENA(0): {1 << 48} bytes, expected less than {1 << 48}"]),
    (lambda p: program(inputs=p.programs[0].inputs * 2)(p), [f"{P}inputs: two have the same name"]),
    (in_program("inputs", 0, dtype="str"), [f"{P}inputs[0].dtype: 'str' is not one that a plan may name"]),
    (
        in_program("inputs", 0, shape=(1,) * 65, strides=(1,) * 65),
        [f"{P}inputs[0].shape: 65 dimensions, expected at most 64"],
    ),
    (in_program("inputs", 0, shape=(4, -1)), [f"{P}inputs[0].shape: (4, -1) has a negative dimension"]),
    (in_program("inputs", 0, strides=(4, -1)), [f"{P}inputs[0].strides: (4, -1) has a negative one"]),
    (in_program("inputs", 0, strides=(4,)), [f"{P}inputs[0].strides: 1, expected one for each of 2 dimensions"]),
    (
        in_program("outputs", 0, strides=(5, 1)),
        [f"{P}outputs[0].pointer: 76 bytes at 0 lie outside OUTPUT(0) (64 bytes)"],
    ),
    (
        in_program("inputs", 0, pointer=plans.pointer(Region.INPUT, index=1)),
        [f"{P}inputs[0].pointer: the program has no region INPUT(1)"],
    ),
    (
        in_program("inputs", 0, pointer=plans.pointer(Region.WEIGHTS)),
        [f"{P}inputs[0].pointer: is in WEIGHTS, which no run changes"],
    ),
    (
        in_program("inputs", 0, dtype="int32", sample_range=(3, 2)),
        [f"{P}inputs[0].sample_range: 3 to 2, {IN_ORDER} from -2147483648 to 2147483647, as int32 holds"],
    ),
    (
        in_program("inputs", 0, dtype="uint8", sample_range=(0, 256)),
        [f"{P}inputs[0].sample_range: 0 to 256, {IN_ORDER} from 0 to 255, as uint8 holds"],
    ),
    (
        in_program("inputs", 0, dtype="bool", sample_range=(-1, 1)),
        [f"{P}inputs[0].sample_range: -1 to 1, {IN_ORDER} from 0 to 1, as bool holds"],
    ),
    (in_program("inputs", 0, sample_range=(0, 1)), [f"{P}inputs[0].sample_range: 0 to 1, expected none for float32"]),
    (program(stream_count=10), [f"{P}stream_count: 10, more than the 9 commands"]),
    (command(4, stream=2), [f"{C}[4].stream: 2 is out of range (there are 2 streams)"]),
    (command(4, op=3), [f"{C}[4].op: 3 is out of range (there are 3 ops)"]),
    (command(8, kernel=7), [f"{C}[8].kernel: 7 is out of range (there are 3 kernels)"]),
    (command(8, params=bytes(20)), [f"{C}[8].params: 20 bytes, the kernel takes 16"]),
    (
        command(8, reads=(plans.access(Region.ARENA, 1000, 64),)),
        [f"{C}[8].reads[0]: 64 bytes at 1000 lie outside ARENA(0) (1024 bytes)"],
    ),
    (
        command(8, writes=(plans.access(Region.OUTPUT, -1, 8),)),
        [f"{C}[8].writes[0]: 8 bytes at -1 lie outside OUTPUT(0) (64 bytes)"],
    ),
    (
        pointed(8, 1, 9, Region.OUTPUT),
        [f"{C}[8].relocations[1].param_offset: 9 is not the start of 8 zero bytes of params"],
    ),
    (
        pointed(1, 2, 20, Region.ARENA),
        [f"{C}[1].relocations[2].param_offset: 20 is not the start of 8 zero bytes of params"],
    ),
    (pointed(1, 1, 4, Region.ARENA), [f"{C}[1].relocations: two of them overlap"]),
    (pointed(1, 1, 8, Region.OUTPUT, index=1), [f"{C}[1].relocations[1].pointer: the program has no region OUTPUT(1)"]),
    (
        pointed(1, 1, 8, Region.ARENA, offset=-(1 << 40) - 1),
        [f"{C}[1].relocations[1].pointer: offset -1099511627777, expected within 1099511627776 of the region"],
    ),
    (command(1, grid=(1, 65536, 1)), [f"{C}[1].grid: (1, 65536, 1), expected 1 to (2147483647, 65535, 65535)"]),
    (command(1, grid=(0, 1, 1)), [f"{C}[1].grid: (0, 1, 1), expected 1 to (2147483647, 65535, 65535)"]),
    (
        command(1, block=(32, 33, 1)),
        [f"{C}[1].block: (32, 33, 1), expected 1 to (1024, 1024, 64), at most 1024 threads"],
    ),
    (command(1, block=(1, 1, 65)), [f"{C}[1].block: (1, 1, 65), expected 1 to (1024, 1024, 64), at most 1024 threads"]),
    (command(6, cluster=(32, 1, 1)), [f"{C}[6].cluster: (32, 1, 1), expected 1 to 16 blocks"]),
    (command(6, cluster=(2, 0, 1)), [f"{C}[6].cluster: (2, 0, 1), expected 1 to 16 blocks"]),
    (command(6, cluster=(1, 4, 1)), [f"{C}[6].cluster: (1, 4, 1) does not divide the grid (32, 2, 1)"]),
    (item("kernels", 1, non_portable_cluster=False), [f"{C}[6].cluster: (16, 1, 1), expected 1 to 8 blocks"]),
    (
        command(6, dynamic_smem_nbytes=65537),
        [f"{C}[6].dynamic_smem_nbytes: 65537, the kernel takes 65536, the device 232448"],
    ),
    (
        command(4, nbytes=1000),
        [f"{C}[4].dst: 1000 bytes at 512 lie outside ARENA(0) (1024 bytes)", f"{C}[4].dst: overlaps src"],
    ),
    (
        command(4, src=plans.pointer(Region.STATE, 200)),
        [f"{C}[4].src: 64 bytes at 200 lie outside STATE(0) (256 bytes)"],
    ),
    (command(4, src=plans.pointer(Region.ARENA, 449)), [f"{C}[4].dst: overlaps src"]),
    (command(4, src=plans.pointer(Region.ARENA, 575)), [f"{C}[4].dst: overlaps src"]),
    (command(4, dst=plans.pointer(Region.WEIGHTS)), [f"{C}[4].dst: is in WEIGHTS, which no run changes"]),
    (command(0, dst=plans.pointer(Region.WEIGHTS)), [f"{C}[0].dst: is in WEIGHTS, which no run changes"]),
    (command(0, element_nbytes=3), [f"{C}[0].element_nbytes: 3, expected 1, 2 or 4"]),
    (command(0, element_nbytes=2, value=65536), [f"{C}[0].value: 65536 does not fit 2 bytes"]),
    (command(0, dst=plans.pointer(Region.ARENA, 258)), [f"{C}[0].dst: 258 is not a multiple of the element size 4"]),
    (command(0, count=193), [f"{C}[0].dst: 772 bytes at 256 lie outside ARENA(0) (1024 bytes)"]),
    (inserted(9, Record(stream=0, event=1)), [f"{C}[9].event: 1 is recorded twice"]),
    (
        inserted(9, Record(stream=0, event=2)),
        [f"{C}[9].event: 2 is out of range (there are 2 events)", f"{P}event_count: 2, but 3 are recorded"],
    ),
    (inserted(0, Wait(stream=0, event=0)), [f"{C}[0].event: 0 is not recorded before this wait"]),
    (program(event_count=3), [f"{P}event_count: 3, but 2 are recorded"]),
    (command(1, programmatic=True), [f"{C}[1].programmatic: no launch is before it on stream 0"]),
    (golden(tolerance=-0.1), [f"{P}golden.tolerance: -0.1, expected a finite number from 0"]),
    (golden(tolerance=inf), [f"{P}golden.tolerance: inf, expected a finite number from 0"]),
    (golden(tolerance=nan), [f"{P}golden.tolerance: nan, expected a finite number from 0"]),
    (golden(outputs=()), [f"{P}golden.outputs: 0, expected 1, as the program"]),
    (
        golden(outputs=(GoldenOutput(sha256=bytes(31), samples=()),)),
        [f"{P}golden.outputs[0].sha256: 31 bytes, expected 32"],
    ),
    (schedule(policy=""), [f"{P}schedule.policy: '', expected 1 to 64 printable characters"]),
    (schedule(policy="a" * 65), [f"{P}schedule.policy: '{'a' * 65}', expected 1 to 64 printable characters"]),
    (schedule(policy="\x1b[2J"), [f"{P}schedule.policy: '\\x1b[2J', expected 1 to 64 printable characters"]),
    (schedule(antichain=(1, 0)), [f"{P}schedule.antichain: is not in ascending order, each once"]),
    (schedule(antichain=(1, 1)), [f"{P}schedule.antichain: is not in ascending order, each once"]),
    (
        schedule(antichain=(0, 5)),
        [f"{P}schedule.antichain: names work that is not there (there are 5 launches, copies and fills)"],
    ),
    (
        schedule(arena_lower_bound_nbytes=1025),
        [f"{P}schedule.arena_lower_bound_nbytes: 1025, more than the arena has (1024 bytes)"],
    ),
    (candidate(policy="a\nb"), [f"{P}schedule.candidates[0].policy: 'a\\nb', expected 1 to 64 printable characters"]),
    (
        candidate(stream_count=6),
        [f"{P}schedule.candidates[0].stream_count: 6, more than the 5 launches, copies and fills"],
    ),
    (
        candidate(sync_count=26),
        [f"{P}schedule.candidates[0].sync_count: 26, more than pairs of launches, copies and fills (25)"],
    ),
    (
        candidate(arena_nbytes=1 << 48),
        [f"{P}schedule.candidates[0].arena_nbytes: {1 << 48}, expected less than {1 << 48}"],
    ),
]

CPU_MISTAKES = [
    (
        item("kernels", 1, parameters=(WORD, WORD)),
        [
            "kernels[1].parameters: two have the same name",
            "kernels[1].parameters[0].name: is empty",
            "kernels[1].parameters[0].dtype: '' is not one that a plan may name",
            "kernels[1].parameters[1].offset: 8 bytes at 0, expected 8 at 8",
            "kernels[1].parameters[1].name: is empty",
            "kernels[1].parameters[1].dtype: '' is not one that a plan may name",
            f"{C}[3].params: 16 bytes, the kernel takes 8",
            f"{C}[3].relocations: expected one for each of 2 parameters, in order",
        ],
    ),
    (
        lambda p: command(3, relocations=p.programs[0].commands[3].relocations[::-1])(p),
        [f"{C}[3].relocations: expected one for each of 2 parameters, in order"],
    ),
    (
        pointed(0, 2, 16, Region.ARENA, offset=200),
        [
            f"{C}[0].relocations[2].pointer: 64 bytes at 200 lie outside ARENA(0) (256 bytes)",
            f"{C}[0].writes: are not what the relocations point to",
        ],
    ),
    (
        pointed(0, 1, 8, Region.ARENA),
        [
            f"{C}[0].relocations[1].pointer: an initializer in ARENA, expected WEIGHTS",
            f"{C}[0].reads: are not what the relocations point to",
            f"{C}[0].relocations: ARENA(0) is written from 0 to 16, and used otherwise too",
        ],
    ),
    (
        pointed(3, 1, 8, Region.WEIGHTS),
        [
            f"{C}[3].relocations[1].pointer: an output in WEIGHTS, which a run does not change",
            f"{C}[3].writes: are not what the relocations point to",
        ],
    ),
    (command(3, programmatic=True), [f"{C}[3].programmatic: expected on the CUDA target only"]),
]


def case_name(value: object) -> str:
    """Name a case after the first sentence that is expected."""
    return value[0].split(",")[0] if isinstance(value, list) else ""


def test_sound_plans_have_no_problems() -> None:
    for plan in (plans.cuda_plan(), plans.cpu_plan(), plans.large_plan(20)):
        assert list(verify.problems(plan)) == []


@pytest.mark.parametrize(("change", "expected"), CUDA_MISTAKES, ids=case_name)
def test_mistakes_of_a_cuda_plan(change: Change, expected: list[str]) -> None:
    assert list(verify.problems(change(plans.cuda_plan()), BOUNDLESS)) == expected


@pytest.mark.parametrize(("change", "expected"), CPU_MISTAKES, ids=case_name)
def test_mistakes_of_a_cpu_plan(change: Change, expected: list[str]) -> None:
    assert list(verify.problems(change(plans.cpu_plan()), BOUNDLESS)) == expected


AT_LIMITS = [
    program(profile=tuple((f"d{n}", (1 << 63) - 1) for n in range(64))),
    lambda p: replace(
        p, kernels=(*p.kernels, Kernel(module=1, symbol="k", parameters=(Parameter(offset=0, nbytes=32764),)))
    ),
    item("kernels", 2, max_dynamic_smem_nbytes=232448),
    item("weights", 1, offset=16),
    item("weights", 1, offset=1016),
    plan_with(weights_nbytes=(1 << 48) - 1),
    in_program("inputs", 0, shape=(1,) * 64, strides=(1,) * 64),
    in_program("inputs", 0, shape=(0, 4), strides=(0, 0)),
    in_program("inputs", 0, dtype="int32", sample_range=(-(2**31), 2**31 - 1)),
    in_program("inputs", 0, dtype="bool", sample_range=(1, 1)),
    in_program("outputs", 0, shape=(1, 16), strides=(1 << 44, 1)),
    program(stream_count=9),
    command(0, count=192, value=(1 << 32) - 1),
    command(0, count=0, element_nbytes=1, value=255, dst=plans.pointer(Region.ARENA, 1024)),
    command(1, grid=(2**31 - 1, 65535, 65535), block=(1, 16, 64)),
    command(1, block=(1024, 1, 1)),
    pointed(1, 1, 8, Region.ARENA, offset=1 << 40),
    pointed(1, 1, 8, Region.ARENA, offset=-(1 << 40)),
    command(4, src=plans.pointer(Region.ARENA, 448)),
    command(4, src=plans.pointer(Region.ARENA, 576)),
    command(6, cluster=(8, 2, 1), dynamic_smem_nbytes=65536),
    lambda p: command(6, cluster=(8, 1, 1))(item("kernels", 1, non_portable_cluster=False)(p)),
    golden(tolerance=0.0),
    schedule(policy="a" * 64, antichain=(0, 4), arena_lower_bound_nbytes=1024, fewest_sync_count=25),
    schedule(antichain=(), arena_lower_bound_nbytes=0, fewest_sync_count=0),
    candidate(stream_count=5, sync_count=25, arena_nbytes=(1 << 48) - 1),
    candidate(stream_count=0),
]


@pytest.mark.parametrize("change", AT_LIMITS)
def test_what_reaches_a_limit_and_does_not_pass_it_is_sound(change: Change) -> None:
    assert list(verify.problems(change(plans.cuda_plan()), BOUNDLESS)) == []


def test_cpu_kernel_takes_more_parameters() -> None:
    many = tuple(Parameter(offset=8 * i, nbytes=8, kind=ParameterKind.INPUT, name=f"p{i}") for i in range(4096))
    plan = item("kernels", 1, parameters=many)(plans.cpu_plan())
    assert not any(".parameters: " in problem for problem in verify.problems(plan, BOUNDLESS))


@examples(100)
@given(any_plan)
def test_any_plan_is_judged(plan: Plan) -> None:
    assert all("\n" not in problem for problem in verify.problems(plan))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("target", Target)
def test_many_parameters_are_judged_in_time(target: Target) -> None:
    plan = replace(plans.large_plan(10_000, relocation_count=0), target=target)
    parameters = tuple(Parameter(offset=i, nbytes=16) for i in range(10_000))
    plan = replace(plan, kernels=(replace(plan.kernels[0], parameters=parameters),))
    assert sum(".params: 16 bytes" in problem for problem in verify.problems(plan)) == 10_000
