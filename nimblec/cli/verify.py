"""``nimblec verify``."""

from itertools import chain
from pathlib import Path

import click
import numpy as np

from nimblec.cli import arguments, loading
from nimblec.cli.command import Command
from nimblec.cli.console import echo, echo_json
from nimblec.inspect import verification
from nimblec.inspect.verification import Result
from nimblert.errors import PlanError
from nimblert.plan.signatures import Trust


@click.command("verify", cls=Command, short_help="Check PLAN, and repeat its recorded run.")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--trusted-key",
    "trusted_keys",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="KEY.pub",
    help="Refuse PLAN, before anything of it is parsed, unless this public Ed25519 key (OpenSSH or PEM) or another one "
    "given has signed it. Repeatable.",
)
@click.option(
    "--signature",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --trusted-key: the signature.  [default: PLAN.sig]",
)
@click.option(
    "--against",
    "model",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="MODEL.onnx",
    help="Also run the ONNX file through ONNX Runtime, without its optimiser, on the CPU, and compare.",
)
@click.option(
    "--constant",
    "constants",
    type=arguments.CONSTANT,
    multiple=True,
    help="With --against: as PLAN was compiled with. Repeatable.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    metavar="R",
    help="With --against: the largest difference to allow, relative to an output's largest magnitude; integers and "
    "bools must be equal.  [default: 0.0001]",
)
@click.option("--entry", metavar="NAME", help="With --against: the entry to compare, where PLAN has several.")
@click.option("--per-node", is_flag=True, help="With --against: name the first ONNX node that differs.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    metavar="S",
    help="With --against: the seed of the inputs.  [default: 0]",
)
@loading.weights_option
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON once all have ended.")
def verify_plan(
    plan: Path,
    trusted_keys: tuple[Path, ...],
    signature: Path | None,
    model: Path | None,
    constants: tuple[tuple[str, Path | np.ndarray], ...],
    tolerance: float | None,
    entry: str | None,
    per_node: bool,
    seed: int | None,
    weights: Path | None,
    as_json: bool,
) -> None:
    """Check PLAN without running it and, on a machine that can run it, by running it.

    \b
    signature a trusted key has signed the file (with --trusted-key)
    format   the file is complete and undamaged
    rules    references, bounds, launch limits
    hazards  conflicting accesses are ordered, also between buffers that share memory
    schedule independent commands prove how many streams full concurrency needs
    symbols  every cubin holds the kernels that are launched from it
    golden   the recorded run, repeated, gives the recorded outputs
    padding  padded and split runs give the results of programs of the sizes called for
    against  ONNX Runtime without its optimiser gives the same outputs of MODEL.onnx for random inputs
    nodes    each of its nodes gives the value that the plan holds for that node, if it holds one

    Prints a line for each check; the exit status is 2 if one failed. A node that differs while the
    outputs agree is reported, but is not a failure.

    \b
    Examples:
      nimblec verify model.plan
      nimblec verify model.plan --trusted-key release.pub
      nimblec verify model.plan --against model.onnx --tolerance 1e-3 --per-node
    """
    if signature is not None and not trusted_keys:
        raise click.UsageError("--signature needs --trusted-key KEY.pub.")
    trust = Trust(trusted_keys, signature) if trusted_keys else None
    checks = verification.verify(plan, trust, weights)
    if model is not None:
        from nimblec.inspect import against

        allowed = against.TOLERANCE if tolerance is None else tolerance
        wanted = against.Against(
            model=model,
            constants=tuple(arguments.read_arrays(constants).items()),
            entry=entry,
            tolerance=allowed,
            per_node=per_node,
            seed=seed or 0,
        )
        checks = chain(checks, against.compare(plan, wanted, trust, weights))
    elif constants or per_node or tolerance is not None or seed is not None or entry is not None:
        raise click.UsageError("--constant, --tolerance, --entry, --per-node and --seed need --against MODEL.onnx.")
    done = []
    for check in checks:
        done.append(check)
        for sentence in () if as_json else check.sentences:
            echo(f"{check.result.value:<8} {check.name}: {sentence}")
    failed = [check for check in done if check.result is Result.FAILED]
    if as_json:
        found = [{"name": c.name, "result": c.result.name.lower(), "sentences": list(c.sentences)} for c in done]
        echo_json({"plan": str(plan), "passed": not failed, "checks": found})
    if failed:
        names = ", ".join(dict.fromkeys(check.name for check in failed))
        first = failed[0].sentences[0].removeprefix(f"{plan}: ")
        raise PlanError(f"{plan}: failed the checks of {names}: {first}")
