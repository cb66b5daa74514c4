"""A two-tower model: the dot product of an image encoder and a text encoder, batch 1."""

import torch
import torchvision
from torch import nn


class TwoTowers(nn.Module):
    """ResNet-18, and four transformer layers over 64 tokens; the towers share nothing."""

    def __init__(self, width: int = 512, vocabulary: int = 8192) -> None:
        super().__init__()
        self.image = torchvision.models.resnet18()
        self.image.fc = nn.Linear(512, width)
        self.tokens = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.text = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, image: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the similarity of an image and a text, shape (1, 1)."""
        return self.image(image) @ self.text(self.tokens(tokens)).mean(1).T


def fp16() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Build the model in half precision."""
    return TwoTowers().eval().half(), (torch.randn(1, 3, 224, 224).half(), torch.randint(0, 8192, (1, 64)))
