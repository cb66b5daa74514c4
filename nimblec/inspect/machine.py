"""What `nimblec check-device` reports, and `nimblec inspect` of a fat plan."""

import os
from typing import Any, TypeAlias

from nimblec.inspect.inspection import device_of
from nimblert import fitting
from nimblert.arrays.layouts import numpy_dtype
from nimblert.cpu.onnx_session import check_origin
from nimblert.cuda.driver import call
from nimblert.errors import CudaError, DeviceMismatchError
from nimblert.plan import Plan, Target, parts

Json: TypeAlias = dict[str, Any]


def examine(plan: Plan, path: str, *, ordinal: int = 0) -> Json:
    """Return the parts of a fat plan, or the plan as the only one, each with what this machine lacks for it.

    ``runs`` is whether the plan can be loaded here, ``choice`` which part of a fat plan that takes, and why.
    """
    if plan.target is not Target.FAT:
        part = _part(plan, ordinal)
        return {"runs": not part["lacks"], "choice": None, "shared_nbytes": 0, "parts": [part]}
    found = [_part(parts.read(plan, index, path), ordinal) for index in range(len(plan.parts))]
    try:
        index, choice = fitting.choose(plan, ordinal=ordinal)
        runs = not found[index]["lacks"]
    except DeviceMismatchError as exc:
        runs, choice = False, str(exc)
    return {"runs": runs, "choice": choice, "shared_nbytes": plan.weights_nbytes, "parts": found}


def _part(plan: Plan, ordinal: int) -> Json:
    return {
        "target": plan.target.name.lower(),
        "device": device_of(plan),
        "for": parts.describe(plan.target, plan.device),
        "file_nbytes": len(plan.stored()),
        "lacks": _all_lacks(plan, ordinal),
    }


def _all_lacks(plan: Plan, ordinal: int) -> list[str]:
    """Return all that this machine lacks for a plan, a sentence each, without loading it."""
    found = [fitting.lacks(plan.target, plan.device, ordinal)]
    if not found[0]:
        try:
            found.append(_lacking_memory(plan, ordinal))
            if plan.target is Target.CPU:
                for origin in dict.fromkeys(module.origin for module in plan.modules):
                    check_origin(origin)
        except (DeviceMismatchError, CudaError) as exc:
            found.append(str(exc))
    for dtype in dict.fromkeys(t.dtype for program in plan.programs for t in (*program.inputs, *program.outputs)):
        try:
            numpy_dtype(dtype)
        except DeviceMismatchError as exc:
            found.append(str(exc))
    return [sentence for sentence in found if sentence]


def _lacking_memory(plan: Plan, ordinal: int) -> str:
    """Return a sentence where weights, state and the largest program need more memory than there is at all."""
    passed = max((sum((*program.input_nbytes, *program.output_nbytes)) for program in plan.programs), default=0)
    needed = plan.weights_nbytes + plan.state_nbytes + plan.arena_nbytes + passed
    if plan.target is Target.CUDA:
        have = int(call("cuDeviceTotalMem", call("cuDeviceGet", ordinal)))
    else:
        have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"the plan needs {needed} bytes of memory, and there are {have}" if needed > have else ""
