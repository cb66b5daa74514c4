"""Layers of LSTM and GRU networks as torch ops: `nimblec.kernels.launch` says what an op is.

The products of the inputs come as ``gates``; the op computes all steps of one layer, in one or both directions.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nimblec.kernels.launch import Launch, Prepared, define_op
from nimblec.kernels.products.recurrence_tilings import Recurrence, RecurrenceTiling
from nimblec.kernels.shapes import next_power_of_2

UNWRITTEN = -1
"""The bits of an element that no step has written: a NaN with a sign, which the kernel never writes."""

_Step = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Computes h and c of all directions from the gates of the inputs, those of the last h, that h, and the last c."""


def recurrence_shape(gates: Tensor, weight: Tensor) -> Recurrence:
    """Return the geometry of a layer.

    ``gates`` are (steps, batch, directions * gates * hidden), ``weight`` is (directions, gates * hidden, hidden).
    """
    directions, rows, hidden = weight.shape
    return Recurrence(
        gates=rows // hidden,
        steps=gates.shape[0],
        batch=gates.shape[1],
        hidden=hidden,
        directions=directions,
        itemsize=gates.dtype.itemsize,
    )


def _lstm_layer(
    gates: Tensor, weight: Tensor, h: Tensor | None, c: Tensor | None, tiling: Sequence[int]
) -> Prepared[tuple[Tensor, Tensor, Tensor]]:
    y, last_h = _results(gates, weight)
    last_c = torch.empty_like(last_h)
    states = {"h_ptr": h, "c_ptr": c, "y_ptr": y, "last_h_ptr": last_h, "last_c_ptr": last_c}
    return Prepared((y, last_h, last_c), _launch(gates, weight, None, states, RecurrenceTiling.of(tiling)))


def _gru_layer(
    gates: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor | None, tiling: Sequence[int]
) -> Prepared[tuple[Tensor, Tensor]]:
    y, last_h = _results(gates, weight)
    states = {"h_ptr": h, "c_ptr": None, "y_ptr": y, "last_h_ptr": last_h, "last_c_ptr": None}
    return Prepared((y, last_h), _launch(gates, weight, bias, states, RecurrenceTiling.of(tiling)))


def _results(gates: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs of which no element has been written, and memory for the last hidden state."""
    shape = recurrence_shape(gates, weight)
    bits = torch.int32 if shape.itemsize == 4 else torch.int16
    size = (shape.steps, shape.batch, shape.directions * shape.hidden)
    y = gates.new_full(size, UNWRITTEN, dtype=bits).view(gates.dtype)
    return y, gates.new_empty(shape.directions, shape.batch, shape.hidden)


def _launch(
    gates: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Mapping[str, Tensor | None],
    tiling: RecurrenceTiling,
) -> Launch:
    """Return the launch that fills ``y``, of which every element is `UNWRITTEN`, and the last states."""
    assert gates.stride(2) == 1, f"gates of strides {gates.stride()} have gaps"
    shape = recurrence_shape(gates, weight)
    return Launch(
        template="nimblec.kernels.products.recurrence_template:recurrence",
        blocks=tiling.blocks(shape),
        pointers={"gates_ptr": gates, "weight_ptr": weight, "bias_ptr": bias, **states},
        settings={
            "STEPS": shape.steps,
            "BATCH": shape.batch,
            "HIDDEN": shape.hidden,
            "DIRECTIONS": shape.directions,
            "STEP_STRIDE": gates.stride(0),
            "BATCH_STRIDE": gates.stride(1),
            "UNITS": tiling.units,
            "ROWS": tiling.rows,
            "BLOCK_R": next_power_of_2(tiling.rows),
            "WIDTH": shape.width,
            "num_warps": tiling.num_warps,
            "launch_cooperative_grid": True,
            # Without a limit the assembler spills weights, to leave room for blocks that there are not.
            "maxnreg": 255,
        },
        # A layer takes so long that an early start of its launch would gain nothing.
        trigger="none",
    )


def _lstm_layer_on_cpu(
    gates: Tensor, weight: Tensor, h: Tensor | None, c: Tensor | None, _tiling: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    def step(x: Tensor, product: Tensor, _h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        entry, forget, new, out = (x + product).chunk(4, -1)
        c = forget.sigmoid() * c + entry.sigmoid() * new.tanh()
        return out.sigmoid() * c.tanh(), c

    return _steps(gates, weight, h, c, step)


def _gru_layer_on_cpu(
    gates: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor | None, _tiling: Sequence[int]
) -> tuple[Tensor, Tensor]:
    def step(x: Tensor, product: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        (reset, keep, new), (r, z, n) = x.chunk(3, -1), product.chunk(3, -1)
        n = n if bias is None else n + bias.float()[:, None]
        new = (new + (reset + r).sigmoid() * n).tanh()
        return new + (keep + z).sigmoid() * (h - new), c

    y, last_h, _ = _steps(gates, weight, h, None, step)
    return y, last_h


def _steps(
    gates: Tensor, weight: Tensor, h: Tensor | None, c: Tensor | None, step: _Step
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all outputs and the last states; each step is computed in float32, and rounds the hidden state."""
    shape, dtype = recurrence_shape(gates, weight), gates.dtype
    states = gates.new_zeros(shape.directions, shape.batch, shape.hidden).float()
    hidden, cell = (states if state is None else state.float() for state in (h, c))
    # (directions, steps, batch, gates), with the steps in the order in which each direction takes them.
    inputs = gates.float().unflatten(2, (shape.directions, -1)).permute(2, 0, 1, 3)
    forth_and_back = [inputs[0], inputs[-1].flip(0)][: shape.directions]
    outputs = []
    for x in torch.stack(forth_and_back, 1):
        hidden, cell = step(x, hidden @ weight.float().mT, hidden, cell)
        hidden = hidden.to(dtype).float()
        outputs.append(hidden)
    y = torch.stack(outputs).to(dtype)
    forth_and_back = [y[:, 0], y[:, -1].flip(0)][: shape.directions]
    return torch.cat(forth_and_back, 2), hidden.to(dtype), cell.to(dtype)


lstm_layer = define_op(
    "lstm_layer(Tensor gates, Tensor weight, Tensor? h, Tensor? c, int[] tiling) -> (Tensor, Tensor, Tensor)",
    prepare=_lstm_layer,
    reference=_lstm_layer_on_cpu,
)
gru_layer = define_op(
    "gru_layer(Tensor gates, Tensor weight, Tensor? bias, Tensor? h, int[] tiling) -> (Tensor, Tensor)",
    prepare=_gru_layer,
    reference=_gru_layer_on_cpu,
)
