"""Five model families in plain torch.nn with random weights, small enough to export in a test."""

import importlib
import warnings
from pathlib import Path

import torch

FAMILIES = ("resnet", "mobilenet", "inception", "bert", "unet")


def export(name: str, path: Path, *, dynamo: bool) -> Path:
    """Export the small model of a family to an ONNX file, by torch's new or old exporter."""
    torch.manual_seed(0)
    module, args = importlib.import_module(f"families.{name}").small()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters' deprecations are not what is tested
        torch.onnx.export(module, args, path, dynamo=dynamo, verbose=False)
    return path
