"""A capture process without measured times, so that two compilations of a model make the same choices.

Our times follow from their keys in the timing cache, torch's times of tilings of its fused kernels from the tiling. -O2
has one variant, the one with the most Triton kernels.
"""

import os
import sys
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from nimblec.base.installation import module_command
from nimblec.cuda import compile as compiling
from nimblec.cuda import worker
from nimblec.optimize import variants
from nimblec.optimize.pipeline import Runs, Setting
from nimblec.optimize.variants import Variant
from nimblec.plan.timing_cache import TimingCache
from nimblec.pytorch.flat import device_of

if TYPE_CHECKING:
    import pytest
    import torch

    from nimblec.optimize.pipeline import Report
    from nimblec.pytorch.model import TorchModel


class DrawnTimes(TimingCache):
    """A cache with a time for every key; keys are digests."""

    def __contains__(self, key: str) -> bool:
        return True

    def __getitem__(self, key: str) -> int:
        return 1 + int(key[:4], 16)


def begin(patched: "pytest.MonkeyPatch", process: str = "drawn_times") -> None:
    """Have compilations for a GPU start this process, or that of another module of this folder."""
    paths = str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")
    patched.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")  # they hold tilings that were measured
    patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    patched.setattr(compiling, "module_command", lambda _, *arguments: module_command(process, *arguments))


def _most_kernels(
    model: "TorchModel", dtype: "torch.dtype | None", times: TimingCache, report: "Report | None", *, fp8: bool
) -> Iterator[Variant]:
    from nimblec.optimize import o2  # brings in the kernels

    runs = Runs(model, Setting(device=device_of(model), dtype=dtype, use=o2.fastest(times), fp8=fp8), report)
    yield Variant(name="Triton kernels", make=partial(runs, *o2.TRITON))


def _drawn(_: object, launcher: Any, *arguments: object, **options: object) -> float:
    """Draw the milliseconds of a kernel of torch's."""
    del arguments, options
    return 1.0 + zlib.crc32(str(launcher.config).encode())


def _main() -> int:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    with (
        patch.object(worker, "TimingCache", DrawnTimes),
        patch.object(variants, "_of_level_2", _most_kernels),
        patch.object(CachingAutotuner, "bench", _drawn),
    ):
        return worker.main(sys.argv[1], int(sys.argv[2]))


if __name__ == "__main__":
    status = _main()
    sys.stdout.flush()
    os._exit(status)  # as the worker itself does
