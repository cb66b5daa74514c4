"""All processes that a command has started, even in other sessions or reparented. Linux only (/proc).

Inside `adopting`, all processes that this one has started stay its descendants. A process belongs to a tree if its
environment holds the tree's token (a child inherits it, and keeps it when its parent ends), or if its parent belongs to
the tree. Neither is true of a process that cleared its environment and whose parent has ended: `stop` finds it, as a
descendant of this process, `Tree.end` does not.
"""

import asyncio
import ctypes
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_VARIABLE = "NIMBLEC_BENCH_TREE"
_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h
_ENDED = "ZX"
_STOPPED = "tT"
_LONGEST_STOP_S = 5.0
"""A process stops or ends when it returns from a system call; those of the GPU's driver may take a while."""
_PAUSE_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    parent: int
    state: str
    """One letter, see proc_pid_stat(5)."""


@contextmanager
def adopting() -> Iterator[None]:
    """Adopt the descendants of this process whose parent ends, in place of init."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = ctypes.c_int()
    if prctl(_GET_CHILD_SUBREAPER, ctypes.byref(before)) or prctl(_SET_CHILD_SUBREAPER, 1):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        prctl(_SET_CHILD_SUBREAPER, before.value)


class Tree:
    """The processes started with this tree's `environment`, and their descendants."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the environment of the first process."""
        return {_VARIABLE: self._token}

    def members(self) -> set[int]:
        """Return the ids of the processes that have not ended."""
        found = _processes()
        return self.among(_below(found), found)

    def among(self, pids: set[int], found: dict[int, _Process]) -> set[int]:
        """Return the members of ``pids`` that belong to this tree."""
        return _with_children({pid for pid in pids if _has_token(pid, self._token)}, found)

    async def end(self) -> None:
        """Kill all of them, and those that they start meanwhile; returns when they have ended."""
        _signal_all(self.members, signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_STOP_S):
                while self.members():  # noqa: ASYNC110  # no event for the end of a grandchild
                    await asyncio.sleep(_PAUSE_S)


def stop(spared: Tree) -> set[int]:
    """Stop all descendants of this process except one tree; returns their ids once they have stopped."""

    def others() -> set[int]:
        found = _processes()
        below = _below(found)
        return below - spared.among(below, found)

    stopped = _signal_all(others, signal.SIGSTOP)
    _wait_until_still(stopped)
    return stopped


def resume(stopped: set[int]) -> None:
    """Resume stopped processes; some may have ended."""
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _signal_all(members: Callable[[], set[int]], number: signal.Signals) -> set[int]:
    """Signal all members, until there are no new ones."""
    signalled: set[int] = set()
    while new := members() - signalled:
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        signalled |= new
    return signalled


def _wait_until_still(pids: set[int]) -> None:
    end = time.monotonic() + _LONGEST_STOP_S
    while time.monotonic() < end:
        found = _processes()
        if all(found[pid].state in _STOPPED for pid in pids & found.keys()):
            return
        time.sleep(_PAUSE_S)


def _processes() -> dict[int, _Process]:
    """Return all processes that have not ended, by id."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  # no Path for each of a thousand
        if name.isdecimal():
            with suppress(FileNotFoundError, ProcessLookupError):
                state, parent = Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                found[int(name)] = _Process(parent=int(parent), state=state)
    return {pid: process for pid, process in found.items() if process.state not in _ENDED}


def _below(found: dict[int, _Process]) -> set[int]:
    """Return the descendants of this process."""
    return _with_children({os.getpid()}, found) - {os.getpid()}


def _has_token(pid: int, token: str) -> bool:
    try:
        return f"{_VARIABLE}={token}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        # The process has ended, or belongs to another user.
        return False


def _with_children(first: set[int], found: dict[int, _Process]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, process in found.items():
        children.setdefault(process.parent, []).append(pid)
    members, waiting = set(first), list(first)
    while waiting:
        new = [pid for pid in children.get(waiting.pop(), ()) if pid not in members]
        members.update(new)
        waiting += new
    return members
