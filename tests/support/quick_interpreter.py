"""Triton's interpreter without work whose results it does not use; it computes the same."""

from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Make the interpreter of this process quicker; nothing else may use Triton in it."""
    _check_no_overflow()
    _look_types_up_once()
    _keep_functions_patched()


def _check_no_overflow() -> None:
    """It repeats operations of integers in 64 bits, for assertions that it makes in debug mode alone."""
    builder: Any = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _look_types_up_once() -> None:
    """NumPy's dtype of Triton's types, from a table that is otherwise made for each value."""
    found = cache(interpreter._get_np_dtype)
    pointer = found(tl.uint64)

    def np_dtype(of: Any) -> Any:
        scalar = of.scalar
        return pointer if scalar.is_ptr() else found(scalar)

    interpreter._get_np_dtype = np_dtype


def _keep_functions_patched() -> None:
    """Of `triton.language`, of which all functions are otherwise exchanged for each call of a jitted function."""
    patch = interpreter._patch_lang
    nothing = interpreter._LangPatchScope()
    patched: dict[frozenset[str], Any] = {}

    def patch_once(fn: Any) -> Any:
        modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        used = frozenset(module.__name__ for module in modules)
        if used not in patched:
            patched[used] = patch(fn)
        return nothing

    interpreter._patch_lang = patch_once
