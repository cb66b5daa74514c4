"""A training step of scikit-learn's digits, for a plan that samples/train_lean.py trains with.

Run from the root of the repository: ``nimblec compile samples.training_step:digits --target cpu -o train.plan``.
"""

import torch
from torch import Tensor, nn

import nimblec

BATCH = 64


class DigitNet(nn.Module):
    """An 8x8 grey image, values 0 to 1, to ten scores."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.classifier = nn.Linear(32 * 2 * 2, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Scores of each image (N x 1 x 8 x 8)."""
        scores: Tensor = self.classifier(self.features(image).flatten(1))
        return scores


def digits() -> object:
    """The entries "train" and "evaluate", for batches of 64."""
    torch.manual_seed(0)
    model = DigitNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    batch = torch.rand(BATCH, 1, 8, 8), torch.randint(0, 10, (BATCH,))
    return nimblec.training_step(model, nn.functional.cross_entropy, optimizer, batch)
