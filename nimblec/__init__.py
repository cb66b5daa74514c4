"""nimblec: compile a neural network into one plan file; nimblert replays it without the framework.

>>> import nimblec, nimblert
>>> plan = nimblec.compile(module, (example,))
>>> with nimblert.load(plan) as executable:
...     y = executable(x)

Importing this package imports no framework: the compiler's parts are imported when they are used.
"""

import nimblec.base.isolation  # noqa: F401 - first, since it may take a folder off the path

# isort: split
import logging
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Never

from nimblec.base.errors import ArgumentError, CompileError, TraceError, UnsupportedModelError
from nimblec.base.installation import VERSION
from nimblec.base.options import (
    DEFAULT_TRIP_LIMIT,
    OWN_PLAN_CACHE,
    OWN_TIMING_CACHE,
    InputSpec,
    Precision,
    TargetChoice,
    read_options,
)
from nimblert.errors import (
    CudaError,
    DeviceMismatchError,
    InputError,
    NimbleError,
    PlanError,
    PlanFormatError,
    PlanInvalidError,
)
from nimblert.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import onnx
    import torch

__version__ = VERSION

__all__ = [
    "ArgumentError",
    "CompileError",
    "CudaError",
    "DeviceMismatchError",
    "InputError",
    "InputSpec",
    "NimbleError",
    "Plan",
    "PlanError",
    "PlanFormatError",
    "PlanInvalidError",
    "TraceError",
    "UnsupportedModelError",
    "compile",
    "generate",
    "load_state",
    "training_step",
]


def compile(  # noqa: A001  # the word that users look for; nimblec.compile shadows nothing outside
    model: "str | PathLike[str] | bytes | onnx.ModelProto | torch.export.ExportedProgram | Callable[..., Any] "
    "| Mapping[str, tuple[Any, ...]]",
    example_inputs: "Sequence[Any] | torch.Tensor | None" = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    target: TargetChoice = "auto",
    inputs: "Mapping[str, Sequence[int | str] | str] | Sequence[InputSpec | str]" = (),
    dims: Mapping[str, int | str | Sequence[int]] | None = None,
    pad_masks: str | Sequence[str] = (),
    dynamic_shapes: "Mapping[str, Any] | Sequence[Any] | None" = None,
    constants: "Mapping[str, float | str | Sequence[float] | np.ndarray] | None" = None,
    examples: "Mapping[str, np.ndarray] | None" = None,
    level: int | None = None,
    precision: Precision = "keep",
    max_error: float | None = None,
    approximate: bool = False,
    trip_limit: int = DEFAULT_TRIP_LIMIT,
    bounds: "Mapping[str, int | str | Sequence[int]] | None" = None,
    print_passes: bool = False,
    refittable: bool = False,
    streams: str | int = "auto",
    memory_limit: int | str | None = None,
    reproducible: bool = False,
    timing_cache: str | PathLike[str] = OWN_TIMING_CACHE,
    plan_cache: str | PathLike[str] | None = OWN_PLAN_CACHE,
    **unknown: Never,
) -> Plan:
    """Compile a neural network to a plan, which can be saved or loaded as it is.

    >>> plan = nimblec.compile(module.eval(), (image,), target="cpu", memory_limit="64MiB")
    >>> plan.save("model.plan")
    >>> with nimblert.load(plan) as executable: ...

    ``model`` is one of

    - a torch.nn.Module or a function of tensors, with ``example_inputs``. It is not modified. For the
      CUDA target it is exported by torch.export in this process, because kernels are captured in a
      fresh one, and pickling would lose parts of a module;
    - a torch.export.ExportedProgram, or the path of a ``.pt2`` file, with the example inputs saved in it;
    - an onnx.ModelProto, its bytes, or the path of an ``.onnx`` file;
    - "package.module:callable", which is imported and called (for the CUDA target in the capture
      process) and returns (module, example_inputs) or (module, example_inputs, kwargs). Its module is
      captured as it runs, without an export;
    - a dict of such tuples by the names of entries, a function without arguments that returns one, or
      "package.module:callable" that does. The plan has a program for each entry; equal weights and code
      are stored once, and what one entry writes into a buffer the others read.

    ``example_inputs`` are the positional arguments of one call, a tensor or a tuple, and ``kwargs`` its
    keyword arguments by name; tensors may be nested in tuples, lists and dicts. Their shapes become
    the plan's. An argument that is an int, float, bool, str or None becomes a constant of the plan.

    The options are those of the command line:

    - ``target``: "auto" (CUDA if there is a GPU and cuda-bindings is installed, else CPU), "cuda" or "cpu", or
      a GPU's architecture, such as "sm_90": no GPU is needed to compile for it (docs/ci.md).
    - ``inputs``: static shapes by input name, ``{"image": (1, 3, 224, 224)}``, or
      ``["image:1x3x224x224", "ids:1x16:int64"]``. An ONNX file needs one for each input with a
      dynamic dimension that has no name; ``{"image": ("batch", 3, 224, 224)}`` names it for ``dims``.
      A PyTorch model's example is replaced by zeros of that shape.
    - ``dims``: sizes of the named dimensions of an ONNX model, or of the symbols of a dynamic
      ExportedProgram: ``{"batch": 4}``. ``inputs`` take precedence. Several, ``(1, 2, 4)`` or ``"1..16"`` (the
      powers of two, and both ends), make a program for each combination. A range within which calls cannot be padded
      has every size if the programs are small, but not at -O2.
    - ``dynamic_shapes``: of a module or a function, as torch.export.export takes them; ``dims`` then gives sizes
      for the names of its Dims.
    - ``pad_masks``: inputs whose zeros mask elements of the others, such as ``"attention_mask"``: calls with
      fewer elements than a program takes are padded if masked results agree.
    - ``constants``: values of inputs of an ONNX model, which become constants of the plan: ``{"rate": 16000}``, an
      array, or as the command line takes them. Of branches that they choose from it has only the one taken.
    - ``examples``: arrays for inputs by name; the range of an integer array bounds the values drawn in later checks.
    - ``level``: 0 keeps the framework's own kernels, 1 (the default on CUDA) fuses, 2 also chooses
      kernels by timing them. CUDA target.
    - ``precision``: "keep", "fp32", "tf32" (how float32 convolutions and matrix products are computed),
      "fp16" or "bf16" (a float32 model in half precision), "fp8" ("fp16" with linear layers of level 2 in e4m3,
      in ranges found on the examples). CUDA target.
    - ``max_error``: the largest difference to accept, relative to an output's largest magnitude: from level 0, or on
      the CPU target from ONNX Runtime without its optimiser and from PyTorch.
    - ``approximate``: round activations to 8 bits in products with quantised weights, which is faster; a note tells
      the error. CPU target.
    - ``trip_limit``: the most trips of a loop whose number of trips the model leaves open; a call that needs more
      fails. CPU target.
    - ``bounds``: the largest shapes of outputs whose sizes depend on values, ``{"boxes": (100, 4)}``; needed where
      the model does not bound them. CPU target.
    - ``print_passes``: note each rewrite, with the calls of the graph before and after it; on the CPU target the
      nodes before and after ONNX Runtime's optimiser.
    - ``refittable``: keep in the plan how weights are folded and repacked, so that `nimblert.Executable.refit` can
      replace them; a note says what it costs.
    - ``streams``: "auto" (the fastest schedule, timed here, that is worth its memory), "max", or a number of streams.
    - ``memory_limit``: the largest arena (memory for results within a run) to accept, in bytes or as "64MiB",
      "1.5GB". Where no schedule fits, results are recomputed instead of kept.
    - ``reproducible``: no measured time decides or is stored, so that builds do not depend on the load of the
      machine; ``timing_cache`` is not used. Level 2 is refused.
    - ``timing_cache``: the file that keeps measured times; ``plan_cache``: the folder that keeps the
      plans of model files (None: keep no plan). Without a home folder there are none by default.

    The notes that the command line prints (arguments that became constants, outputs that are None, measured
    errors) go to the logger "nimblec" at level WARNING.

    Raises ArgumentError (an InputError and a TypeError) for an invalid argument, CompileError if the model
    cannot be compiled (UnsupportedModelError, TraceError), and DeviceMismatchError if this machine lacks
    the target.
    """
    options = read_options(
        target=target,
        inputs=inputs,
        dims=dims or {},
        pad_masks=pad_masks,
        constants=constants or {},
        examples=examples or {},
        level=level,
        precision=precision,
        max_error=max_error,
        approximate=approximate,
        trip_limit=trip_limit,
        bounds=bounds or {},
        print_passes=print_passes,
        refittable=refittable,
        streams=streams,
        memory_limit=memory_limit,
        reproducible=reproducible,
        timing_cache=timing_cache,
        plan_cache=plan_cache,
        **unknown,
    )
    from nimblec.compiler import compile_model

    made = compile_model(
        model, example_inputs, kwargs, options=options, observer=_unobserved, dynamic_shapes=dynamic_shapes
    )
    for note in made.notes:
        logging.getLogger(__name__).warning("%s", note)
    return made.plan


def training_step(
    model: "torch.nn.Module",
    loss: "Callable[..., torch.Tensor]",
    optimizer: "torch.optim.Optimizer",
    example_batch: tuple[Any, Any],
    *,
    clip_norm: float | None = None,
    accumulate: int = 1,
    autocast: "torch.dtype | str | None" = None,
) -> "Mapping[str, tuple[Any, ...]]":
    """Return the entries of a plan that trains a model, for `compile`: "train" and "evaluate", over one state.

    >>> step = nimblec.training_step(model, torch.nn.functional.cross_entropy, optimizer, (images, labels))
    >>> with nimblert.load(nimblec.compile(step, target="cpu")) as exe:
    ...     loss = exe(images, labels, entry="train")
    ...     scores = exe(images, entry="evaluate")

    ``example_batch`` is (inputs, targets), each a tensor or a tuple of them. A step lowers the scalar
    ``loss(model(*inputs), *targets)``, and returns its value before the update. The state has the model's
    parameters and buffers under their names ("model.fc.weight"), the optimizer's state for each parameter
    ("optimizer.fc.weight.exp_avg"), and its learning rate ("optimizer.lr", or "optimizer.lr_0" and so on for
    several groups), which can be set like any other value: ``exe.state["optimizer.lr"] = rate``. The gradients'
    norm is limited to ``clip_norm``. With ``accumulate=N`` the optimizer steps on every N-th call, with the mean
    gradient of those N calls; their sum so far is state as well ("accumulated.fc.weight", "accumulated_calls").

    Dropout, stochastic depth and other uses of uniform, normal or Bernoulli random numbers draw them by Philox from
    the state ("generator.seed", initially torch.initial_seed(), and "generator.offset", which each call advances).
    Equal state gives equal numbers. They differ from torch's, except on the CUDA target at level 0.

    ``autocast``, torch.bfloat16 ("bf16") or torch.float16 ("fp16"), runs model and loss of both entries under
    torch.autocast of the step's device; parameters and optimizer state keep their dtypes. In float16 the loss is
    scaled as torch.amp.GradScaler does by default, with the state "scaler.scale" and "scaler.growth_tracker": if a
    gradient is not finite, parameters and optimizer state stay as they are, and the scale is reduced. `compile`
    takes such a step only by name and for the CUDA target; otherwise it raises UnsupportedModelError.

    Parameters that require no gradient stay as they are. The step starts from the current state of model and optimizer.
    Neither is modified, except that a model in evaluation mode is put into training mode; parts of a model in training
    mode may be in evaluation mode, and are run so. On the CUDA target, give `compile` the name of a function that
    returns the entries.

    Raises ArgumentError for an argument of the wrong kind, TraceError if the step cannot be traced to a graph (Python
    code reads values of tensors, or the model has a generator of its own), UnsupportedModelError if the graph does
    not compute what the optimizer does, or if a kernel draws random numbers itself.
    """
    from nimblec.training.entries import entries

    return entries(
        model, loss, optimizer, example_batch, clip_norm=clip_norm, accumulate=accumulate, autocast=autocast
    )


def generate(
    model: "torch.nn.Module",
    *,
    prompts: Sequence[int] = (16, 64, 256),
    max_new_tokens: int = 128,
    batch: int = 1,
    eos: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> "Mapping[str, tuple[Any, ...]]":
    """Return the entries of a plan that generates text, for `compile`: a prefill for each length, and "generate".

    >>> plan = nimblec.compile(nimblec.generate(model, prompts=(16, 64), eos=2), target="cpu")
    >>> with nimblert.load(plan) as exe:
    ...     first = exe(ids, lengths, entry="prefill_64")  # prompts of up to 64 tokens, padded at the end
    ...     tokens, count = exe(np.array(100), entry="generate")  # up to 100 more, in one call

    ``model`` is a causal language model of transformers, or a module of ``(ids, positions)``, both batch x steps, that
    returns logits (batch x steps x vocabulary) and writes the keys and values of these positions into buffers of its
    own. Sequences may have prompts of different ``lengths``. The caches have room for the longest of ``prompts`` and
    ``max_new_tokens``; "generate" returns batch x ``max_new_tokens`` tokens, of which the first ``count`` were made,
    and -1. It ends early where all sequences have reached the token ``eos``, or the caches are full. Another call goes
    on. Bound to an array of ``exe.empty_output``, tokens can be read as they are made (samples/serving/events.py).

    ``temperature`` 0 takes the most likely token. Otherwise tokens are drawn, from the ``top_k`` most likely (0: all)
    and of these the fewest with ``top_p`` of the probability, by Philox from the state "shared.seed" and
    "shared.offset".

    Raises ArgumentError for an argument out of range, TraceError if torch.export refuses the model.
    """
    from nimblec.pytorch.generation import Sampling, entries

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    return entries(
        model, prompts=prompts, max_new_tokens=max_new_tokens, batch=batch, sampling=sampling, eos=eos, seed=seed
    )


def load_state(
    model: "torch.nn.Module",
    state: "Mapping[str, np.ndarray]",
    optimizer: "torch.optim.Optimizer | None" = None,
    scaler: "torch.amp.GradScaler | None" = None,
) -> None:
    """Load the state of a plan of `training_step`, ``exe.state``, into a model, to continue in PyTorch.

    It is also loaded into the ``optimizer``, and into the torch.amp.GradScaler of a step in float16, if they are given.
    Raises ArgumentError for an argument of the wrong kind, a state of another model or kind of optimizer, one that
    lacks tensors, and, with a ``scaler``, one without a scale; nothing is changed then. The state of a plan leaves out
    tensors of the model that no call writes: these stay as they are.
    """
    from nimblec.training.load import load_state as load

    load(model, state, optimizer, scaler)


def _unobserved(stage: str, seconds: float | None) -> None:
    """Discard progress."""
