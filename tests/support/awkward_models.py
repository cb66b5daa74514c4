"""Small modules, each with an awkward feature; the capture process imports their builders."""

from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

Built = tuple[nn.Module, tuple[Any, ...]]

_normalize: Callable[..., Tensor] = functional.normalize  # annotated for one axis, takes several

Pair = namedtuple("Pair", ["low", "high"])  # noqa: PYI024 - as models have it


class _Of(nn.Module):
    """A function with layers of its own."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Return the function's result."""
        return self.function(self, *args, **kwargs)


class _Buffers(nn.Module):
    """Buffers of several dtypes, parameters in a list and a dict, a weight that is tied."""

    order: Tensor
    mask: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(6, 6)) for _ in range(2))
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.randn(6))})
        self.register_buffer("order", torch.tensor([5, 3, 1, 0, 2, 4]))
        self.register_buffer("mask", torch.arange(6) % 2 == 0, persistent=False)
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.weights[0]

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 6) to the same."""
        for weight in self.weights:
            x = torch.where(self.mask, x @ weight, x[:, self.order])
        return self.head(x + self.shifts["a"]) * self.scale


class _KeywordsOnly(nn.Module):
    def forward(self, *, x: Tensor, gain: Tensor, flip: bool = False) -> dict[str, Any]:
        y = x * gain
        return {"y": y.flip(1) if flip else y, "pair": Pair(y.amin(1), y.amax(1))}


class _Transformer(nn.Module):
    """Attention with a padding mask and a causal one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True, activation="gelu")

    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """Map (2, 7, 16) and bools (2, 7), True where there is no token, to two tensors."""
        causal = torch.triu(torch.ones(7, 7, dtype=torch.bool, device=x.device), 1)
        y, weights = self.attention(x, x, x, key_padding_mask=padding, attn_mask=causal, average_attn_weights=False)
        return self.layer(y, src_key_padding_mask=padding), weights


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.gru = nn.GRU(12, 5)
        self.cell = nn.LSTMCell(5, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, (h, c) = self.lstm(x)
        z, last = self.gru(y.transpose(0, 1))
        state = self.cell(z[0])
        state = self.cell(z[1], state)
        return y, h, c, z, last, *state


class _RecurrentFrom(nn.Module):
    """From states that are given, with projections, and without gates."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, 2, proj_size=4)
        self.rnn = nn.RNN(4, 5, nonlinearity="relu", bias=False, bidirectional=True)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        y, state = self.lstm(x, (h.transpose(0, 1).contiguous().sigmoid(), c))
        return *state, *self.rnn(y)


def _last_steps(module: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """Return the output at the last step of each sequence."""
    y, _ = module.lstm(x)
    return y.gather(1, (lengths % x.shape[1])[:, None, None].expand(-1, 1, y.shape[2])).squeeze(1)


def _reparametrized() -> Built:
    layers = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)),
        nn.ReLU(),
        parametrizations.spectral_norm(nn.Linear(8, 8)),
        parametrizations.orthogonal(nn.Linear(8, 8)),
    )
    return layers, (torch.randn(3, 6),)


def _convolutions() -> Built:
    layers = {
        "one": nn.Conv1d(4, 8, 3, padding=2, dilation=2, groups=2),
        "up": nn.ConvTranspose1d(8, 4, 4, stride=2, padding=1, output_padding=1, groups=2),
        "three": nn.Conv3d(2, 4, (3, 1, 2), stride=(1, 2, 1), padding="valid"),
        "same": nn.Conv2d(3, 6, 3, padding="same", padding_mode="reflect", dilation=2),
        "circular": nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular", groups=6),
        "transposed": nn.ConvTranspose2d(6, 3, 3, stride=2, dilation=2, bias=False),
    }

    def forward(m: Any, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return m.up(functional.gelu(m.one(a))), m.three(b), m.transposed(m.circular(torch.relu(m.same(c))))

    inputs = torch.randn(2, 4, 9), torch.randn(1, 2, 4, 5, 3), torch.randn(2, 3, 7, 8)
    return _Of(forward, **layers), inputs


def _norms() -> Built:
    layers = {
        "plain": nn.LayerNorm((4, 5), elementwise_affine=False),
        "unbiased": nn.LayerNorm(5, bias=False),
        "group": nn.GroupNorm(2, 4),
        "instance": nn.InstanceNorm2d(4, affine=True),
        "tracked": nn.InstanceNorm2d(4, track_running_stats=True),
        "rms": nn.RMSNorm(5),
        "local": nn.LocalResponseNorm(2),
        "batch": nn.BatchNorm2d(4, affine=False),
    }

    def forward(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        y: Any = m.group(m.plain(x))
        return m.unbiased(y), m.rms(m.instance(y)), m.local(m.tracked(y)), _normalize(m.batch(y), dim=(1, 2))

    return _Of(forward, **layers), (torch.randn(2, 4, 4, 5),)


def _resizes(_: Any, x: Tensor, grid: Tensor) -> tuple[Tensor, ...]:
    modes = ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
    resized = [functional.interpolate(x, size=(7, 5), mode=mode) for mode in modes]
    resized.append(functional.interpolate(x, scale_factor=1.5, mode="bilinear", align_corners=True))
    resized.append(functional.interpolate(x, size=(3, 2), mode="bilinear", antialias=True))
    sampled = [functional.grid_sample(x, grid, mode=m, align_corners=False) for m in ("bilinear", "nearest")]
    sampled += [functional.grid_sample(x, grid, padding_mode=m, align_corners=True) for m in ("zeros", "reflection")]
    theta = x.new_tensor([[[1.0, 0.2, 0.0], [0.0, 0.9, 0.1]]]).expand(2, 2, 3)
    return *resized, *sampled, functional.affine_grid(theta, [2, 1, 3, 3], align_corners=False)


def _pixels(_: Any, x: Tensor) -> tuple[Tensor, ...]:
    columns = functional.unfold(x, 3, padding=1, stride=2)
    pooled, where = functional.max_pool2d(x, 2, return_indices=True)
    return (
        functional.pixel_shuffle(x, 2),
        functional.pixel_unshuffle(x, 2),
        functional.channel_shuffle(x, 2),
        columns,
        functional.fold(columns, (6, 6), 3, padding=1, stride=2),
        pooled,
        where,
        functional.max_unpool2d(pooled, where, (2, 2)),
        functional.adaptive_avg_pool2d(x, (4, 1)),
        functional.adaptive_max_pool2d(x, 3),
        functional.lp_pool2d(x, 2, 2),
        functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        functional.pad(x, (1, 2, 0, 1), mode="replicate"),
    )


def _writes(_: Any, x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    y = torch.zeros_like(x)
    y[:, 1::2] = x[:, 1::2].neg()
    z = x.clone()
    z[index, torch.arange(3, device=x.device)] = 7.0
    added = torch.zeros(5, 4, device=x.device).index_add(0, index, x[:3])
    spread = torch.zeros_like(x).scatter(0, index[:, None].expand(3, 4), x[:3])
    reduced = torch.zeros(5, device=x.device).scatter_reduce(0, index, x[:3, 0], "amax", include_self=False)
    put = x.index_put((index,), x[0], accumulate=False)
    return y, z, added, spread, reduced, put, x.masked_fill(x > 0, float("-inf")).softmax(1)


def _orders(_: Any, x: Tensor) -> tuple[Any, ...]:
    values, places = torch.topk(x, 2)
    ordered = torch.sort(x, dim=0, descending=True, stable=True)
    found = torch.searchsorted(ordered.values.flip(0).t().contiguous(), x.t().contiguous())
    counts = torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0], device=x.device))
    sums = x.cumsum(1), x.cumprod(0), x.logcumsumexp(1)
    return values, places, ordered, found, counts, *sums, x.argsort(), x.median(1)


def _integers(_: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    shifted = (ids << 1) ^ 3
    return (
        shifted,
        ids // 3,
        ids % 4,
        ~mask,
        mask.any(0) & mask.all(0),
        (ids * mask).sum(),
        ids.to(torch.uint8),
        mask.float().mean(),
        functional.one_hot(ids, 16),
        torch.where(mask, ids, -1),
        mask.cumsum(-1),
    )


def _products(_: Any, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return (
        torch.einsum("bij,bkj->bik", a, b),
        torch.einsum("bij->ji", a),
        torch.einsum("bij,bij->b", a, b),
        torch.tensordot(a, b, dims=([0, 2], [0, 2])),
        torch.outer(a[0, 0], b[0, 0]),
        torch.kron(a[0], b[0]),
        a[0] @ b[0, 0],
        torch.baddbmm(a @ b.mT, a, b.mT, beta=0.5, alpha=2),
        torch.cdist(a, b),
        torch.addr(a[0] @ b[0].T, a[0, :, 0], b[0, :, 0]),
        torch.linalg.vector_norm(a, dim=(1, 2)),
        torch.linalg.matrix_norm(a),
    )


def _complexes(_: Any, z: Tensor) -> tuple[Tensor, ...]:
    size, angle = z.abs(), z.angle()
    return z * z.conj(), size, angle, torch.view_as_real(z), z.real + 1, (z @ z.mT).imag, torch.polar(size, angle)


def _spectra(_: Any, x: Tensor) -> tuple[Tensor, ...]:
    spectrum = torch.fft.rfft(x)
    return torch.fft.irfft(spectrum * 2, n=x.shape[-1]), spectrum.abs(), torch.fft.fft2(x).real, torch.fft.fftshift(x)


def _results(_: Any, x: Tensor) -> tuple[Any, ...]:
    y = x * 2
    return x, y, y, y[1:], y.t(), y.expand(2, *y.shape), y.sum(), y[0, 0], [y.neg(), {"same": x}], y[:0]


def _nothing_in_some(_: Any, x: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([x, empty]) + 1, x.sum() + empty.sum()


def _scalars(_: Any, x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return x * scale, scale + 1, scale.exp() * x.norm(), x.std(), x.clamp(min=scale), torch.lerp(x, x * 2, scale)


def _activations(_: Any, x: Tensor) -> Tensor:
    names = (
        "relu6 hardswish hardsigmoid hardtanh elu selu celu leaky_relu silu mish softplus softsign tanhshrink "
        "hardshrink softshrink logsigmoid threshold gelu glu log_softmax softmin"
    )
    made = []
    for name in names.split():
        given = {"threshold": (0.1, 2.0), "glu": (1,), "log_softmax": (1,), "softmin": (1,)}.get(name, ())
        made.append(getattr(functional, name)(x, *given).mean(1))
    return torch.stack(made)


def _bag() -> Built:
    layers = {
        "bag": nn.EmbeddingBag(20, 6, mode="sum"),
        "mean": nn.EmbeddingBag(20, 6, mode="mean", padding_idx=0),
        "words": nn.Embedding(20, 6, padding_idx=3),
    }

    def forward(m: Any, ids: Tensor) -> Tensor:
        return m.bag(ids) + m.mean(ids) + m.words(ids).amax(1)

    return _Of(forward, **layers), (torch.randint(0, 20, (3, 5)),)


def _bilinear() -> Built:
    return _Of(lambda m, a, b: m.layer(a, b), layer=nn.Bilinear(4, 5, 3)), (torch.randn(2, 4), torch.randn(2, 5))


def _half_network() -> Built:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    return layers.bfloat16(), (torch.randn(2, 3, 8, 8).bfloat16(),)


def _laid() -> Built:
    layers: Any = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))  # torch's stubs lack memory_format
    images = torch.randn(2, 4, 6, 5).to(memory_format=torch.channels_last)
    return layers.to(memory_format=torch.channels_last), (images,)


def _expanded() -> Built:
    return _Of(lambda _, x, y: (x * y, x.sum(0))), (torch.randn(1, 4).expand(3, 4), torch.randn(4, 3).t())


MODELS: dict[str, Callable[[], Built]] = {
    "buffers": lambda: (_Buffers(), (torch.randn(3, 6),)),
    "keywords": lambda: (_KeywordsOnly(), ()),
    "transformer": lambda: (_Transformer(), (torch.randn(2, 7, 16), torch.arange(7)[None] > torch.tensor([[4], [6]]))),
    "recurrent": lambda: (_Recurrent(), (torch.randn(3, 4, 8),)),
    "recurrent_from": lambda: (
        _RecurrentFrom(), (torch.randn(4, 3, 8), torch.randn(3, 2, 4), torch.randn(2, 3, 6)),
    ),
    "last_steps": lambda: (
        _Of(_last_steps, lstm=nn.LSTM(8, 6, batch_first=True)), (torch.randn(3, 5, 8), torch.tensor([5, 2, 3])),
    ),
    "reparametrized": _reparametrized,
    "convolutions": _convolutions,
    "norms": _norms,
    "resizes": lambda: (_Of(_resizes), (torch.randn(2, 3, 6, 4), torch.rand(2, 5, 5, 2) * 2 - 1)),
    "pixels": lambda: (_Of(_pixels), (torch.randn(2, 4, 6, 6),)),
    "writes": lambda: (_Of(_writes), (torch.randn(5, 4), torch.tensor([0, 2, 1]))),
    "orders": lambda: (_Of(_orders), (torch.randn(3, 5),)),
    "integers": lambda: (_Of(_integers), (torch.arange(12).view(3, 4), torch.arange(12).view(3, 4) % 3 == 0)),
    "products": lambda: (_Of(_products), (torch.randn(2, 3, 4), torch.randn(2, 3, 4))),
    "complexes": lambda: (_Of(_complexes), (torch.randn(2, 3, dtype=torch.complex64),)),
    "spectra": lambda: (_Of(_spectra), (torch.randn(4, 6),)),
    "results": lambda: (_Of(_results), (torch.randn(3, 4),)),
    "nothing_in_some": lambda: (_Of(_nothing_in_some), (torch.randn(2, 3), torch.randn(0, 3))),
    "scalars": lambda: (_Of(_scalars), (torch.randn(3, 4), torch.tensor(0.3))),
    "activations": lambda: (_Of(_activations), (torch.randn(3, 8),)),
    "bag": _bag,
    "bilinear": _bilinear,
    "half_network": _half_network,
    "laid": _laid,
    "expanded": _expanded,
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Build a module in inference, and the arguments of a call."""
    torch.manual_seed(0)
    module, args = MODELS[name]()
    kwargs = {"x": torch.randn(2, 3), "gain": torch.randn(3), "flip": True} if name == "keywords" else {}
    return module.eval(), args, kwargs


def __getattr__(name: str) -> Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Return the builder of a model, as the capture process imports it."""
    if name not in MODELS:
        raise AttributeError(name)
    return partial(build, name)
