"""The number of hypothesis' examples: few and always the same, or many with ``--hypothesis-profile=long``."""

from hypothesis import settings


def examples(count: int) -> settings:
    """Set ``count`` examples for a test where others have 50; the profiles are in tests/conftest.py."""
    chosen = settings.default
    assert chosen is not None
    return settings(max_examples=count * chosen.max_examples // 50)
