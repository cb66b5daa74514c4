"""An ONNX file as a model that PyTorch runs."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from nimblec.base.errors import CompileError
from nimblec.base.options import InputSpec, NamedInput
from nimblec.onnx_import import model_file, model_shapes
from nimblec.onnx_import.importer import OnnxInput, Weigh, import_model
from nimblec.onnx_import.input_arrays import check_examples, make_constant
from nimblec.pytorch.model import TorchModel
from nimblec.pytorch.tensors import as_tensor, resized
from nimblert.plan import Profile


def load_onnx(
    path: Path,
    *,
    device: str,
    specs: tuple[InputSpec, ...] = (),
    named: tuple[NamedInput, ...] = (),
    dims: tuple[tuple[str, int], ...] = (),
    constants: tuple[tuple[str, np.ndarray], ...] = (),
    examples: Mapping[str, np.ndarray] | None = None,
    profile: Profile = (),
    weigh: Weigh | None = None,
    bounds: tuple[tuple[str, tuple[int, ...]], ...] = (),
) -> TorchModel:
    """Return an ONNX file as ATen calls on ``device``; ``examples`` are arrays for its inputs by name.

    ``constants`` take the place of inputs. ``named`` gives names to dimensions that have none. ``specs`` and ``dims``
    give sizes to dynamic dimensions, of one input and by name, and so does the ``profile``, to whose sizes examples are
    repeated or cut. ``weigh`` gives other tensors for its weights. ``bounds`` are the largest shapes of outputs whose
    sizes depend on values.
    """
    given = dict(examples or {})
    loaded = model_file.load(path)
    make_constant(loaded, constants)
    model_shapes.name_dimensions(loaded, named)
    check_examples(loaded, [InputSpec(name=n, shape=a.shape, dtype=a.dtype.name) for n, a in given.items()])
    shown = (InputSpec(name=name, shape=array.shape) for name, array in given.items())
    shapes = {spec.name: spec for spec in model_shapes.resize(loaded, shown, profile)}
    given = {name: resized(array, shapes[name].shape) for name, array in given.items()}
    shapes |= {spec.name: spec for spec in specs}
    model = model_shapes.fix_shapes(loaded, tuple(shapes.values()), (*dims, *profile))
    outputs = [value.name for value in model.graph.output]
    if unknown := next((name for name, _ in bounds if name not in outputs), None):
        raise CompileError(f"--bound {unknown}: is not one of the model's outputs {outputs}")
    program = import_model(model, device=device, weigh=weigh, bounds=dict(bounds))
    inputs = tuple((i.name, _example(i, given.get(i.name)).to(device)) for i in program.inputs)
    tensors = tuple(tensor for _, tensor in inputs)
    return TorchModel(
        module=program.module,
        args=tensors,
        kwargs={},
        inputs=inputs,
        output_names=(*program.outputs, *(f"sizes of {program.outputs[index]}" for index in program.cropped)),
        is_flat=True,
        cropped=program.cropped,
    )


def _example(described: OnnxInput, given: np.ndarray | None) -> torch.Tensor:
    """Return the value of an input during capture: the example, or zeros and ones."""
    if given is not None:
        return as_tensor(np.asarray(given, order="C"))
    count = int(np.prod(described.shape, dtype=np.int64))
    values = torch.arange(count, dtype=torch.int64).remainder(2)
    return values.reshape(described.shape).to(getattr(torch, described.dtype))
