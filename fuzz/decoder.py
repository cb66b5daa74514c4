"""Fuzz the decoder, the rules and the hazard check with damaged bytes of plan files."""

import random
import struct
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from fuzz.campaign import Fuzzer, main
from nimblert.check.hazards import hazards
from nimblert.check.verify import parse_plan
from nimblert.errors import PlanError
from nimblert.plan import container, schema

_CORPUS = Path(__file__).parent / "corpus"
_INTERESTING = (0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 4095, 4096, 65535, 65536)
_EDGES = tuple((1 << bits) + delta for bits in (16, 31, 32, 40, 48, 63, 64) for delta in (-9, -2, -1, 0, 1))


@cache
def _sources() -> tuple[tuple[bytes, int], ...]:
    """Return the files of the corpus, each with the size of its FlatBuffer."""
    files = [path.read_bytes() for path in sorted(_CORPUS.glob("*.plan"))]
    return tuple((file[:-64], struct.unpack_from("<Q", file, len(file) - 56)[0]) for file in files)


def build(seed: int, number: int, _note: Callable[[bytes], object]) -> bytes:
    """Return a file of the corpus with one to four damages, mostly in its FlatBuffer, and a trailer to match."""
    rng = random.Random(f"{seed} {number}")  # noqa: S311 - reproducible damage, no secrets
    content, nbytes = rng.choice(_sources())
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        within = nbytes if rng.random() < 0.8 else len(damaged)
        _damage(damaged, rng.randrange(max(1, min(within, len(damaged)))), rng)
    damaged += struct.pack("<8sQQ40x", schema.MAGIC, min(nbytes, len(damaged)), len(damaged) + 64)
    damaged[-32:] = container.digest(memoryview(damaged))
    return bytes(damaged)


def _damage(data: bytearray, at: int, rng: random.Random) -> None:
    """Flip a bit, set a byte or a word, or delete or insert bytes."""
    kind = rng.randrange(6)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[at : at + 1] = bytes([rng.choice(_INTERESTING) & 255])
    elif kind in (2, 3):
        nbytes, start = rng.choice((4, 8)), at - at % 4
        value = rng.choice(_INTERESTING + _EDGES) * rng.choice((1, -1))
        word = (value % (1 << 8 * nbytes)).to_bytes(nbytes, "little")
        data[start : start + nbytes] = word[: len(data) - start]
    elif kind == 4:
        del data[at : at + rng.choice((1, 2, 4, 8, 100))]
    else:
        data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8, 100)))


def judge(file: bytes) -> str:
    """Read the plan and check its hazards, which may raise nothing but PlanError."""
    try:
        container.check_frame(memoryview(file), "file")
        plan = parse_plan(memoryview(file), "file")
    except PlanError:
        return "refused"
    for program in plan.programs:
        list(hazards(program, target=plan.target, bodies=plan.bodies))
    return "read"


if __name__ == "__main__":
    _sources()
    sys.exit(main(Fuzzer(name="decoder", build=build, judge=judge)))
