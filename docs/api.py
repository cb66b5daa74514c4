"""Generate the API reference from docstrings, as HTML.

Usage: python -W error docs/api.py FOLDER, with pdoc (the extra ``docs``). -W turns pdoc's warnings, such as annotations
that it cannot read, into errors.
"""

import sys
from contextlib import chdir
from pathlib import Path

try:
    import pdoc
except ModuleNotFoundError as exc:
    if exc.name != "pdoc":
        raise
    sys.exit("docs/api.py: pdoc is not installed, and this needs it: pip install '.[docs]'")

MODULES = ("nimblec", "!nimblec[.].*", "nimblert", "!nimblert[.].*", "nimblert.plan.records", "nimblert.plan")
"""The public modules. All others are internal and change without notice."""


def main(folder: Path) -> None:
    """Write one page for each of the modules."""
    pdoc.render.configure(docformat="markdown", show_source=False, footer_text="nimblec")
    with chdir(Path(__file__).parent):  # in the root, pdoc would also find the folder nimblec
        pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -W error docs/api.py FOLDER")
    main(Path(sys.argv[1]).resolve())
