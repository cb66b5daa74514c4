"""Loading a plan in several processes at the same time."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nimblert.calls.entries import Entries
from nimblert.errors import DeviceLostError, DeviceMismatchError, InputError, PlanError, raised_by_handler
from nimblert.executable import checked
from nimblert.files import container
from nimblert.limits import Limits, is_integer
from nimblert.plan import Plan, Target
from nimblert.pool import keeps_state, ordinals
from nimblert.processes.channel import READY, Memory, opened
from nimblert.processes.layout import Layouts
from nimblert.processes.pool import ProcessPool
from nimblert.processes.process import Process, end


def load(
    plan: Plan | container.Source,
    devices: Sequence[int] | None,
    *,
    contexts: int,
    program: str | None,
    copy: bool,
    limits: Limits,
    **options: bool,
) -> ProcessPool:
    """As `nimblert.load_pool` with processes. ``options`` are further ones of `load`."""
    if not is_integer(contexts) or contexts < 1:
        raise InputError(f"contexts: got {contexts!r}, expected a number of at least 1")
    image = container.open_image(container.image_of(plan) if isinstance(plan, Plan) else plan, copy=copy)
    path = "plan" if isinstance(plan, Plan) else container.name(plan)
    container.verify_digest(image, path)
    selected = checked(container.decoded(image, path), program, limits)
    if keeps_state(selected):
        raise InputError("the plan has state, which is each context's own: load it without processes=True")
    layouts = Layouts(Entries(selected))
    found = [0] if selected.target is Target.CPU and devices is None else list(ordinals(devices))
    with ExitStack() as stack:
        weights = Memory()
        stack.callback(weights.close)
        given = {
            **{name: bool(value) for name, value in options.items()},
            "program": program,
            "copy": bool(copy),
            "limits": asdict(limits),
            "weights": weights.file,
        }
        with _file(plan, image) as (given["plan"], files):
            processes = _started(found, contexts, given, (weights.file, *files), skip=devices is None)
        stack.callback(end, processes)
        pool = ProcessPool(selected, layouts, processes, weights)
        stack.pop_all()
    return pool


@contextmanager
def _file(plan: Plan | container.Source, image: memoryview) -> Iterator[tuple[str, Sequence[int]]]:
    """The path of the plan's file for other processes, and the files that are to be open in them.

    Raises PlanError where the file is no longer the one of this ``image``, InputError as `Memory` does.
    """
    given = plan if isinstance(plan, str | os.PathLike) else None
    shared = Memory() if given is None else Memory(_opened(given))
    path = f"/proc/self/fd/{shared.file}"
    try:
        if given is None:
            Path(path).write_bytes(image)
        elif container.recorded_digest(container.open_image(path)) != container.recorded_digest(image):
            raise PlanError(f"{os.fsdecode(given)}: was replaced while it was loaded: load it again")
        yield path, (shared.file,)
    finally:
        shared.close()


def _opened(path: str | os.PathLike[str]) -> int:
    try:
        file: int = opened(os.open, path, os.O_RDONLY)
    except OSError as exc:
        if raised_by_handler(exc):
            raise
        raise PlanError(f"{os.fsdecode(path)}: cannot be read: {exc.strerror}") from exc
    return file


def _started(
    devices: Sequence[int], contexts: int, options: Mapping[str, Any], files: Sequence[int], *, skip: bool
) -> list[Process]:
    """Processes that have loaded the plan; with ``skip`` without those whose devices cannot run it, if some can."""
    with ExitStack() as stack:
        started: list[Process] = []
        stack.callback(end, started)
        for device in devices:
            started.append(Process(device, contexts, options, files))  # noqa: PERF401 - all that started end on an error
        refused: list[tuple[Process, DeviceMismatchError]] = []
        for process in started:
            try:
                process.answer(READY)
            except DeviceMismatchError as exc:
                refused.append((process, exc))
            except DeviceLostError as exc:
                raise DeviceLostError(f"{exc} while it loaded the plan") from None
        if refused and (not skip or len(refused) == len(started)):
            raise refused[0][1]
        end([process for process, _ in refused])
        stack.pop_all()
    unusable = {id(process) for process, _ in refused}
    return [process for process in started if id(process) not in unusable]
