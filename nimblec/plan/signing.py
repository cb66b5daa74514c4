"""Sign plan files; `nimblert.plan.signatures` verifies them."""

import base64
import json
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from nimblert.check.verify import read_plan
from nimblert.errors import InputError
from nimblert.plan import signatures
from nimblert.plan.files import replacing
from nimblert.plan.signatures import PAYLOAD_TYPE, PREDICATE_TYPE, STATEMENT_TYPE

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def sign(plan: str | PathLike[str], key: str | PathLike[str], output: str | PathLike[str]) -> str:
    """Write the signature of a plan file to ``output``, and return the fingerprint of the key.

    Equal files of equal names get equal signatures. Raises PlanError for what is no valid plan, InputError for a key
    that cannot be used, NimbleError where the file cannot be written.
    """
    private = _read_private_key(key)
    # A copy: the bytes that were checked are signed, whatever happens to the file meanwhile.
    image = read_plan(plan, copy=True).stored()
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": Path(plan).name, "digest": {"sha256": signatures.sha256(image)}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {},
    }
    payload = json.dumps(statement).encode()
    fingerprint = signatures.fingerprint(private.public_key())
    signature = private.sign(signatures.authenticated(payload))
    envelope = {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode(),
        "signatures": [{"keyid": fingerprint, "sig": base64.b64encode(signature).decode()}],
    }
    with replacing(output) as file:
        file.write(json.dumps(envelope).encode() + b"\n")
    return fingerprint


def _read_private_key(path: str | PathLike[str]) -> "Ed25519PrivateKey":
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

    try:
        content = signatures.read_limited(path)
        load = load_ssh_private_key if b"OPENSSH PRIVATE KEY" in content else load_pem_private_key
        key = load(content, password=None)
    except OSError as exc:
        raise InputError(f"{path}: cannot be read: {exc.strerror}, expected a private key") from exc
    except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
        raise InputError(
            f"{path}: is not a private key of Ed25519 in OpenSSH or PEM form without a passphrase: make one with"
            f" `ssh-keygen -t ed25519 -N '' -f KEY`"
        ) from exc
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{path}: is a key of another kind than Ed25519: make one with `ssh-keygen -t ed25519`")
    return key
