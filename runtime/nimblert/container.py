"""Plan files: the bytes around the FlatBuffer, how they are written, mapped and checked.

A file is the FlatBuffer, the segments (code, weights), and a trailer of 64 bytes: a magic word, the
FlatBuffer's size, the file's size, 8 zero bytes, and the SHA-256 of all bytes before it.
"""

import hashlib
import mmap
import os
import stat
from io import BytesIO
from pathlib import Path
from struct import Struct
from typing import BinaryIO

from nimblert import schema, segments, verify
from nimblert.decoder import decode, file_nbytes
from nimblert.errors import PlanError, PlanFormatError, PlanInvalidError
from nimblert.plan import Plan
from nimblert.replacing import replacing

MAGIC = b"NPLNTAIL"
"""The first bytes of the trailer."""

_TRAILER = Struct("<8sQQ8x32s")
_DIGEST_NBYTES = 32
_CHUNK_NBYTES = 16 << 20

_SIGNATURES = (
    (b"PK\x03\x04", "a zip archive (a .pt2 or .npz file, perhaps)"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x7fELF", "an ELF file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x80\x02", "a pickle"),
    (b"version https://git-lfs", "a Git LFS pointer: run `git lfs pull`"),
    (b"\x08", "an ONNX model: compile it first, `nimblec compile MODEL -o PLAN`"),
    (b"{", "JSON text"),
)
"""First bytes of files that are taken for plans. An ONNX model starts with its ir_version, field 1."""


def write(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan to ``path``, whole or not at all.

    The bytes go to a temporary file in the same directory, which is renamed when they are on disk.
    Code and weights are streamed. Raises PlanInvalidError where the plan contradicts itself, and
    NimbleError where the file cannot be written; a file of that name is then as it was before.
    """
    problems = tuple(verify.problems(plan))
    if problems:
        raise PlanInvalidError(problems)
    with replacing(Path(path)) as file:
        _stream(plan, file)


def encode_file(plan: Plan) -> bytes:
    """The bytes of the plan's file. Unlike `write`, takes plans that contradict themselves."""
    file = BytesIO()
    _stream(plan, file)
    return file.getvalue()


def read(path: str | os.PathLike[str], *, check_digest: bool = True) -> Plan:
    """The plan in the file at ``path``.

    The file is mapped: code and weights are slices of the map and must not be changed or cut off on
    disk while the plan is in use. Raises PlanError where there is no such file, PlanFormatError where it is
    not a plan, cut short, altered (seen only with ``check_digest``) or damaged, and PlanInvalidError
    where the plan contradicts itself.
    """
    image = map_file(path)
    if check_digest:
        verify_digest(image, path)
    return parse(image, path)


def map_file(path: str | os.PathLike[str]) -> memoryview:
    """Map a plan file, read only, and check its identifier and its length."""
    try:
        # Before open, which would wait for ever at a pipe.
        mode = Path(path).stat().st_mode
        if stat.S_ISDIR(mode):
            raise PlanError(f"{path}: is a directory, expected a plan file")
        if not stat.S_ISREG(mode):
            raise PlanError(f"{path}: is not a regular file, expected a plan file")
        with Path(path).open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise PlanFormatError(f"{path}: is empty, expected a plan file")
            image = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError as exc:
        raise PlanError(f"{path}: no such file") from exc
    except OSError as exc:
        raise PlanError(f"{path}: cannot be read: {exc.strerror}") from exc
    check_frame(image, path)
    return image


def digest(image: memoryview) -> bytes:
    """SHA-256 of all of a plan file's bytes but the digest itself.

    hashlib releases the GIL, so a thread can do this while another decodes the plan.
    """
    sha256 = hashlib.sha256()
    content = image[:-_DIGEST_NBYTES]
    for start in range(0, len(content), _CHUNK_NBYTES):
        sha256.update(content[start : start + _CHUNK_NBYTES])
    return sha256.digest()


def verify_digest(image: memoryview, path: str | os.PathLike[str]) -> None:
    """Raise PlanFormatError where the bytes are not those that were written; ``path`` is for the message."""
    if digest(image) != image[-_DIGEST_NBYTES:]:
        raise PlanFormatError(f"{path}: was altered after it was written (SHA-256 differs); copy or compile it again")


def parse(image: memoryview, path: str | os.PathLike[str]) -> Plan:
    """The plan in a mapped file, checked by `verify.problems`; ``path`` is for messages."""
    _, flatbuffer_nbytes, _, _ = _TRAILER.unpack(image[-_TRAILER.size :])
    try:
        plan = decode(image, flatbuffer_nbytes)
    except PlanFormatError as exc:
        raise PlanFormatError(f"{path}: {exc}") from exc
    problems = tuple(verify.problems(plan))
    if problems:
        raise PlanInvalidError(problems)
    return plan


def check_frame(image: memoryview, path: str | os.PathLike[str]) -> None:
    """Raise PlanFormatError unless the file starts and ends as a plan does, with the lengths it names."""
    if image[4:8] != schema.IDENTIFIER:
        raise PlanFormatError(f"{path}: is not a plan file{_resemblance(image)}")
    actual = len(image)
    if actual >= _TRAILER.size:
        magic, flatbuffer_nbytes, expected, _ = _TRAILER.unpack(image[-_TRAILER.size :])
        if magic == MAGIC and expected == actual and flatbuffer_nbytes <= actual - _TRAILER.size:
            return
    named = file_nbytes(image)
    if named is None or named == actual:
        raise PlanFormatError(f"{path}: the end of its {actual} bytes is missing or damaged; copy it again")
    state = "is cut short" if named > actual else "has bytes behind its end"
    raise PlanFormatError(f"{path}: {state}: {actual} bytes, expected {named}; copy it again")


def _resemblance(image: memoryview) -> str:
    """What a file that is no plan looks like, as the end of a sentence."""
    start = bytes(image[:32])
    for signature, what in _SIGNATURES:
        if start.startswith(signature):
            return f", it looks like {what}"
    return ""


def _stream(plan: Plan, file: BinaryIO) -> None:
    """Write the file's bytes in order, each of them once."""
    from nimblert.encoder import encode  # with the generated code, which readers need not import

    encoded = encode(plan)
    sha256 = hashlib.sha256()
    position = 0

    def put(data: bytes | memoryview) -> None:
        nonlocal position
        sha256.update(data)
        file.write(data)
        position += len(data)

    put(encoded.flatbuffer)
    for segment, data in zip(encoded.segments, segments.contents(plan), strict=True):
        put(bytes(segment.offset - position))
        # An empty memoryview of several dimensions cannot be cast.
        content = data.cast("B") if data.nbytes else memoryview(b"")
        for start in range(0, len(content), _CHUNK_NBYTES):
            put(content[start : start + _CHUNK_NBYTES])
    end = encoded.trailer.offset + encoded.trailer.nbytes
    put(_TRAILER.pack(MAGIC, len(encoded.flatbuffer), end, bytes(_DIGEST_NBYTES))[:-_DIGEST_NBYTES])
    file.write(sha256.digest())
