"""What `nimblec check-device` reports, and `nimblec inspect` of a fat plan."""

from typing import Any, TypeAlias

from nimblec.inspect.inspection import device_of
from nimblert import fitting
from nimblert.errors import DeviceMismatchError
from nimblert.plan import Plan, Target, parts

Json: TypeAlias = dict[str, Any]


def examine(plan: Plan, path: str, *, ordinal: int = 0) -> Json:
    """Return the parts of a fat plan, or the plan as the only one, each with what this machine lacks for it.

    ``runs`` is whether the plan can be loaded here, ``choice`` which part of a fat plan that takes, and why.
    """
    if plan.target is not Target.FAT:
        lacks = fitting.all_lacks(plan, ordinal)
        return {"runs": not lacks, "choice": None, "shared_nbytes": 0, "parts": [_part(plan, lacks)]}
    found = []
    for index in range(len(plan.parts)):
        part = parts.read(plan, index, path)
        found.append(_part(part, fitting.all_lacks(part, ordinal)))
    try:
        index, choice = fitting.choose(plan, ordinal=ordinal)
        runs = not found[index]["lacks"]
    except DeviceMismatchError as exc:
        runs, choice = False, str(exc)
    return {"runs": runs, "choice": choice, "shared_nbytes": plan.weights_nbytes, "parts": found}


def _part(plan: Plan, lacks: list[str]) -> Json:
    return {
        "target": plan.target.name.lower(),
        "device": device_of(plan),
        "for": parts.describe(plan.target, plan.device),
        "file_nbytes": len(plan.stored()),
        "lacks": lacks,
    }
