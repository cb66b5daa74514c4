"""Encoding a plan and decoding it again: the same plan, the same bytes, the same as flatc reads."""

import json
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import flatbuffers
import plans
import pytest
from any_plan import any_plan
from examples import examples
from hypothesis import given

from nimblert._generated import plan_generated as fb
from nimblert.errors import PlanFormatError
from nimblert.files import container, decoder, encoder, schema
from nimblert.files.segments import ALIGNMENT
from nimblert.plan import Launch, Plan, Region, Tensor

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "schema" / "plan.fbs"
RELEASED = sorted((ROOT / "schema" / "released").glob("*.fbs"))

needs_flatc = pytest.mark.skipif(shutil.which("flatc") is None, reason="flatc is not installed")


def decode_file(file: bytes) -> Plan:
    """The plan in a file's bytes, whether or not it agrees with itself."""
    return decoder.decode(memoryview(file), flatbuffer_nbytes(file))


def flatbuffer_nbytes(file: bytes) -> int:
    return struct.unpack_from("<Q", file, len(file) - 56)[0]


@examples(100)
@given(any_plan)
def test_round_trip_of_any_plan(plan: Plan) -> None:
    file = container.encode_file(plan)
    decoded = decode_file(file)
    assert decoded == plan
    assert container.encode_file(decoded) == file


@pytest.mark.parametrize("make", [plans.cuda_plan, plans.cpu_plan])
def test_equal_plans_give_equal_bytes(make: Callable[[], Plan]) -> None:
    assert container.encode_file(make()) == container.encode_file(make())


def test_round_trip_of_a_plan_with_many_launches() -> None:
    plan = plans.large_plan(1400)
    assert decode_file(container.encode_file(plan)) == plan


def test_code_and_weights_are_slices_of_the_file() -> None:
    file = container.encode_file(plans.cuda_plan())
    plan = decode_file(file)
    for view in (plan.modules[1].code, plan.weights[0].data, plan.state[0].data):
        assert view.obj is file


def test_neighbouring_weights_keep_their_distance_in_the_file() -> None:
    encoded = encoder.encode(plans.cuda_plan())
    code, more_code, scale, bias, mean = encoded.segments
    assert code.offset % ALIGNMENT == more_code.offset % ALIGNMENT == 0
    assert scale.offset % ALIGNMENT == mean.offset % ALIGNMENT == 0
    assert bias.offset - scale.offset == 256


def test_structs_are_laid_out_as_flatc_says() -> None:
    plan = plans.cuda_plan()
    root = fb.Plan.GetRootAs(encoder.encode(plan).flatbuffer, 0)
    program = root.Programs(0)
    command = program.Commands(1)
    assert command.ActionType() == fb.Action.Launch
    launch = fb.Launch()
    launch.Init(command.Action().Bytes, command.Action().Pos)
    expected = plan.programs[0].commands[1]
    assert isinstance(expected, Launch)
    for i, relocation in enumerate(expected.relocations):
        read = launch.Relocations(i)
        pointer = read.Pointer(fb.Pointer())
        assert read.ParamOffset() == relocation.param_offset
        assert (pointer.Region(), pointer.Index(), pointer.Offset()) == (
            relocation.pointer.region,
            relocation.pointer.index,
            relocation.pointer.offset,
        )
    for i, access in enumerate(expected.reads):
        read = launch.Reads(i)
        assert read.Nbytes() == access.nbytes
        assert read.Pointer(fb.Pointer()).Region() == access.pointer.region
    assert (schema.RELOCATION.size, schema.ACCESS.size) == (fb.Relocation.SizeOf(), fb.Access.SizeOf())
    assert (schema.POINTER.size, schema.DIM3.size) == (fb.Pointer.SizeOf(), fb.Dim3.SizeOf())


def test_actions_are_numbered_as_flatc_says() -> None:
    generated = {name.upper(): number for name, number in vars(fb.Action).items() if name[0] != "_"}
    assert {"NONE": 0} | {action.name: action.value for action in schema.Action} == generated


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor(name="x", dtype="float32", shape=(2**63,), strides=(1,), pointer=plans.pointer(Region.ARENA)),
        Tensor(name="x", dtype="float32", shape=(), strides=(), pointer=plans.pointer(Region.ARENA, 2**63)),
        Tensor(name="\ud800", dtype="float32", shape=(), strides=(), pointer=plans.pointer(Region.ARENA)),
    ],
)
def test_what_does_not_fit_its_field_is_refused(tensor: Tensor) -> None:
    plan = plans.cpu_plan()
    program = plan.programs[0]
    with pytest.raises(PlanFormatError, match="does not fit its file format"):
        encoder.encode(_with_program(plan, inputs=(tensor, *program.inputs)))


def _with_program(plan: Plan, **changes: object) -> Plan:
    """The plan with fields of its first program replaced."""
    return replace(plan, programs=(replace(plan.programs[0], **changes), *plan.programs[1:]))


def _patched(position_of: Callable[[fb.Plan], int], value: bytes) -> bytes:
    """The CPU plan's file with ``value`` at a position found through the generated accessors."""
    file = bytearray(container.encode_file(plans.cpu_plan()))
    position = position_of(fb.Plan.GetRootAs(file, 0))
    file[position : position + len(value)] = value
    return bytes(file)


def test_newer_major_version_is_refused() -> None:
    file = _patched(lambda root: root.Schema()._tab.Pos, struct.pack("<HH", 3, 3))
    with pytest.raises(PlanFormatError, match=r"plan schema 3\.3, this nimblert reads 1\.x to 2\.x; install a newer"):
        decode_file(file)


def test_older_major_version_is_refused() -> None:
    file = _patched(lambda root: root.Schema()._tab.Pos, struct.pack("<HH", 0, 9))
    with pytest.raises(PlanFormatError, match=r"plan schema 0\.9.*compile the model again"):
        decode_file(file)


def test_newer_minor_version_is_read() -> None:
    file = _patched(lambda root: root.Schema()._tab.Pos, struct.pack("<HH", schema.MAJOR, 60000))
    assert decode_file(file) == plans.cpu_plan()


def test_unknown_action_is_refused() -> None:
    def kind_of_first_command(root: fb.Plan) -> int:
        table = root.Programs(0).Commands(0)._tab
        return table.Pos + table.Offset(4)

    with pytest.raises(PlanFormatError, match="command of kind 6: this nimblert knows kinds 1 to 5"):
        decode_file(_patched(kind_of_first_command, b"\x06"))


def test_unknown_action_of_a_newer_minor_version_names_that() -> None:
    file = bytearray(_patched(lambda root: root.Schema()._tab.Pos, struct.pack("<HH", schema.MAJOR, 7)))
    table = fb.Plan.GetRootAs(file, 0).Programs(0).Commands(0)._tab
    file[table.Pos + table.Offset(4)] = 6
    with pytest.raises(PlanFormatError, match=r"kinds 1 to 5; it is of plan schema 2\.7, .* up to 2\.1: a newer one"):
        decode_file(bytes(file))


@pytest.mark.parametrize("add", [fb.ModuleAddCompression, fb.WeightAddCompression], ids=["code", "weight"])
def test_compression_is_refused(add: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    end = {fb.ModuleAddCompression: "ModuleEnd", fb.WeightAddCompression: "WeightEnd"}[add]
    finish = getattr(fb, end)

    def compressed(builder: flatbuffers.Builder) -> int:
        add(builder, 1)
        return int(finish(builder))

    monkeypatch.setattr(fb, end, compressed)
    file = container.encode_file(plans.cpu_plan())
    with pytest.raises(PlanFormatError, match="segment of compression 1: this nimblert knows none"):
        decode_file(file)


def test_unknown_role_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    add = fb.ProgramAddRole
    monkeypatch.setattr(fb, "ProgramAddRole", lambda builder, _: add(builder, 3))
    file = container.encode_file(plans.cpu_plan())
    with pytest.raises(PlanFormatError, match="3 is not a valid Role"):
        decode_file(file)


def test_an_entry_that_is_not_named_is_the_program() -> None:
    plan = plans.several_entries()
    assert [program.entry for program in decode_file(container.encode_file(plan)).programs] == ["main", "main", "tail"]
    assert b"tail" in container.encode_file(_with_program(plan, name="tail"))


def test_unknown_region_is_refused() -> None:
    def region_of_first_input(root: fb.Plan) -> int:
        return root.Programs(0).Inputs(0).Pointer()._tab.Pos + 12

    with pytest.raises(PlanFormatError, match="9 is not a valid Region"):
        decode_file(_patched(region_of_first_input, b"\x09"))


def _code_segment(root: fb.Plan) -> int:
    return root.Modules(1).Code()._tab.Pos


FILE = container.encode_file(plans.cpu_plan())
FIRST, SECOND = (fb.Plan.GetRootAs(bytearray(FILE), 0).Modules(i).Code().Offset() for i in range(2))
ADD, RELU = (module.code.nbytes for module in plans.cpu_plan().modules)
BEFORE = f"the one before it ends at byte {FIRST + ADD}"
TRAILER = len(FILE) - 64


@pytest.mark.parametrize(
    ("offset", "nbytes", "message"),
    [
        (FIRST, RELU, f"segment at byte {FIRST}: {BEFORE}, expected less than 4096 bytes"),
        (SECOND + 4096, RELU, f"segment at byte {SECOND + 4096}: {BEFORE}, expected less than 4096 bytes"),
        (2**64 - 1, RELU, f"segment at byte 18446744073709551615: {BEFORE}"),
        (SECOND, 2**63, f"segment at byte {SECOND} ends at byte {SECOND + 2**63} of {len(FILE)}"),
        (SECOND, RELU - 1, f"bytes {SECOND + RELU - 1} to 4096: expected zero padding"),
    ],
)
def test_segments_fill_the_file(offset: int, nbytes: int, message: str) -> None:
    with pytest.raises(PlanFormatError, match=message):
        decode_file(_patched(_code_segment, struct.pack("<QQ", offset, nbytes)))


@pytest.mark.parametrize(
    ("offset", "nbytes", "message"),
    [
        (TRAILER, 63, "trailer of 63 bytes, expected 64"),
        (TRAILER + 1, 64, f"bytes {TRAILER} to {TRAILER + 1}: expected zero padding"),
        (TRAILER - 4, 64, f"segment at byte {TRAILER - 4}: the one before it ends at byte {TRAILER}"),
    ],
)
def test_trailer_ends_the_file(offset: int, nbytes: int, message: str) -> None:
    with pytest.raises(PlanFormatError, match=message):
        decode_file(_patched(lambda root: root.Trailer()._tab.Pos, struct.pack("<QQ", offset, nbytes)))


def test_models_stand_close_together_and_cubins_on_pages() -> None:
    cuda = fb.Plan.GetRootAs(bytearray(container.encode_file(plans.cuda_plan())), 0)
    assert [cuda.Modules(i).Code().Offset() % 4096 for i in range(cuda.ModulesLength())] == [0] * cuda.ModulesLength()
    assert (FIRST % 64, SECOND % 64, 0 <= SECOND - FIRST - ADD < 64) == (0, 0, True)


def test_shared_tables_cannot_make_a_small_file_large() -> None:
    # 20,000 commands of 4 bytes each, all of them one launch with 20,000 relocations: 400 million
    # records in 0.6 MB.
    builder = flatbuffers.Builder(1 << 20)
    builder.StartVector(schema.RELOCATION.size, 20_000, 8)
    builder.Pad(schema.RELOCATION.size * 20_000)
    relocations = builder.EndVector()
    fb.LaunchStart(builder)
    fb.LaunchAddRelocations(builder, relocations)
    fb.LaunchAddGrid(builder, fb.CreateDim3(builder, 1, 1, 1))
    fb.LaunchAddBlock(builder, fb.CreateDim3(builder, 1, 1, 1))
    launch = fb.LaunchEnd(builder)
    fb.CommandStart(builder)
    fb.CommandAddActionType(builder, fb.Action.Launch)
    fb.CommandAddAction(builder, launch)
    command = fb.CommandEnd(builder)
    builder.StartVector(4, 20_000, 4)
    for _ in range(20_000):
        builder.PrependUOffsetTRelative(command)
    commands = builder.EndVector()
    fb.ProgramStart(builder)
    fb.ProgramAddCommands(builder, commands)
    program = fb.ProgramEnd(builder)
    builder.StartVector(4, 1, 4)
    builder.PrependUOffsetTRelative(program)
    programs = builder.EndVector()
    fb.DeviceStart(builder)
    device = fb.DeviceEnd(builder)
    fb.PlanStart(builder)
    fb.PlanAddSchema(builder, fb.CreateSchemaVersion(builder, schema.MAJOR, schema.MINOR))
    fb.PlanAddTrailer(builder, fb.CreateSegment(builder, 0, 64))
    fb.PlanAddDevice(builder, device)
    fb.PlanAddPrograms(builder, programs)
    builder.Finish(fb.PlanEnd(builder), schema.IDENTIFIER)
    buffer = builder.Output()
    with pytest.raises(PlanFormatError, match="are more than it has"):
        decoder.decode(memoryview(buffer), len(buffer))


@needs_flatc
def test_generated_code_is_what_flatc_writes(tmp_path: Path) -> None:
    flatc("--python", "--gen-onefile", "-o", tmp_path, SCHEMA)
    committed = ROOT / "runtime" / "nimblert" / "_generated" / "plan_generated.py"
    assert (tmp_path / "plan_generated.py").read_text() == committed.read_text()


@needs_flatc
def test_flatc_reads_a_plan_file_as_it_is(tmp_path: Path) -> None:
    plan = plans.cuda_plan()
    container.write(plan, tmp_path / "model.plan")
    flatc("--json", "--raw-binary", "--strict-json", "-o", tmp_path, SCHEMA, "--", tmp_path / "model.plan")
    read = json.loads((tmp_path / "model.json").read_text())
    assert read["producer"] == plan.producer
    assert [kernel["symbol"] for kernel in read["kernels"]] == [kernel.symbol for kernel in plan.kernels]
    commands = read["programs"][0]["commands"]
    assert [command["action_type"] for command in commands] == [
        type(command).__name__ for command in plan.programs[0].commands
    ]
    assert commands[1]["action"]["relocations"][2] == {
        "pointer": {"offset": -64, "index": 0, "region": "ARENA"},
        "param_offset": 16,
    }
    code = read["modules"][0]["code"]
    file = (tmp_path / "model.plan").read_bytes()
    assert file[code["offset"] : code["offset"] + code["nbytes"]] == plan.modules[0].code


@needs_flatc
def test_fields_of_a_newer_minor_version_are_ignored(tmp_path: Path) -> None:
    newer = tmp_path / "newer.fbs"
    added = "  policy: string;  // what a later version says\n}\n\nroot_type Plan;"
    newer.write_text(SCHEMA.read_text().replace("}\n\nroot_type Plan;", added))
    facts = {
        "schema": {"major": schema.MAJOR, "minor": schema.MINOR + 1},
        "trailer": {"offset": 0, "nbytes": 64},
        "producer": "a later nimblec",
        "device": {"name": "cpu"},
        "policy": "critical path",
    }
    source = tmp_path / "later.json"
    source.write_text(json.dumps(facts))
    flatc("--binary", "-o", tmp_path, newer, source)
    length = (tmp_path / "later.plan").stat().st_size
    facts["trailer"] = {"offset": length, "nbytes": 64}
    source.write_text(json.dumps(facts))
    flatc("--binary", "-o", tmp_path, newer, source)
    buffer = (tmp_path / "later.plan").read_bytes()
    assert b"critical path" in buffer
    plan = decoder.decode(memoryview(buffer + bytes(64)), length)
    assert (plan.producer, plan.programs) == ("a later nimblec", ())


@needs_flatc
@pytest.mark.parametrize("released", RELEASED, ids=lambda path: path.stem)
def test_schema_conforms_to_every_released_one(released: Path) -> None:
    flatc("--conform", released, SCHEMA)


@needs_flatc
def test_conform_sees_a_changed_field(tmp_path: Path) -> None:
    changed = tmp_path / "plan.fbs"
    changed.write_text(SCHEMA.read_text().replace("driver_version: uint;", "driver_version: ulong;"))
    with pytest.raises(subprocess.CalledProcessError):
        flatc("--conform", RELEASED[-1], changed)


def test_no_change_of_the_schema_without_a_new_version() -> None:
    released = ROOT / "schema" / "released" / f"plan-{schema.MAJOR}.{schema.MINOR}.fbs"
    assert released.read_text() == SCHEMA.read_text(), "see the last lines of schema/README.md"


@pytest.mark.parametrize("released", RELEASED, ids=lambda path: path.stem)
def test_a_file_of_every_version_is_read(released: Path) -> None:
    plan = container.read(ROOT / "tests" / "data" / released.with_suffix(".plan").name)
    assert [kernel.symbol for kernel in plan.kernels] == ["_Z5scalePfS_S_i", "_Z3addPfS_", "relu"]
    programs = [(p.name, p.entry, p.profile, len(p.commands)) for p in plan.programs]
    assert programs == [
        ("main", "main", (("batch", 4),) if len(programs) > 1 else (), 9),
        ("main[batch=2]", "main", (("batch", 2),), 9),
        ("tail", "tail", (), 9),
    ][: len(programs)]
    assert len(programs) == {"plan-1.0": 1, "plan-2.0": 3, "plan-2.1": 3}[released.stem]
    assert [refit.name for refit in plan.refits] == (["weights"] if released.stem == "plan-2.1" else [])


def flatc(*arguments: str | Path) -> None:
    """Run flatc; it must succeed."""
    subprocess.run(["flatc", *map(str, arguments)], check=True, capture_output=True)
