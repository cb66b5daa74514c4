"""ViT-B/16 (torchvision), random weights."""

import torch
import torchvision

from bench.models.images import Model, batches


def fp32(batch: int = 1) -> Model:
    """Build the model with attention as eager PyTorch runs it."""
    module = torchvision.models.vit_b_16()
    # The head's weights are zeros before training.
    torch.nn.init.normal_(module.heads.head.weight, std=0.02)
    return module.eval(), (torch.randn(batch, 3, 224, 224),)


def fp16(batch: int = 1) -> Model:
    """Build the model in half precision."""
    module, (image,) = fp32(batch)
    return module.half(), (image.half(),)


fp16_batch_4, fp16_batch_16, fp16_batch_64 = batches(fp16)
