"""Selectors of tilings for tests, with a fake clock and no compiler."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nimblec.kernels.compiling import Job
from nimblec.kernels.gpu import SM_90
from nimblec.kernels.selector import Family, Selector


class Pool:
    """A pool whose copies of weights are zeros."""

    def take(self, like: Tensor) -> Tensor:
        """Return a copy."""
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).zero_()


def selector(
    family: Family[Any, Any], clock: Callable[[int], float], **how: Any
) -> tuple[Selector[Any, Any], list[Job]]:
    """Return a selector whose n-th measurement takes ``clock(n)``, and the jobs that it has compiled."""
    jobs: list[Job] = []
    timed: list[int] = []

    def timer(call: Callable[[int], object]) -> float:
        call(0)
        call(1)
        timed.append(len(timed))
        return clock(timed[-1])

    return Selector(family, SM_90, timer, Pool(), length=2, compile_jobs=jobs.extend, **how), jobs
