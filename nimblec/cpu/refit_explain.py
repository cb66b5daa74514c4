"""Recipes for the constants of an optimised model that depend on its weights.

The model was optimised with weights that are all different. So if a recipe computes a constant from them bit for bit,
it describes that constant, whatever the optimiser did to make it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from math import prod

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from nimblec.cpu import kernels
from nimblec.cpu.refit_deciding import SIZES
from nimblec.cpu.refit_recipe import Fixed, Result, Source, WeightExpression, compute, fixed, result, settled, sources
from nimblec.onnx_import import model_nodes
from nimblert.check.onnx_operators import find as find_operator
from nimblert.cpu.onnx_session import nchwc_block_size, runtime_errors

_MOST_AXES = 4
"""Arrays of more axes are not searched for transposed copies."""

_MOST_FIXED_NBYTES = 1 << 20
"""Recipes read constants that depend on no weight up to this size."""


def folded_values(model: ModelProto, weights: Mapping[str, np.ndarray]) -> dict[str, WeightExpression]:
    """Return, by name, the weights and the values that main-graph nodes compute from them and from other constants."""
    known: dict[str, WeightExpression] = {}
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            array = weights[tensor.name]
            known[tensor.name] = Source(tensor.name, array.dtype.name, array.shape)
        elif not tensor.external_data and tensor.ByteSize() <= _MOST_FIXED_NBYTES:
            known[tensor.name] = Fixed(_unnamed(tensor))
    for node in model.graph.node:
        if model_nodes.subgraphs(node) or not all(name in known or not name for name in node.input):
            continue
        bare = NodeProto()
        bare.CopyFrom(node)
        for part in ("input", "output", "name", "doc_string", "metadata_props"):
            bare.ClearField(part)
        code = bare.SerializeToString(deterministic=True)
        inputs = tuple(known[name] if name else None for name in node.input)
        for index, name in enumerate(node.output):
            known[name] = Result(code, inputs, index, len(node.output))
    return {name: recipe for name, recipe in known.items() if sources(recipe)}


def _unnamed(tensor: TensorProto) -> bytes:
    made = TensorProto()
    made.CopyFrom(tensor)
    made.ClearField("name")
    return bytes(made.SerializeToString(deterministic=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """``recipes`` of constants, by name; ``unknown`` are the constants that depend on weights but have no recipe."""

    recipes: Mapping[str, WeightExpression]
    unknown: tuple[str, ...]


def explain(
    model: ModelProto,
    weights: Mapping[str, np.ndarray],
    constants: Mapping[str, np.ndarray],
    others: Mapping[str, np.ndarray],
) -> Explained:
    """Return recipes for the ``constants`` of the model to which ``model``, with these ``weights``, was optimised.

    ``others`` are the constants for other weights; a constant that is the same there depends on none, unless it is
    known to be rounded.
    """
    known = folded_values(model, weights)
    candidates = list(dict.fromkeys(known.values()))
    header = kernels.header(model)
    values = _Values(candidates, weights, header)
    recipes: dict[str, WeightExpression] = {}
    unknown = []
    for name, array in constants.items():
        found = known.get(name)
        if name in others and _same(array, others[name]) and not _is_rounded(found):
            continue
        if found is None or not _same(values.of(found), array):
            found = values.find(array)
        if found is None or not _is_callable(found, header):
            unknown.append(name)
        else:
            recipes[name] = found
    return Explained(recipes=settled(recipes, header), unknown=tuple(unknown))


@cache
def _is_rounded(recipe: WeightExpression | None) -> bool:
    """Return whether weights are quantised on the way to a value, so that close ones may give the same."""
    if not isinstance(recipe, Result) or not sources(recipe):
        return False
    op_type = NodeProto.FromString(recipe.node).op_type
    return op_type == "QuantizeLinear" or (op_type not in SIZES and any(map(_is_rounded, recipe.inputs)))


def _is_callable(recipe: WeightExpression, header: kernels.Header) -> bool:
    """Return whether a plan may call every operator that a recipe applies to weights."""
    if not isinstance(recipe, Result) or not sources(recipe):
        return True
    node = NodeProto.FromString(recipe.node)
    known = find_operator(node.domain, node.op_type, header.opsets[node.domain])
    return known is not None and all(_is_callable(read, header) for read in recipe.inputs if read is not None)


def _same(one: np.ndarray | None, other: np.ndarray) -> bool:
    return one is not None and _kind(one) == _kind(other) and one.tobytes() == other.tobytes()


def _kind(array: np.ndarray) -> tuple[np.dtype, tuple[int, ...]]:
    return array.dtype, array.shape


class _Values:
    """The values of recipes, searched for an array that equals one, or one with its elements moved."""

    def __init__(
        self, recipes: list[WeightExpression], weights: Mapping[str, np.ndarray], header: kernels.Header
    ) -> None:
        self._arrays: dict[WeightExpression, np.ndarray] = {
            recipe: weights[recipe.name] for recipe in recipes if isinstance(recipe, Source)
        }
        made = [recipe for recipe in recipes if not isinstance(recipe, Source)]
        # Without the values that ONNX Runtime cannot compute, the weights alone are searched.
        with suppress(*runtime_errors()):
            self._arrays |= zip(made, compute(made, weights, header), strict=True)
        self._of_size: dict[int, list[WeightExpression]] = defaultdict(list)
        for recipe, array in self._arrays.items():
            self._of_size[array.size].append(recipe)

    def of(self, recipe: WeightExpression) -> np.ndarray | None:
        """Return the value of a recipe, if it is known."""
        return self._arrays.get(recipe)

    def find(self, wanted: np.ndarray) -> WeightExpression | None:
        """Return a recipe for an array."""
        for find in (self._moved, self._blocked, self._joined):
            if found := find(wanted):
                return found
        return None

    def _moved(self, wanted: np.ndarray) -> WeightExpression | None:
        """Return a recipe for a value reshaped or transposed."""
        content = wanted.tobytes()
        for recipe in self._of_size[wanted.size]:
            array = self._arrays[recipe]
            if array.dtype != wanted.dtype:
                continue
            if array.tobytes() == content:
                return recipe if array.shape == wanted.shape else _reshaped(recipe, wanted.shape)
            if array.ndim > _MOST_AXES or not _has_the_same(array, wanted):
                continue
            for order in permutations(range(array.ndim)):
                if array.transpose(order).tobytes() == content:
                    turned = result("Transpose", recipe, perm=order)
                    return _reshaped(turned, wanted.shape)
        return None

    def _blocked(self, wanted: np.ndarray) -> WeightExpression | None:
        """Return a recipe for the weight or bias of a convolution in ONNX Runtime's blocks, padded with zeros."""
        block = nchwc_block_size()
        if wanted.dtype != np.float32 or block == 1:
            return None
        for recipe, array in self._arrays.items():
            for made, change in _blocks(array, block, wanted.shape):
                if made.tobytes() == wanted.tobytes():
                    return _reshaped(change(recipe), wanted.shape)
        return None

    def _joined(self, wanted: np.ndarray) -> WeightExpression | None:
        """Return a recipe for three arrays concatenated along the last axis: the projections of an attention."""
        if not wanted.ndim or wanted.shape[-1] % 3:
            return None
        parts = [self._moved(np.ascontiguousarray(part)) for part in np.split(wanted, 3, axis=-1)]
        first, second, third = parts
        return result("Concat", first, second, third, axis=-1) if first and second and third else None


def _has_the_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether the elements may be the same in another order: the sums of the bytes are equal."""
    return bool(one.reshape(-1).view(np.uint8).sum() == other.reshape(-1).view(np.uint8).sum())


def _reshaped(recipe: WeightExpression, shape: tuple[int, ...]) -> WeightExpression:
    return result("Reshape", recipe, fixed(np.array(shape, np.int64)))


def _blocks(
    array: np.ndarray, block: int, shape: tuple[int, ...]
) -> Iterator[tuple[np.ndarray, Callable[[WeightExpression], WeightExpression]]]:
    """Yield the blocked forms of an array with as many elements as ``shape``, each with the change to its recipe."""
    count = prod(shape)
    if array.ndim == 1:
        padded = _up(array.size, block)
        if padded == count and padded != array.size:
            yield _blocked(array, (padded,), (padded,), (0,))
        return
    if array.ndim != 4:
        return
    outputs, inputs, height, width = array.shape
    rows, columns = _up(outputs, block), _up(inputs, block)
    if rows * columns * height * width == count:
        split = (rows // block, block, columns // block, block, height, width)
        yield _blocked(array, (rows, columns, height, width), split, (0, 2, 4, 5, 3, 1))
    if rows * inputs * height * width == count:
        yield _blocked(
            array, (rows, inputs, height, width), (rows // block, block, inputs, height, width), (0, 2, 3, 4, 1)
        )


def _up(size: int, block: int) -> int:
    return -(-size // block) * block


def _blocked(
    array: np.ndarray, padded: tuple[int, ...], split: tuple[int, ...], order: tuple[int, ...]
) -> tuple[np.ndarray, Callable[[WeightExpression], WeightExpression]]:
    """Pad an array with zeros, split and reorder its axes; return it, and the same change for its recipe."""
    missing = [after - before for before, after in zip(array.shape, padded, strict=True)]

    def change(recipe: WeightExpression) -> WeightExpression:
        if any(missing):
            pads = np.array([*(0 for _ in missing), *missing], np.int64)
            recipe = result("Pad", recipe, fixed(pads))
        if len(order) == 1:
            return recipe
        return result("Transpose", result("Reshape", recipe, fixed(np.array(split, np.int64))), perm=order)

    made = np.pad(array, [(0, size) for size in missing]).reshape(split).transpose(order)
    return made, change
