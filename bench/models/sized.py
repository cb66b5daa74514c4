"""Networks with one dynamic dimension, random weights; each callable returns a `Sized`."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.models.images import channels_last
from bench.models.texts import Outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A module, its arguments, and the dynamic ``axis`` of each, of sizes from 1 to ``largest``.

    ``bounds`` limit the integers of arguments, by position; ``pad_masks`` are the names of masks of the others.
    """

    module: nn.Module
    args: tuple[Tensor, ...]
    axis: int
    largest: int
    bounds: Mapping[int, tuple[int, int]]
    pad_masks: tuple[str, ...] = ()

    def export(self) -> tuple[torch.export.ExportedProgram, str]:
        """Return the exported module, and torch's name of its dimension."""
        dim = torch.export.Dim("size", min=1, max=self.largest)
        shapes = tuple({self.axis: dim} for _ in self.args)
        with torch.no_grad():
            program = torch.export.export(self.module, self.args, dynamic_shapes=shapes, strict=False)
        (name,) = program.range_constraints
        return program, str(name)

    def draw(self, size: int, seed: int) -> list[Tensor]:
        """Draw arguments of another size: images are channels last, masks keep everything."""
        generator = torch.Generator().manual_seed(seed)

        def one(position: int, like: Tensor) -> Tensor:
            shape = tuple(size if axis == self.axis else length for axis, length in enumerate(like.shape))
            if position in self.bounds:
                low, high = self.bounds[position]
                return torch.randint(low, high + 1, shape, generator=generator)
            drawn = torch.randn(shape, generator=generator).to(like.dtype)
            return drawn.to(memory_format=torch.channels_last) if drawn.ndim == 4 else drawn

        return [one(*each) for each in enumerate(self.args)]


def resnet50() -> Sized:
    """Build ResNet-50 (torchvision) in half precision, channels last, for any batch up to 64."""
    import torchvision

    module, args = channels_last(torchvision.models.resnet50().eval(), torch.randn(2, 3, 224, 224))
    return Sized(module=module, args=args, axis=0, largest=64, bounds={})


def bert_base(layers: int = 12) -> Sized:
    """Build BERT-base (transformers) in half precision, for any length up to 512."""
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=layers)
    return of_tokens(
        Outputs(BertModel(config), "last_hidden_state", "pooler_output").eval().half(), config.vocab_size, 512
    )


def of_tokens(module: nn.Module, vocabulary: int, largest: int) -> Sized:
    """Return an encoder of masked tokens: any length up to ``largest``."""
    ids = torch.randint(vocabulary, (1, largest // 4))
    return Sized(
        module=module,
        args=(ids, torch.ones_like(ids)),
        axis=1,
        largest=largest,
        bounds={0: (0, vocabulary - 1), 1: (1, 1)},
        pad_masks=("attention_mask",),
    )
