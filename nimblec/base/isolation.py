"""``python -m nimblec`` without the current folder on the path; imported before anything else of the package.

``-m`` puts the current folder first, so a ``numpy.py`` beside a model would run. A model
named package.module:callable is imported from the current folder all the same: `compile` adds it then.
"""

import os
import sys
import time

IMPORTED_S = time.perf_counter()
"""The earliest that nimblec knows of the process; Python itself has started some 20 ms before."""

_ROOT = os.path.abspath(__file__).rsplit(os.sep, 3)[0]  # noqa: PTH100 - pathlib is not loaded yet


def _is_the_program() -> bool:
    """Return whether this is ``python -m nimblec ...``: while Python looks for the module, it is named "-m"."""
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m") == "nimblec"


# A folder that holds nimblec itself stays on the path.
if _is_the_program() and not sys.flags.safe_path and sys.path[0] != _ROOT:
    del sys.path[0]
