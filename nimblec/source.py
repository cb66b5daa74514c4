"""Where a model comes from: a file, the name of a callable, or a module of the calling process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nimblec.errors import CompileError, UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model as another process can load it.

    ``kind``: "callable" ("package.module:callable"), "exported" (.pt2), "saved" (a live module) or
    "onnx"; ``model`` its name or path.
    """

    kind: str
    model: str


def find_source(model: Any, example_inputs: Any, folder: Path) -> Source:
    """The source of what a user calls a model; a live module is saved in ``folder``.

    Raises CompileError for what is neither a file, nor such a name, nor a module.
    """
    if not isinstance(model, str | Path):
        return _save_module(model, example_inputs, folder)
    name = str(model)
    suffix = Path(name).suffix.lower()
    if suffix in (".onnx", ".pt2"):
        if not Path(name).is_file():
            raise CompileError(f"{name}: no such file")
        return Source(kind="onnx" if suffix == ".onnx" else "exported", model=str(Path(name).resolve()))
    module, colon, attribute = name.partition(":")
    if colon and not module.endswith(".py") and all(part.isidentifier() for part in (*module.split("."), attribute)):
        return Source(kind="callable", model=name)
    if module.endswith(".py") and attribute.isidentifier():
        dotted = ".".join(Path(module).with_suffix("").parts)
        raise CompileError(f"{name}: a module is named as `import` names it: give {dotted}:{attribute}")
    if Path(name).exists():
        raise UnsupportedModelError(f"{name}: expected an .onnx or .pt2 file, or package.module:callable")
    raise CompileError(f"{name}: no such file, and not of the form package.module:callable")


def _save_module(module: Any, example_inputs: Any, folder: Path) -> Source:
    from nimblec.frontend import pytorch  # brings in torch, which whoever holds a module has

    if not hasattr(module, "state_dict"):
        raise CompileError(f"the model is a {type(module).__name__}: expected a torch.nn.Module or a path")
    if example_inputs is None:
        raise CompileError("a module needs example inputs: compile(module, (x,))")
    return Source(kind="saved", model=str(pytorch.save(module, example_inputs, folder)))
