"""Train a small CNN on scikit-learn's digits and export it as samples/digits.onnx.

Run from the root of the repository: ``python samples/train_digits.py [DIRECTORY]``. Prints the
accuracy on the test split and writes, beside the model, the first test image of each digit that
digits.onnx classifies correctly as digit_N.npy (float32, 1x1x8x8), N being its digit.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

SEED = 0
EPOCHS = 40
BATCH = 64
SHOWN = (0, 3, 7, 9)
"""The digits that get a digit_N.npy."""


class DigitNet(nn.Module):
    """An 8x8 grey image, values 0 to 1, to the digit (int64) and the ten probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Linear(32 * 2 * 2, 10)

    def logits(self, image: Tensor) -> Tensor:
        """Ten scores for each image (N x 1 x 8 x 8)."""
        return self.classifier(self.features(image).flatten(1))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """The most probable digit of each image and the probability of every digit."""
        probabilities = self.logits(image).softmax(dim=1)
        return probabilities.argmax(dim=1), probabilities


def split() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images, test images, training labels, test labels; a quarter is the test split."""
    images, labels = load_digits(return_X_y=True)
    scaled = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    parts = train_test_split(scaled, labels, test_size=0.25, random_state=SEED, stratify=labels)
    images, test_images, labels, test_labels = map(torch.from_numpy, parts)
    return images, test_images, labels, test_labels


def train(images: Tensor, labels: Tensor) -> DigitNet:
    """Adam with a one-cycle rate; the same bits at every run on one machine."""
    torch.manual_seed(SEED)
    net = DigitNet()
    steps = EPOCHS * -(-len(images) // BATCH)
    optimizer = torch.optim.Adam(net.parameters(), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net.logits(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def export(net: DigitNet, path: Path, *, batch: torch.export.Dim | None = None) -> None:
    """Write ``net`` for one image, or a ``batch`` of any size: weights in the one file, no paths of this machine."""
    program = torch.onnx.export(
        net,
        (torch.zeros(1 if batch is None else 2, 1, 8, 8),),
        dynamic_shapes=None if batch is None else ({0: batch},),
        input_names=["image"],
        output_names=["digit", "probabilities"],
        opset_version=20,
        dynamo=True,
        verbose=False,
    )
    assert program is not None  # as dynamo=True returns it
    for node in program.model.graph:
        node.metadata_props.clear()  # stack traces
    program.save(path, external_data=False)


def main(directory: Path) -> None:
    """Train, export, print the accuracy, write the example images."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    images, test_images, labels, test_labels = split()
    net = train(images, labels)
    with torch.inference_mode():
        digits = net(test_images)[0]
    right = digits == test_labels
    print(f"test accuracy: {right.float().mean():.4f} ({int(right.sum())} of {len(right)} images)")
    export(net, directory / "digits.onnx")
    export(net, directory / "digits_batch.onnx", batch=torch.export.Dim("batch"))
    for digit in SHOWN:
        first = int(torch.nonzero((test_labels == digit) & right)[0])
        np.save(directory / f"digit_{digit}.npy", test_images[first : first + 1].numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
