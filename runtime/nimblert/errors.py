"""Everything that nimblert raises on purpose.

A message reads ``path: what was found, what was expected; what to do next``, in lower case.
"""

from collections.abc import Sequence


class NimbleError(Exception):
    """Root of every error of nimblec and nimblert."""


class PlanError(NimbleError, ValueError):
    """A plan file that cannot be used."""


class PlanFormatError(PlanError):
    """The bytes are not a plan, or a damaged one."""


class PlanInvalidError(PlanError):
    """The bytes decode to a plan that contradicts itself.

    ``problems`` holds one sentence for each rule that is broken.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        shown = "; ".join(self.problems[:3])
        more = len(self.problems) - 3
        super().__init__(shown + (f"; and {more} more" if more > 0 else ""))


class DeviceMismatchError(NimbleError):
    """This machine cannot run the plan: no GPU, another GPU generation, an older driver."""


class InputError(NimbleError, ValueError):
    """A tensor given to an executable has the wrong name, dtype or shape."""


class CudaError(NimbleError):
    """A CUDA driver call failed. ``api`` is the function, ``result`` the CUresult's name."""

    def __init__(self, api: str, result: str) -> None:
        self.api = api
        self.result = result
        super().__init__(f"{api}: {result}")
