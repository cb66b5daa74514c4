"""Peak memory of a process and its children, sampled from /proc."""

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_PERIOD_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes: ``resident`` includes mapped pages of files, ``anonymous`` only pages that no file backs.

    Both are sums over the process and its children; shared pages count several times.
    """

    resident: int
    anonymous: int


def run(command: Sequence[str], *, environment: dict[str, str], timeout_s: float) -> tuple[Peak, str]:
    """Run a command that must succeed; returns its peak and its output."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    resident = anonymous = 0
    deadline = time.monotonic() + timeout_s
    while process.poll() is None:
        assert time.monotonic() < deadline, "took too long"
        found = [use for pid in _family(process.pid) if (use := _use(pid))]
        resident = max(resident, sum(use.resident for use in found))
        anonymous = max(anonymous, sum(use.anonymous for use in found))
        time.sleep(_PERIOD_S)
    assert process.stdout is not None
    with process.stdout as stream:
        printed = stream.read()
    assert process.returncode == 0
    return Peak(resident=resident, anonymous=anonymous), printed


def current() -> Peak:
    """Return the current memory of this process."""
    use = _use(os.getpid())
    assert use is not None
    return use


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # it has ended meanwhile
        return
    for child in children:
        yield from _family(child)


def _use(pid: int) -> Peak | None:
    """Return the current memory of a process; None if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
    if "VmRSS" not in fields:
        return None
    return Peak(resident=_nbytes(fields["VmRSS"]), anonymous=_nbytes(fields["RssAnon"]))


def _nbytes(text: str) -> int:
    number, unit = text.split()
    assert unit == "kB"
    return int(number) << 10
