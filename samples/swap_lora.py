"""Swap low-rank adapters (LoRA) of one plan between calls: W + B @ A takes the place of W, nothing is compiled.

Usage: ``python samples/swap_lora.py``. An adapter that PEFT has merged into a .safetensors file is swapped in by
``executable.refit("merged.safetensors")``.
"""

import copy
import time
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

import nimblec
import nimblert

WIDTH, RANK, TOKENS = 64, 4, 16
ADAPTED = ("self_attn.out_proj.weight", "linear1.weight", "linear2.weight")

Weights = Mapping[str, np.ndarray]
Adapter = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""B, (outputs, rank), and A, (rank, inputs), of each weight that is adapted."""


def adapter(base: Weights, seed: int) -> Adapter:
    """A random adapter in place of a trained one."""
    random = np.random.default_rng(seed)

    def factor(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32) / WIDTH

    return {name: (factor(len(base[name]), RANK), factor(RANK, base[name].shape[1])) for name in ADAPTED}


def merged(base: Weights, adapter: Adapter) -> Weights:
    """The weights that an adapter changes; all others stay as they are in the plan."""
    return {name: base[name] + b @ a for name, (b, a) in adapter.items()}


def with_weights(module: nn.Module, weights: Weights) -> nn.Module:
    """A copy of a module with these weights, to compare with."""
    changed = copy.deepcopy(module)
    changed.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()}, strict=False)
    return changed


def main() -> None:
    """Compile once, then answer with each of two adapters, and with none again."""
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True).eval()
    x = torch.randn(1, TOKENS, WIDTH)
    plan = nimblec.compile(module, (x,), target="cpu", refittable=True)
    base = {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}
    with nimblert.load(plan) as executable, torch.no_grad():
        without = executable(x.numpy())
        for seed, name in enumerate(("formal", "casual")):
            weights = merged(base, adapter(base, seed))
            begin = time.perf_counter()
            executable.refit(weights)
            milliseconds = 1e3 * (time.perf_counter() - begin)
            difference = np.abs(executable(x.numpy()) - with_weights(module, weights)(x).numpy()).max()
            print(f"{name}: swapped in {milliseconds:.0f} ms, differs from PyTorch by {difference:.0e}")
        executable.refit({name: base[name] for name in ADAPTED})
        print("base again, bit for bit:", np.array_equal(executable(x.numpy()), without))


if __name__ == "__main__":
    main()
