"""``nimblec sign``."""

from pathlib import Path

import click

from nimblec.cli.command import Command
from nimblec.cli.console import echo
from nimblec.plan import signing
from nimblert.plan.signatures import SUFFIX


@click.command("sign", cls=Command, short_help="Sign PLAN with a private key.")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--key",
    type=click.Path(path_type=Path),
    required=True,
    metavar="KEY",
    help="The private Ed25519 key, in OpenSSH or PEM form, without a passphrase.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The signature to write.  [default: PLAN.sig]",
)
def sign_plan(plan: Path, key: Path, output: Path | None) -> None:
    """Write a signature of PLAN beside it: a DSSE envelope of an in-toto statement over the file's SHA-256.

    PLAN is checked first, and not changed. `nimblec verify --trusted-key` and
    nimblert.load(path, trusted_keys=[...]) verify the signature; docs/security.md has the format.

    \b
    Examples:
      ssh-keygen -t ed25519 -N '' -f release
      nimblec sign model.plan --key release
      nimblec verify model.plan --trusted-key release.pub
    """
    output = output or plan.with_name(f"{plan.name}{SUFFIX}")
    if output.resolve() in (plan.resolve(), key.resolve()):
        raise click.UsageError("PLAN, the key and the signature must be different files.")
    fingerprint = signing.sign(plan, key, output)
    echo(f"wrote {output}, signed by {fingerprint}")
