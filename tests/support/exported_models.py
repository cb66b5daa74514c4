"""Small models of many families in plain torch.nn, for the operators of their exports to ONNX."""

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from exported_images import (
    ConvNext,
    DeepLab,
    DenseNet,
    GoogLeNet,
    RegNet,
    ShuffleNet,
    SqueezeExcite,
    Yolo,
    style_transfer,
    super_resolution,
)
from torch import Tensor, nn

Example = tuple[nn.Module, tuple[Tensor, ...]]


class Tagger(nn.Module):
    """Embedding, a bidirectional recurrent layer or two, and a classifier for each token."""

    def __init__(self, layer: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 12)
        self.layer = layer(12, 10, num_layers=2, bidirectional=True, batch_first=True)
        self.tags = nn.Linear(20, 5)

    def forward(self, ids: Tensor) -> Tensor:
        """Map (N, tokens) ids to (N, tokens, 5)."""
        return self.tags(self.layer(self.words(ids))[0])


class Attention(nn.Module):
    """Self-attention by torch's own fused call."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, tokens, width) to the same."""
        n, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(n, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(n, tokens, width))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, tokens, width) to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Patches, a class token, positions, blocks, a head (Dosovitskiy et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 32)), nn.Parameter(torch.randn(1, 17, 32))
        self.blocks = nn.Sequential(Block(32, 4), Block(32, 4))
        self.head = nn.Linear(32, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Map (N, 3, 32, 32) to (N, 10)."""
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.blocks(x)[:, 0])


class Gpt(nn.Module):
    """Token and position embeddings, causal blocks, tied output weights (Radford et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(60, 32), nn.Embedding(16, 32)
        self.blocks, self.norm = nn.Sequential(Block(32, 4, causal=True), Block(32, 4, causal=True)), nn.LayerNorm(32)

    def forward(self, ids: Tensor) -> Tensor:
        """Map (N, tokens) ids to (N, tokens, 60)."""
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.norm(self.blocks(x)) @ self.words.weight.t()


class Llama(nn.Module):
    """Root mean square norms, rotary positions, grouped queries, a gated network (Touvron et al. 2023)."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale1, self.scale2 = nn.Parameter(torch.rand(32)), nn.Parameter(torch.rand(32))
        self.q, self.k, self.v = nn.Linear(32, 32, False), nn.Linear(32, 16, False), nn.Linear(32, 16, False)
        self.gate, self.up, self.down = nn.Linear(32, 64, False), nn.Linear(32, 64, False), nn.Linear(64, 32, False)
        angle = torch.outer(torch.arange(9.0), 10000 ** -(torch.arange(0, 8, 2) / 8))
        self.register_buffer("cos", torch.cat([angle, angle], -1).cos())
        self.register_buffer("sin", torch.cat([angle, angle], -1).sin())

    @staticmethod
    def _norm(x: Tensor, scale: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale

    def _rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 9, 32) to the same."""
        n, tokens, _ = x.shape
        y = self._norm(x, self.scale1)
        q = self._rotate(self.q(y).view(n, tokens, 4, 8).transpose(1, 2))
        k = self._rotate(self.k(y).view(n, tokens, 2, 8).transpose(1, 2)).repeat_interleave(2, 1)
        v = self.v(y).view(n, tokens, 2, 8).transpose(1, 2).repeat_interleave(2, 1)
        mask = torch.full((tokens, tokens), float("-inf")).triu(1)
        weights = torch.softmax(q @ k.transpose(2, 3) / 8**0.5 + mask, -1)
        x = x + (weights @ v).transpose(1, 2).reshape(n, tokens, 32)
        y = self._norm(x, self.scale2)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Swin(nn.Module):
    """Shifted windows and patch merging (Liu et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 16, 4, 4), nn.LayerNorm(16)
        self.attention, self.merge = Attention(16, 2), nn.Linear(64, 32, False)

    def forward(self, image: Tensor) -> Tensor:
        """Map (N, 3, 32, 32) to (N, 4, 4, 32)."""
        x = self.patches(image).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        y = torch.roll(self.norm(x), (-2, -2), (1, 2)).view(n, h // 4, 4, w // 4, 4, c)
        y = self.attention(y.transpose(2, 3).reshape(-1, 16, c))
        y = y.view(n, h // 4, w // 4, 4, 4, c).transpose(2, 3).reshape(n, h, w, c)
        x = x + torch.roll(y, (2, 2), (1, 2))
        parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.merge(torch.cat(parts, -1))


class T5Encoder(nn.Module):
    """Relative position buckets as a bias of attention (Raffel et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bias = nn.Embedding(40, 16), nn.Embedding(8, 2)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, False) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        """Map (N, tokens) ids to (N, tokens, 16)."""
        x = self.words(ids)
        n, tokens, width = x.shape
        place = torch.arange(tokens)
        distance = place[None, :] - place[:, None]
        far = 2 + (torch.log(distance.abs().clamp(min=2).float() / 2) / 2 * 2).long().clamp(max=1)
        bucket = torch.where(distance.abs() < 2, distance.abs(), far) + 4 * (distance > 0).long()
        bias = self.bias(bucket).permute(2, 0, 1).unsqueeze(0)
        q, k, v = (f(x).view(n, tokens, 2, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = torch.softmax((q @ k.transpose(2, 3) + bias).float(), -1)
        return x + self.o((weights @ v).transpose(1, 2).reshape(n, tokens, width))


class WhisperEncoder(nn.Module):
    """One-dimensional convolutions over a spectrogram, then blocks (Radford et al. 2022)."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(8, 32, 3, padding=1), nn.Conv1d(32, 32, 3, 2, 1)
        self.register_buffer("positions", torch.randn(10, 32))
        self.block = Block(32, 4)

    def forward(self, mel: Tensor) -> Tensor:
        """Map (N, 8, 20) to (N, 10, 32)."""
        x = F.gelu(self.second(F.gelu(self.first(mel)))).permute(0, 2, 1)
        return self.block(x + self.positions)


class DiffusionBlock(nn.Module):
    """A residual block with a time step's embedding, group norms, attention (Ho et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.GroupNorm(4, 16), nn.GroupNorm(4, 16), nn.GroupNorm(4, 16)
        self.conv1, self.conv2 = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.time, self.attention = nn.Linear(32, 16), Attention(16, 2)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        """Map images (N, 16, H, W) and time steps (N,) to (N, 16, H, W)."""
        frequency = torch.exp(torch.arange(16) * (-9.2 / 16))
        angle = step[:, None].float() * frequency[None]
        embedding = torch.cat([angle.sin(), angle.cos()], -1)
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(embedding))[:, :, None, None]
        x = x + self.conv2(F.silu(self.norm2(y)))
        n, c, h, w = x.shape
        tokens = self.norm3(x).view(n, c, h * w).transpose(1, 2)
        return x + self.attention(tokens).transpose(1, 2).reshape(n, c, h, w)


class Recommender(nn.Module):
    """Embeddings of categories, their pairwise products, and dense layers (Naumov et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 8) for size in (10, 20, 30))
        self.bottom, self.top = nn.Sequential(nn.Linear(5, 8), nn.ReLU()), nn.Sequential(nn.Linear(14, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Map (N, 5) numbers and (N, 3) ids to (N, 1)."""
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(categories[:, i]) for i, table in enumerate(self.tables))], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, products[:, rows, columns]], 1))


class DistilBert(nn.Module):
    """Word and position embeddings, post-norm layers with a padding mask, no token types (Sanh et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(50, 24), nn.Embedding(16, 24)
        self.norm = nn.LayerNorm(24, eps=1e-12)
        self.queries, self.keys, self.values, self.out = (nn.Linear(24, 24) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(24, eps=1e-12), nn.LayerNorm(24, eps=1e-12)
        self.mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Map (N, tokens) ids and mask (1: a token) to (N, tokens, 24)."""
        n, tokens = ids.shape
        x = self.norm(self.words(ids) + self.positions(torch.arange(tokens, device=ids.device)))
        q, k, v = (part(x).view(n, tokens, 3, 8).transpose(1, 2) for part in (self.queries, self.keys, self.values))
        scores = (q / 8**0.5) @ k.transpose(2, 3)
        scores = scores.masked_fill((mask == 0)[:, None, None, :], float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, tokens, 24)
        x = self.norm1(self.out(attended) + x)
        return self.norm2(self.mlp(x) + x)


def tabular() -> nn.Module:
    """Build a perceptron with batch norm, dropout and softmax."""
    return nn.Sequential(
        nn.BatchNorm1d(7), nn.Linear(7, 16), nn.ELU(), nn.Dropout(), nn.Linear(16, 4), nn.PReLU(), nn.Softmax(-1)
    )


def _ids(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


MODELS: dict[str, Callable[[], Example]] = {
    "lstm_tagger": lambda: (Tagger(nn.LSTM), (_ids(50, 2, 6),)),
    "gru_tagger": lambda: (Tagger(nn.GRU), (_ids(50, 2, 6),)),
    "vit": lambda: (VisionTransformer(), (torch.randn(2, 3, 32, 32),)),
    "gpt2": lambda: (Gpt(), (_ids(60, 1, 16),)),
    "llama": lambda: (Llama(), (torch.randn(1, 9, 32),)),
    "swin": lambda: (Swin(), (torch.randn(1, 3, 32, 32),)),
    "convnext": lambda: (ConvNext(), (torch.randn(1, 16, 10, 10),)),
    "efficientnet": lambda: (SqueezeExcite(nn.SiLU), (torch.randn(1, 8, 12, 12),)),
    "mobilenet_v3": lambda: (SqueezeExcite(nn.Hardswish), (torch.randn(1, 8, 12, 12),)),
    "shufflenet": lambda: (ShuffleNet(), (torch.randn(1, 16, 8, 8),)),
    "densenet": lambda: (DenseNet(), (torch.randn(1, 8, 8, 8),)),
    "deeplab": lambda: (DeepLab(), (torch.randn(1, 8, 9, 7),)),
    "yolo": lambda: (Yolo(), (torch.randn(1, 3, 32, 32),)),
    "super_resolution": lambda: (super_resolution(), (torch.randn(1, 1, 10, 12),)),
    "style_transfer": lambda: (style_transfer(), (torch.randn(1, 3, 16, 16),)),
    "t5_encoder": lambda: (T5Encoder(), (_ids(40, 2, 9),)),
    "whisper_encoder": lambda: (WhisperEncoder(), (torch.randn(1, 8, 20),)),
    "diffusion": lambda: (DiffusionBlock(), (torch.randn(2, 16, 6, 6), torch.tensor([3, 70]))),
    "recommender": lambda: (Recommender(), (torch.randn(4, 5), _ids(10, 4, 3))),
    "tabular": lambda: (tabular(), (torch.randn(3, 7),)),
    "googlenet": lambda: (GoogLeNet(), (torch.randn(1, 3, 32, 32),)),
    "regnet": lambda: (RegNet(), (torch.randn(1, 8, 10, 10),)),
    "distilbert": lambda: (DistilBert(), (_ids(50, 2, 7), torch.tensor([[1] * 7, [1] * 5 + [0] * 2]))),
}

FAMILIES = ["resnet", "mobilenet", "inception", "bert", "unet", *MODELS]
"""`MODELS`, and the larger models in the folder families."""


def export(family: str, opset: int | None, path: Path) -> dict[str, np.ndarray]:
    """Write a small model with random weights as an ONNX file; inputs for it by name.

    By the dynamo exporter, or by the older one at an opset.
    """
    torch.manual_seed(0)
    make = MODELS[family] if family in MODELS else importlib.import_module(f"families.{family}").small
    module, inputs = make()
    how = {"dynamo": True} if opset is None else {"dynamo": False, "opset_version": opset}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters' deprecations are not what is tested
        torch.onnx.export(module.eval(), inputs, str(path), verbose=False, **how)
    names = [value.name for value in onnxruntime.InferenceSession(path).get_inputs()]
    return dict(zip(names, (tensor.numpy() for tensor in inputs), strict=True))


def optimized(path: Path, level: str) -> Path:
    """Write the file that ONNX Runtime's optimiser makes of a file at a level (BASIC, EXTENDED or ALL)."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # a warning that the file suits this machine only
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(path.with_suffix(f".{level}.onnx"))
    onnxruntime.InferenceSession(path, options)
    return path.with_suffix(f".{level}.onnx")
