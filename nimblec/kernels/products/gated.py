"""Gates after a product: the activation of half of its columns times the other half, as in decoders."""

from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from nimblec.graph.rewriter import fake, is_call, only_user, views
from nimblec.graph.views import is_view, lies_as
from nimblec.graph.vocabulary import RESHAPES, activation_of, is_like

aten = torch.ops.aten

_ROW_VIEWS = (*RESHAPES, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
"""Views of rows that keep the order of their elements."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gate:
    """Calls ``nodes`` that multiply the ``activation`` of half number ``activated`` by the other half."""

    nodes: tuple[fx.Node, ...]
    activation: str
    activated: int


def gate_after(product: fx.Node) -> Gate | None:
    """Return the gate of a product (rows, columns), if nothing but the gate reads its halves."""
    rows, columns = fake(product).shape
    *_, whole = _chain(product)
    parts = [part for user in whole.users for part in ([*user.users] if _is_several(user) else [user])]
    begins = {_begin(part, product): part for part in parts if views(part) is whole and _is_half(part, rows, columns)}
    if len(parts) != 2 or {*begins} != {0, columns // 2}:
        return None
    chains = [_chain(begins[begin]) for begin in sorted(begins)]
    for activated, (chain, other) in enumerate((chains, chains[::-1])):
        call = only_user(chain[-1])
        last = None if call is None else only_user(call)
        activation = None if call is None else activation_of(call)
        if call is None or last is None or activation is None or not is_call(last, aten.mul.Tensor):
            continue
        is_alone = {*last.args} == {call, other[-1]} and only_user(other[-1]) is last and is_like(other[-1], call)
        if is_alone and fake(last).is_contiguous():
            return Gate(nodes=(*chain[1:], call, last), activation=activation, activated=activated)
    return None


def _is_several(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def _is_half(part: fx.Node, rows: int, columns: int) -> bool:
    if _is_several(part) or columns % 2:
        return False
    *leading, size = fake(part).shape
    strides = torch.empty(*leading, columns, device="meta").stride()
    return size == columns // 2 and prod(leading) == rows and lies_as(fake(part), strides)


def _begin(part: fx.Node, product: fx.Node) -> int:
    return int(fake(part).storage_offset() - fake(product).storage_offset())


def _chain(part: fx.Node) -> list[fx.Node]:
    """Return a value and the views of it, each read by nothing but the next."""
    chain = [part]
    while (user := only_user(chain[-1])) is not None and is_call(user, *_ROW_VIEWS) and is_view(user):
        chain.append(user)
    return chain
