"""Triton's initialisation, once in a process, in the background; and the assembler that all its kernels get."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache

_ASSEMBLER = "TRITON_PTXAS_PATH"


def choose_assembler() -> None:
    """Have this process, and those that it starts, assemble all kernels with Triton's own ptxas.

    Otherwise Inductor names PyTorch's, where there is one, once it has compiled a kernel in this process, but not where
    it has found all in its cache: a second compilation would give other code. A ptxas that the user names stays.
    """
    if _ASSEMBLER in os.environ:
        return
    with suppress(ImportError, RuntimeError):  # no Triton, or one without a ptxas
        from triton import knobs

        os.environ[_ASSEMBLER] = knobs.nvidia.ptxas.path


@cache
def begin() -> None:
    """Begin it, once; a caller that needs a result earlier computes it itself, and sees its errors.

    It computes the digest of all of Triton, hundreds of megabytes, which is part of every key of its cache and of
    Inductor's, and loads its driver, which a C compiler builds once on a machine: about a second each. CUDA must
    have been initialised.
    """
    try:
        from triton.runtime import driver
        from triton.runtime.cache import triton_key
    except ImportError:
        return

    def make() -> None:
        triton_key()
        driver.active.get_current_target()

    ThreadPoolExecutor(1).submit(make)
