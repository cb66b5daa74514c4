"""Whether this machine can run a plan, and which part of a fat plan it runs."""

from nimblert.errors import CudaError, DeviceMismatchError, InputError, PlanInvalidError
from nimblert.plan import Device, Plan, Target, parts


def choose(fat: Plan, target: str | None = None, ordinal: int = 0) -> tuple[int, str]:
    """Return the index of the first part that this machine can run, and why it is that one.

    Parts for GPUs come before those for the CPU. ``target`` excludes parts of other targets, and another ``ordinal``
    than 0 those for the CPU. Raises DeviceMismatchError where no part is left, PlanInvalidError where there are none.
    """
    if not 0 < len(fat.parts) <= parts.MOST_PARTS:
        raise PlanInvalidError([f"parts: {len(fat.parts)}, expected 1 to {parts.MOST_PARTS}"])
    refused: list[str] = []
    for index in sorted(range(len(fat.parts)), key=lambda i: fat.parts[i].target is Target.CPU):
        part = fat.parts[index]
        if is_excluded(part.target, target) or (ordinal and part.target is Target.CPU):
            continue
        named = f"part {index + 1} of {len(fat.parts)}, for {parts.describe(part.target, part.device)}"
        if not (why := lacks(part.target, part.device, ordinal)):
            return index, "; ".join((f"{named}, runs here", *refused))
        refused.append(f"{named}, does not: {why}")
    held = "; ".join(refused) or f"none is for {target or 'GPUs'}"
    raise DeviceMismatchError(f"no part of the fat plan runs here: {held}")


def is_excluded(found: Target, wanted: str | None) -> bool:
    """Return whether ``wanted``, "cuda" or "cpu" or None, is another target. Raises InputError for other words."""
    known = [target.name.lower() for target in (Target.CUDA, Target.CPU)]
    if wanted is not None and wanted not in known:
        raise InputError(f"target: got {wanted!r:.100}, expected one of {known}")
    return wanted not in {None, found.name.lower()}


def lacks(target: Target, device: Device, ordinal: int = 0) -> str:
    """Return why this machine runs no plan for a target and device, "" where it does; no context is made for that."""
    try:
        if target is Target.CUDA:
            from nimblert.cuda import driver

            driver.initialise()
            driver.check_device(device, driver.describe(ordinal))
        else:
            from nimblert.cpu import onnx_session

            onnx_session.onnxruntime()
    except (DeviceMismatchError, CudaError) as exc:
        return str(exc)
    return ""
