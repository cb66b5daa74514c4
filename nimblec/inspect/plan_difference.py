"""What differs between two plans: the changes that `nimblec diff` prints and judges."""

import enum
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import NamedTuple, TypeAlias

import numpy as np

from nimblec.base.difference import difference
from nimblec.base.places import joined
from nimblec.inspect.inspection import command_counts, device_of, sizes
from nimblec.inspect.parts import parts_of
from nimblec.inspect.timeline import timeline
from nimblec.plan import interface
from nimblec.plan.interface import shape_text
from nimblert.arrays.layouts import numpy_dtype
from nimblert.plan import Command, Dim3, Launch, Plan, Program, Record, Target, Wait, Weight

Value: TypeAlias = int | str | None
Figure: TypeAlias = tuple[int, int]
"""A number of both plans; 0 where the plan does not record it."""

_CHUNK = 1 << 22
"""Elements of a weight that are compared at once, since they become several arrays of float64."""


class Section(enum.StrEnum):
    """The parts of a plan that are compared. Numbers of MEMORY are bytes, those of TIMES nanoseconds."""

    MADE = "made"
    INTERFACE = "interface"
    OPS = "ops"
    KERNELS = "kernels"
    SCHEDULE = "schedule"
    MEMORY = "memory"
    WEIGHTS = "weights"
    NUMERICS = "numerics"
    TIMES = "times"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that differs; ``before`` or ``after`` is None where that plan lacks it.

    ``program`` is "" for what belongs to the whole plan. ``largest`` is the largest absolute difference of the values
    of a weight or an output. ``within``: an output differs by no more than the tolerance that the plans record.
    """

    section: Section
    what: str
    before: Value
    after: Value
    program: str = ""
    note: str = ""
    largest: float | None = None
    within: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDifference:
    """All that differs between two plans, by section, and the figures that a gate may limit.

    ``not_compared`` has a sentence for each program whose outputs the plans do not record for the same inputs.
    ``latency_ns`` has the time of a run of each program that both plans have.
    """

    changes: tuple[Change, ...]
    not_compared: tuple[str, ...]
    file_nbytes: Figure
    arena_nbytes: Figure
    latency_ns: Mapping[str, Figure]


def compare(before: Plan, after: Plan) -> PlanDifference:
    """Compare two plans that were read from files."""
    old, new = before.stored(), after.stored()
    changes: list[Change] = []
    if not _same_bytes(old, new):
        changes = sorted(_changes(before, after), key=lambda change: list(Section).index(change.section))
        if not changes:
            note = "only in what has no row, such as the order of parts, or names of layers"
            changes = [Change(section=Section.MADE, what="bytes", before=len(old), after=len(new), note=note)]
    both = [(name, a, b) for name, a, b in _matched(before.programs, after.programs) if a and b]
    return PlanDifference(
        changes=tuple(changes),
        not_compared=tuple(f"{name}: {why}" for name, a, b in both if (why := _incomparable(a, b))),
        file_nbytes=(len(old), len(new)),
        arena_nbytes=(before.arena_nbytes, after.arena_nbytes),
        latency_ns={name: _latency(_times(a), _times(b)) for name, a, b in both},
    )


def _changes(before: Plan, after: Plan) -> Iterator[Change]:
    yield from _rows(Section.MADE, _origin(before), _origin(after))
    for name, a, b in _matched(before.programs, after.programs):
        yield from _rows(Section.INTERFACE, interface.of_program(a), interface.of_program(b), name)
        if a and b:
            yield from _numerics(name, a, b)
            yield from _rows(Section.TIMES, _times(a), _times(b), name)
    yield from _rows(Section.INTERFACE, _replaceable(before), _replaceable(after))
    yield from _rows(Section.OPS, _ops(before), _ops(after))
    yield from _kernels(before, after)
    yield from _rows(Section.SCHEDULE, {"bodies": len(before.bodies)}, {"bodies": len(after.bodies)})
    for name, a, b in _matched((*before.programs, *before.bodies), (*after.programs, *after.bodies)):
        if a and b:
            yield from _rows(Section.SCHEDULE, _schedule(a), _schedule(b), name)
            yield from _moved(name, a, b)
    yield from _rows(Section.MEMORY, _memory(before), _memory(after))
    yield from _weights(before.weights, after.weights, "", _readers(after))
    yield from _weights(before.state, after.state, "state ", {})


Facts: TypeAlias = Mapping[str, Value]


def _rows(section: Section, before: Facts, after: Facts, program: str = "") -> Iterator[Change]:
    for what in dict.fromkeys((*before, *after)):
        a, b = before.get(what), after.get(what)
        if a != b:
            yield Change(section=section, what=what, before=a, after=b, program=program)


Matched: TypeAlias = tuple[str, Program | None, Program | None]


def _matched(before: Sequence[Program], after: Sequence[Program]) -> Iterator[Matched]:
    old, new = ({program.name: program for program in programs} for programs in (before, after))
    return ((name, old.get(name), new.get(name)) for name in dict.fromkeys((*old, *new)))


def _origin(plan: Plan) -> Facts:
    return {
        "producer": plan.producer,
        **{f"version of {name}": version for name, version in plan.versions},
        "target": plan.target.name.lower(),
        **{f"device: {key.replace('_', ' ')}": value for key, value in device_of(plan).items()},
    }


def _replaceable(plan: Plan) -> Facts:
    return {f"replaceable weight {t.name!r}": shape_text(t.dtype, t.shape) for r in plan.refits for t in r.inputs}


def _incomparable(before: Program, after: Program) -> str:
    """Return why the recorded outputs of two programs cannot be compared; "" if they can."""
    a, b = before.golden, after.golden
    if a is None or b is None:
        return f"the {'first' if a is None else 'second'} plan records no outputs"
    if a.seed != b.seed:
        return f"outputs are recorded for different inputs, of seed {a.seed} and of seed {b.seed}"
    drawn = [[(t.dtype, t.shape, t.sample_range) for t in program.inputs] for program in (before, after)]
    return "" if drawn[0] == drawn[1] else "outputs are recorded for inputs of different types, shapes or ranges"


def _numerics(name: str, before: Program, after: Program) -> Iterator[Change]:
    """Compare the recorded outputs of one name, or of one place where a name is new."""
    if before.golden is None or after.golden is None or _incomparable(before, after):
        a_seed, b_seed = ({"seed of recorded inputs": p.golden.seed} if p.golden else {} for p in (before, after))
        yield from _rows(Section.NUMERICS, a_seed, b_seed, name)
        return
    allowed = max(before.golden.tolerance, after.golden.tolerance)
    names, places = {t.name for t in after.outputs}, {t.name: place for place, t in enumerate(before.outputs)}
    for place, b in enumerate(after.outputs):
        origin = places.get(b.name, place)
        a = before.outputs[origin] if origin < len(before.outputs) else b
        is_renamed = a.name != b.name and a.name not in names
        if (a.dtype, a.shape) != (b.dtype, b.shape) or not (a.name == b.name in places or is_renamed):
            continue
        left, right = before.golden.outputs[origin], after.golden.outputs[place]
        if left.sha256 != right.sha256:
            differs = difference(np.array(left.samples), np.array(right.samples))
            exact = numpy_dtype(b.dtype).kind in "biu"
            yield Change(
                section=Section.NUMERICS,
                what=f"output {b.name!r}",
                before=left.sha256.hex()[:12],
                after=right.sha256.hex()[:12],
                program=name,
                note=str(differs) if differs.absolute else "differs, though the sampled values are equal",
                largest=differs.absolute,
                within=not exact and 0 < allowed >= differs.relative,
            )


# --- commands


def _ops(plan: Plan) -> Facts:
    """Return how often each operator is computed; of a launch of the CPU target, each node counts."""
    programs = (*plan.programs, *plan.bodies)
    return Counter(p.ops[part.op].name for p in programs for _, work in p.work for part in parts_of(plan, work))


class _Variant(NamedTuple):
    """One way in which a kernel is launched."""

    grid: Dim3
    block: Dim3
    cluster: Dim3
    smem: int
    code: bytes


_Launches: TypeAlias = Mapping[_Variant, Sequence[str]]
"""The launches of a kernel: their sources, by the way in which it is launched."""


def _launches(plan: Plan) -> Mapping[tuple[str, str], _Launches]:
    """Return the launches of each kernel, by origin and symbol."""
    codes = [sha256(module.code).digest() for module in plan.modules]
    found: dict[tuple[str, str], dict[_Variant, list[str]]] = defaultdict(lambda: defaultdict(list))
    for program in (*plan.programs, *plan.bodies, *plan.refits):
        for _, work in program.work:
            if isinstance(work, Launch):
                kernel = plan.kernels[work.kernel]
                tiling = work.grid, work.block, work.cluster, work.dynamic_smem_nbytes
                key = plan.modules[kernel.module].origin, kernel.symbol
                found[key][_Variant(*tiling, codes[kernel.module])].append(program.ops[work.op].source)
    return found


def _kernels(before: Plan, after: Plan) -> Iterator[Change]:
    """Yield the kernels that were added, went, or are launched otherwise; their values count launches."""
    old, new = _launches(before), _launches(after)
    for key in dict.fromkeys((*old, *new)):
        a, b = old.get(key, {}), new.get(key, {})
        counts = [Counter({variant: len(sources) for variant, sources in launches.items()}) for launches in (a, b)]
        if counts[0] != counts[1]:
            gone, added = counts[0] - counts[1], counts[1] - counts[0]
            note = _other_tiling(gone, added, b, after.target) if a and b else "gone" if a else "added"
            what, totals = f"{key[1]} ({key[0]})", [count.total() or None for count in counts]
            yield Change(section=Section.KERNELS, what=what, before=totals[0], after=totals[1], note=note)


def _other_tiling(gone: Counter[_Variant], added: Counter[_Variant], launches: _Launches, target: Target) -> str:
    """Say how launches of one kernel differ; "" where only their number does."""
    old, new = [*gone.elements()], [*added.elements()]
    if not old or not new:
        return ""
    changed = []
    for name in _Variant._fields:
        before, after = ([getattr(variant, name) for variant in variants] for variants in (old, new))
        if Counter(before) != Counter(after):
            changed.append(name if name == "code" else f"{name} {_text(before[0])} to {_text(after[0])}")
    count = min(len(old), len(new))
    where = f"{count} launch{'es' * (count > 1)}"
    if target is Target.CPU:
        return f"other code in {where}"
    what = "other code" if changed == ["code"] else f"another tiling ({', '.join(changed)})"
    source = joined(source for variant in added for source in launches[variant])
    return f"{what} in {where}" + (f" of {source}" if source else "")


def _text(size: Dim3 | int) -> str:
    return str(size) if isinstance(size, int) else "x".join(map(str, size))


def _schedule(program: Program) -> Facts:
    return {
        "policy": program.schedule.policy if program.schedule else None,
        "streams": program.stream_count,
        "events": program.event_count,
        **{f"commands: {kind}": count for kind, count in command_counts(program).items()},
        "commands on the critical path": len(timeline(program).critical_path),
    }


def _moved(name: str, before: Program, after: Program) -> Iterator[Change]:
    """Yield how many commands differ in what no other row shows, if both programs have equally many commands."""
    count = len(before.commands)
    if count != len(after.commands):
        return
    differ = sum(_bare(a) != _bare(b) for a, b in zip(before.commands, after.commands, strict=True))
    if differ:
        note = f"{differ} with another stream, other places or sizes in memory, or other parameters"
        yield Change(section=Section.SCHEDULE, what="commands", before=count, after=count, program=name, note=note)


def _bare(command: Command) -> Command:
    """Return a command without what has rows of its own: kernel, tiling, operator and time."""
    if isinstance(command, Record | Wait):
        return command
    if isinstance(command, Launch):
        none = (0, 0, 0)
        command = replace(command, kernel=0, grid=none, block=none, cluster=none, dynamic_smem_nbytes=0)
    return replace(command, op=0, duration_ns=0)


# --- memory, weights and times


def _memory(plan: Plan) -> Facts:
    parts = sizes(plan, file_nbytes=len(plan.stored()))
    # Metadata is the rest of the file, which the other rows tell.
    arenas = {f"arena of {p.name!r}": p.arena_nbytes for p in plan.programs} if len(plan.programs) > 1 else {}
    return {**{name: nbytes for name, nbytes in parts.items() if name != "metadata"}, **arenas}


def _weights(
    before: Sequence[Weight], after: Sequence[Weight], kind: str, readers: Mapping[int, str]
) -> Iterator[Change]:
    old, new = _by_name(before), _by_name(after)
    for key in dict.fromkeys((*old, *new)):
        a, b = old.get(key), new.get(key)
        types = [shape_text(weight.dtype, weight.shape) if weight else None for weight in (a, b)]
        largest, note = None, ""
        if a and b and types[0] == types[1]:
            if _same_contents(a, b):
                continue
            if a.sha256 or b.sha256:
                note = "other values, which a stripped plan does not hold"
            else:
                largest = _largest_difference(a, b)
                note = f"values differ by up to {largest:.3g}" if largest else "other bytes of equal numbers"
            if reader := readers.get(b.offset):
                note += f", read by {reader}"
        what = f"{kind}{key[0] or '(scratch memory of kernels)'}"
        yield Change(section=Section.WEIGHTS, what=what, before=types[0], after=types[1], note=note, largest=largest)


def _readers(plan: Plan) -> dict[int, str]:
    """Return the sources of the ops that read each weight, by its offset.

    They tell which weight it is: one that was folded or repacked has lost the name that the model gives it.
    """
    offsets = sorted(weight.offset for weight in plan.weights)
    found: dict[int, list[str]] = defaultdict(list)
    for program in (*plan.programs, *plan.bodies):
        for part in (part for _, work in program.work for part in parts_of(plan, work)):
            for pointer in part.weights:
                found[offsets[bisect(offsets, pointer.offset) - 1]].append(program.ops[part.op].source)
    return {offset: joined(sources) for offset, sources in found.items()}


def _by_name(weights: Sequence[Weight]) -> dict[tuple[str, int], Weight]:
    """Return weights by name and, since names may be repeated, their number among those of that name."""
    seen: Counter[str] = Counter()
    found = {}
    for weight in weights:
        found[weight.name, seen[weight.name]] = weight
        seen[weight.name] += 1
    return found


def _same_contents(before: Weight, after: Weight) -> bool:
    if before.sha256 or after.sha256:
        old, new = (weight.sha256 or sha256(weight.data).digest() for weight in (before, after))
        return old == new
    return _same_bytes(before.data, after.data)


def _same_bytes(before: memoryview, after: memoryview) -> bool:
    return np.array_equal(np.frombuffer(before, np.uint8), np.frombuffer(after, np.uint8))


def _largest_difference(before: Weight, after: Weight) -> float:
    """Return the largest absolute difference of two weights of one type; infinite where only one has a NaN."""
    old, new = (np.frombuffer(weight.data, numpy_dtype(weight.dtype)) for weight in (before, after))
    chunks = range(0, old.size, _CHUNK)
    return max((difference(old[i : i + _CHUNK], new[i : i + _CHUNK]).absolute for i in chunks), default=0.0)


def _times(program: Program) -> dict[str, int]:
    """Return the times that a program records; none where it was compiled without measuring."""
    times, found = timeline(program), {}
    if run_ns := measured_run_ns(program):
        found["run, measured"] = run_ns
    if times.measured:
        found |= {"critical path": times.duration_ns, "sum of commands": times.work_ns}
    return found


def measured_run_ns(program: Program) -> int:
    """Return the time of one run of the schedule that was kept; 0 where it was not measured."""
    record = program.schedule
    return next((c.duration_ns for c in record.candidates if c.policy == record.policy), 0) if record else 0


def _latency(before: Mapping[str, int], after: Mapping[str, int]) -> Figure:
    """Return the times of a run: measured if both are, else of the critical paths."""
    for key in ("run, measured", "critical path"):
        if key in before and key in after:
            return before[key], after[key]
    return 0, 0
