"""What the graphs of models on the GPU prove about calls of other sizes."""

from typing import TYPE_CHECKING

from nimblec.base.errors import TraceError, UnsupportedModelError
from nimblec.padding.fits import Proofs
from nimblec.padding.values import Proof
from nimblert.plan import Fit, Plan, Program
from nimblert.plan.dimensions import Axes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nimblec.pytorch.model import TorchModel


def prove_programs(plan: Plan, models: "Iterable[TorchModel]") -> Proofs:
    """Return what the model of each program proves."""
    axes = Axes(plan.programs)
    return {program.name: _proved(program, axes, model) for program, model in zip(plan.programs, models, strict=True)}


def _proved(program: Program, axes: Axes, model: "TorchModel") -> dict[str, Proof]:
    from nimblec.graph.outputs import outputs_of
    from nimblec.graph.rewriter import fake
    from nimblec.padding.aten_graph import prove_aten
    from nimblec.pytorch.flat import flattened
    from nimblec.pytorch.outputs import name_outputs

    sizes = dict(program.profile)
    try:
        flat = flattened(model)
    except (TraceError, UnsupportedModelError) as exc:
        return dict.fromkeys(sizes, Proof(Fit.EXACT, f"the graph of the model is not known: {exc}"))
    inputs = {tensor.name: (of, tensor.mask) for tensor, of in axes.of_inputs(program)}
    outputs = {tensor.name: of for tensor, of in axes.of_outputs(program)}
    made = [fake(node) for node in outputs_of(flat.module)]
    result = flat.nest(made) if flat.nest is not None else dict(zip(flat.output_names, made, strict=True))
    named = {id(tensor): outputs.get(name) for name, tensor in name_outputs(result)}
    given = [inputs.get(name, ((None,) * tensor.dim(), False)) for name, tensor in model.inputs]
    return prove_aten(flat.module, given, [named.get(id(tensor)) for tensor in made], sizes)
