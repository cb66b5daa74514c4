"""Read the parts of a fat plan: plans for several targets, whose equal weights the fat plan holds once."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from nimblert.errors import PlanFormatError
from nimblert.plan import Device, Plan, Target, Weight
from nimblert.plan.container import check_frame, decoded
from nimblert.plan.records import DEFAULT_LIMITS, Limits

MOST_PARTS = 256
"""Each of which is asked about, and named, when none fits."""


def describe(target: Target, device: Device) -> str:
    """Return what a plan runs on, in words."""
    if target is Target.CPU:
        return "the CPU"
    return "compute capability {}.{} ({})".format(*device.compute_capability, device.name)


def name(path: str, index: int) -> str:
    """Return the name of a part in messages; ``path`` is that of the fat plan."""
    return f"{path}, part {index + 1}"


def read(fat: Plan, index: int, path: str, limits: Limits = DEFAULT_LIMITS) -> Plan:
    """Return a part, still without its shared weights; neither its digest nor its rules are checked.

    Raises PlanFormatError where the bytes are not a plan, or one of another target or device than the fat plan says.
    """
    part, named = fat.parts[index], name(path, index)
    check_frame(part.file, named)
    plan = decoded(part.file, named, limits)
    if plan.target is Target.FAT:
        raise PlanFormatError(f"{named}: is a fat plan itself, expected a plan for one target")
    if (plan.target, plan.device) != (part.target, part.device):
        found, expected = describe(plan.target, plan.device), describe(part.target, part.device)
        raise PlanFormatError(f"{named}: is a plan for {found}, expected {expected}, and the same device")
    return plan


def filled(part: Plan, fat: Plan) -> Plan:
    """Return a part with its shared weights, which are slices of the fat plan's file, compared with their digests.

    Raises PlanFormatError where the fat plan lacks one, or it was altered.
    """
    shared = {weight.name: weight.data for weight in fat.weights}
    return replace(part, weights=tuple(_filled(weight, shared) for weight in part.weights))


def _filled(weight: Weight, shared: Mapping[str, memoryview]) -> Weight:
    if not weight.sha256:
        return weight
    data = shared.get(weight.sha256.hex())
    if data is None or hashlib.sha256(data).digest() != weight.sha256:
        raise PlanFormatError(f"weight {weight.name!r}: the fat plan does not hold it, or it was altered")
    return replace(weight, data=data, sha256=b"")
