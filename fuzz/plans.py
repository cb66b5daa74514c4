"""Fuzz loading and running with CPU plans whose meaning is damaged, in guarded memory."""

import dataclasses
import random
import sys
from collections.abc import Callable
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from fuzz import guarded
from fuzz.campaign import Fuzzer, main
from fuzz.corpus import excuse, judge
from nimblec.plan import encoder
from nimblert.check.verify import parse_plan
from nimblert.errors import PlanFormatError
from nimblert.plan import ITEM_NBYTES, Launch, Plan

_CORPUS = Path(__file__).parent / "corpus"
_NUMBERS = (0, 1, 2, 3, 4, 7, 8, 16, 63, 64, 65, 255, 256, 4096, *(1 << n for n in (16, 31, 32, 40, 62)), (1 << 63) - 1)
_UNTOUCHED = ("producer", "versions", "golden", "schedule")


@cache
def _sources() -> tuple[Plan, ...]:
    files = {path: path.read_bytes() for path in sorted(_CORPUS.glob("seed-*.plan"))}
    return tuple(parse_plan(memoryview(data), str(path)) for path, data in files.items())


def build(seed: int, number: int, _note: Callable[[bytes], object]) -> bytes:
    """Return a plan with one to three fields changed, or commands moved, dropped or repeated."""
    rng = random.Random(f"{seed} {number}")  # noqa: S311 - reproducible damage, no secrets
    while True:
        plan = rng.choice(_sources())
        for _ in range(rng.choice((1, 1, 2, 3))):
            plan = _changed_commands(plan, rng) if rng.random() < 0.25 else _changed(plan, rng)
        try:
            return encoder.encode_file(plan)
        except (PlanFormatError, ValueError):  # no file can hold it
            continue


def _changed_commands(plan: Plan, rng: random.Random) -> Plan:
    field = rng.choice([name for name in ("programs", "refits", "bodies") if getattr(plan, name)] or ["programs"])
    programs = list(getattr(plan, field))
    chosen = rng.randrange(len(programs) or 1)
    if not programs or not programs[chosen].commands:  # removed by an earlier change
        return plan
    program = programs[chosen]
    commands = list(program.commands)
    action, at = rng.randrange(5), rng.randrange(len(commands))
    if action == 0:
        del commands[at]
    elif action == 1:
        commands.insert(rng.randrange(len(commands)), commands[at])
    elif action == 2:
        commands[at] = dataclasses.replace(commands[at], stream=rng.randrange(program.stream_count + 1))
    elif action == 3:
        rng.shuffle(commands)
    else:
        commands = [_consistent(c, rng) if i == at else c for i, c in enumerate(commands)]
    programs[chosen] = dataclasses.replace(program, commands=tuple(commands))
    changes: dict[str, Any] = {field: tuple(programs)}
    return dataclasses.replace(plan, **changes)


def _consistent(command: Any, rng: random.Random) -> Any:
    """Return a launch with one pointer moved, consistently in relocations and accesses."""
    if not isinstance(command, Launch) or not command.relocations:
        return command
    old, donor = (rng.choice(command.relocations).pointer for _ in range(2))
    step = rng.choice((-64, -8, -4, 4, 8, 64, 256))
    offset = donor.offset + (step if rng.random() < 0.7 else 0)
    new = dataclasses.replace(donor, offset=max(0, offset))

    def moved(record: Any) -> Any:
        return dataclasses.replace(record, pointer=new) if record.pointer == old else record

    changes: dict[str, Any] = {
        name: tuple(map(moved, getattr(command, name))) for name in ("relocations", "reads", "writes")
    }
    return dataclasses.replace(command, **changes)


def _changed(value: Any, rng: random.Random) -> Any:
    """Return the value with one change somewhere in it."""
    match value:
        case tuple():
            changed: Any = _changed_tuple(value, rng)
        case memoryview() | bytes():
            changed = _changed_bytes(value, rng)
        case bool():
            changed = not value
        case int():
            drawn = rng.choice((*_NUMBERS, value + 1, value + 4, value + 8, max(0, value - 1), value * 2))
            changed = rng.choice(list(type(value))) if isinstance(value, Enum) else drawn
        case str():
            changed = rng.choice((*ITEM_NBYTES, "", "i0", "i1", "o0", "w", value + "x"))
        case _:
            changed = _changed_record(value, rng) if dataclasses.is_dataclass(value) else value
    return changed


def _changed_record(value: Any, rng: random.Random) -> Any:
    fields = [field.name for field in dataclasses.fields(value) if field.init and field.name not in _UNTOUCHED]
    often = ("programs", "refits", "bodies", "kernels", "commands", "parameters", "modules")
    weights = [8 if name in often else 1 for name in fields]
    (name,) = rng.choices(fields, weights)
    return dataclasses.replace(value, **{name: _changed(getattr(value, name), rng)})


def _changed_tuple(value: tuple[Any, ...], rng: random.Random) -> tuple[Any, ...]:
    items = list(value)
    if not items:
        return value
    at, action = rng.randrange(len(items)), rng.random()
    if action < 0.08:
        del items[at]
    elif action < 0.16:
        items.append(items[at])
    elif action < 0.2:
        items.reverse()
    else:
        items[at] = _changed(items[at], rng)
    return tuple(items)


def _changed_bytes(value: memoryview | bytes, rng: random.Random) -> memoryview | bytes:
    data = bytearray(value)
    if data:
        at = rng.randrange(len(data))
        data[at] = rng.choice((0, 1, 2, 8, 127, 128, 255, data[at] ^ 1 << rng.randrange(8)))
    return memoryview(bytes(data)) if isinstance(value, memoryview) else bytes(data)


if __name__ == "__main__":
    _sources()
    sys.exit(main(Fuzzer(name="plans", build=build, judge=judge, start=guarded.install, excuse=excuse)))
