"""A plan's dtype names as numpy dtypes."""

from functools import cache

import numpy as np

from nimblert.errors import DeviceMismatchError
from nimblert.plan import ITEM_NBYTES


@cache
def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a plan's dtype name; bfloat16 comes from ml_dtypes."""
    if name not in ITEM_NBYTES:
        raise ValueError(f"dtype {name!r} is not one that a plan may name")
    if name == "bfloat16":
        try:
            import ml_dtypes  # takes 20 ms
        except ImportError as exc:
            raise DeviceMismatchError("bfloat16 tensors need ml_dtypes: pip install 'nimblert[bfloat16]'") from exc
        bfloat16: np.dtype = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)
