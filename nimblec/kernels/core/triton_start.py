"""What Triton does once in a process before its first kernel, done beside other work."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache


@cache
def begin() -> None:
    """Begin, once; who needs a result before it is there makes it, and meets the errors.

    That is the digest of all of Triton, hundreds of megabytes, which every name in its cache and in
    Inductor's holds, and its driver, which a C compiler makes once on a machine: about a second
    each, in which Python waits. CUDA must have been initialised.
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
