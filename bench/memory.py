"""Resources of this process: host memory, threads and files from /proc, device memory from the driver."""

from pathlib import Path

from nimblert.cuda import driver
from nimblert.plan import Plan, Target

Held = dict[str, int]

SLACK_NBYTES = 4 << 20
"""Growth that an allocator may show without a leak."""


def held(plan: Plan, device: int = 0) -> Held:
    """Return bytes ("anonymous", "device") and counts ("threads", "files"); device memory is all processes'."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    found = {
        "anonymous": int(fields["RssAnon"][0]) << 10,
        "threads": int(fields["Threads"][0]),
        "files": len(list(Path("/proc/self/fd").iterdir())),
    }
    if plan.target is Target.CUDA:
        context = driver.Context(device)
        free, total = driver.call("cuMemGetInfo")
        context.close()
        found["device"] = total - free
    return found


def grown(before: Held, after: Held) -> Held:
    """Return the growth of each."""
    return {name: after[name] - before[name] for name in before}
