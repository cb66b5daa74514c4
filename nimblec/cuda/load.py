"""Load the models of a request."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nimblec.cuda.request import CompileRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nimblec.base.ir import ProgramKey
    from nimblec.onnx_import.importer import Weigh
    from nimblec.pytorch.model import ModelCall, TorchModel

_SEED = 0


def load_models(request: CompileRequest, *, device: str = "cuda") -> "dict[ProgramKey, TorchModel]":
    """Return the model of each entry, in the sizes of each profile, on a device."""
    import torch

    from nimblec.graph.control import trip_limit
    from nimblec.pytorch import sources
    from nimblec.pytorch.model import place_call, set_arithmetic
    from nimblec.pytorch.state import share

    torch.manual_seed(_SEED)
    trip_limit.set(request.options.trip_limit)
    set_arithmetic(request.options.precision)
    if request.source.kind == "onnx":
        return load_files(request, device=device)
    options = request.options
    calls: dict[ProgramKey, ModelCall]
    if request.source.kind == "sizes":
        alone = replace(options, sizes=())
        parts = zip(options.profiles, request.source.entries, strict=True)
        calls = {("main", profile): sources.load(part, alone, device=device)["main"] for profile, (_, part) in parts}
    elif options.sizes:
        program = sources.dynamic_program(request.source, options, device=device)
        calls = {("main", profile): call for profile, call in program.calls(options).items()}
    else:
        calls = {(e, ()): call for e, call in sources.load(request.source, options, device=device).items()}
    placed = {key: place_call(call, device=device) for key, call in calls.items()}
    if request.source.kind != "entries":
        return placed
    entries = dict(request.source.entries)
    modules = {entry: model.module for (entry, _), model in placed.items()}
    share(modules, {entry: part.shared for entry, part in entries.items()}, Path(request.source.model), device)
    return {key: replace(model, writes=entries[key[0]].writes) for key, model in placed.items()}


def choose_without_timing() -> None:
    """Have torch choose the algorithms of libraries and the tilings of generated kernels without timing them."""
    import torch
    from torch._inductor import config

    torch.backends.cudnn.benchmark = False  # a model's code may have set it
    # Reductions would time their tilings otherwise.
    config.deterministic = True
    config.triton.autotune_pointwise = False


def let_torch_draw(models: "Iterable[TorchModel]") -> None:
    """Let models that are captured as they run, and have a generator's state, draw from torch's own generator."""
    from nimblec.pytorch.state import Writing

    for model in models:
        if isinstance(model.module, Writing) and not model.is_compiled:
            model.module.let_torch_draw()


def load_files(
    request: CompileRequest, weigh: "Weigh | None" = None, *, device: str = "cuda"
) -> "dict[ProgramKey, TorchModel]":
    """Return an ONNX file in the sizes of each profile, with the weights from ``weigh``."""
    from nimblec.onnx_import.torch_model import load_onnx

    options = request.options
    return {
        ("main", profile): load_onnx(
            Path(request.source.model),
            device=device,
            specs=options.inputs,
            named=options.named_inputs,
            dims=options.dims,
            constants=options.constants,
            examples=dict(options.examples),
            profile=profile,
            weigh=weigh,
            bounds=options.bounds,
        )
        for profile in options.profiles
    }
