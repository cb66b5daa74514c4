"""Run the models of torchvision, timm and transformers through the rewrites and kernels (tests/support/model_zoo.py).

Usage: python -m bench.model_zoo [--markdown] [--match TEXT] LIBRARY ... Whole runs of a library write
bench/results/cpu/model_zoo_LIBRARY.json; --markdown prints the table of the results.
"""

import argparse
import gc
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from model_zoo import LIBRARIES, run

from bench import environment
from bench.tables import table
from nimblec.pytorch.model import set_arithmetic

RESULTS = Path(__file__).parent / "results" / "cpu"
STATUSES = ("pass", "refused", "wrong", "error")


def markdown() -> str:
    """Return a table of the models of each library by status, and of the sums of their calls."""
    files = {library: environment.read(RESULTS / f"model_zoo_{library}.json") for library in LIBRARIES}
    rows = []
    for library, file in files.items():
        counts = Counter(result["status"] for result in file["results"])
        calls = zip(*(result["calls"] for result in file["results"] if result["status"] == "pass"), strict=True)
        totals = [f"{sum(column):,}" for column in calls]
        rows.append([f"{counts.total()} of {library}", *(str(counts[status]) for status in STATUSES), *totals])
    head = ["", *STATUSES, "calls as traced", "rewritten", "with our kernels"]
    return "\n".join([*table(head, rows), "", environment.shared_provenance(files)])


def main() -> None:
    """Run the models of the libraries named, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", choices=[*LIBRARIES, []], metavar="LIBRARY")
    parser.add_argument("--match", default="", help="run only models whose name contains this")
    parser.add_argument("--markdown", action="store_true", help="print the table of the results")
    options = parser.parse_args()
    if options.markdown:
        print(markdown())
        return
    warnings.simplefilter("ignore")
    set_arithmetic("fp32")
    for library in options.libraries or LIBRARIES:
        results = []
        for name, build in LIBRARIES[library]():
            if options.match in name and (result := run(name, build)) is not None:
                print(f"{result.status}: {name} {result.calls} {result.error:.1g} {result.message}", flush=True)
                results.append(asdict(result))
            gc.collect()
        if not options.match:
            environment.write(RESULTS / f"model_zoo_{library}.json", {"results": results})


if __name__ == "__main__":
    main()
