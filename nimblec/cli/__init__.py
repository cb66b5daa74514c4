"""The command line: one module for each command. It parses, calls and prints."""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import click

import nimblec
from nimblec.cli.bench import bench_plan
from nimblec.cli.build import build_plans
from nimblec.cli.command import OWN_PROCESS, Group, ReaderGoneError
from nimblec.cli.compile import compile_model
from nimblec.cli.console import discard_what_is_closed, echo, echo_lines, escape_what_has_no_encoding
from nimblec.cli.diff import diff_plans
from nimblec.cli.doctor import examine_installation
from nimblec.cli.explain import explain_plan
from nimblec.cli.inspect import inspect_plan
from nimblec.cli.interrupts import INTERRUPTED, prompt_interrupts
from nimblec.cli.run import run_plan
from nimblec.cli.sign import sign_plan
from nimblec.cli.verify import verify_plan


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
)
@click.version_option(nimblec.__version__, prog_name="nimblec")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Compile a neural network into one plan file, and run it without the framework.

    A plan holds the kernels of a model, its weights and its schedule. `compile` makes it once, and
    it runs on any machine of the same kind with nothing but nimblert.

    \b
    Examples:
      nimblec compile model.onnx -o model.plan
      nimblec run model.plan --input image=photo.npy
      nimblec inspect model.plan
      nimblec verify model.plan

    Exit status: 0 on success; 1 where `diff` finds a difference, or `build` a plan that is out of date or over its
    budget; 2 on an error, which is one sentence on standard error; 130 after Ctrl-C.
    """
    if ctx.invoked_subcommand is None:
        echo_lines(ctx.get_help())


for command in (
    compile_model,
    build_plans,
    run_plan,
    bench_plan,
    inspect_plan,
    explain_plan,
    diff_plans,
    verify_plan,
    sign_plan,
    examine_installation,
):
    cli.add_command(command)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit, with the status that its help names, or 141 where nobody reads its output."""
    obj = OWN_PROCESS if args is None else None
    if obj:
        discard_what_is_closed()
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
            # Python writes to stdout once more as it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    sys.exit(status)
