"""Signatures: who signed a plan file is checked before anything of it is parsed."""

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plans
import pytest
from command_line import CommandLine

import nimblert
from nimblec.plan import encoder, signing
from nimblert.check.verify import read_plan
from nimblert.errors import InputError, PlanSignatureError
from nimblert.plan import container, signatures
from nimblert.plan.signatures import Trust

pytest.importorskip("cryptography", reason="needs cryptography: not installed")

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)


def write_keys(folder: Path, name: str, key: Any = None, *, pem: bool = False) -> Path:
    """Write NAME and NAME.pub, and return the former."""
    key = key or Ed25519PrivateKey.generate()
    form = PrivateFormat.PKCS8 if pem else PrivateFormat.OpenSSH
    public = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo) if pem else (Encoding.OpenSSH, PublicFormat.OpenSSH)
    private = folder / name
    private.write_bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))
    (folder / f"{name}.pub").write_bytes(key.public_key().public_bytes(*public) + b" somebody@somewhere\n" * (not pem))
    return private


@pytest.fixture
def signed(tmp_path: Path) -> Path:
    """Return a plan, its signature and ``key``, beside ``other.plan``, which ``stranger`` has signed."""
    for name, key in (("model.plan", "key"), ("other.plan", "stranger")):
        encoder.write(plans.cpu_plan(), tmp_path / name)
        signing.sign(tmp_path / name, write_keys(tmp_path, key), tmp_path / f"{name}.sig")
    return tmp_path / "model.plan"


def refusal(path: Path, *keys: Path | bytes, **options: Any) -> str:
    """Return the sentence with which a plan is refused."""
    with pytest.raises(PlanSignatureError) as caught:
        nimblert.load(path, trusted_keys=keys or [path.with_name("key.pub")], **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("pem", [False, True], ids=["OpenSSH", "PEM"])
def test_load_takes_a_plan_signed_by_one_of_the_keys(signed: Path, *, pem: bool) -> None:
    key = write_keys(signed.parent, "third", pem=pem)
    signing.sign(signed, key, signed.with_name("elsewhere"))
    keys = [signed.with_name("stranger.pub"), (signed.parent / "third.pub").read_bytes()]
    with nimblert.load(signed, trusted_keys=keys, signature=signed.with_name("elsewhere")) as model:
        assert [tensor.name for tensor in model.inputs] == ["x", "index"]
    given = {"trusted_keys": keys, "signature": signed.with_name("elsewhere").read_bytes()}
    with nimblert.load(signed.read_bytes(), **given) as model:
        assert [tensor.name for tensor in model.inputs] == ["x", "index"]


def test_signature_is_what_dsse_and_in_toto_define(signed: Path) -> None:
    """Checked with ``ssh-keygen -l`` and the words of the specifications, not with the code that wrote it."""
    envelope = json.loads(signed.with_name("model.plan.sig").read_bytes())
    payload = base64.b64decode(envelope["payload"])
    (signature,) = envelope["signatures"]
    key = signatures.read_public_key(signed.with_name("key.pub"))
    key.verify(
        base64.b64decode(signature["sig"]), b"DSSEv1 28 application/vnd.in-toto+json %d " % len(payload) + payload
    )
    if shutil.which("ssh-keygen"):
        listed = subprocess.run(
            ["ssh-keygen", "-l", "-f", signed.with_name("key.pub")], capture_output=True, check=True
        )
        assert signature["keyid"] in listed.stdout.decode()
    summed = subprocess.run(["sha256sum", signed], capture_output=True, check=True).stdout.split()[0].decode()
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [{"name": "model.plan", "digest": {"sha256": summed}}]


def test_another_library_verifies_signature(signed: Path) -> None:
    """The library that in-toto's and TUF's tools verify DSSE envelopes with."""
    dsse = pytest.importorskip("securesystemslib.dsse", reason="needs securesystemslib: not installed")
    from securesystemslib.exceptions import VerificationError
    from securesystemslib.signer import SSlibKey

    written = json.loads(signed.with_name("model.plan.sig").read_bytes())
    keyid = written["signatures"][0]["keyid"]
    key, stranger = (
        SSlibKey.from_crypto(signatures.read_public_key(signed.with_name(f"{name}.pub")), keyid=keyid)
        for name in ("key", "stranger")
    )
    envelope = dsse.Envelope.from_dict(written)
    assert envelope.verify([key], threshold=1) == {keyid: key}
    with pytest.raises(VerificationError):
        envelope.verify([stranger], threshold=1)


def tamper(plan: Path) -> None:
    """Change the file, and give it the digest of its new contents, as a forger would."""
    content = bytearray(plan.read_bytes())
    content[len(content) // 2] ^= 1
    content[-32:] = container.digest(memoryview(content))
    plan.write_bytes(content)


def sign_another_statement(plan: Path) -> None:
    """Replace the signature by another statement about the same file, signed with the same key."""
    private = signing._read_private_key(plan.with_name("key"))
    sig = plan.with_name("model.plan.sig")
    envelope = json.loads(sig.read_bytes())
    payload = base64.b64decode(envelope["payload"]).replace(b"urn:nimblec:plan:v1", b"urn:tests:failed")
    envelope["payload"] = base64.b64encode(payload).decode()
    envelope["signatures"][0]["sig"] = base64.b64encode(private.sign(signatures.authenticated(payload))).decode()
    sig.write_text(json.dumps(envelope))


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        (lambda plan: plan.with_name("model.plan.sig").unlink(), "is not signed: .*model.plan.sig: No such file"),
        (tamper, "is not the file that .* signs: its SHA-256 is [0-9a-f]{64}, signed is [0-9a-f]{64};"),
        (lambda plan: plan.write_bytes(plan.read_bytes()[:-100]), "is not the file that .*model.plan.sig signs"),
        (lambda plan: plan.write_bytes(b"no plan"), "is not the file that .*model.plan.sig signs"),
        (
            lambda plan: plan.with_name("other.plan.sig").rename(f"{plan}.sig"),
            "is not signed by a trusted key, expected",
        ),
        (sign_another_statement, "is not the signature of a plan .*predicateType is 'urn:tests:failed'"),
        (lambda plan: plan.with_name("model.plan.sig").write_bytes(b"[" * 100_000), "is not the signature of a plan"),
        (lambda plan: plan.with_name("model.plan.sig").write_bytes(b"{}"), "is not the signature of a plan"),
        (lambda plan: plan.with_name("model.plan.sig").write_bytes(bytes(2 << 20)), "more than 1048576 bytes"),
        (
            lambda plan: plan.with_name("model.plan.sig").write_bytes(plan.read_bytes()),
            "is not the signature of a plan",
        ),
    ],
)
def test_load_refuses_before_it_parses(
    signed: Path, monkeypatch: pytest.MonkeyPatch, attack: Callable[[Path], object], why: str
) -> None:
    attack(signed)
    for function in ("check_frame", "decoded", "verify_digest"):
        monkeypatch.setattr(container, function, lambda *_: pytest.fail("was parsed"))
    with pytest.raises(PlanSignatureError, match=why):
        nimblert.load(signed, trusted_keys=[signed.with_name("key.pub")])
    with pytest.raises(PlanSignatureError):
        nimblert.load_pool(signed, trusted_keys=[signed.with_name("key.pub")])


def test_load_refuses_the_signature_of_another_plan(signed: Path) -> None:
    tamper(signed.with_name("other.plan"))
    content = signed.with_name("other.plan").read_bytes()
    with pytest.raises(PlanSignatureError, match="is not the file that signature signs"):
        nimblert.load(
            content,
            trusted_keys=[signed.with_name("key.pub")],
            signature=signed.with_name("model.plan.sig").read_bytes(),
        )


def test_plan_holds_the_bytes_that_were_verified(signed: Path) -> None:
    """Neither a new file of that name nor a write to the old one reaches a plan whose signature was checked."""
    plan = read_plan(signed, trust=Trust([signed.with_name("key.pub")]))
    verified = signed.read_bytes()
    tamper(signed)
    assert bytes(plan.stored()) == verified != signed.read_bytes()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([], r"trusted_keys: got \[\], expected a list of at least one public key"),
        ("key.pub", "trusted_keys: got 'key.pub', expected a list"),
        ([3], "trusted key: got int, expected the path of a file or its bytes"),
        (["missing.pub"], "missing.pub: cannot be read: No such file or directory, expected a public key"),
        ([b"ssh-ed25519 AAAA"], "trusted key: is not one public key of Ed25519 in OpenSSH or PEM form"),
        (["key"], "key: is not one public key of Ed25519"),
        (["curve.pub"], "curve.pub: is a key of another kind than Ed25519"),
    ],
)
def test_load_names_a_key_that_cannot_be_used(
    signed: Path, monkeypatch: pytest.MonkeyPatch, keys: Any, message: str
) -> None:
    monkeypatch.chdir(signed.parent)
    write_keys(signed.parent, "curve", generate_private_key(SECP256R1()))
    with pytest.raises(InputError, match=message):
        nimblert.load(signed, trusted_keys=keys)


def test_load_refuses_what_has_no_signature_to_look_for(signed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [signed.with_name("key.pub")]
    with pytest.raises(InputError, match="signature: the plan is given as bytes, which have no file beside them"):
        nimblert.load(signed.read_bytes(), trusted_keys=keys)
    with pytest.raises(InputError, match="the plan is a Plan, which was parsed before"):
        nimblert.load(read_plan(signed), trusted_keys=keys)
    with pytest.raises(InputError, match="expected a list of at least one public key"):
        nimblert.load(signed, signature=f"{signed}.sig")
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(InputError, match=r"pip install 'nimblert\[signing\]'"):
        nimblert.load(signed, trusted_keys=keys)


def test_commands_sign_and_verify(nimblec: CommandLine, signed: Path) -> None:
    folder = signed.parent
    assert nimblec.prints("sign", signed, "--key", folder / "key").startswith(f"wrote {signed}.sig, signed by SHA256:")
    shown = nimblec.prints(
        "verify", signed, "--trusted-key", folder / "stranger.pub", "--trusted-key", folder / "key.pub"
    )
    assert shown.startswith("ok       signature: a trusted key has signed the file\nok       format: ")
    assert "is not signed by a trusted key" in nimblec.refused(
        "verify", signed, "--trusted-key", folder / "stranger.pub"
    )
    other = "--signature", folder / "other.plan.sig"
    assert "is not signed by" in nimblec.refused("verify", signed, "--trusted-key", folder / "key.pub", *other)
    assert nimblec.refused("verify", signed, *other).startswith("--signature needs --trusted-key")
    tamper(signed)
    assert "is not the file that" in nimblec.refused("verify", signed, "--trusted-key", folder / "key.pub")


def test_sign_refuses_what_it_cannot_sign_with(nimblec: CommandLine, signed: Path) -> None:
    folder = signed.parent
    key, output = folder / "key", folder / "new.sig"
    (folder / "locked").write_bytes(
        Ed25519PrivateKey.generate().private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"passphrase")
        )
    )
    write_keys(folder, "curve", generate_private_key(SECP256R1()))
    for wrong in ("locked", "key.pub", "curve", "missing"):
        assert nimblec.refused("sign", signed, "--key", folder / wrong, "-o", output).startswith(f"{folder / wrong}: ")
    tamper(signed)
    assert "rules" not in nimblec.refused("sign", key, "--key", key, "-o", output)
    for target in (signed, key):
        assert "must be different files" in nimblec.refused("sign", signed, "--key", key, "-o", target)
    assert not output.exists()
