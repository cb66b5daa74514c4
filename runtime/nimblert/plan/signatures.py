"""Verify detached signatures of plan files: DSSE envelopes of in-toto statements, signed with Ed25519.

docs/security.md has the format. `nimblec.plan.signing` writes it.
"""

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from nimblert.errors import InputError, PlanSignatureError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:nimblec:plan:v1"
"""What a signature says. Other statements about a plan, such as "its tests failed", may be signed with the same key."""

SUFFIX = ".sig"
"""The end of the name of a signature beside its plan."""

_LARGEST_NBYTES = 1 << 20
"""The size of a signature or a key that is still read."""

FileOrBytes: TypeAlias = str | PathLike[str] | bytes
"""A file by its path, or its contents."""


class Trust(NamedTuple):
    """Public keys, one of which must have signed a plan file; ``signature`` is by default the file PLAN.sig."""

    keys: Sequence[FileOrBytes]
    signature: FileOrBytes | None = None


def verify(image: memoryview, plan: str | None, trust: Trust) -> None:
    """Raise PlanSignatureError unless a trusted key has signed these bytes; ``plan`` is their path, if they have one.

    Nothing of the plan is parsed, and nothing of the statement before its signature is verified. Raises InputError for
    keys that cannot be used.
    """
    if isinstance(trust.keys, str | bytes) or not isinstance(trust.keys, Sequence) or not trust.keys:
        raise InputError(f"trusted_keys: got {trust.keys!r:.100}, expected a list of at least one public key")
    keys = [read_public_key(key) for key in trust.keys]
    signature = trust.signature
    if signature is None:
        if plan is None:
            raise InputError("signature: the plan is given as bytes, which have no file beside them: give it, too")
        signature = f"{plan}{SUFFIX}"
    name, plan = _name(signature, "signature"), plan or "plan"
    try:
        payload = _signed_payload(read_limited(signature), keys)
        signed = None if payload is None else _digests(payload)
    except OSError as exc:
        raise PlanSignatureError(
            f"{plan}: is not signed: {name}: {exc.strerror}; sign it, `nimblec sign {plan} --key KEY`"
        ) from exc
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise PlanSignatureError(
            f"{plan}: is not signed: {name} is not the signature of a plan ({type(exc).__name__}: {exc})"
        ) from exc
    if signed is None:
        trusted = ", ".join(map(fingerprint, keys))
        raise PlanSignatureError(f"{plan}: {name} is not signed by a trusted key, expected {trusted}")
    if (found := sha256(image)) not in signed:
        raise PlanSignatureError(
            f"{plan}: is not the file that {name} signs: its SHA-256 is {found}, signed is {' or '.join(signed)};"
            f" it was altered, cut short or swapped"
        )


def sha256(image: memoryview) -> str:
    """Return the SHA-256 of all bytes of a file."""
    return hashlib.sha256(image).hexdigest()


def authenticated(payload: bytes) -> bytes:
    """Return the bytes that DSSE signs, its "pre-authentication encoding"."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def read_limited(source: FileOrBytes) -> bytes:
    """Return the contents of a small file. Raises OSError where it cannot be read, ValueError where it is large."""
    if isinstance(source, bytes):
        return source
    # Opening a pipe would otherwise wait for a writer.
    with open(source, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        content = file.read(_LARGEST_NBYTES + 1)
    if len(content) > _LARGEST_NBYTES:
        raise ValueError(f"has more than {_LARGEST_NBYTES} bytes")
    return content


def read_public_key(source: FileOrBytes) -> "Ed25519PublicKey":
    """Return a key in OpenSSH or PEM form. Raises InputError for anything but an Ed25519 key."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key
    except ImportError as exc:
        raise InputError("trusted_keys: signatures need a package: pip install 'nimblert[signing]'") from exc
    name = _name(source, "trusted key")
    try:
        content = read_limited(source).strip()
        key = load_pem_public_key(content) if content.startswith(b"-----BEGIN") else load_ssh_public_key(content)
    except OSError as exc:
        raise InputError(f"{name}: cannot be read: {exc.strerror}, expected a public key") from exc
    except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
        raise InputError(f"{name}: is not one public key of Ed25519 in OpenSSH or PEM form") from exc
    if not isinstance(key, Ed25519PublicKey):
        raise InputError(f"{name}: is a key of another kind than Ed25519: make one with `ssh-keygen -t ed25519`")
    return key


def fingerprint(key: "Ed25519PublicKey") -> str:
    """Return what ``ssh-keygen -l`` prints of a key: SHA256:..."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    blob = base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


def _name(source: FileOrBytes, what: str) -> str:
    if not isinstance(source, str | bytes | PathLike):
        raise InputError(f"{what}: got {type(source).__name__}, expected the path of a file or its bytes")
    return what if isinstance(source, bytes) else os.fsdecode(source)


def _signed_payload(envelope: bytes, keys: "Sequence[Ed25519PublicKey]") -> bytes | None:
    """Return the payload of an envelope, or None where no key has signed it."""
    parsed = json.loads(envelope)
    if parsed["payloadType"] != PAYLOAD_TYPE:
        raise ValueError(f"payload of type {parsed['payloadType']!r:.100}, expected {PAYLOAD_TYPE!r}")
    payload = _decoded(parsed["payload"])
    for signature in parsed["signatures"]:
        if any(_has_signed(key, _decoded(signature["sig"]), payload) for key in keys):
            return payload
    return None


def _decoded(text: str) -> bytes:
    """Decode base64 in either of its alphabets, as DSSE requires."""
    return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)


def _has_signed(key: "Ed25519PublicKey", signature: bytes, payload: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, authenticated(payload))
    except InvalidSignature:
        return False
    return True


def _digests(payload: bytes) -> list[str]:
    """Return the SHA-256 of each subject of a statement. Raises ValueError where it says something else."""
    statement = json.loads(payload)
    for field, expected in (("_type", STATEMENT_TYPE), ("predicateType", PREDICATE_TYPE)):
        if statement[field] != expected:
            raise ValueError(f"{field} is {statement[field]!r:.100}, expected {expected!r}")
    return [subject["digest"]["sha256"].lower() for subject in statement["subject"]]
