"""Triton's initialisation, once in a process, in the background."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache


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
