"""-O0: the model as it is; in half precision, cast and nothing else."""

from nimblec.optimize.passes.cast import cast
from nimblec.optimize.passes.recurrent import pack_recurrent_weights
from nimblec.optimize.passes.state import write_state
from nimblec.optimize.pipeline import Pass, Phase, Pipeline

CAST = Pipeline(
    Phase(
        name="precision",
        passes=(
            Pass(run=cast, takes=("dtype",), reason="the graph is cast as the model's author wrote it"),
            Pass(
                run=pack_recurrent_weights,
                needs=(cast,),
                reason="casting makes new weights, outside of the buffer that cuDNN reads them from",
            ),
        ),
    ),
    Phase(
        name="state",
        passes=(Pass(run=write_state, needs=(cast,), reason="every other pass takes a call to be pure"),),
    ),
)
