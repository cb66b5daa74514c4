"""LSTM and GRU networks as one launch of a Triton kernel for each layer, after one product for all of its inputs."""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, argument, bound, fake
from nimblec.graph.vocabulary import DTYPES
from nimblec.kernels.call import Call, Leaf, Made, Pool, evaluate, example
from nimblec.kernels.gpu import Trigger
from nimblec.kernels.products.recurrence_op import gru_layer, lstm_layer
from nimblec.kernels.products.recurrence_tilings import Recurrence, RecurrenceTiling, recurrence_candidates
from nimblec.kernels.selector import Choose, Family, Timed

aten = torch.ops.aten

LSTM, GRU = aten.lstm.input, aten.gru.input
_MOST_SEQUENCES = 16
"""Larger batches are left to the framework, whose products of matrices they are worth."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """The weights of a layer: of each direction those of the input, (gates, width), and of the state, and biases."""

    of_input: Sequence[Tensor]
    of_state: Sequence[Tensor]
    biases: Sequence[tuple[Tensor, Tensor]]

    @property
    def recurrent(self) -> Tensor:
        """The weights of the state: (directions, gates, hidden)."""
        return torch.stack(list(self.of_state))

    @property
    def input_bias(self) -> Tensor:
        """The sum of both biases, (directions * gates,), but for those that a GRU adds within its reset gate."""
        outside = [b.float() for _, b in self.biases]
        if self._is_gru:
            outside = [torch.cat([b.chunk(3)[0], b.chunk(3)[1], torch.zeros_like(b.chunk(3)[2])]) for b in outside]
        total = [a.float() + b for (a, _), b in zip(self.biases, outside, strict=True)]
        return torch.cat(total).to(self.of_input[0].dtype)

    @property
    def reset_bias(self) -> Tensor | None:
        """The biases that a GRU adds within its reset gate: (directions, hidden)."""
        return torch.stack([b.chunk(3)[2] for _, b in self.biases]) if self._is_gru and self.biases else None

    @property
    def _is_gru(self) -> bool:
        return self.of_state[0].shape[0] == 3 * self.of_state[0].shape[1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecurrenceRequest:
    """A network ``node`` whose layers, all of the geometry ``shape``, are a launch each.

    ``states`` are the initial ones of all layers, None for zeros. ``constants`` are all that the node reads.
    """

    node: fx.Node
    x: fx.Node
    shape: Recurrence
    layers: Sequence[_Layer]
    states: tuple[fx.Node | None, ...]
    constants: dict[fx.Node, Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of everything that is read and written."""
        return fake(self.x).dtype

    @property
    def signature(self) -> str:
        """A text that is equal for equal requests."""
        has = [state is not None for state in self.states]
        return f"recurrence {self.shape} {len(self.layers)} {fake(self.x).shape} {has} {self.dtype}"


def use_triton_recurrences(
    module: fx.GraphModule, choose: Choose[RecurrenceRequest, RecurrenceTiling], _trigger: Trigger = "late"
) -> None:
    """Compute the steps of each layer of an LSTM or GRU by one launch, where ``choose`` finds it faster."""
    rewriter = Rewriter(module)
    for request in list(requests(module)):
        tiling = choose(request)
        if tiling is not None:
            _replace(rewriter, request, tiling)
    rewriter.finish()


def _replace(rewriter: Rewriter, request: RecurrenceRequest, tiling: RecurrenceTiling) -> None:
    at, directions = request.node, request.shape.directions
    is_batch_first = bound(at)["batch_first"]
    y, last = request.x, []
    for n, layer in enumerate(request.layers):
        gates = _input_products(rewriter, y, layer, at)
        if is_batch_first and n == 0:
            gates = rewriter.call(aten.transpose.int, gates, 0, 1, at=at)
        states: list[Leaf | None] = [
            state and rewriter.call(aten.slice.Tensor, state, 0, n * directions, (n + 1) * directions, at=at)
            for state in request.states
        ]
        results = _layer_call(layer, gates, states, tiling).put(rewriter, at=at)
        y, *ends = (rewriter.call(operator.getitem, results, i, at=at) for i in range(1 + len(states)))
        last.append(ends)
    if is_batch_first:
        y = rewriter.call(aten.transpose.int, y, 0, 1, at=at)
    ends = last[0]
    if len(last) > 1:
        ends = [rewriter.call(aten.cat.default, list(parts), at=at) for parts in zip(*last, strict=True)]
    for part in list(at.users):
        rewriter.replace(part, [y, *ends][argument(part, 1)])
    # It could draw random numbers, so it is not dropped like other calls that nothing reads.
    rewriter.graph.erase_node(at)


def _input_products(rewriter: Rewriter, x: fx.Node, layer: _Layer, at: fx.Node) -> fx.Node:
    """Return the product of the inputs of all steps with their weights: (rows, columns, directions * gates)."""
    rows, columns, width = fake(x).shape
    weight = rewriter.constant(torch.cat(list(layer.of_input)).t(), at=at)
    flat = rewriter.call(aten.reshape.default, x, [rows * columns, width], at=at)
    if layer.biases:
        bias = rewriter.constant(layer.input_bias, at=at)
        product = rewriter.call(aten.addmm.default, bias, flat, weight, at=at)
    else:
        product = rewriter.call(aten.mm.default, flat, weight, at=at)
    return rewriter.call(aten.reshape.default, product, [rows, columns, fake(product).shape[1]], at=at)


def _layer_call(
    layer: _Layer, gates: Leaf, states: Sequence[Leaf | None], tiling: RecurrenceTiling
) -> Call:
    """Return the call of the op of a layer; an LSTM has two states."""
    weight = _made(layer.recurrent, "weights")
    if len(states) == 2:
        return Call(op=lstm_layer, args=(gates, weight, *states, tiling.numbers))
    bias = None if layer.reset_bias is None else _made(layer.reset_bias, "factors")
    return Call(op=gru_layer, args=(gates, weight, bias, *states, tiling.numbers))


def requests(module: fx.GraphModule) -> Iterator[RecurrenceRequest]:
    """Yield all requests in a graph."""
    rewriter = Rewriter(module)
    for node in rewriter.calls(LSTM, GRU):
        request = _request(rewriter, node)
        if request is not None:
            yield request


def _request(rewriter: Rewriter, node: fx.Node) -> RecurrenceRequest | None:
    given = bound(node)
    x: fx.Node = given["input"]
    states: Sequence[fx.Node] = [given["hx"]] if isinstance(given["hx"], fx.Node) else given["hx"]
    constants = {source: value for source in node.all_input_nodes if (value := rewriter.value(source)) is not None}
    directions = 2 if given["bidirectional"] else 1
    steps, batch = (fake(x).shape[n] for n in ((1, 0) if given["batch_first"] else (0, 1)))
    has_projections = any(fake(state).shape != fake(states[0]).shape for state in states)
    is_served = (
        all(weight in constants for weight in given["params"])
        and {fake(source).dtype for source in node.all_input_nodes} <= {fake(x).dtype} <= set(DTYPES)
        and bool(fake(x).numel())
        and batch <= _MOST_SEQUENCES
        and not has_projections
        and all(fake(state).is_contiguous() for state in states)
        and all(user.target is operator.getitem for user in node.users)
    )
    if not is_served:
        return None
    params = [constants[weight] for weight in given["params"]]
    each = 4 if given["has_biases"] else 2
    parts = [params[n : n + each] for n in range(0, len(params), each)]
    layers = [
        _Layer(
            of_input=[part[0] for part in parts[n : n + directions]],
            of_state=[part[1] for part in parts[n : n + directions]],
            biases=[(part[2], part[3]) for part in parts[n : n + directions]] if given["has_biases"] else [],
        )
        for n in range(0, len(parts), directions)
    ]
    shape = Recurrence(
        gates=4 if node.target is LSTM else 3,
        steps=steps,
        batch=batch,
        hidden=fake(states[0]).shape[2],
        directions=directions,
        itemsize=fake(x).dtype.itemsize,
    )
    return RecurrenceRequest(
        node=node,
        x=x,
        shape=shape,
        layers=layers,
        states=tuple(None if state in constants and not constants[state].any() else state for state in states),
        constants=constants,
    )


def call(request: RecurrenceRequest, tiling: RecurrenceTiling, _trigger: Trigger) -> Call:
    """Return a call like that of each layer, on products and initial states of zeros."""
    shape, layer = request.shape, request.layers[0]
    like = layer.of_state[0]
    gates = like.new_zeros(shape.steps, shape.batch, shape.directions * shape.gates * shape.hidden)
    initial = like.new_zeros(shape.directions, shape.batch, shape.hidden)
    states = [None if state is None else _made(initial, "factors") for state in request.states]
    return _layer_call(layer, _made(gates, "factors"), states, tiling)


def _made(source: Tensor, role: Literal["weights", "factors"]) -> Made:
    return Made(source=source, make=lambda tensor: tensor, role=role)


def framework(request: RecurrenceRequest, _pool: Pool, _length: int) -> Timed:
    """Return the framework's call, made once for as many calls as there are layers: their time is that of one layer.

    It computes the products of the inputs, too, which take a small part of that time.
    """
    device = request.layers[0].of_state[0].device
    values = {
        node: request.constants[node] if node in request.constants else example(fake(node), device)
        for node in request.node.all_input_nodes
    }
    return lambda n: None if n % len(request.layers) else evaluate((request.node,), values)


RECURRENCE: Family[RecurrenceRequest, RecurrenceTiling] = Family(
    name="recurrence",
    requests=requests,
    tilings=lambda request, gpu: recurrence_candidates(request.shape, gpu),
    call=call,
    framework=framework,
    use=use_triton_recurrences,
    templates=("nimblec.kernels.products.recurrence_template",),
    reason="it leaves the products of the inputs to the kernels for products",
)
