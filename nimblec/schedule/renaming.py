"""Replace the buffers of a task."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from nimblec.base.ir import Access, CopyWork, FillWork, KernelWork, Task, Work


def renamed(task: Task, name: Callable[[int], int]) -> Task:
    """A task that uses the buffer ``name(b)`` wherever it used ``b``."""
    return replace(
        task,
        work=_work(task.work, name),
        reads=_accesses(task.reads, name),
        writes=_accesses(task.writes, name),
    )


def _accesses(accesses: Sequence[Access], name: Callable[[int], int]) -> tuple[Access, ...]:
    return tuple(_access(access, name) for access in accesses)


def _access(access: Access, name: Callable[[int], int]) -> Access:
    return replace(access, buffer=name(access.buffer))


def _work(work: Work, name: Callable[[int], int]) -> Work:
    match work:
        case KernelWork():
            return replace(work, references=tuple(replace(r, buffer=name(r.buffer)) for r in work.references))
        case CopyWork():
            return replace(work, dst=_access(work.dst, name), src=_access(work.src, name))
        case FillWork():
            return replace(work, dst=_access(work.dst, name))
