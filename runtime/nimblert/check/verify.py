"""Verification of a plan: every rule that needs no device.

A broken rule yields a sentence, `path: actual, expected`. Whatever a plan file decodes to, nothing here raises. Whether
conflicting commands are ordered is checked by `nimblert.check.hazards`.
"""

import copyreg
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from nimblert.arrays.layouts import is_dense
from nimblert.check import bounds, program_rules
from nimblert.check.bounds import MAX_NBYTES, Sizes, array_problems, extent_problems, region_sizes, under
from nimblert.errors import PlanError, PlanFormatError, PlanInvalidError
from nimblert.plan import (
    Candidate,
    Crop,
    Golden,
    Kernel,
    Launch,
    Memcpy,
    Memset,
    ParameterKind,
    Plan,
    Program,
    Record,
    Region,
    Role,
    ScheduleRecord,
    Switch,
    Target,
    Tensor,
    Wait,
    Weight,
    While,
    Work,
    container,
    parts,
)
from nimblert.plan.container import Source
from nimblert.plan.pieces import SIZE_NBYTES
from nimblert.plan.records import DEFAULT_LIMITS, Limits, dense_nbytes

if TYPE_CHECKING:
    from nimblert.check.cpu_rules import Nodes
    from nimblert.plan.signatures import Trust

MAX_BIAS = 1 << 40
"""How far from its region a relocation may point; see `Pointer`."""
MAX_POLICY_LENGTH = 64

_SHA256_NBYTES = 32

_MOST_SENTENCES = 1 << 16
"""A plan may break each rule a million times."""


def problems(plan: Plan, limits: Limits = DEFAULT_LIMITS) -> Iterator[str]:
    """Yield a sentence for each rule that the plan breaks, and each of ``limits`` that it exceeds; none if it is valid.

    Whether conflicting accesses are ordered is checked by `hazards`. Ends after 65,536 sentences.
    """
    beyond = tuple(bounds.limit_problems(plan, limits))
    rules = _fat_problems if plan.parts or plan.target is Target.FAT else _problems
    # A plan beyond a limit is not examined further.
    return iter(beyond) if beyond else islice(rules(plan, limits), _MOST_SENTENCES)


def check(plan: Plan, limits: Limits = DEFAULT_LIMITS) -> None:
    """Raise PlanInvalidError if there are `problems`."""
    if found := tuple(problems(plan, limits)):
        raise PlanInvalidError(found)


def _problems(plan: Plan, limits: Limits) -> Iterator[str]:
    if not plan.programs:
        yield "programs: the plan has none"
    yield from _repeated("programs", [program.name for program in plan.programs])
    yield from program_rules.entry_problems(plan)
    for i, module in enumerate(plan.modules):
        if not module.code.nbytes or not module.code.c_contiguous:
            yield f"modules[{i}].code: is empty or not contiguous"
    for i, kernel in enumerate(plan.kernels):
        yield from under(f"kernels[{i}]", _kernel_problems(kernel, plan))
    nodes = None
    if plan.target == Target.CPU:
        from nimblert.check import cpu_rules

        yield from cpu_rules.kernels_problems(plan, limits)
        nodes = cpu_rules.Nodes(plan.modules)
    yield from _weights_problems("weights", plan.weights, plan.weights_nbytes, limits)
    yield from _weights_problems("state", plan.state, plan.state_nbytes, limits)
    yield from program_rules.state_problems(plan)
    params_nbytes = tuple(kernel.params_nbytes for kernel in plan.kernels)
    owners = program_rules.roots(plan)
    for path, programs in (("programs", plan.programs), ("bodies", plan.bodies), ("refits", plan.refits)):
        for i, program in enumerate(programs):
            if path == "bodies" and i not in owners:  # `body_problems` reports it
                continue
            sizes = region_sizes(plan, owners[i] if path == "bodies" else program)
            scope = _Scope(
                plan=plan, limits=limits, program=program, sizes=sizes, params_nbytes=params_nbytes, nodes=nodes
            )
            yield from under(f"{path}[{i}]", _program_problems(scope))
    yield from program_rules.body_problems(plan, limits.trips)
    yield from program_rules.refit_problems(plan)


def _fat_problems(fat: Plan, limits: Limits) -> Iterator[str]:
    """Yield the problems of a fat plan and of each of its parts."""
    if fat.target is not Target.FAT or not 0 < len(fat.parts) <= parts.MOST_PARTS:
        yield f"parts: {len(fat.parts)}, expected 1 to {parts.MOST_PARTS} in a fat plan, and none in others"
        return
    if any((fat.programs, fat.bodies, fat.refits, fat.kernels, fat.modules, fat.state)):
        yield "programs: a fat plan has parts and weights only"
    yield from _weights_problems("weights", fat.weights, fat.weights_nbytes, limits)
    for i, part in enumerate(fat.parts):
        try:
            plan = parts.filled(parts.read(fat, i, "plan", limits), fat)
            container.verify_digest(part.file, parts.name("plan", i))
        except PlanFormatError as exc:
            yield f"parts[{i}]: {exc}"
        else:
            yield from under(f"parts[{i}]", problems(plan, limits))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """What the rules of a command refer to; ``params_nbytes`` is that of each kernel.

    ``nodes`` are those of the modules on the CPU target, None on the CUDA target.
    """

    plan: Plan
    limits: Limits
    program: Program
    sizes: Sizes
    params_nbytes: tuple[int, ...]
    nodes: "Nodes | None"

    @property
    def refits(self) -> bool:
        """Whether the program may write weights."""
        return self.program.role is Role.REFIT


def _repeated(path: str, names: Sequence[str]) -> Iterator[str]:
    if len(set(names)) != len(names):
        yield f"{path}: two have the same name"


def _index_problems(path: str, index: int, count: int, what: str) -> Iterator[str]:
    if not 0 <= index < count:
        yield f"{path}: {index} is out of range (there are {count} {what})"


def _weights_problems(path: str, weights: Sequence[Weight], region_nbytes: int, limits: Limits) -> Iterator[str]:
    if not 0 <= region_nbytes < MAX_NBYTES:
        yield f"{path}_nbytes: {region_nbytes}, expected less than {MAX_NBYTES}"
    end = 0
    for i, weight in enumerate(weights):
        yield from under(f"{path}[{i}]", array_problems(weight.dtype, weight.shape, limits.tensor_nbytes))
        nbytes = dense_nbytes(weight.dtype, weight.shape)
        if weight.sha256:
            if len(weight.sha256) != _SHA256_NBYTES or weight.data.nbytes:
                yield f"{path}[{i}].sha256: {len(weight.sha256)} bytes, expected 32, and no data beside it"
        elif weight.data.nbytes != nbytes or not weight.data.c_contiguous:
            yield f"{path}[{i}].data: {weight.data.nbytes} bytes, expected {nbytes}, contiguous"
        if weight.offset < end:
            yield f"{path}[{i}].offset: {weight.offset} lies in the tensor before it, which ends at {end}"
        end = max(end, weight.offset + weight.nbytes)
        if end > region_nbytes:
            yield f"{path}[{i}]: ends at {end}, outside the region ({region_nbytes} bytes)"


def _kernel_problems(kernel: Kernel, plan: Plan) -> Iterator[str]:
    yield from _index_problems("module", kernel.module, len(plan.modules), "modules")
    if not kernel.symbol or "\0" in kernel.symbol:
        yield f"symbol: {kernel.symbol!r} is not a name"
    if kernel.params_nbytes > bounds.MAX_PARAMS_NBYTES and plan.target == Target.CUDA:
        yield f"parameters: {kernel.params_nbytes} bytes, expected at most {bounds.MAX_PARAMS_NBYTES}"
    if kernel.max_dynamic_smem_nbytes > bounds.MAX_DYNAMIC_SMEM_NBYTES:
        yield f"max_dynamic_smem_nbytes: {kernel.max_dynamic_smem_nbytes} is more than a device has"
    if plan.target == Target.CUDA:
        for i, parameter in enumerate(kernel.parameters):
            if parameter.kind != ParameterKind.VALUE:
                yield f"parameters[{i}].kind: {parameter.kind.name}, expected VALUE on the CUDA target"


def _program_problems(scope: _Scope) -> Iterator[str]:
    program, sizes = scope.program, scope.sizes
    for (region, index), nbytes in sizes.items():
        if not 0 <= nbytes < MAX_NBYTES:
            yield f"{region.name}({index}): {nbytes} bytes, expected less than {MAX_NBYTES}"
    yield from _tensors_problems("inputs", program.inputs, scope)
    yield from _tensors_problems("outputs", program.outputs, scope)
    # Unused streams would cost threads or handles.
    if program.stream_count > max(1, len(program.commands)):
        yield f"stream_count: {program.stream_count}, more than the {len(program.commands)} commands"
    for i, tensor in enumerate(program.inputs):
        if tensor.pointer.region == Region.WEIGHTS and not scope.refits:
            yield f"inputs[{i}].pointer: is in WEIGHTS, which no run changes"
    for i, command in enumerate(program.commands):
        path = f"commands[{i}]"
        yield from _index_problems(f"{path}.stream", command.stream, program.stream_count, "streams")
        if isinstance(command, Work):
            yield from under(path, _work_problems(command, scope))
    yield from _event_problems(program)
    yield from _programmatic_problems(program, scope.plan)
    if program.golden is not None:
        yield from under("golden", _golden_problems(program.golden, len(program.outputs)))
    if program.schedule is not None:
        yield from under("schedule", _schedule_problems(program.schedule, program))


def _tensors_problems(path: str, tensors: Sequence[Tensor], scope: _Scope) -> Iterator[str]:
    yield from _repeated(path, [tensor.name for tensor in tensors])
    for i, tensor in enumerate(tensors):
        yield from under(f"{path}[{i}]", _tensor_problems(tensor, scope))


def _tensor_problems(tensor: Tensor, scope: _Scope) -> Iterator[str]:
    broken = tuple(array_problems(tensor.dtype, tensor.shape, scope.limits.tensor_nbytes))
    yield from broken
    if len(tensor.strides) != len(tensor.shape):
        yield f"strides: {len(tensor.strides)}, expected one for each of {len(tensor.shape)} dimensions"
    elif min(tensor.strides, default=0) < 0:
        yield f"strides: {tensor.strides} has a negative one"
    elif max(tensor.strides, default=0) * 16 > MAX_NBYTES:
        yield f"strides: {tensor.strides} has one beyond any memory"
    elif not broken:
        yield from extent_problems("pointer", tensor.pointer, tensor.span_nbytes, scope.sizes)
        if scope.plan.target == Target.CPU and 0 not in tensor.shape and not is_dense(tensor.shape, tensor.strides):
            yield f"strides: {tensor.strides} leave gaps or overlap, expected a dense tensor on the CPU target"
    if tensor.sample_range is not None and not broken:
        yield from _sample_range_problems(tensor.dtype, *tensor.sample_range)


def _sample_range_problems(dtype: str, low: int, high: int) -> Iterator[str]:
    """Yield a sentence unless the range holds integers of the dtype: golden runs and padding use it."""
    if not dtype.startswith(("int", "uint", "bool")):
        yield f"sample_range: {low} to {high}, expected none for {dtype}"
        return
    least, most = (0, 1) if dtype == "bool" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    if not least <= low <= high <= most:
        yield f"sample_range: {low} to {high}, expected integers in order from {least} to {most}, as {dtype} holds"


def _work_problems(work: Work, scope: _Scope) -> Iterator[str]:
    yield from _index_problems("op", work.op, len(scope.program.ops), "ops")
    match work:
        case Launch():
            yield from _launch_problems(work, scope)
        case Memcpy():
            yield from _memcpy_problems(work, scope)
        case Memset():
            yield from _memset_problems(work, scope)
        case While(condition=byte) | Switch(index=byte):
            yield from extent_problems("condition", byte, 1, scope.sizes)
            yield from _accesses_problems(work, scope.sizes)
        case Crop():
            yield from extent_problems("sizes", work.sizes, SIZE_NBYTES * work.rank, scope.sizes)
            yield from _crop_problems(work, scope.program)


def _crop_problems(crop: Crop, program: Program) -> Iterator[str]:
    outputs = program.outputs
    if not 0 <= crop.output < len(outputs):
        yield f"output: {crop.output} is out of range (there are {len(outputs)} outputs)"
    elif crop.rank != len(outputs[crop.output].shape):
        yield f"rank: {crop.rank}, the output has {len(outputs[crop.output].shape)} dimensions"
    if next(work for _, work in program.work if isinstance(work, Crop) and work.output == crop.output) is not crop:
        yield f"output: {crop.output} is cropped by a command before this one"


def _launch_problems(launch: Launch, scope: _Scope) -> Iterator[str]:
    plan, sizes = scope.plan, scope.sizes
    yield from _accesses_problems(launch, sizes)
    if not 0 <= launch.kernel < len(plan.kernels):
        yield f"kernel: {launch.kernel} is out of range (there are {len(plan.kernels)} kernels)"
        return
    kernel = plan.kernels[launch.kernel]
    params_nbytes = scope.params_nbytes[launch.kernel]
    if len(launch.params) != params_nbytes:
        yield f"params: {len(launch.params)} bytes, the kernel takes {params_nbytes}"
    yield from _relocation_problems(launch)
    if scope.nodes is None:
        yield from bounds.launch_problems(launch, kernel)
        for i, relocation in enumerate(launch.relocations):
            pointer = relocation.pointer
            if (pointer.region, pointer.index) not in sizes:
                place = f"{pointer.region.name}({pointer.index})"
                yield f"relocations[{i}].pointer: the program has no region {place}"
            elif abs(pointer.offset) > MAX_BIAS:
                yield f"relocations[{i}].pointer: offset {pointer.offset}, expected within {MAX_BIAS} of the region"
    else:
        from nimblert.check import cpu_rules

        yield from cpu_rules.launch_problems(launch, kernel, scope.nodes, sizes, refits=scope.refits)


def _accesses_problems(work: Launch | While | Switch, sizes: Sizes) -> Iterator[str]:
    for what, accesses in (("reads", work.reads), ("writes", work.writes)):
        for i, access in enumerate(accesses):
            yield from extent_problems(f"{what}[{i}]", access.pointer, access.nbytes, sizes)


def _relocation_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence unless relocations are of 8 zero bytes of the parameters each, and do not overlap."""
    for i, relocation in enumerate(launch.relocations):
        at = relocation.param_offset
        if launch.params[at : at + 8] != bytes(8):
            yield f"relocations[{i}].param_offset: {at} is not the start of 8 zero bytes of params"
    offsets = sorted(relocation.param_offset for relocation in launch.relocations)
    if any(after - before < 8 for before, after in pairwise(offsets)):
        yield "relocations: two of them overlap"


def _memcpy_problems(memcpy: Memcpy, scope: _Scope) -> Iterator[str]:
    yield from extent_problems("dst", memcpy.dst, memcpy.nbytes, scope.sizes)
    yield from extent_problems("src", memcpy.src, memcpy.nbytes, scope.sizes)
    if memcpy.dst.region == Region.WEIGHTS and not scope.refits:
        yield "dst: is in WEIGHTS, which no run changes"
    same_region = (memcpy.dst.region, memcpy.dst.index) == (memcpy.src.region, memcpy.src.index)
    if same_region and abs(memcpy.dst.offset - memcpy.src.offset) < memcpy.nbytes:
        yield "dst: overlaps src"


def _memset_problems(memset: Memset, scope: _Scope) -> Iterator[str]:
    yield from extent_problems("dst", memset.dst, memset.count * memset.element_nbytes, scope.sizes)
    if memset.dst.region == Region.WEIGHTS and not scope.refits:
        yield "dst: is in WEIGHTS, which no run changes"
    if memset.element_nbytes not in (1, 2, 4):
        yield f"element_nbytes: {memset.element_nbytes}, expected 1, 2 or 4"
        return
    if not 0 <= memset.value < 1 << 8 * memset.element_nbytes:
        yield f"value: {memset.value} does not fit {memset.element_nbytes} bytes"
    if memset.dst.offset % memset.element_nbytes:
        yield f"dst: {memset.dst.offset} is not a multiple of the element size {memset.element_nbytes}"


def _event_problems(program: Program) -> Iterator[str]:
    """Yield a sentence for each event that is not recorded once, before it is waited for."""
    recorded: set[int] = set()
    for i, command in enumerate(program.commands):
        if isinstance(command, Record):
            path = f"commands[{i}].event"
            yield from _index_problems(path, command.event, program.event_count, "events")
            if command.event in recorded:
                yield f"{path}: {command.event} is recorded twice"
            recorded.add(command.event)
        elif isinstance(command, Wait) and command.event not in recorded:
            yield f"commands[{i}].event: {command.event} is not recorded before this wait"
    if len(recorded) != program.event_count:
        yield f"event_count: {program.event_count}, but {len(recorded)} are recorded"


def _programmatic_problems(program: Program, plan: Plan) -> Iterator[str]:
    """Yield a sentence for each programmatic edge that does not run from a launch to a launch."""
    last: dict[int, Work] = {}
    for i, command in program.work:
        if isinstance(command, Launch) and command.programmatic:
            if plan.target != Target.CUDA:
                yield f"commands[{i}].programmatic: expected on the CUDA target only"
            elif not isinstance(last.get(command.stream), Launch):
                yield f"commands[{i}].programmatic: no launch is before it on stream {command.stream}"
        last[command.stream] = command


def _golden_problems(golden: Golden, output_count: int) -> Iterator[str]:
    if not 0 <= golden.tolerance < inf:
        yield f"tolerance: {golden.tolerance}, expected a finite number from 0"
    if len(golden.outputs) != output_count:
        yield f"outputs: {len(golden.outputs)}, expected {output_count}, as the program"
    for i, output in enumerate(golden.outputs):
        if len(output.sha256) != 32:
            yield f"outputs[{i}].sha256: {len(output.sha256)} bytes, expected 32"


def _schedule_problems(record: ScheduleRecord, program: Program) -> Iterator[str]:
    """Yield a sentence where the record cannot be of this program; `nimblec verify` checks its claims."""
    work_count = sum(1 for _ in program.work)
    yield from _policy_problems(record.policy)
    if any(before >= after for before, after in pairwise(record.antichain)):
        yield "antichain: is not in ascending order, each once"
    if record.antichain and not 0 <= min(record.antichain) <= max(record.antichain) < work_count:
        yield f"antichain: names work that is not there (there are {work_count} launches, copies and fills)"
    if not 0 <= record.arena_lower_bound_nbytes <= program.arena_nbytes:
        yield (
            f"arena_lower_bound_nbytes: {record.arena_lower_bound_nbytes},"
            f" more than the arena has ({program.arena_nbytes} bytes)"
        )
    if not 0 <= record.fewest_sync_count <= work_count**2:
        yield f"fewest_sync_count: {record.fewest_sync_count}, more than pairs of work commands ({work_count**2})"
    for i, candidate in enumerate(record.candidates):
        # A launch of the CPU target may have several ops, which other schedules launch apart.
        yield from under(f"candidates[{i}]", _candidate_problems(candidate, max(work_count, len(program.ops))))


def _candidate_problems(candidate: Candidate, most: int) -> Iterator[str]:
    yield from _policy_problems(candidate.policy)
    if not 0 <= candidate.stream_count <= max(1, most):
        yield f"stream_count: {candidate.stream_count}, more than the {most} launches, copies and fills"
    if not 0 <= candidate.sync_count <= most**2:
        yield f"sync_count: {candidate.sync_count}, more than pairs of launches, copies and fills ({most**2})"
    if not 0 <= candidate.arena_nbytes < MAX_NBYTES:
        yield f"arena_nbytes: {candidate.arena_nbytes}, expected less than {MAX_NBYTES}"


def _policy_problems(policy: str) -> Iterator[str]:
    """Yield a sentence for a policy that tables could not show unchanged."""
    if not 0 < len(policy) <= MAX_POLICY_LENGTH or not policy.isprintable():
        yield f"policy: {policy!r}, expected 1 to {MAX_POLICY_LENGTH} printable characters"


def read_plan(
    source: Source,
    *,
    check_digest: bool = True,
    copy: bool = False,
    limits: Limits = DEFAULT_LIMITS,
    trust: "Trust | None" = None,
    fat: bool = False,
) -> Plan:
    """Return the plan in a file, or in the bytes of one, checked against ``limits``.

    See `open_image` for ``copy`` and ``trust``. Raises PlanError where there is no such file, or where it is a fat plan
    and not ``fat``; PlanSignatureError where no trusted key has signed it; PlanFormatError where it is not a plan,
    truncated, altered (noticed only with ``check_digest``) or damaged; PlanInvalidError where the plan contradicts
    itself; and InputError where ``source`` is neither a path nor bytes.
    """
    image = container.open_image(source, copy=copy, trust=trust)
    if check_digest:
        container.verify_digest(image, container.name(source))
    plan = parse_plan(image, container.name(source), limits)
    if plan.target is Target.FAT and not fat:
        raise PlanError(
            f"{container.name(source)}: is a fat plan, of {len(plan.parts)} parts: give one of the plans from which it"
            " was merged"
        )
    return plan


def parse_plan(image: memoryview, path: str, limits: Limits = DEFAULT_LIMITS) -> Plan:
    """Return the plan in a file's bytes, checked by `check`; ``path`` is for messages."""
    plan = container.decoded(image, path, limits)
    check(plan, limits)
    return plan


# Pickle and copy make a plan of its file.
copyreg.pickle(Plan, lambda plan: (partial(read_plan, fat=True), (bytes(plan.stored()),)))
