"""RNN, GRU and LSTM: a call of the framework's network where it is the same, else one step of time after another.

Of the latter, the product of the inputs with their weights is one matrix product for all steps; each step then
takes one product with the recurrent weights. Sequence lengths that are shorter than the longest
keep a sequence's state as it is beyond its end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from nimblec.graph.recurrence import recurrence_of_lengths
from nimblec.onnx_ops.axes import zero_like
from nimblec.onnx_ops.indexing import reversed_steps
from nimblec.onnx_ops.table import Floats, Refused, Strings, op

aten = torch.ops.aten

Activation = Callable[[Tensor], Tensor]
State = tuple[Tensor, ...]
Step = Callable[[Tensor, State], State]
"""Given the inputs' part of the gates and the state, return the next state; its first part is the output."""

PLAIN: dict[str, Activation] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softsign": functional.softsign,
    "softplus": functional.softplus,
}
WITH_ALPHA: dict[str, tuple[float, Callable[[Tensor, float], Tensor]]] = {
    "leakyrelu": (0.01, functional.leaky_relu),
    "thresholdedrelu": (1.0, lambda x, alpha: torch.where(x > alpha, x, zero_like(x))),
    "elu": (1.0, functional.elu),
}
WITH_BOTH: dict[str, tuple[float | None, float | None, Callable[[Tensor, float, float], Tensor]]] = {
    "affine": (1.0, 0.0, lambda x, alpha, beta: alpha * x + beta),
    "scaledtanh": (None, None, lambda x, alpha, beta: alpha * torch.tanh(beta * x)),
    "hardsigmoid": (0.2, 0.5, lambda x, alpha, beta: torch.clamp(alpha * x + beta, 0, 1)),
}
"""Activations with the defaults of their alpha and beta, None where ONNX names none."""


def _activations(names: Strings, alphas: Floats | None, betas: Floats | None) -> list[Activation]:
    """Return the named functions; each that takes an alpha or beta takes the next one given."""
    next_alpha, next_beta = iter(alphas or ()), iter(betas or ())
    found: list[Activation] = []
    for name in (name.lower() for name in names):
        if name in PLAIN:
            found.append(PLAIN[name])
        elif name in WITH_ALPHA:
            default, function = WITH_ALPHA[name]
            found.append(_with(function, next(next_alpha, default)))
        elif name in WITH_BOTH:
            alpha, beta, scaled = WITH_BOTH[name]
            alpha, beta = next(next_alpha, alpha), next(next_beta, beta)
            if alpha is None or beta is None:
                raise Refused(f"activation {name!r} has no defaults; expected activation_alpha and activation_beta")
            found.append(_with(scaled, alpha, beta))
        else:
            known = ", ".join([*PLAIN, *WITH_ALPHA, *WITH_BOTH])
            raise Refused(f"activation {name!r} is unknown; expected one of {known}")
    return found


def _with(function: Callable[..., Tensor], *factors: float) -> Activation:
    return lambda x: function(x, *factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The common parts of RNN, GRU and LSTM nodes; tensors as ONNX lays them out.

    ``x`` is (steps, batch, input size); weights carry the directions first.
    """

    x: Tensor
    w: Tensor
    r: Tensor
    b: Tensor | None
    lengths: Tensor | None
    states: tuple[Tensor | None, ...]
    hidden_size: int
    directions: int
    backward: tuple[bool, ...]


def _layer(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    lengths: Tensor | None,
    states: tuple[Tensor | None, ...],
    direction: str,
    hidden_size: int | None,
    layout: int,
) -> Layer:
    turns = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
    if direction not in turns or layout not in (0, 1):
        raise Refused(f"direction {direction!r} and layout {layout} are not supported")
    if layout:
        x = x.transpose(0, 1)
        states = tuple(None if state is None else state.transpose(0, 1) for state in states)
    if lengths is not None and not isinstance(lengths, FakeTensor) and bool((lengths == x.shape[0]).all()):
        lengths = None
    hidden = r.shape[-1] if hidden_size is None else hidden_size
    if w.shape[0] != len(turns[direction]) or r.shape[-1] != hidden:
        raise Refused(f"weights of shape {tuple(w.shape)} and {tuple(r.shape)} do not fit {direction}, {hidden}")
    return Layer(
        x=x,
        w=w,
        r=r,
        b=b,
        lengths=lengths,
        states=states,
        hidden_size=hidden,
        directions=len(turns[direction]),
        backward=turns[direction],
    )


def _network(layer: Layer, network: Any, order: Sequence[int]) -> tuple[Tensor, ...]:
    """Return Y and the last states by the framework's ``network``, whose gates are those of ONNX in this ``order``."""
    zeros = torch.zeros(layer.directions, layer.x.shape[1], layer.hidden_size, dtype=layer.x.dtype)
    states = [zeros if state is None else state for state in layer.states]
    params = [_params(layer, i, order) for i in range(layer.directions)]
    if layer.lengths is not None:
        found = [
            recurrence_of_lengths(
                network, layer.x, layer.lengths, [state.narrow(0, i, 1) for state in states], params[i], is_backward
            )
            for i, is_backward in enumerate(layer.backward)
        ]
        outputs, *last = zip(*found, strict=True)
        return torch.stack(outputs, 1), *map(torch.cat, last)
    is_reverse = layer.backward == (True,)
    x = layer.x.flip(0) if is_reverse else layer.x
    flat = [part for each in params for part in each]
    hx = states if len(states) > 1 else states[0]
    y, *last = network(x, hx, flat, layer.b is not None, 1, 0.0, False, layer.directions == 2, False)
    y = y.flip(0) if is_reverse else y
    return y.unflatten(2, (layer.directions, -1)).transpose(1, 2), *last


def _params(layer: Layer, direction: int, order: Sequence[int]) -> list[Tensor]:
    """Return the weights of the input and of the state, and both biases if there are any."""
    biases = () if layer.b is None else layer.b.select(0, direction).chunk(2)
    gates = [part.chunk(len(order)) for part in (layer.w.select(0, direction), layer.r.select(0, direction), *biases)]
    return [torch.cat([parts[place] for place in order]) for parts in gates]


def _run(layer: Layer, cells: Sequence[tuple[Tensor, Step]]) -> tuple[Tensor, ...]:
    """Run each direction step by step; return Y and the last states, stacked by direction."""
    outputs, finals = [], []
    for i, (gates, step) in enumerate(cells):
        zeros = torch.zeros(layer.x.shape[1], layer.hidden_size, dtype=layer.x.dtype)
        states = tuple(zeros if state is None else state.select(0, i) for state in layer.states)
        sequence, final = _run_direction(gates, step, states, layer.lengths, layer.backward[i])
        outputs.append(sequence)
        finals.append(final)
    return torch.stack(outputs, 1), *map(torch.stack, zip(*finals, strict=True))


def _laid_out(results: tuple[Tensor, ...], layout: int) -> tuple[Tensor, ...]:
    """Return Y and the last states with the batch first for layout 1."""
    if not layout:
        return results
    y, *last = results
    return y.permute(2, 0, 1, 3), *[state.transpose(0, 1) for state in last]


def _run_direction(
    gates: Tensor, step: Step, state: State, lengths: Tensor | None, backward: bool
) -> tuple[Tensor, State]:
    order = reversed(range(gates.shape[0])) if backward and lengths is None else range(gates.shape[0])
    turn = None
    if backward and lengths is not None:
        turn = reversed_steps(gates, lengths, 1, 0)
        gates = torch.gather(gates, 0, turn)
    outputs = {}
    for t in order:
        following = step(gates.select(0, t), state)
        if lengths is None:
            state, outputs[t] = following, following[0]
        else:
            alive = (lengths > t).unsqueeze(1)
            state = tuple(torch.where(alive, new, old) for new, old in zip(following, state, strict=True))
            outputs[t] = torch.where(alive, following[0], zero_like(gates))
    sequence = torch.stack([outputs[t] for t in range(gates.shape[0])])
    if turn is not None:
        sequence = torch.gather(sequence, 0, turn.narrow(-1, 0, sequence.shape[-1]))
    return sequence, state


def _input_gates(layer: Layer, direction: int, bias: Tensor | None) -> Tensor:
    """Return x W' + bias for all steps: (steps, batch, gates)."""
    steps, batch, size = layer.x.shape
    rows = layer.x.reshape(steps * batch, size)
    weight = layer.w.select(0, direction).t()
    flat = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    return flat.reshape(steps, batch, -1)


def _clipped(x: Tensor, clip: float | None) -> Tensor:
    return x if clip is None else torch.clamp(x, -clip, clip)


def _both_biases(layer: Layer, direction: int) -> Tensor | None:
    if layer.b is None:
        return None
    half = layer.b.shape[-1] // 2
    return torch.add(*layer.b.select(0, direction).split(half))


def _names(names: Strings | None, defaults: Strings, directions: int) -> Strings:
    chosen = defaults * directions if names is None else names
    if len(chosen) != len(defaults) * directions:
        raise Refused(f"attribute 'activations' is {chosen}; expected {len(defaults) * directions} names")
    return chosen


def _are_usual(names: Strings, usual: Strings) -> bool:
    """Return whether each direction has the functions of the framework's networks."""
    return tuple(name.lower() for name in names) == usual * (len(names) // len(usual))


@op("RNN", since=7)
def rnn(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    *,
    activation_alpha: Floats | None = None,
    activation_beta: Floats | None = None,
    activations: Strings = ("Tanh", "Tanh"),
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
) -> tuple[Tensor, ...]:
    layer = _layer(x, w, r, b, sequence_lens, (initial_h,), direction, hidden_size, layout)
    names = {name.lower() for name in activations[: layer.directions]}
    if clip is None and names in ({"tanh"}, {"relu"}):
        network = aten.rnn_tanh.input if names == {"tanh"} else aten.rnn_relu.input
        return _laid_out(_network(layer, network, (0,)), layout)
    functions = _activations(activations[: layer.directions], activation_alpha, activation_beta)

    def cell(i: int) -> tuple[Tensor, Step]:
        def step(gates: Tensor, state: State) -> State:
            return (functions[i](_clipped(torch.addmm(gates, state[0], r.select(0, i).t()), clip)),)

        return _input_gates(layer, i, _both_biases(layer, i)), step

    return _laid_out(_run(layer, [cell(i) for i in range(layer.directions)]), layout)


@op("GRU", since=7)
def gru(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    *,
    activation_alpha: Floats | None = None,
    activation_beta: Floats | None = None,
    activations: Strings | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
) -> tuple[Tensor, ...]:
    layer = _layer(x, w, r, b, sequence_lens, (initial_h,), direction, hidden_size, layout)
    names = _names(activations, ("Sigmoid", "Tanh"), layer.directions)
    if clip is None and linear_before_reset and _are_usual(names, ("sigmoid", "tanh")):
        return _laid_out(_network(layer, aten.gru.input, (1, 0, 2)), layout)
    functions = _activations(names, activation_alpha, activation_beta)
    size = layer.hidden_size

    def cell(i: int) -> tuple[Tensor, Step]:
        f, g = functions[2 * i], functions[2 * i + 1]
        recurrent = r.select(0, i).t()
        first, second = recurrent.split((2 * size, size), 1)
        bias = torch.zeros(6 * size, dtype=x.dtype) if b is None else b.select(0, i)
        input_bias, recurrent_bias = bias.split(3 * size)
        if not linear_before_reset:
            input_bias = input_bias + recurrent_bias

        def step(gates: Tensor, state: State) -> State:
            h = state[0]
            gate, candidate = gates.split((2 * size, size), 1)
            if linear_before_reset:
                head, tail = torch.addmm(recurrent_bias, h, recurrent).split((2 * size, size), 1)
                z, reset = f(_clipped(gate + head, clip)).split(size, 1)
                new = candidate + reset * tail
            else:
                total = torch.addmm(gate, h, first)
                z, reset = f(_clipped(total, clip)).split(size, 1)
                new = torch.addmm(candidate, reset * h, second)
            new = g(_clipped(new, clip))
            return (new + z * (h - new),)

        return _input_gates(layer, i, input_bias), step

    return _laid_out(_run(layer, [cell(i) for i in range(layer.directions)]), layout)


@op("LSTM", since=7)
def lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    initial_c: Tensor | None = None,
    p: Tensor | None = None,
    *,
    activation_alpha: Floats | None = None,
    activation_beta: Floats | None = None,
    activations: Strings | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
) -> tuple[Tensor, ...]:
    layer = _layer(x, w, r, b, sequence_lens, (initial_h, initial_c), direction, hidden_size, layout)
    names = _names(activations, ("Sigmoid", "Tanh", "Tanh"), layer.directions)
    if clip is None and p is None and not input_forget and _are_usual(names, ("sigmoid", "tanh", "tanh")):
        return _laid_out(_network(layer, aten.lstm.input, (0, 2, 3, 1)), layout)
    functions = _activations(names, activation_alpha, activation_beta)
    size = layer.hidden_size

    def cell(i: int) -> tuple[Tensor, Step]:
        f, g, h_function = functions[3 * i : 3 * i + 3]
        recurrent = r.select(0, i).t()
        peephole = None if p is None else p.select(0, i).split(size)

        def step(gates: Tensor, state: State) -> State:
            h, c = state
            total = torch.addmm(gates, h, recurrent)
            if peephole is not None:
                return peephole_step(total, c, peephole)
            three, new = _clipped(total, clip).split((3 * size, size), 1)
            entry, out, forget = f(three).split(size, 1)
            forget = 1 - entry if input_forget else forget
            c = torch.addcmul(forget * c, entry, g(new))
            return out * h_function(c), c

        def peephole_step(total: Tensor, c: Tensor, weights: Sequence[Tensor]) -> State:
            entry, out, forget, new = total.split(size, 1)
            entry = f(_clipped(entry + weights[0] * c, clip))
            forget = 1 - entry if input_forget else f(_clipped(forget + weights[2] * c, clip))
            c = forget * c + entry * g(_clipped(new, clip))
            return f(_clipped(out + weights[1] * c, clip)) * h_function(c), c

        return _input_gates(layer, i, _both_biases(layer, i)), step

    return _laid_out(_run(layer, [cell(i) for i in range(layer.directions)]), layout)
