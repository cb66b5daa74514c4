"""Triton's initialisation, once in a process, in the background; the assembler and the cache of all its kernels."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache


def choose_assembler_and_cache() -> None:
    """Have this process, and those that it starts, assemble all kernels with Triton's own ptxas, into Triton's cache.

    Otherwise Inductor names PyTorch's ptxas, where there is one, once it has compiled a kernel in this process, but not
    where it has found all in its cache: a second compilation would give other code. It also names a cache of its own
    then, where kernels that were compiled before are not found. What the user names stays.
    """
    with suppress(ImportError, RuntimeError):  # no Triton, or one without a ptxas
        from triton import knobs

        os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
        os.environ.setdefault("TRITON_PTXAS_PATH", knobs.nvidia.ptxas.path)


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
