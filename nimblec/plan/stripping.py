"""Move the weights of a plan file into a safetensors file beside it; `nimblert.plan.external` reads them."""

import hashlib
import json
from dataclasses import replace
from os import PathLike
from pathlib import Path

from nimblec.plan import encoder
from nimblert.check.verify import read_plan
from nimblert.errors import InputError
from nimblert.plan import Plan, Weight
from nimblert.plan.external import DTYPES, METADATA, names
from nimblert.plan.files import replacing

_ALIGNMENT = 64
"""Of tensors that a CPU plan uses where the file is mapped; it copies others."""

_OURS = json.dumps({METADATA: {"producer": "nimblec"}})[:-1].encode()
"""The start of the header of every file that is written here: no other file is overwritten."""


def check_destination(path: str | PathLike[str]) -> None:
    """Raise InputError where there is a file that `strip` did not write, such as the model's own weights."""
    path = Path(path)
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            if file.read(8 + len(_OURS))[8:] != _OURS:
                raise InputError(f"{path}: exists and holds no weights of a plan: remove it, or name another file")


def strip(path: str | PathLike[str], weights: str | PathLike[str]) -> None:
    """Write weights and state of the plan in the file ``path`` to the file ``weights``, and the plan without them back.

    Raises InputError as `check_destination` does, and NimbleError where a file cannot be written.
    """
    check_destination(weights)
    plan = read_plan(path)
    _write(plan, weights)
    stripped = replace(plan, weights=tuple(map(_stripped, plan.weights)), state=tuple(map(_stripped, plan.state)))
    encoder.write(stripped, path)


def _stripped(tensor: Weight) -> Weight:
    return replace(tensor, data=memoryview(b""), sha256=hashlib.sha256(tensor.data).digest())


def _write(plan: Plan, path: str | PathLike[str]) -> None:
    """Write a safetensors file: the size of the header, the header, and the tensors without gaps.

    Tensors whose size keeps the next one aligned come first.
    """
    known = {name: code for code, name in DTYPES.items()}
    named = zip(names(plan), (*plan.weights, *plan.state), strict=True)
    ordered = sorted(named, key=lambda pair: pair[1].nbytes % _ALIGNMENT != 0)
    header: dict[str, object] = json.loads(_OURS + b"}")
    end = 0
    for name, tensor in ordered:
        # safetensors has no complex128, whose bytes are stored.
        dtype, shape = known.get(tensor.dtype, "U8"), tensor.shape if tensor.dtype in known else (tensor.nbytes,)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end := end + tensor.nbytes)}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(tensor.data)
