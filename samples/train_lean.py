"""Train with a plan and nimblert alone: no PyTorch in the process.

Usage: ``python samples/train_lean.py train.plan [EPOCHS]``; samples/training_step.py says how the plan is made. Prints
the loss of each epoch and the accuracy on the test split, and writes the state to train.safetensors.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.progress import track
from safetensors.numpy import save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nimblert

SEED = 0
FIRST_RATE = 0.05


def split() -> list[np.ndarray]:
    """Training images, test images, training labels, test labels; a quarter is the test split."""
    images, labels = load_digits(return_X_y=True)
    scaled = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    parts: list[np.ndarray] = train_test_split(scaled, labels, test_size=0.25, random_state=SEED, stratify=labels)
    return parts


def batches(count: int, size: int, epoch: int) -> Iterator[np.ndarray]:
    """Indices of each batch of an epoch; an incomplete last batch is dropped."""
    order = np.random.default_rng([SEED, epoch]).permutation(count)
    yield from order[: count // size * size].reshape(-1, size)


def accuracy(model: nimblert.Executable, images: np.ndarray, labels: np.ndarray, size: int) -> float:
    """The share of images that are classified correctly; the last batch is padded with copies of the last image."""
    padded = np.concatenate((images, np.repeat(images[-1:], -len(images) % size, axis=0)))
    scores = [model(part, entry="evaluate") for part in padded.reshape(-1, size, *images.shape[1:])]
    return float((np.concatenate(scores).argmax(axis=1)[: len(labels)] == labels).mean())


def main(plan: str, epochs: int = 15) -> None:
    """Train, report, and keep the state."""
    images, test_images, labels, test_labels = split()
    with nimblert.load(plan) as model:
        size = model.entry("train").programs[0].inputs[0].shape[0]
        for epoch in track(range(epochs), "training"):
            model.state["optimizer.lr"] = FIRST_RATE * (1 - epoch / epochs)
            chosen = batches(len(images), size, epoch)
            losses = [model(images[each], labels[each], entry="train") for each in chosen]
            print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")
        print(f"accuracy {accuracy(model, test_images, test_labels, size):.4f}")
        save_file(dict(model.state), Path(plan).with_suffix(".safetensors"))
    assert "torch" not in sys.modules


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: python samples/train_lean.py PLAN [EPOCHS]")
    main(sys.argv[1], *map(int, sys.argv[2:]))
