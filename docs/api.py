"""Make the API reference from docstrings, as HTML.

Usage: python -W error docs/api.py FOLDER, with pdoc (the extra ``docs``). Its warnings, of annotations that it cannot
read for example, are then errors.
"""

import sys
from contextlib import chdir
from pathlib import Path

import pdoc

MODULES = ("nimblec", "!nimblec[.].*", "nimblert", "!nimblert[.].*", "nimblert.commands", "nimblert.plan")
"""What users import. The other modules are the project's own, and change without notice."""


def main(folder: Path) -> None:
    """Write one page for each of the modules."""
    pdoc.render.configure(docformat="markdown", show_source=False, footer_text="nimblec")
    with chdir(Path(__file__).parent):  # beside the folder nimblec, pdoc would not know which one is meant
        pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
