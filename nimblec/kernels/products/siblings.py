"""Convolutions that read the same images joined into one launch, mostly where a network branches."""

from collections.abc import Collection

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, bound, constant_of, fake, only_user, times_read
from nimblec.graph.views import replace_by_slices
from nimblec.kernels.images import ALIGNMENT_NBYTES
from nimblec.kernels.products.concatenation import begins_concatenations
from nimblec.kernels.products.gemm_match import ProductRequest, requests


def join_siblings(module: fx.GraphModule) -> None:
    """Join convolutions of one geometry that read the same images; comes before `use_triton_kernels`.

    Only where nothing but the kernels' convolutions reads the results, which become parts of the channels of larger
    images. The last one may begin a concatenation instead, which `concatenate_in_place` puts into the same memory.
    """
    rewriter = Rewriter(module)
    asked = [request for request in requests(module) if request.kind != "linear"]
    readers = {request.head for request in asked}
    siblings: dict[object, list[ProductRequest]] = {}
    beginnings: dict[object, ProductRequest] = {}
    for request in asked:
        if not _can_join(request):
            continue
        if _is_read_by(readers, request.nodes[-1]):
            siblings.setdefault(_shared(request), []).append(request)
        elif begins_concatenations(request.nodes[-1]):
            beginnings.setdefault(_shared(request), request)
    for key, group in siblings.items():
        if key in beginnings:
            group.append(beginnings[key])
    groups = [group for group in siblings.values() if len(group) > 1]
    for group in groups:
        _join(rewriter, group)
    rewriter.finish()


def _can_join(request: ProductRequest) -> bool:
    return (
        request.kind == "convolution"
        and request.shape.groups == 1
        and request.residual is None
        and fake(request.nodes[-1]).shape[1] * request.dtype.itemsize % ALIGNMENT_NBYTES == 0
        and only_user(request.weight) is not None  # other users would keep them in memory as well
    )


def _is_read_by(readers: Collection[fx.Node], images: fx.Node) -> bool:
    """Return whether only ``readers`` read the images, and each of them once: not as a residual too."""
    return all(user in readers and times_read(images, user) == 1 for user in images.users)


def _shared(request: ProductRequest) -> object:
    """Return what siblings have in common: the call except for its weights, and the activation after it."""
    head = request.head
    given = bound(head) | {"weight": request.shape.kernel, "bias": request.bias is None}
    return head.target, request.dtype, request.activation, tuple(map(str, given.values()))


def _join(rewriter: Rewriter, group: list[ProductRequest]) -> None:
    heads = [request.head for request in group]
    first = min(heads)
    given = bound(heads[0])
    for name in ("weight", "bias"):
        if given[name] is not None:
            parts = [constant_of(rewriter.module, bound(head)[name]) for head in heads]
            given[name] = rewriter.constant(torch.cat(parts), at=first)
    joined = rewriter.call(heads[0].target, *given.values(), at=first)
    lasts = [request.nodes[-1] for request in group]
    if lasts[0] is not heads[0]:
        joined = rewriter.call(lasts[0].target, joined, *lasts[0].args[1:], at=first, **lasts[0].kwargs)
    replace_by_slices(rewriter, lasts, joined)
