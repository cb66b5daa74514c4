"""The comparison of two commits: its kept figures are those of the document, and it measures a plan."""

import json
import re
from pathlib import Path
from statistics import geometric_mean

from cpu_plans import bent_sum

from bench import commits

ROOT = commits.ROOT


def test_ratios_are_those_of_the_document() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "gpu" / "core_calls.json").read_text())["rows"]
    found = commits.ratios(rows)
    means = {name: geometric_mean(by_plan.values()) for name, by_plan in found.items()}
    text = " ".join((ROOT / "docs" / "measured.md").read_text().split())
    (written,) = re.findall(
        r"90a315cf takes ([\d.]+) \(numpy\), ([\d.]+) \(page-locked\) and ([\d.]+) \(device\) times the calls of "
        r"61cc224e, ([\d.]+) times the replays, ([\d.]+) times the loads, and ([\d.]+) times the load of a 2.1 GB plan",
        text,
    )
    names = ("numpy_us", "page_locked_us", "device_us", "replay_us")
    figures = [f"{means[name]:.3f}" for name in names]
    assert [*figures, f"{means['load_ms']:.2f}", f"{found['load_ms']['big']:.2f}"] == list(written)


def test_measure_gives_every_figure_of_a_plan(tmp_path: Path) -> None:
    found = commits.measure(str(bent_sum(tmp_path)))
    assert len(found["load_ms"]) == 3
    assert min(*found["load_ms"], found["numpy_us"]["min"], found["replay_us"]["min"]) > 0
