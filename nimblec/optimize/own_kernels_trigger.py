"""The same graph with another trigger: no call is chosen anew, and no weights are packed again."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import fx

from nimblec.kernels.compiling import Job, compile_all, convolution_job, depthwise_job
from nimblec.kernels.depthwise import DepthwiseTiling, depthwise, depthwise_settings
from nimblec.kernels.launching import Trigger, settings
from nimblec.kernels.ops import convolution, convolution_shape, linear
from nimblec.kernels.shapes import Convolution, Tiling, product
from nimblec.optimize.rewriter import bound, fake, is_call

_OPTIONAL = ("bias", "residual", "scale", "shift", "gate")


def retriggered(
    module: fx.GraphModule, trigger: Trigger, *, compile_jobs: Callable[[Sequence[Job]], None] = compile_all
) -> fx.GraphModule:
    """A copy of a graph after `use_own_kernels` whose launches have this trigger; its kernels are compiled."""
    result = fx.GraphModule(module, copy.deepcopy(module.graph), class_name=type(module).__name__)
    jobs: list[Job] = []
    for node in result.graph.nodes:
        if is_call(node, convolution, linear, depthwise):
            node.args = (*node.args[:-1], trigger)
            job = _job(node)
            jobs += [job] if job not in jobs else []
    result.recompile()
    if jobs:
        compile_jobs(jobs)
    return result


def _job(node: fx.Node) -> Job:
    given = bound(node)
    dtype = str(fake(node).dtype).removeprefix("torch.")
    has = {name for name in _OPTIONAL if given.get(name) is not None}
    how = {name: given.get(name, "none") for name in ("activation", "before", "trigger")}
    x = fake(given["x"])
    if is_call(node, depthwise):
        tiling = DepthwiseTiling.of(given["tiling"])
        shape = convolution_shape(x, x.shape[1], *_geometry(given))
        return depthwise_job(depthwise_settings(shape, tiling, **how), dtype=dtype, has=has)
    if is_call(node, linear):
        shape = _product(x, given["out_channels"])
    else:
        shape = convolution_shape(x, given["out_channels"], *_geometry(given))
    return convolution_job(settings(shape, Tiling.of(given["tiling"]), **how), dtype=dtype, has=has)


def _geometry(given: dict[str, object]) -> list[Sequence[int]]:
    return [given[name] for name in ("kernel", "stride", "padding", "dilation")]  # type: ignore[misc]


def _product(x: torch.Tensor, columns: int) -> Convolution:
    rows, depth = x.shape
    return product(rows, depth, columns, row_stride=x.stride(0) if rows > 1 else depth)
