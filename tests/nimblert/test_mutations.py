"""Whatever the bytes, reading ends in PlanError or in a plan that can be written and read again.

Each damage is tried twice: as it is, where the digest gives it away, and with trailer and digest made
to match, so that the decoder and the verifier see it.
"""

import hashlib
import mmap
import random
import resource
import struct
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

import plans
import pytest
from sized_plans import sized

from nimblec.plan import encoder
from nimblert.check.verify import parse_plan
from nimblert.errors import PlanError
from nimblert.plan import Plan, container, schema

FILES = {
    "cuda": encoder.encode_file(plans.cuda_plan()),
    "cpu": encoder.encode_file(plans.cpu_plan()),
    "sizes": encoder.encode_file(sized(2, 4)),
}
MEMORY_LIMIT_NBYTES = 64 << 20
INTERESTING = (0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 4095, 4096, 65535, 65536)
EDGES = tuple((1 << bits) + delta for bits in (16, 31, 32, 40, 48, 63, 64) for delta in (-9, -2, -1, 0, 1))


def parse(file: bytes) -> Plan:
    """Parse a file's bytes as `read_plan` does, without the file."""
    image = memoryview(file)
    container.check_frame(image, "file")
    container.verify_digest(image, "file")
    return parse_plan(image, "file")


def flatbuffer_nbytes(file: bytes) -> int:
    return struct.unpack_from("<Q", file, len(file) - 56)[0]


def signed(content: bytes, flatbuffer_size: int) -> bytes:
    """Return a file of this content, with a trailer that agrees with it."""
    head = content + struct.pack("<8sQQ8x", schema.MAGIC, flatbuffer_size, len(content) + 64)
    return head + hashlib.sha256(head).digest()


def mutated(content: bytes, flatbuffer_size: int, rng: random.Random) -> bytes:
    """Return the content with one to three damages, most of them in the FlatBuffer."""
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        within = flatbuffer_size if rng.random() < 0.9 else len(damaged)
        at = rng.randrange(max(1, min(within, len(damaged))))
        kind = rng.randrange(6)
        if kind == 0:
            damaged[at : at + 1] = bytes([damaged[at] ^ 1 << rng.randrange(8)]) if damaged else b""
        elif kind == 1:
            damaged[at : at + 1] = bytes([rng.choice(INTERESTING) & 255])
        elif kind in (2, 3):
            nbytes = rng.choice((4, 8))
            value = rng.choice(INTERESTING + EDGES) * rng.choice((1, -1))
            aligned = at - at % 4
            word = (value % (1 << 8 * nbytes)).to_bytes(nbytes, "little")
            damaged[aligned : aligned + nbytes] = word[: len(damaged) - aligned]
        elif kind == 4:
            del damaged[at : at + rng.choice((1, 2, 4, 8, 100))]
        else:
            damaged[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8, 100)))
    return bytes(damaged)


def read_or_refused(file: bytes) -> bool:
    """Return whether ``file`` is read; if so it must hold a sound plan. Any exception but PlanError escapes."""
    try:
        plan = parse(file)
    except PlanError:
        return False
    assert content(parse(encoder.encode_file(plan))) == content(plan)
    return True


def content(value: object) -> object:
    """Return all that a record holds in a form to compare: damage can make a NaN of a number."""
    if isinstance(value, tuple):
        return tuple(map(content, value))
    if isinstance(value, memoryview):
        return bytes(value)
    names = field_names(type(value))
    return repr(value) if names is None else tuple(content(getattr(value, name)) for name in names)


@cache
def field_names(kind: type) -> tuple[str, ...] | None:
    """Return the names of a record's fields; None for anything else."""
    return tuple(field.name for field in fields(kind) if field.compare) if is_dataclass(kind) else None


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """Let the process map no more than the limit in addition: beyond it, a MemoryError escapes."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_LIMIT_NBYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("bounded_memory")
def test_the_limit_of_memory_holds() -> None:
    # Not a bytearray: that may come from memory which earlier tests have freed and malloc has kept.
    with pytest.raises(OSError, match="Cannot allocate memory"):
        mmap.mmap(-1, 2 * MEMORY_LIMIT_NBYTES)


@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("target", FILES)
@pytest.mark.parametrize("seed", range(5))
def test_ten_thousand_mutations(target: str, seed: int) -> None:
    file = FILES[target]
    content, size = file[:-64], flatbuffer_nbytes(file)
    rng = random.Random(f"{target} {seed}")  # noqa: S311 (reproducible damage, no secrets)
    accepted = 0
    for _ in range(1000):
        damaged = mutated(content, size, rng)
        if damaged != content:
            with pytest.raises(PlanError):
                parse(damaged + file[-64:])
        accepted += read_or_refused(signed(damaged, min(size, len(damaged))))
    # Most damage must be refused, and some (a name, a duration) cannot be: the test sees both.
    assert 0 < accepted < 500


@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("target", FILES)
def test_every_truncation(target: str) -> None:
    file = FILES[target]
    content, size = file[:-64], flatbuffer_nbytes(file)
    for length in range(len(file)):
        with pytest.raises(PlanError):
            parse(file[:length])
    # Behind the FlatBuffer all lengths are refused alike: some of them will do.
    for length in (*range(size), *range(size, len(content), 61)):
        with pytest.raises(PlanError):
            parse(signed(content[:length], min(size, length)))


@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("target", FILES)
def test_every_length_of_the_flatbuffer(target: str) -> None:
    file = FILES[target]
    size = flatbuffer_nbytes(file)
    accepted = [length for length in range(size + 100) if read_or_refused(signed(file[:-64], length))]
    assert size in accepted


@pytest.mark.usefixtures("bounded_memory")
def test_every_word_of_the_flatbuffer_made_extreme() -> None:
    file = FILES["cpu"]
    content, size = file[:-64], flatbuffer_nbytes(file)
    for at in range(0, size, 4):
        for word in (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", bytes(4)):
            read_or_refused(signed(content[:at] + word + content[at + 4 :], size))
