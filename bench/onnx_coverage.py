"""Run ONNX's backend cases through nimblec, as a measure of the ONNX front end (tests/support/onnx_conformance.py).

Usage: python -m bench.onnx_coverage [--markdown] [--target aten|optimized|fused|cpu] [--match TEXT] [--workers N]
[--write-known FILE]. Prints each case that does not pass. Whole runs write these to
bench/results/cpu/onnx_coverage*.json; --markdown prints the table of all targets' results.
"""

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onnx_cases import cases
from onnx_conformance import RUNNERS, Result, is_excused, run

from bench import environment
from bench.tables import table

RESULTS = Path(__file__).parent / "results" / "cpu"
TITLES = {
    "aten": "ATen (CUDA target)",
    "optimized": "ATen, rewritten as by `-O1`",
    "fused": "the same, regions compiled for the CPU",
    "cpu": "CPU target",
}
STATUSES = ("pass", "refused", "wrong", "error", "crash", "hang")


def results_path(target: str) -> Path:
    """Return the path of a target's results."""
    suffix = {"aten": "", "cpu": "_cpu_target"}.get(target, f"_{target}")
    return RESULTS / f"onnx_coverage{suffix}.json"


def counts(results: Mapping[str, Any], kind: str, field: str = "status") -> Counter[str]:
    """Count the cases of a kind ("core" or "all") by status; passing cases are not listed in the results."""
    found = Counter(case[field] for case in results["failures"] if (kind == "all" or case["core"]))
    found["pass"] += results["cases"][kind] - found.total()
    return found


def markdown() -> str:
    """Return the table of docs/measured.md: the number of cases by target and status."""
    files = {target: environment.read(results_path(target)) for target in TITLES}
    cpu = files["cpu"]
    rows = [(TITLES[target], results, "status") for target, results in files.items()]
    rows += [("ONNX Runtime itself", cpu, "onnxruntime")]
    lines = table(
        ["", *STATUSES],
        [
            [f"{title}, {kind} {results['cases'][kind]:,} cases", *(f"{found[name]:,}" for name in STATUSES)]
            for title, results, field in rows
            for kind in ("core", "all")
            for found in [counts(results, kind, field)]
        ],
    )
    runnable = counts(cpu, "core", "onnxruntime")["pass"]
    passed = runnable - sum(case["core"] and case["onnxruntime"] == "pass" for case in cpu["failures"])
    wrong = [case["onnxruntime"] for case in cpu["failures"] if case["status"] == "wrong"]
    lines += ["", f"Of the {runnable:,} core cases that ONNX Runtime passes, {passed:,} pass on the CPU target."]
    lines += [f"Of the {len(wrong)} that are wrong there, {wrong.count('wrong')} are wrong in ONNX Runtime."]
    return "\n".join([*lines, "", environment.shared_provenance(files)])


def write_known_failures(path: Path, failures: Sequence[Result]) -> None:
    """Write the cases that should pass and do not, each with its message."""
    lines = []
    for heading, core in (("# Core cases", True), ("# Other cases", False)):
        chosen = sorted((r for r in failures if r.core == core and not is_excused(r)), key=lambda r: r.name)
        lines += [heading, *(f"{r.name}: {r.status}: {' '.join(r.message.split())[:240]}" for r in chosen)]
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Run the cases and print those that do not pass, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=sorted(RUNNERS), default="aten")
    parser.add_argument("--match", default="", help="run only cases whose name contains this")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write-known", type=Path, help="write the cases that do not pass to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table of the results")
    options = parser.parse_args()
    if options.markdown:
        print(markdown())
        return
    results = run([i for i, case in enumerate(cases()) if options.match in case.name], options.target, options.workers)
    failures = [result for result in results if result.status != "pass"]
    for result in failures:
        print(f"{result.status}: {result.name}: {' '.join(result.message.split())[:200]}")
    total = {"core": sum(result.core for result in results), "all": len(results)}
    print(f"{len(results) - len(failures)} of {len(results)} cases pass")
    if options.write_known:
        write_known_failures(options.write_known, failures)
    if not options.match:
        listed = [asdict(result) for result in results if {result.status, result.onnxruntime or "pass"} != {"pass"}]
        environment.write(results_path(options.target), {"cases": total, "failures": listed})


if __name__ == "__main__":
    main()
