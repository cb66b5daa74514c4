"""The same graph with another trigger: no call is chosen anew, and no weights are packed again."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nimblec.kernels.attention import AttentionTiling, attention, attention_job, attention_settings, attention_shape
from nimblec.kernels.compiling import Job, compile_all, convolution_job, depthwise_job
from nimblec.kernels.depthwise import DepthwiseTiling, depthwise, depthwise_settings
from nimblec.kernels.launching import Trigger, settings
from nimblec.kernels.norm import NormTiling, add_layer_norm, layer_norm, norm_job, norm_settings, norm_shape
from nimblec.kernels.ops import convolution, convolution_shape, linear
from nimblec.kernels.shapes import Tiling, product
from nimblec.optimize.rewriter import bound, fake, is_call

Given = dict[str, Any]
"""The arguments of a call by name, tensors as fake ones."""


def retriggered(
    module: fx.GraphModule, trigger: Trigger, *, compile_jobs: Callable[[Sequence[Job]], None] = compile_all
) -> fx.GraphModule:
    """A copy of a graph with calls of our own whose launches have this trigger; its kernels are compiled."""
    result = fx.GraphModule(module, copy.deepcopy(module.graph), class_name=type(module).__name__)
    jobs: list[Job] = []
    for node in result.graph.nodes:
        if is_call(node, *_JOBS):
            node.args = (*node.args[:-1], trigger)
            given = {name: fake(x) if isinstance(x, fx.Node) else x for name, x in bound(node).items()}
            job = _JOBS[node.target](given)
            jobs += [job] if job not in jobs else []
    result.recompile()
    if jobs:
        compile_jobs(jobs)
    return result


def _convolution(given: Given) -> Job:
    shape = convolution_shape(given["x"], given["out_channels"], *_geometry(given))
    constants = settings(shape, Tiling.of(given["tiling"]), **_how(given))
    return convolution_job(constants, dtype=_name(given["x"]), has=_has(given))


def _linear(given: Given) -> Job:
    x = given["x"]
    rows, depth = x.shape
    shape = product(rows, depth, given["out_channels"], row_stride=x.stride(0) if rows > 1 else depth)
    constants = settings(shape, Tiling.of(given["tiling"]), **_how(given))
    return convolution_job(constants, dtype=_name(x), has=_has(given))


def _depthwise(given: Given) -> Job:
    x = given["x"]
    shape = convolution_shape(x, x.shape[1], *_geometry(given))
    constants = depthwise_settings(shape, DepthwiseTiling.of(given["tiling"]), **_how(given))
    return depthwise_job(constants, dtype=_name(x), has=_has(given))


def _attention(given: Given) -> Job:
    query, mask = given["query"], given["mask"]
    shape = attention_shape(query, given["key"], given["value"], mask, causal=given["causal"])
    tiling = AttentionTiling.of(given["tiling"])
    constants = attention_settings(shape, tiling, scale=given["scale"], trigger=given["trigger"])
    return attention_job(constants, dtype=_name(query), mask=None if mask is None else _name(mask))


def _norm(given: Given) -> Job:
    x, weight, bias = given["x"], given["weight"], given["bias"]
    tiling = NormTiling.of(given["tiling"])
    return norm_job(
        norm_settings(norm_shape(x, rms=given["rms"]), tiling, eps=given["eps"], trigger=given["trigger"]),
        dtype=_name(x),
        out_dtype=str(given["dtype"]).removeprefix("torch."),
        weight=None if weight is None else _name(weight),
        bias=None if bias is None else _name(bias),
        residual=given.get("residual") is not None,
    )


_JOBS: Mapping[Any, Callable[[Given], Job]] = {
    convolution: _convolution,
    linear: _linear,
    depthwise: _depthwise,
    attention: _attention,
    layer_norm: _norm,
    add_layer_norm: _norm,
}
"""What each op launches; the trigger is the last of its positional arguments."""


def _geometry(given: Given) -> list[Sequence[int]]:
    return [given[name] for name in ("kernel", "stride", "padding", "dilation")]


def _how(given: Given) -> dict[str, str]:
    return {name: given.get(name, "none") for name in ("activation", "before", "trigger")}


def _has(given: Given) -> set[str]:
    return {name for name in ("bias", "residual", "scale", "shift", "gate") if given.get(name) is not None}


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
