# mypy: disable-error-code="no-untyped-call"
# (flatc writes no types, and every line here calls what it wrote)
"""Encode a `Plan` as the FlatBuffer of a plan file: the only user of the generated writers.

FlatBuffers grow from back to front: the children of a table are written before it.
"""

import struct
from typing import NamedTuple, assert_never

import flatbuffers

from nimblert._generated import plan_generated as fb
from nimblert.errors import PlanFormatError
from nimblert.files import schema, segments
from nimblert.files.flatbuffer_writer import Writer
from nimblert.files.segments import Segment
from nimblert.plan import (
    Access,
    Candidate,
    Command,
    Device,
    Golden,
    GoldenOutput,
    Kernel,
    Launch,
    Memcpy,
    Memset,
    Module,
    Op,
    Parameter,
    Plan,
    Pointer,
    Program,
    Record,
    Relocation,
    ScheduleRecord,
    Tensor,
    Wait,
    Weight,
)


class Encoded(NamedTuple):
    """A FlatBuffer, and the places in the file of `segments.contents` and of the trailer."""

    flatbuffer: bytes
    segments: tuple[Segment, ...]
    trailer: Segment


def encode(plan: Plan) -> Encoded:
    """Encode everything but code and weights, which are only given places.

    Equal plans give equal bytes. Raises PlanFormatError where a number does not fit its field or the
    FlatBuffer would pass 2 GiB.
    """
    encoder = _Encoder()
    try:
        buffer = encoder.finish(plan)
    except (
        struct.error,
        TypeError,
        UnicodeEncodeError,
        OverflowError,
        flatbuffers.builder.BuilderSizeError,
    ) as exc:
        raise PlanFormatError(f"the plan does not fit its file format: {exc}") from exc
    placed = segments.place(plan, len(buffer))
    end = placed[-1].offset + placed[-1].nbytes if placed else len(buffer)
    trailer = Segment(end, segments.TRAILER_NBYTES)
    for position, segment in zip(encoder.segments, (*placed, trailer), strict=True):
        # Builder offsets count from the end of the buffer.
        schema.SEGMENT.pack_into(buffer, len(buffer) - position, *segment)
    return Encoded(bytes(buffer), placed, trailer)


class _Encoder(Writer):
    """One method for each table of the schema, which returns the table's offset in the builder.

    The places of segments depend on the size of the FlatBuffer, so they are written as zeros; ``segments`` holds where
    to fill them in: those of `segments.contents` in order, then that of the trailer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.segments: list[int] = []

    def finish(self, plan: Plan) -> bytearray:
        """The FlatBuffer of the plan, with its segments still zero."""
        self._builder.Finish(self._plan(plan), schema.IDENTIFIER)
        buffer: bytearray = self._builder.Output()
        return buffer

    def _segment(self) -> int:
        """A Segment to be filled in."""
        position = int(fb.CreateSegment(self._builder, 0, 0))
        self.segments.append(position)
        return position

    def _pointer(self, pointer: Pointer) -> int:
        return int(fb.CreatePointer(self._builder, pointer.offset, pointer.index, pointer.region))

    def _plan(self, plan: Plan) -> int:
        builder = self._builder
        producer = self._string(plan.producer)
        versions = self._tables([self._version(*version) for version in plan.versions])
        device = self._device(plan.device)
        modules = self._tables([self._module(module) for module in plan.modules])
        kernels = self._tables([self._kernel(kernel) for kernel in plan.kernels])
        weights = self._tables([self._weight(weight) for weight in plan.weights])
        state = self._tables([self._weight(weight) for weight in plan.state])
        programs = self._tables([self._program(program) for program in plan.programs])
        refits = self._tables([self._program(program) for program in plan.refits])
        fb.PlanStart(builder)
        fb.PlanAddSchema(builder, fb.CreateSchemaVersion(builder, schema.MAJOR, schema.MINOR))
        fb.PlanAddTrailer(builder, self._segment())
        fb.PlanAddProducer(builder, producer)
        fb.PlanAddVersions(builder, versions)
        fb.PlanAddTarget(builder, plan.target)
        fb.PlanAddDevice(builder, device)
        fb.PlanAddModules(builder, modules)
        fb.PlanAddKernels(builder, kernels)
        fb.PlanAddWeightsNbytes(builder, plan.weights_nbytes)
        fb.PlanAddWeights(builder, weights)
        fb.PlanAddStateNbytes(builder, plan.state_nbytes)
        fb.PlanAddState(builder, state)
        fb.PlanAddPrograms(builder, programs)
        fb.PlanAddRefits(builder, refits)
        return int(fb.PlanEnd(builder))

    def _version(self, library: str, version: str) -> int:
        name_offset, version_offset = self._string(library), self._string(version)
        fb.LibraryVersionStart(self._builder)
        fb.LibraryVersionAddName(self._builder, name_offset)
        fb.LibraryVersionAddVersion(self._builder, version_offset)
        return int(fb.LibraryVersionEnd(self._builder))

    def _device(self, device: Device) -> int:
        builder = self._builder
        name = self._string(device.name)
        fb.DeviceStart(builder)
        fb.DeviceAddName(builder, name)
        if device.compute_capability != (0, 0):
            capability = fb.CreateComputeCapability(builder, *device.compute_capability)
            fb.DeviceAddComputeCapability(builder, capability)
        fb.DeviceAddMultiprocessorCount(builder, device.multiprocessor_count)
        fb.DeviceAddDriverVersion(builder, device.driver_version)
        return int(fb.DeviceEnd(builder))

    def _module(self, module: Module) -> int:
        origin = self._string(module.origin)
        fb.ModuleStart(self._builder)
        fb.ModuleAddOrigin(self._builder, origin)
        fb.ModuleAddCode(self._builder, self._segment())
        return int(fb.ModuleEnd(self._builder))

    def _parameter(self, parameter: Parameter) -> int:
        builder = self._builder
        name, dtype = self._string(parameter.name), self._string(parameter.dtype)
        shape = self._numbers("q", parameter.shape)
        fb.ParameterStart(builder)
        fb.ParameterAddOffset(builder, parameter.offset)
        fb.ParameterAddNbytes(builder, parameter.nbytes)
        fb.ParameterAddKind(builder, parameter.kind)
        fb.ParameterAddName(builder, name)
        fb.ParameterAddDtype(builder, dtype)
        fb.ParameterAddShape(builder, shape)
        return int(fb.ParameterEnd(builder))

    def _kernel(self, kernel: Kernel) -> int:
        builder = self._builder
        symbol = self._string(kernel.symbol)
        parameters = self._tables([self._parameter(parameter) for parameter in kernel.parameters])
        fb.KernelStart(builder)
        fb.KernelAddModule(builder, kernel.module)
        fb.KernelAddSymbol(builder, symbol)
        fb.KernelAddParameters(builder, parameters)
        fb.KernelAddMaxDynamicSmemNbytes(builder, kernel.max_dynamic_smem_nbytes)
        fb.KernelAddNonPortableCluster(builder, kernel.non_portable_cluster)
        return int(fb.KernelEnd(builder))

    def _weight(self, weight: Weight) -> int:
        builder = self._builder
        name, dtype = self._string(weight.name), self._string(weight.dtype)
        shape = self._numbers("q", weight.shape)
        fb.WeightStart(builder)
        fb.WeightAddName(builder, name)
        fb.WeightAddDtype(builder, dtype)
        fb.WeightAddShape(builder, shape)
        fb.WeightAddOffset(builder, weight.offset)
        fb.WeightAddData(builder, self._segment())
        return int(fb.WeightEnd(builder))

    def _program(self, program: Program) -> int:
        builder = self._builder
        name = self._string(program.name)
        inputs = self._tables([self._tensor(tensor) for tensor in program.inputs])
        outputs = self._tables([self._tensor(tensor) for tensor in program.outputs])
        input_nbytes = self._numbers("Q", program.input_nbytes)
        output_nbytes = self._numbers("Q", program.output_nbytes)
        ops = self._tables([self._op(op) for op in program.ops])
        commands = self._tables([self._command(command) for command in program.commands])
        golden = self._golden(program.golden) if program.golden else 0
        schedule = self._schedule(program.schedule) if program.schedule else 0
        entry = self._string(program.entry) if program.entry != program.name else 0
        profile = self._tables([self._dimension(*dimension) for dimension in program.profile])
        fits = self._data(bytes(program.fits))
        fb.ProgramStart(builder)
        fb.ProgramAddName(builder, name)
        fb.ProgramAddInputs(builder, inputs)
        fb.ProgramAddOutputs(builder, outputs)
        fb.ProgramAddInputNbytes(builder, input_nbytes)
        fb.ProgramAddOutputNbytes(builder, output_nbytes)
        fb.ProgramAddArenaNbytes(builder, program.arena_nbytes)
        fb.ProgramAddStreamCount(builder, program.stream_count)
        fb.ProgramAddEventCount(builder, program.event_count)
        fb.ProgramAddOps(builder, ops)
        fb.ProgramAddCommands(builder, commands)
        fb.ProgramAddGolden(builder, golden)
        fb.ProgramAddSchedule(builder, schedule)
        fb.ProgramAddEntry(builder, entry)
        fb.ProgramAddProfile(builder, profile)
        fb.ProgramAddRole(builder, program.role)
        fb.ProgramAddFits(builder, fits)
        return int(fb.ProgramEnd(builder))

    def _dimension(self, name: str, size: int) -> int:
        name_offset = self._string(name)
        fb.DimensionStart(self._builder)
        fb.DimensionAddName(self._builder, name_offset)
        fb.DimensionAddSize(self._builder, size)
        return int(fb.DimensionEnd(self._builder))

    def _tensor(self, tensor: Tensor) -> int:
        builder = self._builder
        name, dtype = self._string(tensor.name), self._string(tensor.dtype)
        shape, strides = self._numbers("q", tensor.shape), self._numbers("q", tensor.strides)
        fb.TensorStart(builder)
        fb.TensorAddName(builder, name)
        fb.TensorAddDtype(builder, dtype)
        fb.TensorAddShape(builder, shape)
        fb.TensorAddStrides(builder, strides)
        fb.TensorAddPointer(builder, self._pointer(tensor.pointer))
        if tensor.sample_range is not None:
            fb.TensorAddSampleRange(builder, fb.CreateSampleRange(builder, *tensor.sample_range))
        fb.TensorAddMask(builder, tensor.mask)
        return int(fb.TensorEnd(builder))

    def _op(self, op: Op) -> int:
        name, source = self._string(op.name), self._string(op.source)
        fb.OpStart(self._builder)
        fb.OpAddName(self._builder, name)
        fb.OpAddSource(self._builder, source)
        return int(fb.OpEnd(self._builder))

    def _command(self, command: Command) -> int:
        match command:
            case Launch():
                kind, action = fb.Action.Launch, self._launch(command)
            case Memcpy():
                kind, action = fb.Action.Memcpy, self._memcpy(command)
            case Memset():
                kind, action = fb.Action.Memset, self._memset(command)
            case Record():
                kind, action = fb.Action.Record, self._record(command)
            case Wait():
                kind, action = fb.Action.Wait, self._wait(command)
            case _:
                assert_never(command)
        fb.CommandStart(self._builder)
        fb.CommandAddActionType(self._builder, kind)
        fb.CommandAddAction(self._builder, action)
        return int(fb.CommandEnd(self._builder))

    def _launch(self, launch: Launch) -> int:
        builder = self._builder
        params = self._data(launch.params)
        relocations = self._records(schema.RELOCATION, [_relocation(r) for r in launch.relocations])
        reads = self._records(schema.ACCESS, [_access(access) for access in launch.reads])
        writes = self._records(schema.ACCESS, [_access(access) for access in launch.writes])
        fb.LaunchStart(builder)
        fb.LaunchAddStream(builder, launch.stream)
        fb.LaunchAddOp(builder, launch.op)
        fb.LaunchAddKernel(builder, launch.kernel)
        fb.LaunchAddParams(builder, params)
        fb.LaunchAddRelocations(builder, relocations)
        fb.LaunchAddReads(builder, reads)
        fb.LaunchAddWrites(builder, writes)
        fb.LaunchAddGrid(builder, fb.CreateDim3(builder, *launch.grid))
        fb.LaunchAddBlock(builder, fb.CreateDim3(builder, *launch.block))
        if launch.cluster != (0, 0, 0):
            fb.LaunchAddCluster(builder, fb.CreateDim3(builder, *launch.cluster))
        fb.LaunchAddDynamicSmemNbytes(builder, launch.dynamic_smem_nbytes)
        fb.LaunchAddCooperative(builder, launch.cooperative)
        fb.LaunchAddProgrammatic(builder, launch.programmatic)
        fb.LaunchAddDurationNs(builder, launch.duration_ns)
        return int(fb.LaunchEnd(builder))

    def _memcpy(self, memcpy: Memcpy) -> int:
        builder = self._builder
        fb.MemcpyStart(builder)
        fb.MemcpyAddStream(builder, memcpy.stream)
        fb.MemcpyAddOp(builder, memcpy.op)
        fb.MemcpyAddDst(builder, self._pointer(memcpy.dst))
        fb.MemcpyAddSrc(builder, self._pointer(memcpy.src))
        fb.MemcpyAddNbytes(builder, memcpy.nbytes)
        fb.MemcpyAddDurationNs(builder, memcpy.duration_ns)
        return int(fb.MemcpyEnd(builder))

    def _memset(self, memset: Memset) -> int:
        builder = self._builder
        fb.MemsetStart(builder)
        fb.MemsetAddStream(builder, memset.stream)
        fb.MemsetAddOp(builder, memset.op)
        fb.MemsetAddDst(builder, self._pointer(memset.dst))
        fb.MemsetAddValue(builder, memset.value)
        fb.MemsetAddElementNbytes(builder, memset.element_nbytes)
        fb.MemsetAddCount(builder, memset.count)
        fb.MemsetAddDurationNs(builder, memset.duration_ns)
        return int(fb.MemsetEnd(builder))

    def _record(self, record: Record) -> int:
        fb.RecordStart(self._builder)
        fb.RecordAddStream(self._builder, record.stream)
        fb.RecordAddEvent(self._builder, record.event)
        return int(fb.RecordEnd(self._builder))

    def _wait(self, wait: Wait) -> int:
        fb.WaitStart(self._builder)
        fb.WaitAddStream(self._builder, wait.stream)
        fb.WaitAddEvent(self._builder, wait.event)
        return int(fb.WaitEnd(self._builder))

    def _golden(self, golden: Golden) -> int:
        builder = self._builder
        outputs = self._tables([self._golden_output(output) for output in golden.outputs])
        fb.GoldenStart(builder)
        fb.GoldenAddSeed(builder, golden.seed)
        fb.GoldenAddTolerance(builder, golden.tolerance)
        fb.GoldenAddOutputs(builder, outputs)
        return int(fb.GoldenEnd(builder))

    def _golden_output(self, output: GoldenOutput) -> int:
        sha256, samples = self._data(output.sha256), self._numbers("d", output.samples)
        fb.GoldenOutputStart(self._builder)
        fb.GoldenOutputAddSha256(self._builder, sha256)
        fb.GoldenOutputAddSamples(self._builder, samples)
        return int(fb.GoldenOutputEnd(self._builder))

    def _schedule(self, record: ScheduleRecord) -> int:
        builder = self._builder
        policy = self._string(record.policy)
        antichain = self._numbers("I", record.antichain)
        candidates = self._tables([self._candidate(candidate) for candidate in record.candidates])
        fb.ScheduleRecordStart(builder)
        fb.ScheduleRecordAddPolicy(builder, policy)
        fb.ScheduleRecordAddAntichain(builder, antichain)
        fb.ScheduleRecordAddArenaLowerBoundNbytes(builder, record.arena_lower_bound_nbytes)
        fb.ScheduleRecordAddCandidates(builder, candidates)
        fb.ScheduleRecordAddFewestSyncCount(builder, record.fewest_sync_count)
        return int(fb.ScheduleRecordEnd(builder))

    def _candidate(self, candidate: Candidate) -> int:
        builder = self._builder
        policy = self._string(candidate.policy)
        fb.CandidateStart(builder)
        fb.CandidateAddPolicy(builder, policy)
        fb.CandidateAddStreamCount(builder, candidate.stream_count)
        fb.CandidateAddSyncCount(builder, candidate.sync_count)
        fb.CandidateAddArenaNbytes(builder, candidate.arena_nbytes)
        fb.CandidateAddDurationNs(builder, candidate.duration_ns)
        return int(fb.CandidateEnd(builder))


def _relocation(relocation: Relocation) -> tuple[int, int, int, int]:
    """The numbers of schema.RELOCATION."""
    pointer = relocation.pointer
    return pointer.offset, pointer.index, pointer.region, relocation.param_offset


def _access(access: Access) -> tuple[int, int, int, int]:
    """The numbers of schema.ACCESS."""
    pointer = access.pointer
    return pointer.offset, pointer.index, pointer.region, access.nbytes
