"""A second compilation with the times of the first gives the same plan, which names no folder of this machine.

Parameters that are structs may differ, in bytes that no kernel reads.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from verdicts import verdicts

import nimblec
from nimblec.base.options import read_options
from nimblec.compiler import compile_model
from nimblert.check.verify import read_plan
from nimblert.golden import Verdict
from nimblert.plan import Command, Launch, Plan

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_second_compilation_gives_the_same_plan(level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches of Inductor and Triton are empty in the first, and full in the second, which measures nothing."""
    support = Path(__file__).parents[1] / "support"
    monkeypatch.setenv("PYTHONPATH", str(support), prepend=":")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    times = tmp_path / "times.json"
    options = read_options(target="cuda", level=level, timing_cache=times, plan_cache=None)
    plans, kept = [], []
    for number in range(2):
        path = tmp_path / f"{number}.plan"
        compile_model("drawn_weights:resnet_0", options=options, output=path, observer=lambda *_: None)
        plans.append(read_plan(path))
        kept.append(times.read_bytes())
    assert kept[0] == kept[1]
    first, second = (_without_structs(plan) for plan in plans)
    assert first == second
    assert verdicts(_with_others(*plans)) == {Verdict.BIT_EXACT}
    code = [bytes(module.code) for module in plans[0].modules]
    assert code
    folders = support.parents[1], Path(nimblec.__file__).parent, tmp_path
    assert not any(str(folder).encode() in each for folder in folders for each in code)


def _without_structs(plan: Plan) -> Plan:
    """Remove parameters larger than a number, in which libraries leave stale bytes of the host's stack."""

    def stripped(command: Command) -> Command:
        if not isinstance(command, Launch):
            return command
        layout = plan.kernels[command.kernel].parameters
        numbers = [command.params[p.offset : p.offset + p.nbytes] for p in layout if p.nbytes <= 8]
        return replace(command, params=b"".join(numbers))

    programs = (replace(each, commands=tuple(map(stripped, each.commands))) for each in plan.programs)
    return replace(plan, programs=tuple(programs))


def _with_others(plan: Plan, same: Plan) -> Plan:
    """Return the plan with other values in all bytes of parameters that differ from those of the same plan."""

    def changed(command: Command, like: Command) -> Command:
        if not (isinstance(command, Launch) and isinstance(like, Launch)):
            return command
        pairs = zip(command.params, like.params, strict=True)
        return replace(command, params=bytes(mine if mine == its else mine ^ 0xA5 for mine, its in pairs))

    programs = []
    for mine, its in zip(plan.programs, same.programs, strict=True):
        pairs = zip(mine.commands, its.commands, strict=True)
        programs.append(replace(mine, commands=tuple(changed(*pair) for pair in pairs)))
    return replace(plan, programs=tuple(programs))
