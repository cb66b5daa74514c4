"""What the capture process needs besides torch, begun on threads while it imports torch.

An import mostly waits for files, and a digest of a library for nothing at all: neither holds the interpreter.
"""

import importlib
from contextlib import suppress
from threading import Thread

_PACKAGES = ("sympy", "networkx", "scipy.sparse.csgraph")
"""Large ones that torch's compilers and our schedules import; none of them imports torch."""


def begin() -> tuple[Thread, ...]:
    """Start; who needs a result finds it, waits for it, or makes it, and tells what is missing."""
    threads = (
        *(Thread(target=_import, args=(name,), daemon=True) for name in _PACKAGES),
        Thread(target=_find_triton_key, daemon=True),
    )
    for thread in threads:
        thread.start()
    return threads


def _import(name: str) -> None:
    with suppress(ImportError):
        importlib.import_module(name)


def _find_triton_key() -> None:
    """The digest of all of Triton, hundreds of megabytes: part of the name of everything in its cache."""
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()
