"""The models of torchvision, timm and transformers through the rewrites and kernels, in float32 on the CPU.

Each model, with random weights, is traced, rewritten as by ``-O1`` for a GPU, and given Triton kernels wherever they
apply, by the pipelines of ``-O2``; torch computes the kernels' results by their definitions. Both are compared with the
model itself. torchvision contributes all models of images and videos except detectors, timm one of each architecture,
transformers two layers of a selection. Models of more than 100 million parameters are left out.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from calling import place
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nimblec.base.errors import CompileError
from nimblec.graph.definitions import Interpreter
from nimblec.kernels.gpu import SM_90
from nimblec.optimize.o2 import TRITON, first
from nimblec.optimize.pipeline import Runs, Setting

TOLERANCE = 1e-4
"""Limit of the error, relative to the norm of an output."""
LARGEST = 100e6
"""Parameters of the largest model that is run."""

Built = tuple[nn.Module, tuple[Tensor, ...]]
Builder = Callable[[], Built]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a model, and the calls of its graph as traced, as rewritten, and with Triton kernels."""

    name: str
    status: str
    message: str = ""
    calls: tuple[int, ...] = ()
    error: float = 0.0


def torchvision_models() -> Iterator[tuple[str, Builder]]:
    """Yield all models except detectors and quantized ones."""
    from torchvision import models

    others = {
        *models.list_models(models.detection),
        *models.list_models(models.quantization),
        "raft_large",
        "raft_small",
    }
    videos = set(models.list_models(models.video))
    segmenting = set(models.list_models(models.segmentation))

    def build(name: str) -> Built:
        given: dict[str, Any] = {"weights": None}
        if name in segmenting:
            given["weights_backbone"] = None
        if name in {"googlenet", "inception_v3"}:
            given["init_weights"] = False
        x = torch.randn(1, 3, 16, 224, 224) if name in videos else torch.randn(1, 3, 224, 224)
        return models.get_model(name, **given), (x,)

    for name in models.list_models():
        if name not in others:
            yield name, partial(build, name)


def timm_models() -> Iterator[tuple[str, Builder]]:
    """Yield the model with the shortest name of each architecture."""
    import timm

    def build(name: str) -> Built:
        module = timm.create_model(name)
        return module, (torch.randn(1, *module.default_cfg["input_size"]),)

    for architecture in timm.list_modules():
        names = timm.list_models(module=architecture)
        if names:
            name = min(names, key=lambda name: (len(name), name))
            yield name, partial(build, name)


_LANGUAGE = (
    "Albert", "Bert", "Bloom", "Camembert", "CodeGen", "Cohere", "ConvBert", "DebertaV2", "DistilBert",
    "Electra", "Ernie", "FNet", "Falcon", "GPT2", "GPTBigCode", "GPTJ", "GPTNeoX", "Gemma", "Gemma2",
    "Granite", "Llama", "MPNet", "MegatronBert", "Mistral", "ModernBert", "Mpt", "Nystromformer", "OPT",
    "Olmo", "Phi", "Phi3", "Qwen2", "Qwen3", "RoFormer", "Roberta", "SqueezeBert", "StableLm", "Starcoder2",
    "XLMRoberta", "XLNet",
)  # fmt: skip
_VISION = {
    "Beit": 32,
    "CLIPVision": 32,
    "ConvNext": 64,
    "Dinov2": 64,
    "MobileViT": 64,
    "PoolFormer": 64,
    "RegNet": 64,
    "ResNet": 64,
    "Segformer": 64,
    "SiglipVision": 32,
    "ViT": 32,
}
"""Image sizes."""
_SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "hidden_dim"), 128),
    "head_dim": 16,
    "rotary_dim": 16,
    "vocab_size": 200,
    "max_position_embeddings": 128,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Set wherever a configuration has a field of the name."""


class _First(nn.Module):
    """A model, reduced to its first result."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self._name = model, name

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens or images to states."""
        first: Tensor = self.model(**{self._name: x})[0]
        return first


def transformers_models() -> Iterator[tuple[str, Builder]]:
    """Yield a selection, of two layers each."""
    import transformers

    def configured(name: str, image: int | None) -> nn.Module:
        kind = getattr(transformers, f"{name}Model")
        config = kind.config_class()
        for key, size in ({"image_size": image} | _SIZES if image else _SIZES).items():
            is_derived = isinstance(getattr(type(config), key, None), property)
            if not is_derived and isinstance(getattr(config, key, ()), int | None):
                setattr(config, key, size)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:2]
        if hasattr(config, "use_cache"):
            config.use_cache = False
        model: nn.Module = kind(config)
        return model

    def of_tokens(name: str) -> Built:
        return _First(configured(name, None), "input_ids"), (torch.randint(3, 190, (1, 32)),)

    def of_images(name: str, size: int) -> Built:
        return _First(configured(name, size), "pixel_values"), (torch.randn(1, 3, size, size),)

    for name in _LANGUAGE:
        yield name, partial(of_tokens, name)
    for name, size in _VISION.items():
        yield name, partial(of_images, name, size)


LIBRARIES: dict[str, Callable[[], Iterable[tuple[str, Builder]]]] = {
    "torchvision": torchvision_models,
    "timm": timm_models,
    "transformers": transformers_models,
}


def run(name: str, build: Builder) -> Result | None:
    """Return the outcome of a model; None if it is too large."""
    torch.manual_seed(0)
    module, inputs = build()
    if sum(parameter.numel() for parameter in module.parameters()) > LARGEST:
        return None
    try:
        calls, error = compared(module.eval(), inputs)
    except CompileError as exc:
        return Result(name=name, status="refused", message=str(exc))
    except (AssertionError, RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as exc:
        return Result(name=name, status="error", message=f"{type(exc).__name__}: {str(exc).split(chr(10))[0]}")
    status = "pass" if error <= TOLERANCE else "wrong"
    return Result(name=name, status=status, calls=calls, error=float(f"{error:.2g}"))


def compared(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[tuple[int, ...], float]:
    """Return the number of calls of each graph, and the largest relative error of any output."""
    with torch.no_grad():
        expected = [leaf for leaf in pytree.tree_leaves(module(*inputs)) if isinstance(leaf, Tensor)]
        model = place(module, inputs)
        runs = Runs(model, Setting(device="cuda", use=first(SM_90)))
        rewritten, *kernels = TRITON[:-1]  # no regions: torch computes the calls by their definitions
        graphs = [runs(*pipelines).module for pipelines in ((), (rewritten,), (rewritten, *kernels))]
        given = [tensor for _, tensor in model.inputs]
        errors = [
            _error(wanted, got)
            for graph in graphs
            for wanted, got in zip(expected, Interpreter(graph).run(*given), strict=True)
        ]
    calls = tuple(sum(node.op == "call_function" for node in graph.graph.nodes) for graph in graphs)
    return calls, torch.tensor(errors, dtype=torch.float64).max().item()  # NaN if any is NaN


def _error(expected: Tensor, found: Tensor) -> float:
    assert (expected.dtype, expected.shape) == (found.dtype, found.shape), "an output has another dtype or shape"
    wanted = expected.double()
    return float((wanted - found.double()).norm() / wanted.norm().clamp_min(1e-30))
