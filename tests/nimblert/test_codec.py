"""Encoding a plan and decoding it again: the same plan, the same bytes, the same as flatc reads."""

import json
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import plans
import pytest
from any_plan import any_plan
from examples import examples
from hypothesis import given

from nimblec.plan import encoder
from nimblert.check.verify import read_plan
from nimblert.errors import PlanFormatError
from nimblert.plan import Launch, Module, Plan, Program, Region, Tensor, Weight, decoder, schema
from nimblert.plan.decoder import FlatBuffer
from nimblert.plan.schema import ALIGNMENT, ENUMS, NUMBERS, REQUIRED, STRUCTS, TABLES, Field

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "schema" / "plan.fbs"
RELEASED = sorted((ROOT / "schema" / "released").glob("*.fbs"))

needs_flatc = pytest.mark.skipif(shutil.which("flatc") is None, reason="flatc is not installed")


def decode_file(file: bytes) -> Plan:
    """Return the plan in a file's bytes, whether or not it agrees with itself."""
    return decoder.decode(memoryview(file), flatbuffer_nbytes(file))


def flatbuffer_nbytes(file: bytes) -> int:
    return struct.unpack_from("<Q", file, len(file) - 56)[0]


@examples(100)
@given(any_plan)
def test_round_trip_of_any_plan(plan: Plan) -> None:
    file = encoder.encode_file(plan)
    decoded = decode_file(file)
    assert decoded == plan
    assert encoder.encode_file(decoded) == file


@pytest.mark.parametrize("make", [plans.cuda_plan, plans.cpu_plan])
def test_equal_plans_give_equal_bytes(make: Callable[[], Plan]) -> None:
    assert encoder.encode_file(make()) == encoder.encode_file(make())


def test_round_trip_of_a_plan_with_many_launches() -> None:
    plan = plans.large_plan(1400)
    assert decode_file(encoder.encode_file(plan)) == plan


def test_code_and_weights_are_slices_of_the_file() -> None:
    file = encoder.encode_file(plans.cuda_plan())
    plan = decode_file(file)
    for view in (plan.modules[0].code, plan.weights[0].data, plan.state[0].data):
        assert view.obj is file


def test_neighbouring_weights_keep_their_distance_in_the_file() -> None:
    encoded = encoder.encode(plans.cuda_plan())
    code, more_code, scale, bias, mean = encoded.segments
    assert code.offset % ALIGNMENT == 0
    assert more_code.offset == code.offset + code.nbytes  # compressed
    assert scale.offset % ALIGNMENT == mean.offset % ALIGNMENT == 0
    assert bias.offset - scale.offset == 256


def declared(path: Path = SCHEMA) -> dict[str, dict[str, str]]:
    """Return the bodies of a schema's declarations by kind and name, without comments."""
    text = re.sub("//.*", "", path.read_text())
    found: dict[str, dict[str, str]] = {"enum": {}, "struct": {}, "union": {}, "table": {}}
    for kind, name, body in re.findall(r"^(\w+) (\w+)(?: : ubyte)? \{(.*?)\}", text, re.DOTALL | re.MULTILINE):
        found[kind][name] = body
    return found


def declared_fields(body: str) -> list[tuple[str, str, bool]]:
    """Name and type of each field, and whether it is required; a union is preceded by the number of its member."""
    found = re.findall(r"(\w+): (\[?\w+\]?)( \(required\))?;", body)
    assert len(found) == body.count(";"), body
    unions = declared()["union"]
    return [
        field
        for name, kind, required in found
        for field in ([(f"{name}_type", "ubyte", False)] if kind in unions else []) + [(name, kind, bool(required))]
    ]


def test_fields_table_repeats_the_schema() -> None:
    """Slots, names and types; a field is required in both or has the default that FlatBuffers gives it."""
    expected = {name: declared_fields(body) for name, body in declared()["table"].items()}
    assert {n: [(f.name, f.type, f.default is REQUIRED) for f in t.fields] for n, t in TABLES.items()} == expected
    for field in (field for table in TABLES.values() for field in table.fields if field.default is not REQUIRED):
        assert not any(field.default) if isinstance(field.default, tuple | bytes | str) else not field.default, field
        assert isinstance(field.default, _type_of(field)), field


def _type_of(field: Field) -> Any:
    if field.type in STRUCTS or field.type in TABLES:
        return tuple | None
    if field.type.startswith("["):
        return bytes if field.type == "[ubyte]" else tuple
    return {"string": str, "bool": bool, "double": float, **ENUMS}.get(field.type, int)


def test_fields_table_names_the_fields_of_records() -> None:
    for name, table in TABLES.items():
        if table.record is tuple:
            continue
        assert table.record.__name__ == name
        kept = {field.name: field.default for field in table.fields if field.name not in table.apart}
        of_record = {field.name: field.default for field in fields(table.record) if field.init}
        assert kept.keys() == of_record.keys()
        for field, default in of_record.items():
            assert default is MISSING or kept[field] is REQUIRED or default == kept[field], (name, field)


def test_fields_table_knows_the_version_of_each_field() -> None:
    since: dict[tuple[str, str], tuple[int, int]] = {}
    for released in RELEASED:
        major, minor = map(int, re.findall(r"\d+", released.stem))
        for name, body in declared(released)["table"].items():
            for field, _, _ in declared_fields(body):
                since.setdefault((name, field), (major, minor))
    assert {(name, field.name): field.since for name, table in TABLES.items() for field in table.fields} == since


def test_structs_are_laid_out_as_the_schema_says() -> None:
    structs = declared()["struct"]

    def members(name: str) -> Iterator[str]:
        """Yield the formats of the numbers, each aligned to its size, and of padding."""
        at, alignment = 0, 1
        for _, kind, _ in declared_fields(structs[name]):
            parts = list(members(kind)) if kind in structs else [{"ushort": "H", "Region": "B"}.get(kind) or code(kind)]
            widest = max(struct.calcsize(part) for part in parts if "x" not in part)
            alignment = max(alignment, widest)
            yield from [f"{-at % widest}x"] if at % widest else []
            yield from parts
            at += -at % widest + struct.calcsize("<" + "".join(parts))
        yield from [f"{-at % alignment}x"] if at % alignment else []

    def code(kind: str) -> str:
        return NUMBERS[kind].format.removeprefix("<")

    assert {name: "<" + "".join(members(name)) for name in structs} == {n: s.format for n, s in STRUCTS.items()}


def test_enums_and_actions_are_numbered_as_in_the_schema() -> None:
    expected = {n: dict(re.findall(r"(\w+) = (\d+)", body)) for n, body in declared()["enum"].items()}
    assert {n: {m.name: str(m.value) for m in enum} for n, enum in ENUMS.items()} == expected
    assert re.findall(r"\w+", declared()["union"]["Action"]) == list(schema.ACTIONS)


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
    """Return the plan with fields of its first program replaced."""
    return replace(plan, programs=(replace(plan.programs[0], **changes), *plan.programs[1:]))


def place(file: bytes, *path: str | int) -> int:
    """Return the position of a field, which is found through names of fields and numbers of elements."""
    buffer = FlatBuffer(memoryview(file))
    kind, table, at = "Plan", buffer.target(0), 0
    for step in path:
        if isinstance(step, int):
            kind, at = kind.strip("[]"), buffer.target(at) + 4 + 4 * step
        else:
            fields = TABLES[kind].fields
            slot = [field.name for field in fields].index(step)
            kind, at = fields[slot].type, table + buffer.layout(buffer.vtable(table), len(fields))[1][slot]
        if kind in TABLES:
            table = buffer.target(at)
    return at


def code_of(file: bytes, module: int) -> tuple[int, int]:
    """Return the place of a module's code."""
    return struct.unpack_from("<QQ", file, place(file, "modules", module, "code"))


def _patched(value: bytes, *path: str | int) -> bytes:
    """Return the CPU plan's file with ``value`` at a field; a number as the last step counts bytes from there."""
    file = bytearray(encoder.encode_file(plans.cpu_plan()))
    *path_, last = path
    position = place(file, *path_) + last if isinstance(last, int) else place(file, *path)
    file[position : position + len(value)] = value
    return bytes(file)


def test_newer_major_version_is_refused() -> None:
    file = _patched(struct.pack("<HH", 3, 3), "schema")
    with pytest.raises(PlanFormatError, match=r"plan schema 3\.3, this nimblert reads 1\.x to 2\.x; install a newer"):
        decode_file(file)


def test_older_major_version_is_refused() -> None:
    file = _patched(struct.pack("<HH", 0, 9), "schema")
    with pytest.raises(PlanFormatError, match=r"plan schema 0\.9.*compile the model again"):
        decode_file(file)


def test_newer_minor_version_is_read() -> None:
    file = _patched(struct.pack("<HH", schema.MAJOR, 60000), "schema")
    assert decode_file(file) == plans.cpu_plan()


def test_unknown_action_is_refused() -> None:
    with pytest.raises(PlanFormatError, match="command of kind 9: this nimblert knows kinds 1 to 8"):
        decode_file(_patched(b"\x09", "programs", 0, "commands", 0, "action_type"))


def test_unknown_action_of_a_newer_minor_version_names_that() -> None:
    file = bytearray(_patched(struct.pack("<HH", schema.MAJOR, 7), "schema"))
    file[place(file, "programs", 0, "commands", 0, "action_type")] = 9
    with pytest.raises(PlanFormatError, match=r"kinds 1 to 8; it is of plan schema 2\.7, .* up to 2\.4: a newer one"):
        decode_file(bytes(file))


def with_field(monkeypatch: pytest.MonkeyPatch, record: type, name: str, value: object) -> bytes:
    """Return the CPU plan's file with this value in a field of all records of a kind."""
    whole = encoder._value
    monkeypatch.setattr(encoder, "_value", lambda r, f: value if (type(r), f.name) == (record, name) else whole(r, f))
    return encoder.encode_file(plans.cpu_plan())


@pytest.mark.parametrize("record", [Module, Weight])
def test_compression_is_refused(record: type, monkeypatch: pytest.MonkeyPatch) -> None:
    file = with_field(monkeypatch, record, "compression", 3)
    with pytest.raises(PlanFormatError, match=r"^segment of compression 3: this nimblert does not know it$"):
        decode_file(file)
    file = with_field(monkeypatch, record, "compression", 1)
    with pytest.raises(PlanFormatError, match=rf"{record.__name__} at byte \d+ has no data, or no digest of it"):
        decode_file(file)


def test_unknown_role_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file = with_field(monkeypatch, Program, "role", 3)
    with pytest.raises(PlanFormatError, match="3 is not a valid Role"):
        decode_file(file)


def test_a_required_field_that_is_absent_is_named() -> None:
    file = encoder.encode_file(plans.cpu_plan())
    buffer = FlatBuffer(memoryview(file))
    device = buffer.vtable(buffer.target(0)) + 4 + 2 * 5
    with pytest.raises(PlanFormatError, match=r"flatbuffer: Plan at byte \d+ lacks its field device"):
        decode_file(file[:device] + bytes(2) + file[device + 2 :])


def test_an_entry_that_is_not_named_is_the_program() -> None:
    plan = plans.several_entries()
    assert [program.entry for program in decode_file(encoder.encode_file(plan)).programs] == ["main", "main", "tail"]
    assert b"tail" in encoder.encode_file(_with_program(plan, name="tail"))


def test_unknown_region_is_refused() -> None:
    with pytest.raises(PlanFormatError, match="9 is not a valid Region"):
        decode_file(_patched(b"\x09", "programs", 0, "inputs", 0, "pointer", 12))


FILE = encoder.encode_file(plans.cpu_plan())
FIRST, SECOND = (code_of(FILE, module)[0] for module in range(2))
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
        decode_file(_patched(struct.pack("<QQ", offset, nbytes), "modules", 1, "code"))


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
        decode_file(_patched(struct.pack("<QQ", offset, nbytes), "trailer"))


def test_models_stand_close_together_and_cubins_on_pages() -> None:
    cuda = encoder.encode_file(plans.cuda_plan())
    first, second = (code_of(cuda, module) for module in range(2))
    assert (first[0] % 4096, second[0]) == (0, sum(first))  # the second is compressed
    assert (FIRST % 64, SECOND % 64, 0 <= SECOND - FIRST - ADD < 64) == (0, 0, True)


def test_shared_tables_cannot_make_a_small_file_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 commands of 4 bytes each, all of them one launch with 20,000 relocations: 400 million in 0.6 MB."""
    plan = plans.cpu_plan()
    launch = plan.programs[0].commands[0]
    assert isinstance(launch, Launch)
    launch = replace(launch, relocations=launch.relocations[:1] * 20_000)
    write, written = encoder._Encoder._table, list[int]()

    def write_once(self: encoder._Encoder, name: str, record: object) -> int:
        if name != "Command":
            return write(self, name, record)
        written[:] = written or [write(self, name, record)]
        return written[0]

    monkeypatch.setattr(encoder._Encoder, "_table", write_once)
    file = encoder.encode_file(_with_program(plan, commands=(launch,) * 20_000))
    assert len(file) < 1 << 20
    with pytest.raises(PlanFormatError, match="are more than it has"):
        decode_file(file)


@needs_flatc
def test_flatc_reads_a_plan_file_as_it_is(tmp_path: Path) -> None:
    plan = plans.cuda_plan()
    encoder.write(plan, tmp_path / "model.plan")
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
    plan = read_plan(ROOT / "tests" / "data" / released.with_suffix(".plan").name)
    assert [kernel.symbol for kernel in plan.kernels] == ["_Z5scalePfS_S_i", "_Z3addPfS_", "relu"]
    programs = [(p.name, p.entry, p.profile, len(p.commands)) for p in plan.programs]
    assert (
        programs
        == [
            ("main", "main", (("batch", 4),) if len(programs) > 1 else (), 9),
            ("main[batch=2]", "main", (("batch", 2),), 9),
            ("tail", "tail", (), 12 if plan.bodies else 9),
        ][: len(programs)]
    )
    assert len(programs) == (1 if released.stem == "plan-1.0" else 3)
    assert [refit.name for refit in plan.refits] == (["weights"] if released.stem >= "plan-2.1" else [])
    bodies = ["tail.loop", "tail.else", "tail.then"] if released.stem >= "plan-2.2" else []
    assert [body.name for body in plan.bodies] == bodies
    assert plan.is_stripped == (released.stem >= "plan-2.3")
    assert (plan.saved_nbytes > 0) == (released.stem >= "plan-2.4")


def flatc(*arguments: str | Path) -> None:
    """Run flatc; it must succeed."""
    subprocess.run(["flatc", *map(str, arguments)], check=True, capture_output=True)
