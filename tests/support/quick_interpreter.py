"""Triton's interpreter without work whose results it does not use; it computes the same."""

from dataclasses import replace
from functools import cache
from operator import index
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def install() -> None:
    """Make the interpreter of this process quicker; nothing else may use Triton in it."""
    _check_no_overflow()
    _look_types_up_once()
    _make_types_once()
    _describe_tensors_once()
    _broadcast_equal_shapes_at_once()
    _keep_functions_patched()


def _check_no_overflow() -> None:
    """Skip the overflow checks in 64 bits, which serve assertions of debug mode alone."""
    builder: Any = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _look_types_up_once() -> None:
    """Cache NumPy's dtype of each of Triton's types, which is otherwise looked up for each value."""
    found = cache(interpreter._get_np_dtype)
    pointer = found(tl.uint64)

    def np_dtype(of: Any) -> Any:
        scalar = of.scalar
        return pointer if scalar.is_ptr() else found(scalar)

    interpreter._get_np_dtype = np_dtype


def _make_types_once() -> None:
    """Cache block types, which are otherwise made for each value; ``sizes`` is a block's shape as Python's tuple."""
    block: Any = tl.block_type
    init = block.__init__
    made: dict[object, Any] = {}

    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = tuple(map(index, shape))
        key = (type(element_ty), element_ty.name, sizes)
        if key not in made:
            made[key] = object.__new__(cls)
            made[key].sizes = sizes
        return made[key]

    def init_once(self: Any, element_ty: Any, shape: Any) -> None:
        if not hasattr(self, "name"):
            init(self, element_ty, shape)

    block.__new__, block.__init__ = new, init_once


def _describe_tensors_once() -> None:
    """Share the description of tensors of one type; only their values differ."""
    tensor: Any = tl.tensor
    init = tensor.__init__

    def init_quickly(self: Any, handle: Any, kind: Any) -> None:
        if "of_tensors" in kind.__dict__:
            self.__dict__.update(kind.of_tensors)
        else:
            init(self, None, kind)
            kind.of_tensors = {**self.__dict__}
        self.handle = handle

    tensor.__init__ = init_quickly


def _broadcast_equal_shapes_at_once() -> None:
    """Return tensors of equal shapes as they are."""
    semantic: Any = TritonSemantic
    broadcast = semantic.broadcast_impl_value

    def broadcast_quickly(self: Any, lhs: Any, rhs: Any) -> Any:
        equal = getattr(lhs.type, "sizes", ()) == getattr(rhs.type, "sizes", ())
        return (lhs, rhs) if equal else broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_quickly


def _keep_functions_patched() -> None:
    """Keep `triton.language` patched; otherwise each call of a jitted function patches all of its functions."""
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
