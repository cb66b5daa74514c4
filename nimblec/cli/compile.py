"""``nimblec compile``."""

import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from nimblec.base.isolation import IMPORTED_S
from nimblec.base.options import DEFAULT_LEVEL, DEFAULT_TRIP_LIMIT, Options, Precision, TargetChoice, read_options
from nimblec.cli import arguments, report
from nimblec.cli.command import OWN_PROCESS, Command, refuse_both
from nimblec.cli.console import echo, echo_json
from nimblec.cli.progress import StageProgress
from nimblec.inspect.inspection import Json, command_counts, sizes
from nimblec.plan import stripping
from nimblert.plan import Target, schema
from nimblert.plan.records import DEFAULT_LIMITS

if TYPE_CHECKING:
    from nimblec.compiler import Compiled


@click.command("compile", cls=Command)
@click.argument("model")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="PLAN",
    help="The file to write.",
)
@click.option(
    "--target",
    type=click.Choice(get_args(TargetChoice)),
    default="auto",
    show_default=True,
    help="Target device. auto: cuda if there is a GPU and cuda-bindings is installed, else cpu. sm_90 and the like: "
    "a GPU of that architecture, which need not be here.",
)
@click.option(
    "--input",
    "inputs",
    type=arguments.SPEC,
    multiple=True,
    help="Fix the shape (and dtype) of an input: image:1x3x224x224, ids:1x16:int64, scale:scalar. "
    "Needed for every input of an ONNX file with a dynamic dimension that has no name; image:batch,3,224,224 names it "
    "for --dim. Repeatable.",
)
@click.option(
    "--dim",
    "dims",
    type=arguments.NAMED_SIZES,
    multiple=True,
    help="The size of a named dimension, in all inputs that have it: batch=4. Several sizes (batch=1,2,4) or a range "
    "(batch=1..16: the powers of two and both ends) make one program for each combination. --input takes precedence. "
    "Repeatable.",
)
@click.option(
    "--pad-mask",
    "pad_masks",
    multiple=True,
    metavar="NAME",
    help="An input whose zeros mask elements of the others, such as attention_mask: calls are padded along its "
    "dimensions if results agree. Repeatable.",
)
@click.option(
    "--constant",
    "constants",
    type=arguments.CONSTANT,
    multiple=True,
    help="Make an input of an ONNX model a constant: rate=16000, use_cache=false, scales=1,2, mask=mask.npy. The plan "
    "has no such input, and of branches that it chooses from only the one taken. Repeatable.",
)
@click.option(
    "--example",
    "examples",
    type=arguments.NAMED_FILE,
    multiple=True,
    metavar="NAME=FILE.npy",
    help="An array for an input; the range of an integer array bounds the values drawn in later checks. Repeatable.",
)
@click.option(
    "-O",
    "level",
    type=click.IntRange(0, 2),
    metavar="LEVEL",
    help="CUDA target. 0: the framework's own kernels, bit for bit. 1: rewrites, and fusion into generated kernels. 2: "
    "also kernels chosen by timing, nimblec's own among them. 1 and 2 report how far their outputs are from those of "
    f"0.  [default: {DEFAULT_LEVEL}]",
)
@click.option(
    "--precision",
    type=click.Choice(get_args(Precision)),
    default="keep",
    show_default=True,
    help="fp32, tf32: how float32 convolutions and matrix products are computed on the GPU. keep: as PyTorch does, "
    "TF32 for convolutions. fp16, bf16: a float32 model in half precision, with its inputs and outputs unchanged. fp8: "
    "fp16 with linear layers in e4m3, in ranges found on the examples, where -O2 finds it faster.",
)
@click.option(
    "--max-error",
    type=click.FloatRange(0),
    metavar="E",
    help="The largest difference of an output to accept, as a part of its largest magnitude: from -O0 for -O1, -O2, "
    "fp16, bf16 or fp8; on the CPU target from ONNX Runtime without its optimiser, and from PyTorch.",
)
@click.option(
    "--approximate",
    is_flag=True,
    help="CPU target. Round activations to 8 bits in products with quantised weights, which is faster; prints the "
    "error.",
)
@click.option(
    "--trip-limit",
    type=click.IntRange(1, DEFAULT_LIMITS.trips),
    default=DEFAULT_TRIP_LIMIT,
    show_default=True,
    metavar="N",
    help="The most trips of a loop whose number of trips the model leaves open; a call that needs more "
    "fails.",
)
@click.option(
    "--bound",
    "bounds",
    type=arguments.NAMED_SHAPE,
    multiple=True,
    help="The largest shape of an output whose size depends on values: boxes=100x4. Needed where the model "
    "does not bound it. Repeatable.",
)
@click.option(
    "--print-passes",
    is_flag=True,
    help="Note each rewrite of -O1 and -O2, with the calls of the graph before and after it; on the CPU target the "
    "nodes before and after ONNX Runtime's optimiser.",
)
@click.option(
    "--refittable",
    is_flag=True,
    help="Record in the plan how weights are folded and repacked, so that a loaded plan can be given others; prints "
    "the cost.",
)
@click.option(
    "--streams",
    type=arguments.STREAMS,
    default="auto",
    show_default=True,
    metavar="auto|1|max|N",
    help="1: one stream, in the model's order. max: as many streams as the model can use. N: at most N. auto: the "
    "fastest of several schedules, timed on this machine, that is worth its memory.",
)
@click.option(
    "--memory-limit",
    type=arguments.NBYTES,
    help="The largest arena (memory for results within a run) to accept: 64MiB, 1.5GB, 1000000. Where no schedule "
    "fits, results are recomputed instead of kept.",
)
@click.option(
    "--reproducible",
    is_flag=True,
    help="Let no measured time decide, and store none: schedules are chosen by estimates, so that builds do not depend "
    "on the load of the machine. For CI. Not with -O2.",
)
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where measured times are kept, so that the next compilation measures nothing.  "
    "[default: ~/.cache/nimblec/timings.json]",
)
@click.option(
    "--plan-cache",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Where plans of model files are kept: the same file with the same options is not compiled twice on the "
    "same machine with the same software.  [default: ~/.cache/nimblec/plans]",
)
@click.option("--no-plan-cache", is_flag=True, help="Neither read nor write the plan cache.")
@click.option(
    "--strip-weights",
    "weights",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the weights to a safetensors file instead of PLAN, which keeps their digests: it is loaded with "
    "--weights FILE, in Python load(plan, weights=FILE).",
)
@click.option(
    "--compress-weights",
    is_flag=True,
    help="Compress weights that shrink by a tenth, such as integers and zeros: such a plan loads more slowly, and its "
    "processes share no memory for them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON: sizes, notes, seconds of each stage.")
@click.option("-v", "--verbose", is_flag=True, help="Print each stage as it ends, even to a pipe.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def compile_model(
    model: str,
    output: Path,
    *,
    weights: Path | None,
    compress_weights: bool,
    as_json: bool,
    verbose: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Compile MODEL into a plan file.

    MODEL is an ONNX file (.onnx, with or without external data), a file of torch.export.save (.pt2), or
    package.module:callable. The callable is imported with the current directory on the path and called;
    it returns (module, example_inputs), (module, example_inputs, kwargs), or a dict of such tuples by the
    names of entries. A .pt2 file or a callable is code that runs with your rights: compile only what you
    trust.

    The last stage runs the plan and compares its outputs with the framework's; a difference is an
    error. PLAN is written to a temporary folder beside it (.nimblec-*) and renamed, so an old file
    stays whole until the new one is complete. The next compilation that writes to that folder removes
    what a killed one left there. A symbolic link is kept and its target replaced; a device, a pipe, a
    folder, or a file that is not a plan is refused.

    \b
    Examples:
      nimblec compile resnet.onnx -o resnet.plan
      nimblec compile bert.onnx -o bert.plan --target cpu \\
          --dim batch=1 --dim sequence=128 --example input_ids=tokens.npy
      nimblec compile samples.resnet:resnet18 -o resnet18.plan --target cuda -O2
    """
    begin = IMPORTED_S if click.get_current_context().obj == OWN_PROCESS else time.perf_counter()
    refuse_both("--verbose", "--quiet", given=verbose and quiet)
    refuse_both("--json", "--quiet", given=as_json and quiet)
    refuse_both("--strip-weights", "--compress-weights", given=weights is not None and compress_weights)
    options = options_of(model, output, weights=weights, **given)
    is_callable = is_code(model)
    if not quiet and (is_callable or (model.lower().endswith(".pt2") and Path(model).is_file())):
        echo(f"note: {model} is code that runs with your rights: compile only what you trust", err=True)
    if is_callable and str(Path.cwd()) not in sys.path:
        # As with `python -m`, package.module:callable is found in the current folder.
        sys.path.insert(0, str(Path.cwd()))

    from nimblec import compiler  # imports the frameworks

    chosen, reason = compiler.choose_target(options.target)
    if not quiet and not as_json:
        echo(f"target: {chosen.name.lower()} ({reason})")
    if not options.is_for_absent:
        options = replace(options, target="cuda" if chosen is Target.CUDA else "cpu")
    start_s = time.perf_counter() - begin
    with StageProgress(verbose=verbose, quiet=quiet) as observer:
        made = compiler.compile_model(
            model,
            options=options,
            output=output,
            weights=weights,
            compress_weights=compress_weights,
            observer=observer,
        )
    if quiet:
        return
    facts = _facts(made, output, start_s=start_s, all_s=time.perf_counter() - begin)
    if as_json:
        echo_json(facts)
        return
    for note in made.notes:
        echo(f"note: {note}")
    report.SafeConsole().print(report.compiled(facts))
    for written in filter(None, (output, weights)):
        echo(f"wrote {written}")


def is_code(model: str) -> bool:
    """Return whether a model is named as package.module:callable."""
    return Path(model).suffix.lower() not in {".onnx", ".pt2"} and all(model.partition(":"))


def options_of(model: str, output: Path, *, weights: Path | None, no_plan_cache: bool, **given: Any) -> Options:
    """Return the options that the parameters of ``nimblec compile`` stand for; the arrays that they name are read."""
    for cache in ("timing_cache", "plan_cache"):
        if given[cache] is None:
            del given[cache]
    refuse_both("--plan-cache", "--no-plan-cache", given=no_plan_cache and "plan_cache" in given)
    refuse_both("--reproducible", "--timing-cache", given=given["reproducible"] and "timing_cache" in given)
    if no_plan_cache:
        given["plan_cache"] = None
    files = (file for _, file in (*given["constants"], *given["examples"]) if isinstance(file, Path))
    read = (Path(model), *filter(None, (given.get("timing_cache"),)), *files)
    _refuse_overwriting(output, read)
    if weights is not None:
        if weights.resolve() in [path.resolve() for path in (output, *read)]:
            raise click.UsageError(f"{weights}: is PLAN, or is read by this compilation: name another file.")
        stripping.check_destination(weights)
    given |= {name: tuple(arguments.read_arrays(given[name]).items()) for name in ("constants", "examples")}
    return read_options(**given)


def _facts(made: "Compiled", output: Path, *, start_s: float, all_s: float) -> Json:
    """Return the result, for --json; "other" is what no stage accounts for, mostly imports between them."""
    plan = made.plan
    stages = [("start", start_s), *made.stages]
    stages.append(("other", max(all_s - sum(seconds for _, seconds in stages), 0.0)))
    return {
        "plan": str(output),
        "target": plan.target.name.lower(),
        "sizes": sizes(plan, file_nbytes=output.stat().st_size),
        "modules": len(plan.modules),
        "kernels": len(plan.kernels),
        "launches": sum(command_counts(program)["launch"] for program in plan.programs),
        "notes": list(made.notes),
        "stages": [{"name": name, "seconds": seconds} for name, seconds in stages],
        "seconds": all_s,
    }


def _refuse_overwriting(output: Path, read: Iterable[Path]) -> None:
    for path in read:
        if output.exists() and path.exists() and output.samefile(path):
            what = "is read by this compilation, and would be overwritten"
            raise click.UsageError(f"{output}: {what}: name another PLAN.")
    if output.is_file() and output.stat().st_size and not _is_plan(output):
        raise click.UsageError(f"{output}: exists and is not a plan: remove it, or name another PLAN.")


def _is_plan(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.read(8)[4:] == schema.IDENTIFIER
    return False
