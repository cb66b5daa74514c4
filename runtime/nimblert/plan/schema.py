"""The format of plan files: its constants, and the one table of fields by which plans are read and written.

`TABLES` repeats schema/plan.fbs beside the records of `nimblert.plan`. The reader (`nimblert.plan.decoder`) and the
compiler's encoder both follow it; a test compares it with the schema. To add a field: schema/README.md.
"""

from enum import IntEnum
from struct import Struct
from typing import Any, Final, NamedTuple

from nimblert import plan
from nimblert.errors import PlanFormatError

IDENTIFIER = b"NPLN"
"""Bytes 4 to 8 of the file, schema/plan.fbs: file_identifier."""

MAJOR = 2
"""The major version that is written. Version 1, which 2 extends, is read too; see schema/README.md."""
MINOR = 4
"""The minor version that is written; fields of newer ones are ignored."""
OLDEST_MAJOR = 1
"""The oldest major version that is read."""

ALIGNMENT = 4096
"""A page: segments can be mapped, and read with O_DIRECT, one by one."""

MAGIC = b"NPLNTAIL"
"""The first bytes of the trailer."""
TRAILER = Struct("<8sQQ8x32s")
"""The last bytes of the file: MAGIC, size of the FlatBuffer, size of the file, SHA-256 of all bytes before it."""
DIGEST_NBYTES = 32


class Segment(NamedTuple):
    """``nbytes`` bytes from ``offset`` of the file."""

    offset: int
    nbytes: int


NUMBERS = {
    "bool": Struct("<?"),
    "ubyte": Struct("<B"),
    "uint": Struct("<I"),
    "long": Struct("<q"),
    "ulong": Struct("<Q"),
    "double": Struct("<d"),
}


class Compression(IntEnum):
    """How the bytes of a segment are stored: as they are used, in another file, or as one frame of Zstandard."""

    NONE = 0
    EXTERNAL = 1
    ZSTD = 2

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise PlanFormatError(f"segment of compression {value}: this nimblert does not know it")


ENUMS: dict[str, type[IntEnum]] = {
    "Target": plan.Target,
    "Region": plan.Region,
    "ParameterKind": plan.ParameterKind,
    "Role": plan.Role,
    "Fit": plan.Fit,
    "Compression": Compression,
}
"""Enums, each stored as one byte."""

STRUCTS = {
    "SchemaVersion": Struct("<HH"),
    "Segment": Struct("<QQ"),
    "Pointer": Struct("<qIB3x"),
    "Relocation": Struct("<qIB3xI4x"),
    "Access": Struct("<qIB3xQ"),
    "Dim3": Struct("<III"),
    "SampleRange": Struct("<qq"),
    "ComputeCapability": Struct("<HH"),
}
"""The numbers of each struct, in the order of the schema; a struct in a struct by its numbers."""

ACTIONS = ("Launch", "Memcpy", "Memset", "Record", "Wait", "While", "Switch", "Crop")
"""The members of the union Action, numbered from 1."""

REQUIRED: Final = object()
"""The default of a field that is never absent."""


class Field(NamedTuple):
    """A field: its name in the schema and in the record, and its type as the schema writes it.

    ``default`` is the value that the absence of the field means; ``since`` the first version of the schema with it.
    """

    name: str
    type: str
    default: Any
    since: tuple[int, int] = (1, 0)


class Table(NamedTuple):
    """A table: the record that holds it, or `tuple`, and its fields by slot, in the order of the schema."""

    record: type[Any]
    fields: tuple[Field, ...]

    @property
    def apart(self) -> tuple[str, ...]:
        """The fields that the record lacks: they belong to the file alone."""
        kept = getattr(self.record, "__dataclass_fields__", None)
        return () if kept is None else tuple(field.name for field in self.fields if field.name not in kept)


TABLES = {
    "LibraryVersion": Table(tuple, (
        Field("name", "string", ""),
        Field("version", "string", ""),
    )),
    "Device": Table(plan.Device, (
        Field("name", "string", ""),
        Field("compute_capability", "ComputeCapability", (0, 0)),
        Field("multiprocessor_count", "uint", 0),
        Field("driver_version", "uint", 0),
    )),
    "Module": Table(plan.Module, (
        Field("origin", "string", ""),
        Field("code", "Segment", REQUIRED),
        Field("compression", "Compression", Compression.NONE, (2, 0)),
        Field("unpacked_nbytes", "ulong", 0, (2, 4)),
    )),
    "Parameter": Table(plan.Parameter, (
        Field("offset", "uint", 0),
        Field("nbytes", "uint", 0),
        Field("kind", "ParameterKind", plan.ParameterKind.VALUE),
        Field("name", "string", ""),
        Field("dtype", "string", ""),
        Field("shape", "[long]", ()),
    )),
    "Kernel": Table(plan.Kernel, (
        Field("module", "uint", 0),
        Field("symbol", "string", ""),
        Field("parameters", "[Parameter]", ()),
        Field("max_dynamic_smem_nbytes", "uint", 0),
        Field("non_portable_cluster", "bool", False),
    )),
    "Weight": Table(plan.Weight, (
        Field("name", "string", ""),
        Field("dtype", "string", ""),
        Field("shape", "[long]", ()),
        Field("offset", "ulong", 0),
        Field("data", "Segment", REQUIRED),
        Field("compression", "Compression", Compression.NONE, (2, 0)),
        Field("sha256", "[ubyte]", b"", (2, 3)),
        Field("unpacked_nbytes", "ulong", 0, (2, 4)),
    )),
    "Tensor": Table(plan.Tensor, (
        Field("name", "string", ""),
        Field("dtype", "string", ""),
        Field("shape", "[long]", ()),
        Field("strides", "[long]", ()),
        Field("pointer", "Pointer", REQUIRED),
        Field("sample_range", "SampleRange", None),
        Field("mask", "bool", False, (2, 1)),
    )),
    "Op": Table(plan.Op, (
        Field("name", "string", ""),
        Field("source", "string", ""),
    )),
    "Launch": Table(plan.Launch, (
        Field("stream", "uint", 0),
        Field("op", "uint", 0),
        Field("kernel", "uint", 0),
        Field("params", "[ubyte]", b""),
        Field("relocations", "[Relocation]", ()),
        Field("reads", "[Access]", ()),
        Field("writes", "[Access]", ()),
        Field("grid", "Dim3", REQUIRED),
        Field("block", "Dim3", REQUIRED),
        Field("cluster", "Dim3", (0, 0, 0)),
        Field("dynamic_smem_nbytes", "uint", 0),
        Field("cooperative", "bool", False),
        Field("programmatic", "bool", False),
        Field("duration_ns", "ulong", 0),
    )),
    "Memcpy": Table(plan.Memcpy, (
        Field("stream", "uint", 0),
        Field("op", "uint", 0),
        Field("dst", "Pointer", REQUIRED),
        Field("src", "Pointer", REQUIRED),
        Field("nbytes", "ulong", 0),
        Field("duration_ns", "ulong", 0),
    )),
    "Memset": Table(plan.Memset, (
        Field("stream", "uint", 0),
        Field("op", "uint", 0),
        Field("dst", "Pointer", REQUIRED),
        Field("value", "uint", 0),
        Field("element_nbytes", "ubyte", 0),
        Field("count", "ulong", 0),
        Field("duration_ns", "ulong", 0),
    )),
    "Record": Table(plan.Record, (
        Field("stream", "uint", 0),
        Field("event", "uint", 0),
    )),
    "Wait": Table(plan.Wait, (
        Field("stream", "uint", 0),
        Field("event", "uint", 0),
    )),
    "While": Table(plan.While, (
        Field("stream", "uint", 0, (2, 2)),
        Field("op", "uint", 0, (2, 2)),
        Field("condition", "Pointer", REQUIRED, (2, 2)),
        Field("body", "uint", 0, (2, 2)),
        Field("limit", "ulong", 0, (2, 2)),
        Field("reads", "[Access]", (), (2, 2)),
        Field("writes", "[Access]", (), (2, 2)),
        Field("duration_ns", "ulong", 0, (2, 2)),
    )),
    "Switch": Table(plan.Switch, (
        Field("stream", "uint", 0, (2, 2)),
        Field("op", "uint", 0, (2, 2)),
        Field("index", "Pointer", REQUIRED, (2, 2)),
        Field("bodies", "[uint]", (), (2, 2)),
        Field("reads", "[Access]", (), (2, 2)),
        Field("writes", "[Access]", (), (2, 2)),
        Field("duration_ns", "ulong", 0, (2, 2)),
    )),
    "Crop": Table(plan.Crop, (
        Field("stream", "uint", 0, (2, 2)),
        Field("op", "uint", 0, (2, 2)),
        Field("output", "uint", 0, (2, 2)),
        Field("sizes", "Pointer", REQUIRED, (2, 2)),
        Field("rank", "uint", 0, (2, 2)),
        Field("duration_ns", "ulong", 0, (2, 2)),
    )),
    "Command": Table(tuple, (
        Field("action_type", "ubyte", 0),
        Field("action", "Action", REQUIRED),
    )),
    "GoldenOutput": Table(plan.GoldenOutput, (
        Field("sha256", "[ubyte]", b""),
        Field("samples", "[double]", ()),
    )),
    "Golden": Table(plan.Golden, (
        Field("seed", "ulong", 0),
        Field("tolerance", "double", 0.0),
        Field("outputs", "[GoldenOutput]", ()),
    )),
    "Candidate": Table(plan.Candidate, (
        Field("policy", "string", ""),
        Field("stream_count", "uint", 0),
        Field("sync_count", "uint", 0),
        Field("arena_nbytes", "ulong", 0),
        Field("duration_ns", "ulong", 0),
    )),
    "ScheduleRecord": Table(plan.ScheduleRecord, (
        Field("policy", "string", ""),
        Field("antichain", "[uint]", ()),
        Field("arena_lower_bound_nbytes", "ulong", 0),
        Field("candidates", "[Candidate]", ()),
        Field("fewest_sync_count", "uint", 0),
    )),
    "Dimension": Table(tuple, (
        Field("name", "string", "", (2, 0)),
        Field("size", "ulong", 0, (2, 0)),
    )),
    "Program": Table(plan.Program, (
        Field("name", "string", ""),
        Field("inputs", "[Tensor]", ()),
        Field("outputs", "[Tensor]", ()),
        Field("input_nbytes", "[ulong]", ()),
        Field("output_nbytes", "[ulong]", ()),
        Field("arena_nbytes", "ulong", 0),
        Field("stream_count", "uint", 0),
        Field("event_count", "uint", 0),
        Field("ops", "[Op]", ()),
        Field("commands", "[Command]", ()),
        Field("golden", "Golden", None),
        Field("schedule", "ScheduleRecord", None),
        Field("entry", "string", "", (2, 0)),
        Field("profile", "[Dimension]", (), (2, 0)),
        Field("role", "Role", plan.Role.ENTRY, (2, 0)),
        Field("fits", "[Fit]", (), (2, 1)),
    )),
    "Part": Table(plan.Part, (
        Field("target", "Target", plan.Target.CUDA, (2, 4)),
        Field("device", "Device", REQUIRED, (2, 4)),
        Field("file", "Segment", REQUIRED, (2, 4)),
    )),
    "Plan": Table(plan.Plan, (
        Field("schema", "SchemaVersion", REQUIRED),
        Field("trailer", "Segment", REQUIRED),
        Field("producer", "string", ""),
        Field("versions", "[LibraryVersion]", ()),
        Field("target", "Target", plan.Target.CUDA),
        Field("device", "Device", REQUIRED),
        Field("modules", "[Module]", ()),
        Field("kernels", "[Kernel]", ()),
        Field("weights_nbytes", "ulong", 0),
        Field("weights", "[Weight]", ()),
        Field("state_nbytes", "ulong", 0),
        Field("state", "[Weight]", ()),
        Field("programs", "[Program]", ()),
        Field("refits", "[Program]", (), (2, 1)),
        Field("bodies", "[Program]", (), (2, 2)),
        Field("parts", "[Part]", (), (2, 4)),
        Field("digests", "[ubyte]", b"", (2, 4)),
    )),
}  # fmt: skip
"""Every table of the schema, each behind those that it holds."""
