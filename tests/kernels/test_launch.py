"""What an op launches is what its template takes: every pointer and constant by its name, for every family."""

import ast
import json
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from triton_process import needs_triton, run

from nimblec.base.errors import CompileError
from nimblec.kernels import compiling
from nimblec.kernels.call import Call, Made
from nimblec.kernels.compiling import Job
from nimblec.kernels.gpu import SM_90, Trigger
from nimblec.kernels.launch import Launch, launch_of, ops
from nimblec.kernels.products.depthwise_op import depthwise, depthwise_into
from nimblec.kernels.products.gemm_op import (
    convolution,
    convolution_into,
    linear,
    linear_and_moments,
    linear_moments_and_fp8,
)
from nimblec.kernels.products.quantized_op import convolution_of_integers
from nimblec.kernels.products.recurrence_op import gru_layer, lstm_layer
from nimblec.kernels.products.split_op import split
from nimblec.kernels.products.trained_op import (
    depthwise_convolution,
    depthwise_image_gradient,
    depthwise_weight_gradient,
    image_gradient,
    trained_convolution,
    weight_gradient,
)
from nimblec.kernels.reductions.attention_op import attention
from nimblec.kernels.reductions.cached_op import cached_attention
from nimblec.kernels.reductions.group_norm_op import group_moments
from nimblec.kernels.reductions.norm_op import add_layer_norm, layer_norm, layer_norm_and_fp8
from nimblec.kernels.reductions.pool_op import mean2d, pool2d
from nimblec.optimize.o2 import FAMILIES

OPTIONS = {
    *("num_warps", "num_stages", "launch_pdl", "launch_cooperative_grid", "maxnreg"),
    *("debug", "sanitize_overflow", "enable_fp_fusion"),
}
"""Triton's."""

TRIGGERS: tuple[Trigger, ...] = ("none", "late")


def _images(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float16, device="meta").contiguous(memory_format=torch.channels_last)


def _half(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


X, WEIGHT, VECTOR, COUNTERS = _images(1, 16, 8, 8), _half(1, 1, 16, 16), _half(16), _half(9, dtype=torch.int32)
GEOMETRY = (16, [3, 3], [1, 1], [1, 1], [1, 1], "relu")
FACTORS = {"scale": _half(16, dtype=torch.float32), "shift": None, "gate": _half(1, 16, 1, 1), "before": "relu"}
ROWS = _half(5, 16)
MOMENTS = {"moments": _half(2, 2, 5, dtype=torch.float32), "column_sums": _half(16, dtype=torch.float32), "rms": True}
HEADS = _half(1, 9, 2, 16).transpose(1, 2)
HEAD = HEADS[:, :, :1]
FILTERS, TRAINED = _images(16, 16, 3, 3), ([1, 1, 1, 1, 1, 1], [16, 16, 16, 2, 4, 2], "late")
DEPTHWISE = _half(16, 1, 3, 3)
STATE = _half(2, 3, 64)

CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "convolution": (convolution, (X, WEIGHT, VECTOR, X, COUNTERS, *GEOMETRY, [16, 16, 16, 2, 4, 2], "late"), FACTORS),
    "convolution of one": (convolution, (X, WEIGHT, None, None, None, *GEOMETRY, [16, 16, 16, 1, 4, 2], "none"), {}),
    "convolution into": (
        convolution_into,
        (X, WEIGHT, None, None, None, *GEOMETRY, [16, 16, 16, 1, 4, 2], "late"),
        {"out": _images(1, 32, 8, 8)[:, 16:]},
    ),
    "linear": (linear, (ROWS, WEIGHT, VECTOR, ROWS, None, 16, "gelu", [16, 16, 16, 1, 4, 2], "late"), MOMENTS),
    "linear and moments": (
        linear_and_moments,
        (ROWS, WEIGHT, None, None, COUNTERS, 16, "none", [16, 16, 16, 2, 4, 2], "late"),
        {},
    ),
    "linear, moments and fp8": (
        linear_moments_and_fp8,
        (ROWS, WEIGHT, None, None, COUNTERS, 16, "none", [16, 16, 16, 2, 4, 2], "late"),
        {"out_factor": FACTORS["scale"]},
    ),
    "depthwise": (depthwise, (X, _half(1, 9, 16), VECTOR, X, *GEOMETRY, [4, 16, 2], "late"), FACTORS),
    "depthwise into": (
        depthwise_into,
        (X, _half(1, 9, 16), None, X, *GEOMETRY, [4, 16, 2], "late"),
        {"out": _images(1, 32, 8, 8)[:, 16:]},
    ),
    "integers": (
        convolution_of_integers,
        (
            _half(1, 16, 8, 8, dtype=torch.uint8).contiguous(memory_format=torch.channels_last),
            _half(1, 1, 16, 32, dtype=torch.int8),
            FACTORS["scale"],
            *(COUNTERS, None, FACTORS["scale"], COUNTERS),
            *GEOMETRY[:-1],
            *(True, False, torch.int8, [16, 16, 32, 2, 4, 2], "late"),
        ),
        {},
    ),
    "attention": (attention, (HEADS, HEADS, HEADS, _half(9, 9), False, 0.5, [16, 32, 4, 1], "late"), {}),
    "causal attention": (attention, (HEADS, HEADS, HEADS, None, True, 0.5, [16, 32, 4, 1], "late"), {}),
    "cached attention": (
        cached_attention,
        (HEAD, HEADS, HEADS, HEAD, HEAD, COUNTERS[:1].long(), _half(9), VECTOR, VECTOR, 0.5, [16, 4, 1], "late"),
        {},
    ),
    "pool": (pool2d, (X, "max", [3, 3], [2, 2], [1, 1], [1, 1], False, None, "relu", [8, 16, 2], "late"), {}),
    "mean": (mean2d, (X, True, "none", [64, 16, 4], "late"), {}),
    "trained convolution": (trained_convolution, (X, FILTERS, VECTOR, COUNTERS, *TRAINED), {"arithmetic": "tf32"}),
    "image gradient": (image_gradient, (X, FILTERS, COUNTERS, [8, 8], *TRAINED), {}),
    "weight gradient": (weight_gradient, (X, X, COUNTERS, [3, 3], *TRAINED), {}),
    "depthwise convolution": (depthwise_convolution, (X, DEPTHWISE, VECTOR, TRAINED[0], [4, 16, 2], "late"), {}),
    "depthwise image gradient": (depthwise_image_gradient, (X, DEPTHWISE, [8, 8], TRAINED[0], [4, 16, 2], "late"), {}),
    "depthwise weight gradient": (
        depthwise_weight_gradient,
        (X, X, COUNTERS, [3, 3], TRAINED[0], [4, 16, 2, 4], "late"),
        {},
    ),
    "lstm layer": (lstm_layer, (_half(5, 3, 512), _half(2, 256, 64), STATE, STATE, [4, 3, 2]), {}),
    "gru layer": (gru_layer, (_half(5, 3, 384), _half(2, 192, 64), _half(2, 64), None, [4, 3, 2]), {}),
    "group moments": (group_moments, (X, COUNTERS, 2, 1e-5, [2, 16], "late"), {}),
    "norm": (layer_norm, (ROWS, VECTOR, None, 1e-5, False, torch.float16, [1, 1], "late"), {}),
    "norm and e4m3": (
        layer_norm_and_fp8,
        (ROWS, VECTOR, None, 1e-5, False, torch.float16, [1, 1], "late", _half(1, dtype=torch.float32)),
        {},
    ),
    "split": (split, (_half(8, 4, dtype=torch.float32), 0, 1, "late"), {}),
    "sum and norm": (add_layer_norm, (ROWS, ROWS, VECTOR, VECTOR, 1e-5, True, torch.float32, [1, 1], "late"), {}),
}


def _parameters(template: str) -> tuple[list[str], list[str]]:
    """Read the names of a template's pointers and constants, in order, from its source: Triton may be missing."""
    module, _, name = template.partition(":")
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    (function,) = (
        node
        for node in ast.parse(Path(spec.origin).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    is_constant = {arg.arg: arg.annotation is not None for arg in function.args.args}
    return [n for n, constant in is_constant.items() if not constant], [n for n, c in is_constant.items() if c]


def _launch(name: str) -> Launch:
    op, args, kwargs = CALLS[name]
    return launch_of(op, *args, **kwargs)


@pytest.mark.parametrize("name", CALLS)
def test_a_launch_has_all_that_its_template_takes(name: str) -> None:
    launch = _launch(name)
    pointers, constants = _parameters(launch.template)
    assert list(launch.pointers) == pointers
    assert sorted(launch.job.settings.keys() - OPTIONS) == sorted(constants)
    assert launch.blocks > 0


@pytest.mark.parametrize("name", [name for name, (_, args, _) in CALLS.items() if args[-1] in TRIGGERS])
@pytest.mark.parametrize("trigger", TRIGGERS)
def test_a_launch_starts_early_only_if_its_kernel_waits(name: str, trigger: Trigger) -> None:
    op, (*args, _trigger), kwargs = CALLS[name]
    settings = launch_of(op, *args, trigger, **kwargs).job.settings
    assert (settings["TRIGGER"], settings["launch_pdl"]) == (trigger, trigger != "none")


def test_every_op_and_every_template_is_among_them() -> None:
    assert {op for op, *_ in CALLS.values()} == ops()
    told = {template for family in FAMILIES for template in family.templates}
    # How they are launched follows from their sizes.
    told |= {"nimblec.kernels.reductions.cached_template", "nimblec.kernels.products.split_template"}
    assert {_launch(name).template.partition(":")[0] for name in CALLS} == told


def test_job_names_unaligned_pointers() -> None:
    op, (_, *args), kwargs = CALLS["norm"]
    rows = torch.empty(7, 16, dtype=torch.float16, device="meta")
    assert launch_of(op, rows.flatten()[1:81].reshape(5, 16), *args, **kwargs).job.unaligned == ["x_ptr"]
    assert launch_of(op, rows[1:6], *args, **kwargs).job.unaligned == []


@pytest.mark.parametrize("name", CALLS)
def test_a_job_is_the_launch_without_memory(name: str) -> None:
    launch = _launch(name)
    job = launch.job
    assert Job(**json.loads(json.dumps(asdict(job)))) == job
    dtypes = {name: None if t is None else str(t.dtype).removeprefix("torch.") for name, t in launch.pointers.items()}
    assert dict(job.pointers) == dtypes


def test_pointers_lie_where_their_names_say() -> None:
    op, args, how = CALLS["convolution"]
    launch = launch_of(op, *args, **how)
    named = dict(zip(("x", "weight", "bias"), args, strict=False)) | {"gate": how["gate"], "scale": how["scale"]}
    assert all(launch.pointers[f"{name}_ptr"] is tensor for name, tensor in named.items())
    assert launch.pointers["counters_ptr"] is COUNTERS
    assert launch.pointers["moments_ptr"] is None


@examples(20)
@given(count=st.integers(1, 4))
def test_arguments_keep_their_places(count: int) -> None:
    """Made constants are found wherever they stand, and nothing else is changed."""
    made = [Made(source=torch.ones(n + 1), make=torch.neg, role="factors") for n in range(count)]
    call = Call(op=layer_norm, args=(made[0], 3, None, [1, 2], "late"), kwargs={"rest": made[1:]})
    args, kwargs = call.arguments(lambda leaf: leaf.value)
    assert torch.equal(args[0], -torch.ones(1))
    assert args[1:] == (3, None, [1, 2], "late")
    assert [tensor.numel() for tensor in kwargs["rest"]] == list(range(2, count + 1))


COMPILED = """
import inspect, json
from nimblec.kernels.compiling import Job, compile_job, load_template
for name, described in json.loads(JOBS).items():
    job = Job(**described)
    taken = list(inspect.signature(load_template(job.template).fn).parameters)
    assert taken[: len(job.pointers)] == list(job.pointers), name
    assert compile_job(job, architecture=90).asm["cubin"], name
    print(name)
"""


@pytest.mark.parametrize("size", [1, 1 << 20], ids=["few", "more than a pipe holds"])
def test_a_worker_that_is_killed_is_reported(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    monkeypatch.setattr(compiling, "module_command", lambda *_: killed)
    compiler = compiling.Compiler()
    monkeypatch.setattr(compiling, "compiler", lambda: compiler)
    job = Job(template="none:none", pointers={}, settings={"NAME": "x" * size})
    with pytest.raises(CompileError, match="could not compile a kernel: its process ended with status -9"):
        compiling.compile_all([job], gpu=SM_90)
    with suppress(BrokenPipeError):
        compiler.close()


@needs_triton
@pytest.mark.timeout(900)  # minutes on a busy machine
def test_all_launches_compile(tmp_path: Path) -> None:
    jobs = json.dumps({name: asdict(_launch(name).job) for name in CALLS})
    assert run(f"JOBS = {jobs!r}\n{COMPILED}", tmp_path).splitlines() == list(CALLS)
