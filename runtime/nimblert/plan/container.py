"""Plan files: mapped, and their frame and digest checked. `nimblert.plan.schema` has their format."""

import hashlib
import mmap
import os
import stat
import weakref
from io import BufferedReader
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from nimblert.errors import InputError, PlanError, PlanFormatError
from nimblert.plan import Plan
from nimblert.plan.decoder import decode, file_nbytes
from nimblert.plan.records import DEFAULT_LIMITS, Limits
from nimblert.plan.schema import DIGEST_NBYTES, IDENTIFIER, MAGIC, TRAILER
from nimblert.stages import stage

if TYPE_CHECKING:
    from nimblert.plan.signatures import Trust

Source: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview
"""A plan file, by its path or by its bytes."""

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
"""The first bytes of files that users may mistake for plans. An ONNX model starts with its ir_version, field 1."""


def name(source: Source) -> str:
    """Return the name of a plan file, or of the bytes of one, in messages."""
    return "plan" if isinstance(source, bytes | bytearray | memoryview) else os.fsdecode(source)


def open_image(source: Source, *, copy: bool = False, trust: "Trust | None" = None) -> memoryview:
    """Return the bytes of a plan file, read-only, after a check of its identifier and length.

    A file is mapped: code and weights are slices of the map. Overwriting the file in place then changes the plan, and
    truncating it ends the process (SIGBUS) when the bytes are next read; replacing it by a rename, as `save` does, is
    safe. ``copy`` reads the file into memory instead, so that later changes do not matter. Mutable bytes are always
    copied. So are all bytes with ``trust``, one of whose keys must have signed them: what was verified is then parsed
    and run.
    """
    copy = copy or trust is not None
    if isinstance(source, bytes | bytearray | memoryview):
        view = memoryview(source)
        is_constant = view.readonly and view.c_contiguous and view.nbytes > 0
        image = view.cast("B") if is_constant and not copy else _copied(view)
    elif isinstance(source, str | os.PathLike):
        image = read_file(source, "a plan file", copy=copy)
    else:
        raise InputError(
            f"plan: got {type(source).__name__}, expected the path of a plan file, its bytes, or a Plan"
            f" (nimblec.compile makes one of a model)"
        )
    if trust is not None:
        from nimblert.plan import signatures  # most plans are loaded without

        signatures.verify(image, name(source) if isinstance(source, str | os.PathLike) else None, trust)
    check_frame(image, name(source))
    return image


def _copied(view: memoryview) -> memoryview:
    if not view.nbytes:
        return memoryview(b"")
    pages = mmap.mmap(-1, view.nbytes)  # aligned, so that weights can be used in place
    pages.write(view.cast("B") if view.c_contiguous else view.tobytes())
    return memoryview(pages).toreadonly()


class Mapped(mmap.mmap):
    """A mapped plan file, read-only: its pages can be dropped, and are read again on access."""


_mapped_files: weakref.WeakValueDictionary[tuple[int, ...], Mapped] = weakref.WeakValueDictionary()
"""Maps by device, inode, times and size: a file is mapped once, however often it is loaded."""


def _mapped(file: BinaryIO, nbytes: int) -> Mapped:
    status = os.fstat(file.fileno())
    key = status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, nbytes
    found = _mapped_files.get(key)
    return found or _mapped_files.setdefault(key, Mapped(file.fileno(), nbytes, access=mmap.ACCESS_READ))


def read_file(path: str | os.PathLike[str], what: str, *, copy: bool) -> memoryview:
    """Return the bytes of a file, mapped, or read with ``copy``; ``what`` it should be is for messages.

    Raises PlanError where there is no such regular file, or an empty one.
    """
    try:
        # Opening a pipe would otherwise wait for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            nbytes = _file_nbytes(file, path, what)
            if not copy:
                return memoryview(_mapped(file, nbytes))
            pages = mmap.mmap(-1, nbytes)
            return memoryview(pages).toreadonly()[: file.readinto(pages)]
    except PlanError:
        # PlanError is a ValueError, too.
        raise
    except FileNotFoundError as exc:
        raise PlanError(f"{name(path)}: no such file") from exc
    except IsADirectoryError as exc:
        raise PlanError(f"{name(path)}: is a directory, expected {what}") from exc
    except OSError as exc:
        raise PlanError(f"{name(path)}: cannot be read: {exc.strerror}") from exc
    except ValueError as exc:  # a null character in the path, more than can be mapped
        raise PlanError(f"{name(path)!r}: cannot be read: {exc}") from exc


def _file_nbytes(file: BufferedReader, path: str | os.PathLike[str], what: str) -> int:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise PlanError(f"{name(path)}: is not a regular file, expected {what}")
    if status.st_size == 0:
        raise PlanFormatError(f"{name(path)}: is empty, expected {what}")
    return status.st_size


def digest(image: memoryview) -> bytes:
    """Hash all of a plan file's bytes but the digest itself by SHA-256.

    hashlib releases the GIL, so this can run in a thread while another decodes the plan.
    """
    sha256 = hashlib.sha256()
    content = image[:-DIGEST_NBYTES]
    for start in range(0, len(content), _CHUNK_NBYTES):
        sha256.update(content[start : start + _CHUNK_NBYTES])
    return sha256.digest()


def digests(flatbuffer: memoryview, plan: Plan) -> bytes:
    """Return `Plan.digests`: SHA-256 of the FlatBuffer, whose own digest counts as zeros, and of unpacked segments.

    Threads hash segments side by side, which one digest of the whole file does not permit.
    """
    # CPU plans load without this import where they are small.
    from concurrent.futures import ThreadPoolExecutor

    def hashed(content: memoryview) -> bytes:
        # An empty memoryview of several dimensions cannot be cast.
        return hashlib.sha256(content.cast("B") if content.nbytes else b"").digest()

    own = plan.digests[:DIGEST_NBYTES]
    contents = [memoryview(bytes(flatbuffer).replace(own, bytes(len(own)), 1)) if own else flatbuffer]
    contents += [module.code for module in plan.modules]
    contents += [weight.data for weight in (*plan.weights, *plan.state)]
    contents += [part.file for part in plan.parts]
    with ThreadPoolExecutor() as pool:
        return b"".join(pool.map(hashed, contents))


@stage("SHA-256")
def verify_digest(image: memoryview, path: str, plan: Plan | None = None) -> None:
    """Raise PlanFormatError where the bytes are not those that were written; ``path`` is for the message.

    Compares the digest in the trailer or, where the decoded ``plan`` is given and has digests, these.
    """
    if plan is not None and plan.digests:
        _, flatbuffer_nbytes, _, _ = TRAILER.unpack(image[-TRAILER.size :])
        is_whole = digests(image[:flatbuffer_nbytes], plan) == plan.digests
    else:
        is_whole = digest(image) == image[-DIGEST_NBYTES:]
    if not is_whole:
        raise PlanFormatError(f"{path}: was altered after it was written (SHA-256 differs); copy or compile it again")


def decoded(image: memoryview, path: str, limits: Limits = DEFAULT_LIMITS) -> Plan:
    """Return the plan in a file's bytes, which may contradict itself; ``path`` is for messages."""
    _, flatbuffer_nbytes, _, _ = TRAILER.unpack(image[-TRAILER.size :])
    try:
        return decode(image, flatbuffer_nbytes, limits)
    except PlanFormatError as exc:
        raise PlanFormatError(f"{path}: {exc}") from exc


def check_frame(image: memoryview, path: str) -> None:
    """Raise PlanFormatError unless identifier, trailer and the lengths in it are those of a plan file."""
    if image[4:8] != IDENTIFIER:
        kinds = (f", it looks like {what}" for start, what in _SIGNATURES if image[: len(start)] == start)
        raise PlanFormatError(f"{path}: is not a plan file{next(kinds, '')}")
    actual = len(image)
    if actual >= TRAILER.size:
        magic, flatbuffer_nbytes, expected, _ = TRAILER.unpack(image[-TRAILER.size :])
        if magic == MAGIC and expected == actual and flatbuffer_nbytes <= actual - TRAILER.size:
            return
    named = file_nbytes(image)
    if named is None or named == actual:
        raise PlanFormatError(f"{path}: the end of its {actual} bytes is missing or damaged; copy it again")
    state = "is cut short" if named > actual else "has bytes behind its end"
    raise PlanFormatError(f"{path}: {state}: {actual} bytes, expected {named}; copy it again")
