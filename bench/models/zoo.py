"""Networks of timm, torchvision and transformers, random weights, batch 1; drawn by a seed, not picked.

``bench.models.zoo:LIBRARY_NAME`` is a network in half precision: an image in fp16, channels last; 128 tokens of an
encoder in fp16; 64 tokens of a decoder in bf16, without a cache. zoo.txt holds the names that a draw gave with
timm 1.0.29, torchvision 0.26 and transformers 5.17: ``python -m bench.models.zoo`` draws them again, in an hour on two
cores. A draw shuffles the families of each library, takes one network of each, and skips what cannot be measured: more
than `LARGEST` parameters, outputs that are not finite or are random, or a graph that torch.export does not find.
Decoders and encoders keep the sizes of their library's default configuration, with half the layers as often as
`LARGEST` asks.
"""

import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bench.models.images import Model, channels_last, settled

NAMES = {re.sub(r"\W", "_", name): name for name in Path(__file__).with_suffix(".txt").read_text().split()}
"""The names of libraries and networks, such as timm/resnet18, by their attributes of this module."""
SEED = 56
LARGEST = 1e9
"""Parameters of the largest network."""
DRAWN = {"timm": 22, "torchvision": 14, "encoder": 8, "decoder": 8, "vision": 8}
"""The networks of each library; the last three are of transformers."""
_CLASSES = {
    "encoder": "AutoModel",
    "decoder": "AutoModelForCausalLM",
    "vision": "AutoModelForImageClassification",
}


class First(nn.Module):
    """A network reduced to its first output, a tensor."""

    def __init__(self, model: nn.Module, **given: Any) -> None:
        """Wrap a network, which also gets the arguments ``given``."""
        super().__init__()
        self.model, self._given = model, given

    def forward(self, x: Tensor) -> Tensor:
        """Map an image or tokens to the first output."""
        first: Tensor = pytree.tree_leaves(self.model(x, **self._given))[0]
        return first


def _scaled(module: nn.Module) -> nn.Module:
    """Return a network with other scales than 0, 1e-6 or 1, with which residual branches start their training."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1 and not name.endswith("bias") and (parameter == parameter[0]).all():
                parameter.uniform_(0.5, 1)
    return module


def plain(library: str, name: str) -> nn.Module:
    """Return a network as its library makes it, with few enough layers if it is of transformers."""
    if library == "timm":
        import timm

        return timm.create_model(name)
    if library == "torchvision":
        from torchvision import models

        given: dict[str, Any] = {"init_weights": False} if name in {"googlenet", "inception_v3"} else {}
        if name in models.list_models(models.segmentation):
            given["weights_backbone"] = None
        return models.get_model(name, weights=None, **given)
    import transformers

    make = partial(getattr(transformers, _CLASSES[library]).from_config, transformers.AutoConfig.for_model(name))
    config = make.args[0]
    while parameters(make) > LARGEST and config.num_hidden_layers > 1:
        config.num_hidden_layers //= 2
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
    return make()


def parameters(make: Callable[[], nn.Module]) -> int:
    """Return the number of parameters of a network, without their memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())


def model(library: str, name: str) -> Model:
    """Return a network and its input."""
    module = plain(library, name)
    config: Any = getattr(module, "config", None)
    if library in {"encoder", "decoder"}:
        is_decoder = library == "decoder"
        given = {"use_cache": False} if is_decoder else {}
        tokens = torch.randint(3, config.vocab_size, (1, 64 if is_decoder else 128))
        return _scaled(First(module, **given)).eval().to(torch.bfloat16 if is_decoder else torch.float16), (tokens,)
    shape: Sequence[int] = (3, 224, 224)
    if library == "timm":
        made: Any = module
        shape = made.default_cfg["input_size"]
    elif library == "vision":
        size = getattr(config, "image_size", 224)
        shape = (getattr(config, "num_channels", 3), *([size, size] if isinstance(size, int) else size))
    # Batch norms need several pixels for a variance: of two images, there are at least two.
    return channels_last(settled(_scaled(First(module)), torch.randn(2, *shape)), torch.randn(1, *shape))


def __getattr__(name: str) -> Callable[[], Model]:
    """Return the network of this name, as a callable without arguments."""
    if name not in NAMES:
        raise AttributeError(name)
    library, _, network = NAMES[name].partition("/")
    return partial(model, library, network)


def families(library: str) -> dict[str, list[str]]:
    """Return the names of a library's networks by family: its module, or its type of configuration."""
    if library == "timm":
        import timm

        return {family: timm.list_models(module=family) for family in timm.list_modules()}
    if library == "torchvision":
        from torchvision import models

        found: dict[str, list[str]] = {}
        for name in (*models.list_models(models), *models.list_models(models.segmentation)):
            found.setdefault(models.get_model_builder(name).__module__, []).append(name)
        return found
    from transformers.models.auto import modeling_auto as auto

    if library == "vision":
        names = {*auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES}
    elif library == "encoder":
        names = {*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    else:
        names = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    return {name: [name] for name in names}


def _is_measurable(library: str, name: str) -> bool:
    """Return whether a network is small, has a graph, and finite, repeatable outputs; else write the reason."""
    torch.manual_seed(0)
    try:
        reason = "is too large" if parameters(partial(plain, library, name)) > LARGEST else ""
        if not reason:
            module, inputs = model(library, name)
            with torch.no_grad():
                torch.export.export(module, inputs, strict=False)
                first = module(*inputs)
                reason = "" if first.isfinite().all() else "is not finite"
                reason = reason or ("" if first.equal(module(*inputs)) else "draws random numbers")
    except Exception as exc:  # noqa: BLE001 - the libraries' code may raise anything
        reason = f"{type(exc).__name__}: {exc}"
    if reason:
        sys.stderr.write(f"{library}/{name}: {' '.join(reason.split())[:150]}\n")
    return not reason


def draw(seed: int) -> Iterator[str]:
    """Yield the networks of a draw, those of a library in the order of their families."""
    for library, count in DRAWN.items():
        drawn = random.Random(seed)  # noqa: S311 - no secret
        found = {family: sorted(names) for family, names in families(library).items() if names}
        names = [drawn.choice(found[family]) for family in drawn.sample(sorted(found), len(found))]
        yield from islice((f"{library}/{name}" for name in names if _is_measurable(library, name)), count)


if __name__ == "__main__":
    for each in draw(SEED):
        print(each, flush=True)
