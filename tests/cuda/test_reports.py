"""What the capture process reports: notes once, and failures with a way out."""

import io
import json

from nimblec.base.errors import MissingPackageError
from nimblec.cuda.reports import Reports


def test_reports_tell_each_note_once() -> None:
    pipe = io.StringIO()
    reports = Reports(pipe)
    reports.note(["one", "two"])
    reports.note(["two", "three"])
    assert [json.loads(line) for line in pipe.getvalue().splitlines()] == [{"note": n} for n in ("one", "two", "three")]


def test_reports_name_the_extra_of_a_missing_package() -> None:
    pipe = io.StringIO()
    Reports(pipe).failure(ModuleNotFoundError("No module named 'torch'", name="torch"))
    told = json.loads(pipe.getvalue())
    assert told["error"] == MissingPackageError.__name__
    assert "pip install 'nimblec[compile]'" in told["message"]
