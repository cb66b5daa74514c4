"""The command line: compile | run | inspect | verify. It parses, calls and prints."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import get_args

import click

import nimblec
from nimblec import arguments, dot, inspection, picture, report, trace, verification
from nimblec.command import Command, Group, ReaderGoneError
from nimblec.console import echo, echo_lines, escape_what_has_no_encoding
from nimblec.interrupts import INTERRUPTED, prompt_interrupts
from nimblec.options import DEFAULT_LEVEL, InputSpec, Precision, TargetChoice, read_options
from nimblec.progress import StageProgress
from nimblec.verification import Result
from nimblert import container, golden
from nimblert.errors import InputError, PlanError
from nimblert.executable import Executable, load
from nimblert.onnx_session import share_thread_pool
from nimblert.plan import Plan, Target
from nimblert.replacing import replacing

WARM_UPS = 20
"""At most so many runs before latencies count."""

OWN_PROCESS = "own process"
"""The context's object where the command line was started as a program, not called from one."""


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
)
@click.version_option(nimblec.__version__, prog_name="nimblec")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Compile a neural network into one plan file, and run it without the framework.

    A plan holds the kernels of a model, its weights and the order of its work. It is made once,
    by `compile`, and runs on every machine of its kind with nothing but nimblert.

    \b
    Examples:
      nimblec compile model.onnx -o model.plan
      nimblec run model.plan --input image=photo.npy
      nimblec inspect model.plan
      nimblec verify model.plan

    Exit status: 0 on success, 2 where something was refused, with one sentence on standard error.
    """
    if ctx.invoked_subcommand is None:
        echo_lines(ctx.get_help())


@cli.command(cls=Command)
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
    help="What shall run the plan. auto: cuda where a GPU and cuda-python are here, else cpu.",
)
@click.option(
    "--input",
    "inputs",
    type=arguments.Spec(),
    multiple=True,
    help="Fix the shape (and dtype) of an input: image:1x3x224x224, ids:1x16:int64, scale:scalar. "
    "Needed for every input with a dynamic dimension that has no name. Repeatable.",
)
@click.option(
    "--dim",
    "dims",
    type=arguments.NamedSize(),
    multiple=True,
    help="The size of an ONNX file's named dimension, in all inputs that have it: batch=4. What --input says of "
    "a dimension wins. Repeatable.",
)
@click.option(
    "--example",
    "examples",
    type=arguments.NamedFile(),
    multiple=True,
    help="An array for an input; its integers bound the ones drawn in checks. Repeatable.",
)
@click.option(
    "-O",
    "level",
    type=click.IntRange(0, 2),
    help="0: the framework's own kernels, bit for bit. 1: rewritten, and fused by generated kernels. 2: kernels chosen "
    "by timing them too, our own among them. These are the CUDA target's; 1 and 2 report how far they are from 0.  "
    f"[default: {DEFAULT_LEVEL}]",
)
@click.option(
    "--precision",
    type=click.Choice(get_args(Precision)),
    default="keep",
    show_default=True,
    help="fp32, tf32: how float32 convolutions and matrix products are computed on the GPU. keep: as PyTorch does, "
    "TF32 for convolutions. fp16, bf16: a float32 model in half precision, its inputs and outputs as they were.",
)
@click.option(
    "--max-error",
    type=float,
    metavar="E",
    help="Refuse -O1, -O2, fp16 or bf16 where an output differs by more than E of its largest magnitude.",
)
@click.option(
    "--streams",
    type=arguments.Streams(),
    default="auto",
    show_default=True,
    help="1: the captured order. max: every stream the model can use. N: at most N. auto: the fastest of several, "
    "measured here.",
)
@click.option("--memory-limit", type=arguments.Nbytes(), help="What the arena may take: 64MiB, 1.5GB, 1000000.")
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where measured times are kept, so that the next compilation measures nothing.  [default: the user's own]",
)
@click.option(
    "--plan-cache",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Where the plans of model files are kept: the same file with the same options is not compiled twice on the "
    "same machine with the same software.  [default: the user's own]",
)
@click.option("--no-plan-cache", is_flag=True, help="Compile anew, and keep no plan.")
@click.option("-v", "--verbose", is_flag=True, help="Print each stage as it ends, also to a pipe.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def compile(  # noqa: A001  # the command's name
    model: str,
    output: Path,
    target: TargetChoice,
    inputs: tuple[InputSpec, ...],
    dims: tuple[tuple[str, int], ...],
    examples: tuple[tuple[str, Path], ...],
    level: int | None,
    precision: Precision,
    max_error: float | None,
    streams: str,
    memory_limit: int | None,
    timing_cache: Path | None,
    plan_cache: Path | None,
    no_plan_cache: bool,
    verbose: bool,
    quiet: bool,
) -> None:
    """Compile MODEL into a plan file.

    MODEL is an ONNX file (.onnx, external data too), a file of torch.export.save (.pt2), or
    package.module:callable, which is imported with the current directory on the path, called, and
    returns (module, example_inputs) or (module, example_inputs, kwargs). The last two are code, which
    runs with your rights: compile them only where you trust their origin.

    The last stage runs the plan and compares its outputs with the framework's; a difference is an
    error. PLAN is written to a temporary folder beside it (.nimblec-*) and renamed, so an old file
    stays whole until the new one is complete. What a killed compilation leaves there is removed by
    the next one that writes to that folder. A symbolic link stays, and what it leads to is replaced;
    a device, a pipe or a folder is refused.

    \b
    Examples:
      nimblec compile resnet.onnx -o resnet.plan
      nimblec compile bert.onnx -o bert.plan --target cpu \\
          --dim batch=1 --dim sequence=128 --example input_ids=tokens.npy
      nimblec compile samples.resnet:resnet18 -o resnet18.plan --target cuda -O2
    """
    _refuse_both("--verbose", "--quiet", given=verbose and quiet)
    _refuse_both("--plan-cache", "--no-plan-cache", given=plan_cache is not None and no_plan_cache)
    for kept in (Path(model), timing_cache, *(file for _, file in examples)):
        if kept is not None and output.exists() and kept.exists() and output.samefile(kept):
            raise click.UsageError(f"{output}: is to be read, and would be overwritten: name another PLAN.")
    arrays = arguments.read_arrays(examples)
    suffix = Path(model).suffix.lower()
    is_callable = suffix not in {".onnx", ".pt2"} and all(model.partition(":"))
    if not quiet and (is_callable or (suffix == ".pt2" and Path(model).is_file())):
        echo(f"note: {model} is code, and runs with your rights: go on only if you trust its origin", err=True)
    if is_callable and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does, for package.module:callable

    from nimblec.compiler import choose_target, compile_model  # brings in the frameworks

    chosen, reason = choose_target(target)
    if not quiet:
        echo(f"target: {chosen.name.lower()} ({reason})")
    caches: dict[str, Path | None] = {} if timing_cache is None else {"timing_cache": timing_cache}
    if plan_cache is not None or no_plan_cache:
        caches["plan_cache"] = plan_cache
    options = read_options(
        target=chosen.name.lower(),
        inputs=inputs,
        dims=dims,
        examples=tuple(arrays.items()),
        level=level,
        precision=precision,
        max_error=max_error,
        streams=streams,
        memory_limit=memory_limit,
        **caches,
    )
    with StageProgress(verbose=verbose, quiet=quiet) as observer:
        made = compile_model(model, options=options, output=output, observer=observer)
    if quiet:
        return
    for note in made.notes:
        echo(f"note: {note}")
    size = output.stat().st_size
    report.SafeConsole().print(report.compiled(made.plan, made.stages, file_nbytes=size))
    echo(f"wrote {output}")


def _refuse_both(one: str, other: str, *, given: bool) -> None:
    if given:
        raise click.UsageError(f"{one} and {other} contradict each other.")


@cli.command(cls=Command)
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--input",
    "files",
    type=arguments.NamedFile(),
    multiple=True,
    help="The array of an input. Inputs not given are drawn from the seed. Repeatable.",
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write every output to DIR as NAME.npy; characters that suit no file name become _.",
)
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    metavar="N",
    help="Measure the latency of N runs, warmed up first.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    default=0,
    show_default=True,
    metavar="S",
    help="What inputs not given are drawn from.",
)
def run(
    plan: Path, files: tuple[tuple[str, Path], ...], output_dir: Path | None, repeat: int | None, seed: int
) -> None:
    """Run PLAN once and print its outputs.

    Prints the name, type and digest (the first 6 bytes of SHA-256) of every output, and the values
    of small ones.

    \b
    Examples:
      nimblec run digits.plan --input image=samples/digit_7.npy
      nimblec run resnet.plan --repeat 1000
      nimblec run bert.plan --input input_ids=tokens.npy --output-dir out
    """
    given = arguments.read_arrays(files)
    with load(_prepared(plan)) as executable:
        tensors = {tensor.name: tensor for tensor in executable.inputs}
        if unknown := [name for name in given if name not in tensors]:
            raise InputError(f"input {unknown[0]!r} is not one of the plan's inputs {list(tensors)}")
        restored = {name: arguments.restore_dtype(array, tensors[name]) for name, array in given.items()}
        drawn = golden.draw_inputs(executable.program, seed)
        outputs = executable.run({**drawn, **restored})
        latencies = measure(executable, repeat) if repeat else []
    console = report.SafeConsole()
    if missing := [name for name in tensors if name not in given]:
        echo(f"drawn from seed {seed}: {', '.join(missing)}")
    digests = {name: golden.digest(array) for name, array in outputs.items()}
    console.print(report.outputs(outputs, digests))
    if latencies:
        echo(report.latency_text(latencies))
    if output_dir is not None:
        for path in arguments.write_arrays(output_dir, outputs):
            echo(f"wrote {path}")


def measure(executable: Executable, repeat: int) -> list[float]:
    """Seconds of each of ``repeat`` synchronised runs on inputs that are already in place."""
    for _ in range(min(repeat, WARM_UPS)):
        executable.replay()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        executable.replay()
        seconds.append(time.perf_counter() - start)
    return seconds


@cli.command(cls=Command, short_help="Show what PLAN holds.")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--timeline", "as_timeline", is_flag=True, help="Draw the streams in the terminal instead.")
@click.option(
    "--chrome-trace",
    "trace_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the timeline as JSON for ui.perfetto.dev or chrome://tracing.",
)
@click.option(
    "--dot",
    "dot_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the graph of the commands for Graphviz.",
)
def inspect(plan: Path, as_json: bool, as_timeline: bool, trace_file: Path | None, dot_file: Path | None) -> None:
    """Show what PLAN holds: target, inputs, outputs, commands, schedule, kernels, memory, weights, sizes.

    Works on every machine, whatever the plan was made for. The timeline, the trace and the critical
    path are simulated from the durations of single commands, measured when the plan was made.

    \b
    Examples:
      nimblec inspect model.plan
      nimblec inspect model.plan --json | jq .sizes
      nimblec inspect model.plan --timeline
      nimblec inspect model.plan --chrome-trace trace.json --dot graph.dot
    """
    _refuse_both("--json", "--timeline", given=as_json and as_timeline)
    files = [path for path in (trace_file, dot_file) if path is not None]
    resolved = [path.resolve() for path in (plan, *files)]
    if len(set(resolved)) < len(resolved):
        raise click.UsageError("PLAN and the files to write must be different files.")
    opened = container.read(plan)
    if as_json:
        facts = inspection.describe(opened, file_nbytes=plan.stat().st_size)
        echo_lines(json.dumps(facts, indent=2, ensure_ascii=False))
    elif as_timeline:
        console = report.SafeConsole()
        for program in opened.programs:
            console.print(*picture.picture(program, width=console.width), sep="\n")
    elif not files:
        console = report.SafeConsole()
        for table in report.inspected(inspection.describe(opened, file_nbytes=plan.stat().st_size)):
            console.print(table)
    if trace_file is not None:
        _write_text(trace_file, json.dumps(trace.chrome_trace(opened)), quiet=as_json)
    if dot_file is not None:
        _write_text(dot_file, dot.dot(opened), quiet=as_json)


def _write_text(path: Path, text: str, *, quiet: bool) -> None:
    """Write a file, and say so unless that would mix with what is printed."""
    with replacing(path) as file:
        file.write(text.encode())
    if not quiet:
        echo(f"wrote {path}")


@cli.command(cls=Command, short_help="Check PLAN, and repeat its recorded run.")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--against",
    "model",
    type=click.Path(path_type=Path),
    metavar="MODEL.onnx",
    help="Also run the ONNX file through ONNX Runtime on the CPU, and compare.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    metavar="R",
    help="With --against: the difference to allow, of an output's largest magnitude; integers and bools must be "
    "equal.  [default: 0.0001]",
)
@click.option("--per-node", is_flag=True, help="With --against: name the first ONNX node that differs.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    metavar="S",
    help="With --against: what the inputs are drawn from.  [default: 0]",
)
def verify(plan: Path, model: Path | None, tolerance: float | None, per_node: bool, seed: int | None) -> None:
    """Check PLAN without running it and, on a machine that can run it, by running it.

    \b
    format   the file is complete and undamaged
    rules    references, bounds, launch limits
    hazards  accesses that conflict, those of buffers that share bytes too, are ordered
    schedule commands of which none waits for another prove that fewer streams would not do
    symbols  every cubin holds the kernels that are launched from it
    golden   the recorded run, repeated, gives the recorded outputs
    against  a plain ONNX Runtime session of MODEL.onnx gives the same outputs of random inputs
    nodes    so does each node of it, as far as the plan has the values of single nodes

    One line for each check; exit status 2 if one failed. Where outputs agree, a node that differs
    is told and is no failure.

    \b
    Examples:
      nimblec verify model.plan
      nimblec verify model.plan --against model.onnx --tolerance 1e-3 --per-node
    """
    checks = verification.verify(plan)
    if model is not None:
        checks = chain(checks, _against(plan, model, tolerance, seed, per_node=per_node))
    elif per_node or tolerance is not None or seed is not None:
        raise click.UsageError("--tolerance, --per-node and --seed need --against MODEL.onnx.")
    failed = []
    for check in checks:
        for sentence in check.sentences:
            echo(f"{check.result.value:<8} {check.name}: {sentence}")
        if check.result is Result.FAILED:
            failed.append(check)
    if failed:
        names = ", ".join(dict.fromkeys(check.name for check in failed))
        raise PlanError(f"{plan}: failed the checks of {names}: {failed[0].sentences[0]}")


def _against(
    plan: Path, model: Path, tolerance: float | None, seed: int | None, *, per_node: bool
) -> Iterator[verification.Check]:
    from nimblec import against  # brings in onnx and ONNX Runtime

    allowed = against.TOLERANCE if tolerance is None else tolerance
    yield from against.compare(plan, against.Against(model=model, tolerance=allowed, per_node=per_node, seed=seed or 0))


def _prepared(path: Path) -> Plan:
    """The plan in a file; where it is for the CPU and this process is ours, its sessions share one thread pool.

    ONNX Runtime then refuses sessions with threads of their own, which is for a program to decide.
    """
    plan = container.read(path)
    if plan.target is Target.CPU and click.get_current_context().obj == OWN_PROCESS:
        share_thread_pool()
    return plan


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 on success, 2 with one sentence where it refuses."""
    obj = OWN_PROCESS if args is None else None
    if obj:
        escape_what_has_no_encoding()
    try:
        with prompt_interrupts() if obj else nullcontext():
            status = cli.main(args, prog_name="nimblec", standalone_mode=False, obj=obj)
    except click.UsageError as exc:
        command = exc.ctx.command_path if exc.ctx else "nimblec"
        echo(f"nimblec: {exc.format_message().rstrip('.')}: see {command} --help", err=True)
        status = 2
    except click.ClickException as exc:
        echo(f"nimblec: {exc.format_message()}", err=True)
        status = 2
    except click.Abort:
        status = INTERRUPTED
    except ReaderGoneError:
        if obj:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes as it ends
        status = 128 + signal.SIGPIPE
    sys.exit(status)
