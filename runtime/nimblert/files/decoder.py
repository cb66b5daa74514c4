"""Decode the bytes of a plan file into a `Plan`: the only reader of its FlatBuffer.

The numbers passed to a `Table` are positions of fields in schema/plan.fbs.
"""

from struct import Struct
from struct import error as struct_error

from nimblert.errors import PlanFormatError
from nimblert.files import schema, segments
from nimblert.files.flatbuffer import FlatBuffer, Table
from nimblert.files.schema import Action
from nimblert.files.segments import Segment
from nimblert.plan import (
    Access,
    Candidate,
    Command,
    Device,
    Dim3,
    Fit,
    Golden,
    GoldenOutput,
    Kernel,
    Launch,
    Memcpy,
    Memset,
    Module,
    Op,
    Parameter,
    ParameterKind,
    Plan,
    Pointer,
    Program,
    Record,
    Region,
    Relocation,
    Role,
    ScheduleRecord,
    Target,
    Tensor,
    Wait,
    Weight,
)

_U32 = Struct("<I")
_I64 = Struct("<q")
_U64 = Struct("<Q")
_F64 = Struct("<d")


def decode(image: memoryview, flatbuffer_nbytes: int) -> Plan:
    """The plan in a file's bytes; its code and weights are slices of ``image``, not copies.

    Raises PlanFormatError where the bytes are not a plan, or of an unsupported major version of the schema. Whether the
    plan is valid is for `nimblert.rules.verify` to check.
    """
    try:
        root = FlatBuffer(image[:flatbuffer_nbytes]).root()
        version = root.record(0, schema.SCHEMA_VERSION)
    except struct_error as exc:
        raise PlanFormatError(f"flatbuffer is damaged: {exc}") from exc
    _check_version(*version)
    try:
        return _Decoder(image, flatbuffer_nbytes).plan(root)
    except PlanFormatError as exc:
        raise PlanFormatError(f"{exc}{_hint(*version)}") from exc
    except (struct_error, TypeError, IndexError, ValueError, OverflowError) as exc:
        raise PlanFormatError(f"flatbuffer is damaged: {exc}{_hint(*version)}") from exc


def file_nbytes(image: memoryview) -> int | None:
    """The full length of the file that ``image`` is the start of; None where it is too short to tell."""
    try:
        trailer = Segment(*FlatBuffer(image).root().record(1, schema.SEGMENT))
    except (struct_error, PlanFormatError):
        return None
    return trailer.offset + trailer.nbytes


def _check_version(major: int, minor: int) -> None:
    if not schema.OLDEST_MAJOR <= major <= schema.MAJOR:
        raise PlanFormatError(
            f"made with plan schema {major}.{minor}, this nimblert reads {schema.OLDEST_MAJOR}.x to {schema.MAJOR}.x;"
            f" {'install a newer nimblert' if major > schema.MAJOR else 'compile the model again'}"
        )


def _hint(major: int, minor: int) -> str:
    """A possible reason why a plan cannot be decoded, for the end of a message."""
    if (major, minor) <= (schema.MAJOR, schema.MINOR):
        return ""
    return (
        f"; it is of plan schema {major}.{minor}, which this nimblert knows up to {schema.MAJOR}.{schema.MINOR}:"
        f" a newer one may read it"
    )


class _Pointers(dict[tuple[int, int, int], Pointer]):
    """Pointers by (offset, index, region), made once each: a plan repeats most of them."""

    def __missing__(self, key: tuple[int, int, int]) -> Pointer:
        offset, index, region = key
        made = self[key] = Pointer(region=Region(region), index=index, offset=offset)
        return made


class _Decoder:
    """One method for each table of the schema, from the root down."""

    def __init__(self, image: memoryview, flatbuffer_nbytes: int) -> None:
        self._image = image
        self._flatbuffer_nbytes = flatbuffer_nbytes
        self._segments: list[Segment] = []
        self._pointers = _Pointers()

    def plan(self, table: Table) -> Plan:
        plan = Plan(
            producer=table.string(2),
            versions=tuple((version.string(0), version.string(1)) for version in table.tables(3)),
            target=Target(table.u8(4)),
            device=self._device(table.table(5)),
            modules=tuple(map(self._module, table.tables(6))),
            kernels=tuple(map(self._kernel, table.tables(7))),
            weights_nbytes=table.u64(8),
            weights=tuple(map(self._weight, table.tables(9))),
            state_nbytes=table.u64(10),
            state=tuple(map(self._weight, table.tables(11))),
            programs=tuple(map(self._program, table.tables(12))),
            refits=tuple(map(self._program, table.tables(13))),
        )
        trailer = Segment(*table.record(1, schema.SEGMENT))
        if trailer.nbytes != segments.TRAILER_NBYTES:
            raise PlanFormatError(f"trailer of {trailer.nbytes} bytes, expected {segments.TRAILER_NBYTES}")
        segments.check((*self._segments, trailer), self._image, self._flatbuffer_nbytes)
        return plan

    def _device(self, table: Table) -> Device:
        major, minor = table.optional_record(1, schema.COMPUTE_CAPABILITY) or (0, 0)
        return Device(
            name=table.string(0),
            compute_capability=(major, minor),
            multiprocessor_count=table.u32(2),
            driver_version=table.u32(3),
        )

    def _bytes(self, table: Table, slot: int) -> memoryview:
        """The bytes of a Segment, fewer where it leaves the file; the field after it is its compression.

        The places of segments are checked once all are known.
        """
        if compression := table.u8(slot + 1):
            raise PlanFormatError(f"segment of compression {compression}: this nimblert knows none")
        segment = Segment(*table.record(slot, schema.SEGMENT))
        self._segments.append(segment)
        return self._image[segment.offset : segment.offset + segment.nbytes]

    def _module(self, table: Table) -> Module:
        return Module(origin=table.string(0), code=self._bytes(table, 1))

    def _kernel(self, table: Table) -> Kernel:
        return Kernel(
            module=table.u32(0),
            symbol=table.string(1),
            parameters=tuple(map(_parameter, table.tables(2))),
            max_dynamic_smem_nbytes=table.u32(3),
            non_portable_cluster=table.boolean(4),
        )

    def _weight(self, table: Table) -> Weight:
        return Weight(
            name=table.string(0),
            dtype=table.string(1),
            shape=table.numbers(2, _I64),
            offset=table.u64(3),
            data=self._bytes(table, 4),
        )

    def _program(self, table: Table) -> Program:
        golden, schedule = table.optional_table(10), table.optional_table(11)
        return Program(
            name=table.string(0),
            inputs=tuple(map(self._tensor, table.tables(1))),
            outputs=tuple(map(self._tensor, table.tables(2))),
            input_nbytes=table.numbers(3, _U64),
            output_nbytes=table.numbers(4, _U64),
            arena_nbytes=table.u64(5),
            stream_count=table.u32(6),
            event_count=table.u32(7),
            ops=tuple(Op(name=op.string(0), source=op.string(1)) for op in table.tables(8)),
            commands=tuple(map(self._command, table.tables(9))),
            golden=None if golden is None else _golden(golden),
            schedule=None if schedule is None else _schedule(schedule),
            entry=table.string(12),
            profile=tuple((dimension.string(0), dimension.u64(1)) for dimension in table.tables(13)),
            role=Role(table.u8(14)),
            fits=tuple(map(Fit, table.data(15))),
        )

    def _tensor(self, table: Table) -> Tensor:
        sample_range = table.optional_record(5, schema.SAMPLE_RANGE)
        return Tensor(
            name=table.string(0),
            dtype=table.string(1),
            shape=table.numbers(2, _I64),
            strides=table.numbers(3, _I64),
            pointer=self._pointer(table, 4),
            sample_range=sample_range and (sample_range[0], sample_range[1]),
            mask=bool(table.u8(6)),
        )

    def _command(self, table: Table) -> Command:
        kind, action = table.u8(0), table.table(1)
        match kind:
            case Action.LAUNCH:
                return self._launch(action)
            case Action.MEMCPY:
                return self._memcpy(action)
            case Action.MEMSET:
                return self._memset(action)
            case Action.RECORD:
                return Record(stream=action.u32(0), event=action.u32(1))
            case Action.WAIT:
                return Wait(stream=action.u32(0), event=action.u32(1))
        raise PlanFormatError(f"command of kind {kind}: this nimblert knows kinds 1 to {Action.WAIT}")

    def _launch(self, table: Table) -> Launch:
        return Launch(
            stream=table.u32(0),
            op=table.u32(1),
            kernel=table.u32(2),
            params=table.data(3),
            relocations=self._relocations(table, 4),
            reads=self._accesses(table, 5),
            writes=self._accesses(table, 6),
            grid=_dim3(table.record(7, schema.DIM3)),
            block=_dim3(table.record(8, schema.DIM3)),
            cluster=_dim3(table.optional_record(9, schema.DIM3) or (0, 0, 0)),
            dynamic_smem_nbytes=table.u32(10),
            cooperative=table.boolean(11),
            programmatic=table.boolean(12),
            duration_ns=table.u64(13),
        )

    def _memcpy(self, table: Table) -> Memcpy:
        return Memcpy(
            stream=table.u32(0),
            op=table.u32(1),
            dst=self._pointer(table, 2),
            src=self._pointer(table, 3),
            nbytes=table.u64(4),
            duration_ns=table.u64(5),
        )

    def _memset(self, table: Table) -> Memset:
        return Memset(
            stream=table.u32(0),
            op=table.u32(1),
            dst=self._pointer(table, 2),
            value=table.u32(3),
            element_nbytes=table.u8(4),
            count=table.u64(5),
            duration_ns=table.u64(6),
        )

    def _pointer(self, table: Table, slot: int) -> Pointer:
        offset, index, region = table.record(slot, schema.POINTER)
        return self._pointers[offset, index, region]

    def _relocations(self, table: Table, slot: int) -> tuple[Relocation, ...]:
        pointers = self._pointers
        return tuple(
            Relocation(param_offset=param_offset, pointer=pointers[offset, index, region])
            for offset, index, region, param_offset in table.records(slot, schema.RELOCATION)
        )

    def _accesses(self, table: Table, slot: int) -> tuple[Access, ...]:
        pointers = self._pointers
        return tuple(
            Access(pointer=pointers[offset, index, region], nbytes=nbytes)
            for offset, index, region, nbytes in table.records(slot, schema.ACCESS)
        )


def _parameter(table: Table) -> Parameter:
    return Parameter(
        offset=table.u32(0),
        nbytes=table.u32(1),
        kind=ParameterKind(table.u8(2)),
        name=table.string(3),
        dtype=table.string(4),
        shape=table.numbers(5, _I64),
    )


def _golden(table: Table) -> Golden:
    return Golden(
        seed=table.u64(0),
        tolerance=table.f64(1),
        outputs=tuple(
            GoldenOutput(sha256=output.data(0), samples=output.numbers(1, _F64)) for output in table.tables(2)
        ),
    )


def _schedule(table: Table) -> ScheduleRecord:
    return ScheduleRecord(
        policy=table.string(0),
        antichain=table.numbers(1, _U32),
        arena_lower_bound_nbytes=table.u64(2),
        candidates=tuple(map(_candidate, table.tables(3))),
        fewest_sync_count=table.u32(4),
    )


def _candidate(table: Table) -> Candidate:
    return Candidate(
        policy=table.string(0),
        stream_count=table.u32(1),
        sync_count=table.u32(2),
        arena_nbytes=table.u64(3),
        duration_ns=table.u64(4),
    )


def _dim3(numbers: tuple[int, ...]) -> Dim3:
    x, y, z = numbers
    return x, y, z
