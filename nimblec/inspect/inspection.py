"""A plan as a dict of strings and numbers: what `nimblec inspect` shows, and prints with --json."""

from collections import Counter
from dataclasses import asdict
from math import prod
from typing import Any, TypeAlias

from nimblec.inspect.layers import by_layer
from nimblec.inspect.parts import parts_of
from nimblert.plan import (
    ITEM_NBYTES,
    Crop,
    Device,
    Fit,
    Launch,
    Memcpy,
    Plan,
    Pointer,
    Program,
    Region,
    ScheduleRecord,
    Target,
    Tensor,
    Weight,
    pieces,
)

Json: TypeAlias = dict[str, Any]

_COMMAND_KINDS = ("launch", "memcpy", "memset", "record", "wait")
"""The kinds of commands that are counted where there are none, too."""


def describe(plan: Plan, *, file_nbytes: int) -> Json:
    """Describe everything in a plan but its bytes, in an order that does not change; sizes are in bytes.

    ``file_nbytes`` is the size of the file that the plan came from.
    """
    return {
        "producer": plan.producer,
        "versions": dict(plan.versions),
        "target": plan.target.name.lower(),
        "device": device_of(plan),
        "is_stripped": plan.is_stripped,
        "sizes": sizes(plan, file_nbytes=file_nbytes),
        "modules": modules_by_origin(plan),
        "kernels": kernels_by_origin(plan),
        "regions": {"weights": plan.weights_nbytes, "state": plan.state_nbytes},
        "weights": [_weight(weight) for weight in plan.weights],
        "state": [
            {**_weight(weight), "uses": uses} for weight, uses in zip(plan.state, state_uses(plan), strict=True)
        ],
        "programs": [describe_program(plan, program) for program in plan.programs],
        "refits": [
            {
                "weights": [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in refit.inputs],
                "commands": len(refit.commands),
            }
            for refit in plan.refits
        ],
    }


def sizes(plan: Plan, *, file_nbytes: int) -> dict[str, int]:
    """Return the bytes of the file by content, and the bytes of memory that a run needs.

    ``metadata`` is what is neither code nor contents of weights and state: the FlatBuffer, the
    trailer and the padding. ``saved`` is what compression saves of code, weights and state in the file.
    """
    code = sum(module.code.nbytes for module in plan.modules)
    weights = sum(weight.data.nbytes for weight in plan.weights)
    state = sum(weight.data.nbytes for weight in plan.state)
    return {
        "file": file_nbytes,
        "code": code,
        "weights": weights,
        "state": state,
        "metadata": file_nbytes + plan.saved_nbytes - code - weights - state,
        "saved": plan.saved_nbytes,
        "arena": plan.arena_nbytes,
    }


def modules_by_origin(plan: Plan) -> dict[str, Json]:
    """Count the modules of each origin, and their bytes."""
    counts, nbytes = Counter[str](), Counter[str]()
    for module in plan.modules:
        counts[module.origin] += 1
        nbytes[module.origin] += module.code.nbytes
    return {origin: {"count": counts[origin], "nbytes": nbytes[origin]} for origin in sorted(counts)}


def kernels_by_origin(plan: Plan) -> list[Json]:
    """Return every kernel with its origin and its launches: by origin, most launched first."""
    launches = Counter(
        command.kernel
        for program in (*plan.programs, *plan.bodies)
        for command in program.commands
        if isinstance(command, Launch)
    )
    rows = [
        {
            "origin": plan.modules[kernel.module].origin,
            "symbol": kernel.symbol,
            "module": kernel.module,
            "launches": launches[index],
        }
        for index, kernel in enumerate(plan.kernels)
    ]
    return sorted(rows, key=lambda row: (row["origin"], -row["launches"], row["symbol"], row["module"]))


def pointer_text(pointer: Pointer) -> str:
    """Return a pointer for people to read: ``arena+4096``, ``input[0]+0``."""
    indexed = pointer.region in {Region.INPUT, Region.OUTPUT}
    region = pointer.region.name.lower() + (f"[{pointer.index}]" if indexed else "")
    return f"{region}{pointer.offset:+d}"


def command_counts(program: Program) -> dict[str, int]:
    """Return the number of commands of each kind in a program."""
    counts = Counter(type(command).__name__.lower() for command in program.commands)
    return dict.fromkeys(_COMMAND_KINDS, 0) | counts


def device_of(plan: Plan) -> Json:
    """Return the machine that a plan was made on."""
    device: Device = plan.device
    if plan.target is Target.CPU:
        return {"name": device.name}
    return {
        "name": device.name,
        "compute_capability": "{}.{}".format(*device.compute_capability),
        "multiprocessor_count": device.multiprocessor_count,
        "driver": f"CUDA {device.driver_version // 1000}.{device.driver_version % 1000 // 10}",
    }


def _weight(weight: Weight) -> Json:
    return {
        "name": weight.name,
        "dtype": weight.dtype,
        "shape": list(weight.shape),
        "offset": weight.offset,
        "nbytes": weight.nbytes,
    }


def _tensor(tensor: Tensor) -> Json:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "strides": list(tensor.strides),
        "nbytes": prod(tensor.shape) * ITEM_NBYTES[tensor.dtype],
        "place": pointer_text(tensor.pointer),
    }


def describe_program(plan: Plan, program: Program) -> Json:
    """Return the part of `describe` that is about one program; it may be a body."""
    golden = program.golden
    cropped = {work.output for _, work in program.work if isinstance(work, Crop)}
    fits = program.fits or (Fit.EXACT,) * len(program.profile)
    return {
        "name": program.name,
        "entry": program.entry,
        "profile": dict(program.profile),
        "fits": {name: fit.name.lower() for (name, _), fit in zip(program.profile, fits, strict=True)},
        "role": program.role.name.lower(),
        "inputs": [_tensor(tensor) for tensor in program.inputs],
        "outputs": [{**_tensor(t), "is_bound": i in cropped} for i, t in enumerate(program.outputs)],
        "streams": program.stream_count,
        "events": program.event_count,
        "ops": len({part.op for _, work in program.work for part in parts_of(plan, work)}),
        "commands": command_counts(program),
        "regions": {
            "arena": program.arena_nbytes,
            "inputs": list(program.input_nbytes),
            "outputs": list(program.output_nbytes),
        },
        "arena_map": arena_map(program),
        "layers": [
            {"layers": list(layers), "phases": list(phases), **asdict(share)}
            for (layers, phases), share in by_layer(plan, program).items()
        ],
        "golden": None if golden is None else {"seed": golden.seed, "tolerance": golden.tolerance},
        "schedule": None if program.schedule is None else _schedule(program, program.schedule),
    }


def _schedule(program: Program, record: ScheduleRecord) -> Json:
    """Return the choice of the schedule; a sync is a wait of one stream for another."""
    return {
        "policy": record.policy,
        "streams": program.stream_count,
        "syncs": command_counts(program)["wait"],
        "fewest_syncs": record.fewest_sync_count,
        "antichain": list(record.antichain),
        "arena": program.arena_nbytes,
        "arena_lower_bound": record.arena_lower_bound_nbytes,
        "candidates": [
            {
                "policy": candidate.policy,
                "streams": candidate.stream_count,
                "syncs": candidate.sync_count,
                "arena": candidate.arena_nbytes,
                "duration_ns": candidate.duration_ns,
            }
            for candidate in record.candidates
        ],
    }


def arena_map(program: Program) -> list[Json]:
    """Return the byte ranges of the arena that commands touch, with the first and last command to do so.

    In ascending order of offset; ranges overlap where buffers take turns in the same bytes.
    """
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    for index, work in program.work:
        for access in (*pieces.reads(work), *pieces.writes(work)):
            if access.pointer.region is Region.ARENA:
                place = access.pointer.offset, access.nbytes
                first, _ = spans.get(place, (index, index))
                spans[place] = (first, index)
    return [
        {"offset": offset, "nbytes": nbytes, "first_command": first, "last_command": last}
        for (offset, nbytes), (first, last) in sorted(spans.items())
    ]


def state_uses(plan: Plan) -> list[dict[str, str]]:
    """Return, for each tensor of the state, its use in each program that uses it, by the program's name.

    "in place": commands write it where it lies, a part of it or over what they read; "copied": its next value
    is made elsewhere and copied there; "read".
    """
    return [{p.name: how for p in plan.programs if (how := _use(p, tensor)) is not None} for tensor in plan.state]


def _use(program: Program, tensor: Weight) -> str | None:
    start, end = tensor.offset, tensor.offset + tensor.data.nbytes
    found = None
    for _, work in program.work:
        reads, writes = (
            any(
                access.pointer.region is Region.STATE
                and access.pointer.offset < end
                and start < access.pointer.offset + access.nbytes
                for access in accesses
            )
            for accesses in (pieces.reads(work), pieces.writes(work))
        )
        if writes and isinstance(work, Memcpy):
            return "copied"
        if writes:
            found = "in place"
        elif reads and found is None:
            found = "read"
    return found
