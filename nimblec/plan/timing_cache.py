"""A cache of measured times, so that compiling the same model again measures nothing.

One JSON file maps keys to nanoseconds. A key is the SHA-256 of what a time depends on and a second compilation finds
again: device, code and launch for a command, what runs when and where for a run. A time that is known stays as it is,
since decisions were taken by it. So a second compilation on the same machine makes the same ones. Noisy times are not
kept.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from statistics import median_low

from nimblec.base.gpu_lock import lock
from nimblec.plan import ownership
from nimblec.plan.planning import Measured, Timer
from nimblert.errors import NimbleError
from nimblert.plan import (
    Crop,
    Device,
    Kernel,
    Launch,
    Memcpy,
    Memset,
    Plan,
    Pointer,
    Program,
    Record,
    Switch,
    Wait,
    While,
    Work,
)
from nimblert.plan.files import destination, replacing
from nimblert.plan.pieces import bodies_of, reads, writes

_LONGEST_NS = 24 * 3600 * 10**9
"""No command takes a day."""

_LARGEST_NUMBER_NBYTES = 8
"""A larger parameter is a struct."""


class TimingCache:
    """The times in one file, or of this process alone (None).

    A damaged file only costs new measurements, and is reported in ``notes``. A file that never was one of JSON is
    somebody's, and left alone.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._new: dict[str, int] = {}
        self._notes: dict[str, None] = {}  # in order, each once
        self._known = (None if path is None else self._read(path)) or {}

    def __getitem__(self, key: str) -> int:
        return self._known[key]

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __setitem__(self, key: str, duration_ns: int) -> None:
        self._known[key] = self._new[key] = duration_ns

    @property
    def notes(self) -> tuple[str, ...]:
        """Problems of the file, for the user."""
        return tuple(self._notes)

    def save(self) -> None:
        """Add new times to the file; those that another process has written there meanwhile stay."""
        if not self._new or self._path is None:
            return
        try:
            ownership.make_folder(self._path.parent)
            with _alone(destination(self._path).parent):
                known = self._read(self._path)
                if known is not None:
                    with replacing(self._path) as file:
                        file.write(json.dumps(self._new | known, sort_keys=True).encode())
                        os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & ~0o022)
        except (NimbleError, OSError) as exc:
            reason = getattr(exc, "strerror", None) or str(exc).removeprefix(f"{self._path}: ")
            self._note(f"not kept, and will be measured again: {reason}")

    def _read(self, path: Path) -> dict[str, int] | None:
        """Return the plausible times in the file; None where it is somebody's, or others may write it."""
        try:
            if path.exists() and not path.is_file():
                self._note("is not a regular file, and is left alone")
                return {}
            path = Path(os.path.realpath(path))
            unsafe = ownership.problem(path.parent) or ownership.problem(path)
            content = b"" if unsafe else path.read_bytes().lstrip()
            if unsafe or (content and not content.startswith((b"{", b"["))):
                foreign = "is no timing cache, and is left alone: name another file"
                self._note(f"not used: {unsafe}" if unsafe else foreign)
                return None
            found = json.loads(content.decode() or "{}")
        except FileNotFoundError:
            return {}
        except OSError as exc:
            self._note(f"cannot be read: {exc.strerror}")
            return {}
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            self._note("is damaged, and is replaced")
            return {}
        times = {key: time for key, time in found.items() if type(time) is int and 0 <= time <= _LONGEST_NS}
        if len(times) < len(found):
            self._note(f"held {len(found) - len(times)} entries that are no times, which are replaced")
        return times

    def _note(self, problem: str) -> None:
        self._notes[f"timing cache {self._path}: {problem}"] = None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, so that no other process adds times to a file there meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)


class CachedTimer:
    """A timer that asks another one only for times that the cache lacks."""

    def __init__(self, timer: Timer, cache: TimingCache, device: Device) -> None:
        self.max_streams, self.least_gain = timer.max_streams, timer.least_gain
        self._timer = timer
        self._cache = cache
        self._device = repr(device)
        self._code: dict[int, str] = {}

    def command_durations(self, plan: Plan) -> Measured[Sequence[int]]:
        """Return the time of each command; identical launches are measured once."""
        keys = self._command_keys(plan)
        known = {key: self._cache[key] for key in keys if key in self._cache}
        is_noisy = False
        if len(known) < len(set(keys)):
            ns, is_noisy = self._timer.command_durations(plan)
            measured = defaultdict(list)
            for key, duration in zip(keys, ns, strict=True):
                if key not in known:
                    measured[key].append(duration)
            for key, durations in measured.items():
                known[key] = self._kept(key, Measured(median_low(durations), is_noisy)).ns
        return Measured([known[key] for key in keys], is_noisy)

    def duration(self, plan: Plan) -> Measured[int]:
        """Return the time of one run."""
        key = self._key("run", *self._steps(plan), plan.programs[0].arena_nbytes)
        return Measured(self._cache[key]) if key in self._cache else self._kept(key, self._timer.duration(plan))

    def _kept(self, key: str, measured: Measured[int]) -> Measured[int]:
        """Keep a time unless it is noisy."""
        if not measured.is_noisy:
            self._cache[key] = measured.ns
        return measured

    def _steps(self, plan: Plan) -> Iterator[tuple[object, ...]]:
        """Yield the work, stream and addresses of each command, or its event."""
        keys = iter(self._command_keys(plan))
        for command in plan.programs[0].commands:
            if isinstance(command, Record | Wait):
                yield type(command).__name__, command.stream, command.event
            else:
                early = isinstance(command, Launch) and command.programmatic
                yield next(keys), command.stream, early, *_pointers(command)

    def _command_keys(self, plan: Plan) -> list[str]:
        for index, module in enumerate(plan.modules):
            if index not in self._code:
                self._code[index] = sha256(module.code).hexdigest()
        return self._keys(plan, plan.programs[0])

    def _keys(self, plan: Plan, program: Program) -> list[str]:
        return [self._key(*self._describe(plan, work)) for _, work in program.work]

    def _describe(self, plan: Plan, command: Work) -> tuple[object, ...]:
        if isinstance(command, Memcpy):
            return "Memcpy", command.nbytes
        if isinstance(command, Memset):
            return "Memset", command.element_nbytes, command.count
        if isinstance(command, Crop):
            return "Crop", command.rank
        if isinstance(command, While | Switch):
            return type(command).__name__, *(self._keys(plan, plan.bodies[n]) for n in bodies_of(command))
        kernel = plan.kernels[command.kernel]
        launch = (command.grid, command.block, command.cluster, command.dynamic_smem_nbytes, command.cooperative)
        sizes = tuple(access.nbytes for access in (*command.reads, *command.writes))
        return (self._code[kernel.module], kernel.symbol, *launch, *_numbers(kernel, command.params), sizes)

    def _key(self, *parts: object) -> str:
        return sha256(repr((self._device, parts)).encode()).hexdigest()


def _numbers(kernel: Kernel, params: bytes) -> Iterator[bytes]:
    """Yield the parameters that are plain numbers.

    Structs are left out: their padding, and array entries that no kernel reads, hold what was on the host's stack.
    Code, grid and sizes of memory tell the launches apart.
    """
    for parameter in kernel.parameters:
        if parameter.nbytes <= _LARGEST_NUMBER_NBYTES:
            yield params[parameter.offset : parameter.offset + parameter.nbytes]


def _pointers(command: Work) -> Iterator[tuple[object, ...]]:
    """Yield the memory addresses that a command is given, as numbers."""
    if isinstance(command, Launch):
        for relocation in command.relocations:
            yield relocation.param_offset, *_place(relocation.pointer)
    else:
        yield from (_place(access.pointer) for access in (*writes(command), *reads(command)))


def _place(pointer: Pointer) -> tuple[int, int, int]:
    return pointer.region.value, pointer.index, pointer.offset
