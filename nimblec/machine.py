"""What this machine is called."""

import os
import platform
from pathlib import Path


def processor() -> str:
    """The CPU's name and its number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{(*names, platform.machine())[0]} x {os.cpu_count()}"
