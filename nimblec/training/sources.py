"""Find the layer that each call of an optimizer's step is for, in the graph of a step."""

from torch import fx

from nimblec.base.places import SOURCE_KEY, Phase, Place, places
from nimblec.pytorch.source_tracker import noted
from nimblec.training.state import MODEL, SUM, TrainingState


def name_updates(graph: fx.Graph, state: TrainingState) -> None:
    """Give each call of the update the layer whose parameters or optimizer state it reads.

    ``graph`` takes the tensors of ``state`` first. Calls for several layers stay as they are, such as the norm of all
    gradients.
    """
    layers: dict[fx.Node, str] = {}
    arguments = (node for node in graph.nodes if node.op == "placeholder")
    layers.update((node, layer) for node, layer in zip(arguments, _layers(state), strict=False) if layer)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        of = {layers[read] for read in node.all_input_nodes if read in layers}
        source = noted(node.meta)
        if source == Phase.UPDATE:
            of = of or {_layer(read) for read in node.all_input_nodes if _layer(read)}
            if len(of) == 1:
                node.meta["custom"] = {**node.meta["custom"], SOURCE_KEY: str(Place(Phase.UPDATE, *of))}
        if len(of) == 1 and (source is None or source == Phase.UPDATE):
            (layers[node],) = of


def _layer(node: fx.Node) -> str:
    """Return the layer whose gradient a node is, if any."""
    (place, *_) = places(noted(node.meta) or "")
    return place.layer if place.phase is Phase.BACKWARD else ""


def _layers(state: TrainingState) -> list[str]:
    """Return the layer of each tensor of a state, "" for one without a layer."""
    parameters = [_module(name) for name in state.parameters]
    slots = [_module(path.rpartition(".")[0]) for path in state.slots]
    own = [_module(name.removeprefix(f"{SUM}.")) if name.startswith(f"{SUM}.") else "" for name in state.own]
    return [*parameters, *("" for _ in state.buffers), *slots, *("" for _ in state.rates), *own]


def _module(parameter: str) -> str:
    return ".".join((MODEL, *parameter.split(".")[:-1]))
