"""The errors that nimblert raises.

A message reads ``path: what was found, what was expected; what to do next``, in lower case.
"""

from collections.abc import Sequence


class NimbleError(Exception):
    """Root of every error of nimblec and nimblert."""


_LONGEST = 500
"""Characters of one sentence about a plan."""


class PlanError(NimbleError, ValueError):
    """A plan file that cannot be used."""


class PlanFormatError(PlanError):
    """The bytes are not a plan, or a damaged one."""


class PlanSignatureError(PlanError):
    """The bytes of a plan file are not signed by a trusted key."""


class PlanInvalidError(PlanError):
    """The bytes decode to a plan that contradicts itself.

    ``problems`` holds one sentence for each rule that is broken, without the middle of one that is very long: names in
    a plan may be.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(p if len(p) <= _LONGEST else f"{p[:300]}...{p[-150:]}" for p in problems)
        super().__init__(self.problems)  # so that a pickle of it can be read

    def __str__(self) -> str:
        more = len(self.problems) - 3
        return "; ".join(self.problems[:3]) + (f"; and {more} more" if more > 0 else "")


class DeviceMismatchError(NimbleError):
    """This machine cannot run the plan: no GPU, another GPU generation, an older driver."""


class InputError(NimbleError, ValueError):
    """What a caller asked for or gave cannot be used: a name, dtype, shape, array or option, or a closed executable."""


def endless(origin: str, limit: int) -> InputError:
    """Return the error for a loop that goes beyond its limit of trips; ``origin`` is the op that it came from."""
    return InputError(
        f"{origin}: has not ended after {limit} trips, the limit that the plan was compiled with: give other "
        "inputs, or compile with a higher --trip-limit"
    )


class CudaError(NimbleError):
    """A CUDA driver call failed. ``api`` is the function, ``result`` the CUresult's name.

    After some errors, such as a failed kernel, CUDA refuses every later call of the process; the message then says so.
    """

    def __init__(self, api: str, result: str) -> None:
        self.api = api
        self.result = result
        super().__init__(api, result)  # so that a pickle of it can be read

    def __str__(self) -> str:
        next_step = ""
        if self.result == "CUDA_ERROR_OUT_OF_MEMORY":
            next_step = "; the GPU has not enough free memory: close other plans and processes that use it"
        elif self.is_final:
            next_step = "; this process can no longer use CUDA: load the plan in a new one"
        return f"{self.api}: {self.result}{next_step}"

    @property
    def is_final(self) -> bool:
        """Whether CUDA refuses every later call of the process."""
        return self.result in _FATAL


_FATAL = frozenset({
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_CONTAINED",
    "CUDA_ERROR_EXTERNAL_DEVICE",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK",
})
"""The results after which, by CUDA's documentation, the process "must be terminated and relaunched"."""
