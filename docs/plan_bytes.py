"""A plan file explained byte by byte: its parts, its head and its trailer."""

import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from struct import Struct, unpack_from
from typing import Any, TypeAlias

from nimblec.plan import encoder
from nimblert.plan import Plan, Target, schema

SCHEMA = Path(__file__).parent.parent / "schema" / "plan.fbs"

Lines: TypeAlias = Iterator[str]
"""Text, line by line."""

_SIZES = Struct("<QQ")


def columns(rows: Iterable[Sequence[object]]) -> Lines:
    """Rows in aligned columns, numbers to the right and text to the left."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numbers = [all(re.fullmatch(r"[\d,]*", cell) for cell in column) for column in zip(*cells[1:], strict=True)]
    for row in cells:
        aligned = (
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numbers, strict=True)
        )
        yield "  ".join(aligned).rstrip()


def file_map(plan: Plan, image: memoryview) -> Lines:
    """The parts of the file, in order."""
    flatbuffer_nbytes = _flatbuffer_nbytes(image)
    placed = encoder.encode(plan).segments
    names = [f"model of kernel {i}: {plan.kernels[i].symbol}" for i in range(len(plan.modules))]
    names += [f"weight {w.name}, at {w.offset:,} of its region" for w in plan.weights]
    rows: list[Sequence[object]] = [("offset", "bytes", "what"), ("0", f"{flatbuffer_nbytes:,}", "FlatBuffer")]
    rows += [(f"{s.offset:,}", f"{s.nbytes:,}", name) for s, name in zip(placed, names, strict=True)]
    rows.append((f"{len(image) - schema.TRAILER.size:,}", f"{schema.TRAILER.size}", "trailer"))
    yield from columns(rows)


def _flatbuffer_nbytes(image: memoryview) -> int:
    return int(_SIZES.unpack_from(image, len(image) - schema.TRAILER.size + 8)[0])


def _dump(image: memoryview, begin: int, end: int, notes: Sequence[tuple[int, str]], hidden: int = 0) -> Lines:
    """A hex dump whose rows start at the offsets of ``notes``; bytes from ``hidden`` on are dots."""
    starts = [start for start, _ in notes]
    for (start, note), stop in zip(notes, (*starts[1:], end), strict=True):
        for row in range(start, stop, 16):
            shown = bytes(image[row : min(row + 16, stop)]).hex(" ")
            if hidden and row >= hidden:
                shown = re.sub(r"\w", ".", shown)
            yield f"{row - begin:6d}  {shown:<47}  {note if row == start else ''}".rstrip()


def head(image: memoryview) -> Lines:
    """The first bytes of the file: root, identifier, the vtable of the root table, the table itself."""
    (root,) = unpack_from("<I", image, 0)
    (back,) = unpack_from("<i", image, root)
    vtable = root - back
    vtable_nbytes, table_nbytes = unpack_from("<HH", image, vtable)
    names = re.findall(r"^  (\w+):", _table("Plan"), re.MULTILINE)
    slots = unpack_from(f"<{(vtable_nbytes - 4) // 2}H", image, vtable + 4)
    notes = [(0, f"uint32: the root table starts at byte {root}"), (4, f"identifier {bytes(image[4:8]).decode()!r}")]
    if vtable > 8:
        notes.append((8, "padding"))
    notes.append((vtable, f"vtable: {vtable_nbytes} bytes; its table has {table_nbytes}"))
    notes.append((vtable + 4, "uint16 for each field, in the schema's order: its place in the table"))
    notes.append((root, f"root table: int32, its vtable is {back} bytes before it"))
    for name, slot in sorted(zip(names, slots, strict=False), key=lambda pair: pair[1]):
        if slot:
            notes.append((root + slot, f"{name}: {_field(image, root + slot, name)}"))
    yield from _dump(image, 0, root + table_nbytes, notes)


def _table(name: str) -> str:
    schema = SCHEMA.read_text()
    return schema.partition(f"table {name} {{")[2].partition("}")[0]


def _field(image: memoryview, at: int, name: str) -> str:
    """A description of a field of the root table."""
    if name == "schema":
        return "version {}.{}".format(*unpack_from("<HH", image, at))
    if name == "trailer":
        return "{1} bytes at {0}".format(*_SIZES.unpack_from(image, at))
    if name == "target":
        return Target(image[at]).name
    if name.endswith("_nbytes"):
        return f"{unpack_from('<Q', image, at)[0]:,}"
    return f"at byte {at + unpack_from('<I', image, at)[0]}"


def trailer(image: memoryview) -> Lines:
    """The last 64 bytes of the file."""
    begin = len(image) - schema.TRAILER.size
    flatbuffer_nbytes, nbytes = _SIZES.unpack_from(image, begin + 8)
    notes = [
        (begin, "magic 'NPLNTAIL'"),
        (begin + 8, f"uint64: the FlatBuffer has {flatbuffer_nbytes:,} bytes"),
        (begin + 16, f"uint64: the file has {nbytes:,} bytes"),
        (begin + 24, "zeros"),
        (begin + 32, "SHA-256 of all bytes before it (differs between machines)"),
    ]
    yield from _dump(image, begin, len(image), notes, hidden=begin + 32)


def flatc(path: Path, folder: Path) -> Lines:
    """A few fields as read by another FlatBuffers tool, flatc, which must be installed."""
    command = ["flatc", "--json", "--raw-binary", "--strict-json", "-o", folder, SCHEMA, "--", path]
    subprocess.run(command, check=True)
    facts: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    program = facts["programs"][0]
    chosen = {key: facts[key] for key in ("schema", "trailer", "producer", "target", "weights_nbytes")}
    chosen |= {"modules[0]": facts["modules"][0], "programs[0].inputs[0]": program["inputs"][0]}
    launch = program["commands"][0]["action"]
    chosen |= {"programs[0].commands[0].action.relocations[0]": launch["relocations"][0]}
    for key, value in chosen.items():
        yield f"{key}: {json.dumps(value)}"
