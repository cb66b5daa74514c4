"""Read plan files, and check what they hold."""

import copyreg
from collections.abc import Callable

from nimblert.check import verify
from nimblert.plan import Plan, container
from nimblert.plan.container import Source
from nimblert.plan.limits import DEFAULT_LIMITS, Limits


def read_plan(
    source: Source, *, check_digest: bool = True, copy: bool = False, limits: Limits = DEFAULT_LIMITS
) -> Plan:
    """Return the plan in a file, or in the bytes of one, checked against ``limits``; see `open_image` for ``copy``.

    Raises PlanError where there is no such file; PlanFormatError where it is not a plan, truncated, altered (noticed
    only with ``check_digest``) or damaged; PlanInvalidError where the plan contradicts itself; and InputError where
    ``source`` is neither a path nor bytes.
    """
    image = container.open_image(source, copy=copy)
    if check_digest:
        container.verify_digest(image, container.name(source))
    return parse_plan(image, container.name(source), limits)


def parse_plan(image: memoryview, path: str, limits: Limits = DEFAULT_LIMITS) -> Plan:
    """Return the plan in a file's bytes, checked by `verify.check`; ``path`` is for messages."""
    plan = container.decoded(image, path)
    verify.check(plan, limits)
    return plan


def _reduced(plan: Plan) -> tuple[Callable[[bytes], Plan], tuple[bytes]]:
    """Return what pickle and copy make a plan of: its file."""
    return read_plan, (bytes(plan.stored()),)


copyreg.pickle(Plan, _reduced)
