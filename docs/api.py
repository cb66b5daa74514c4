"""Generate the API reference from docstrings, as HTML.

Usage: python -W error docs/api.py FOLDER, with pdoc (the extra ``docs``). -W turns pdoc's warnings, such as annotations
that it cannot read, into errors.
"""

import sys
from contextlib import chdir
from pathlib import Path

import pdoc

MODULES = (
    *("nimblec", "!nimblec[.].*", "nimblert", "!nimblert[.].*"),
    *("nimblert.commands", "nimblert.plan", "nimblert.processes", "!nimblert[.]processes[.].*"),
)
"""The public modules. All others are internal and change without notice."""


def main(folder: Path) -> None:
    """Write one page for each of the modules."""
    pdoc.render.configure(docformat="markdown", show_source=False, footer_text="nimblec")
    with chdir(Path(__file__).parent):  # in the root, pdoc would also find the folder nimblec
        pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
