"""The processors of this machine: their name, and how many of them this process may use."""

import os
import platform
from pathlib import Path


def processor() -> str:
    """The CPU's name and the number of usable processors: the machine that measured times are for."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{(*names, platform.machine())[0]} x {processor_count()}"


def processor_count() -> int:
    """How many processors this process may use: a container or `taskset` allows some of them."""
    return len(os.sched_getaffinity(0))
