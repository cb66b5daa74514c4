"""A capture process in which Inductor tiles equal kernels differently each time, by random times."""

import os
import random
import sys
from typing import TYPE_CHECKING
from unittest.mock import patch

import drawn_times

from nimblec.cuda import worker

if TYPE_CHECKING:
    import pytest


def begin(patched: "pytest.MonkeyPatch") -> None:
    """Have compilations for a GPU start this process, in which Inductor compiles without workers."""
    patched.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    drawn_times.begin(patched, "restless_times")


def _main() -> int:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    with patch.object(CachingAutotuner, "bench", lambda *_, **__: random.random()):  # noqa: S311 - milliseconds
        return worker.main(sys.argv[1], int(sys.argv[2]))


if __name__ == "__main__":
    status = _main()
    sys.stdout.flush()
    os._exit(status)  # as the worker itself does
