"""How many examples hypothesis draws: by default few, the same each time; with ``--hypothesis-profile=long``, many."""

from hypothesis import settings


def examples(count: int) -> settings:
    """For a test that takes ``count`` examples where others take 50; the profiles are in tests/conftest.py."""
    chosen = settings.default
    assert chosen is not None
    return settings(max_examples=count * chosen.max_examples // 50)
