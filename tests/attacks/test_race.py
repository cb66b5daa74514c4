"""Streams that do not wait for each other are refused, whatever the plan says that their launches access."""

from dataclasses import replace
from pathlib import Path

import pytest
from hostile_plans import two_streams_plan, with_program

import nimblert
from nimblec.plan import encoder
from nimblert.errors import PlanInvalidError
from nimblert.plan import Launch, Record, Wait


@pytest.mark.parametrize(
    ("emptied", "sentence"),
    [(False, "nothing orders their accesses to arena bytes"), (True, "are not what the relocations point to")],
)
def test_load_refuses_streams_that_do_not_wait(tmp_path: Path, emptied: bool, sentence: str) -> None:
    """The second attack also empties the lists of accesses, by which conflicts are found."""
    plan = two_streams_plan(tmp_path)
    commands = [c for c in plan.programs[0].commands if not isinstance(c, Wait | Record)]
    if emptied:
        commands = [replace(c, reads=(), writes=()) if isinstance(c, Launch) else c for c in commands]
    racy = with_program(plan, commands=tuple(commands), event_count=0)
    path = tmp_path / "racy.plan"
    path.write_bytes(encoder.encode_file(racy))
    for source in (racy, path):
        with pytest.raises(PlanInvalidError) as caught:
            nimblert.load(source)
        assert all(sentence in problem for problem in caught.value.problems)
