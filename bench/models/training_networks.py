"""Training steps of the paper's networks (torchvision and timm, random weights) on images of 32 x 32, by batch size.

The networks of bench/models/training_at_size.py are trained at their own sizes.
NETWORK_batch_N is a step in float32, NETWORK_batch_N_bf16 one under torch.autocast. "small" is a network for tests,
without torchvision. At batch 1 the last features are one pixel, which has no variance: PyTorch's batch norms refuse it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import nimblec
from bench.models import training_at_size

CLASSES = 10
BATCHES = (2, 8, 32, 128)


def parts(network: str, batch: int) -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    """Return the model on the CPU, SGD with momentum, and a batch of inputs and targets; the same at each call."""
    torch.manual_seed(0)
    if network in training_at_size.NETWORKS:
        model, example = training_at_size.NETWORKS[network](batch)
    else:
        model, example = _of_cifar(network), (torch.randn(batch, 3, 32, 32), torch.randint(0, CLASSES, (batch,)))
    return model, torch.optim.SGD(model.parameters(), 0.0625, momentum=0.9), example


def _of_cifar(network: str) -> nn.Module:
    if network == "small":
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, CLASSES))
        )
    if network == "nasnet_a_mobile":
        from bench.models.nasnet_a_mobile import NASNetAMobile

        nasnet = NASNetAMobile()
        nasnet.reset_classifier(CLASSES)
        return nasnet
    import torchvision

    made: nn.Module = getattr(torchvision.models, network)(num_classes=CLASSES)
    return made


def loss_of(network: str) -> Callable[..., torch.Tensor]:
    """Return the loss of a network's outputs and targets."""
    return training_at_size.cycle_loss if network == "cyclegan" else nn.functional.cross_entropy


def split(name: str) -> tuple[str, int, str | None]:
    """Return the network, the batch size and the dtype of autocast in a name; ValueError if it has another form."""
    plain, autocast = (name.removesuffix("_bf16"), "bf16") if name.endswith("_bf16") else (name, None)
    network, _, batch = plain.rpartition("_batch_")
    return network, int(batch), autocast


def step(network: str, batch: int, autocast: str | None) -> Any:
    """Return the entries of a plan for a training step."""
    model, optimizer, example = parts(network, batch)
    return nimblec.training_step(model, loss_of(network), optimizer, example, autocast=autocast)


def __getattr__(name: str) -> Callable[[], Any]:
    """Return the step of this name, as a callable without arguments."""
    try:
        return partial(step, *split(name))
    except ValueError as exc:
        raise AttributeError(name) from exc
