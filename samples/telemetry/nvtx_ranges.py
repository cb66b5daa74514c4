"""Mark each call of a plan as an NVTX range, for Nsight Systems.

Copy this file beside your program, install nvtx (`pip install nvtx`), and write:

>>> nimblert.observe(nvtx_range)
"""

from contextlib import AbstractContextManager

import nvtx

from nimblert import ObservedCall


def nvtx_range(call: ObservedCall) -> AbstractContextManager[object]:
    """Return a range of the domain "nimblert", named after the program, or the entry of a call without one."""
    name = call.entry if call.program is None else call.program.name
    found: AbstractContextManager[object] = nvtx.annotate(f"run {name}", domain="nimblert")
    return found
