"""How many examples hypothesis draws: by default few, the same each time; with ``--hypothesis-profile=long``, many."""

from hypothesis import settings


def examples(count: int) -> settings:
    """For a test that is run with ``count`` examples by default, and with ten times as many in the long profile."""
    chosen = settings.default
    assert chosen is not None
    return settings(max_examples=count * chosen.max_examples // settings.get_profile("quick").max_examples)
