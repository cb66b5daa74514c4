"""Arguments of the command line, as people write them."""

import pytest

from nimblec.cli.arguments import NBYTES


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("7", 7),
        ("7 B", 7),
        ("3kB", 3_000),
        ("3 KB", 3_000),
        ("3MB", 3_000_000),
        ("1.5GB", 1_500_000_000),
        ("3KiB", 3 << 10),
        ("64MiB", 64 << 20),
        ("2gib", 2 << 30),
    ],
)
def test_units_are_decimal_or_binary(text: str, nbytes: int) -> None:
    assert NBYTES.convert(text, None, None) == nbytes
