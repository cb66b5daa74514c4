"""The networks, parts and tables of `bench.zoo`, without building a network."""

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

from bench import zoo
from bench.models.zoo import DRAWN, NAMES
from nimblec.find_source import find_source


def test_names_are_as_many_as_drawn_of_each_library() -> None:
    assert len(NAMES) == 60
    assert Counter(name.partition("/")[0] for name in NAMES.values()) == DRAWN


def test_names_are_those_of_callables(tmp_path: Path) -> None:
    for name in NAMES:
        assert find_source(f"{zoo.MODELS}:{name}", None, None, tmp_path).kind == "callable"


def test_parts_cover_all_networks_once() -> None:
    parts = [zoo.names(zoo.parser().parse_args(["--part", f"{k}/8"])) for k in range(1, 9)]
    assert sorted(chain.from_iterable(parts)) == sorted(NAMES)
    jobs = list(chain.from_iterable(zoo.table(zoo.parser().parse_args(["--part", "1/8", "--limit-s", "9"])).jobs))
    assert {job.model for job in jobs[:2]} == {f"bench.models.zoo:{next(iter(NAMES))}"}
    assert [job.mode for job in jobs[:2]] == ["freeze", "-O2"]


def row(kernels_us: float, **more: Any) -> dict[str, Any]:
    clocks = {name: {"median": kernels_us} for name in ("kernels_us", "call_us")}
    return {**clocks, "noisy": [], "commit": "c", "gpu": "g", "kernels": 2, "error": 1e-3, **more}


def test_markdown_ranks_networks_and_says_what_failed() -> None:
    work = {"slow": {"count": 1, "gpu_us": 90.0, "mbytes": 4.8}, "fast": {"count": 1, "gpu_us": 1.0, "mbytes": 4.8}}
    ours = {"work": work, "weights_nbytes": 48e6, "prepare_s": 60.0, "notes": ["tried a 1 us", "other"]}
    models = {
        "bench.models.zoo:timm_a": {"freeze": row(200, multiply_adds=400e6), "-O2": row(100, **ours)},
        "bench.models.zoo:timm_b": {"freeze": row(50, multiply_adds=400e6), "-O2": row(100, **ours)},
        "bench.models.zoo:timm_c": {"freeze": row(50), "-O2": {"failed": "why", "commit": "c", "gpu": "g"}},
    }
    text = zoo.markdown({"models": models, "environment": {"gpu": "g", "torch": "2"}})
    assert text.index("timm_b | 50 / 100 (**0.50**)") < text.index("timm_a | 200 / 100 (2.00)")
    assert "2 networks, torch.compile's kernels over ours: geometric mean 1.00, lowest 0.50, 50% at least 1.3." in text
    assert "Failed: timm_c -O2: why." in text
    assert "2.0 to 2.5  # 1" in text
    assert "**timm_b** (0.50): 100 us; alone weights 10, products 1, launches 1 us." in text
    assert text.index("| slow | 1 | 90.0 | 1.0 | 0.7 | 89.0 |") < text.index("| fast |")
