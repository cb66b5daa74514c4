"""What the documents show and name is there."""

import ast
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from subprocesses import ROOT, python

import nimblec
import nimblert
from bench import readme_tables
from nimblec.cli import cli
from nimblec.plan.plan_cache import LIMIT_NBYTES

DOCUMENT = ROOT / "docs" / "how-it-works.md"
RUN = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"


def blocks(document: str) -> dict[str, str]:
    """Return the blocks of a document that the walkthrough writes, by name, in order."""
    return dict(re.findall(r"```text (\w+)\n(.*?)```", document, re.DOTALL))


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """Return what docs/walkthrough.py prints, by section, in order."""
    out = python(f"import sys; sys.path.insert(0, 'docs'); {RUN}", ROOT / "docs" / "walkthrough.py")
    return {name: text.rstrip("\n") + "\n" for name, text in re.findall(r"== (\w+)\n(.*?\n)(?=== |\Z)", out, re.DOTALL)}


def test_document_has_each_walkthrough_section(printed: dict[str, str]) -> None:
    expected = list(blocks(DOCUMENT.read_text()))
    if not shutil.which("flatc"):
        expected.remove("flatc")
    assert list(printed) == expected


def test_the_blocks_are_what_the_walkthrough_prints(printed: dict[str, str]) -> None:
    shown = blocks(DOCUMENT.read_text())
    if shown["machine"] != printed["machine"]:
        pytest.skip(f"written with {shown['machine'].strip()}; here is {printed['machine'].strip()}")
    for name, text in printed.items():
        assert text == shown[name], f"{name}: run python docs/walkthrough.py --write"


DOCUMENTS = sorted(
    str(path.relative_to(ROOT)) for folder in (".", "docs", "schema") for path in (ROOT / folder).glob("*.md")
)
GENERATED = re.compile("<!-- table: .*?<!-- end of table -->", re.DOTALL)
"""Tables, whose ops are no names of the interface."""


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_a_document_names_is_there(document: str) -> None:
    text = (ROOT / document).read_text()
    names = set(re.findall(r"`((?:nimblec|runtime|docs|bench|fuzz|samples|schema|tests)/[\w./-]*)`", text))
    links = set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text))
    missing = [name for name in names if not (ROOT / name).exists()]
    missing += [link for link in links if not (ROOT / document).parent.joinpath(link).exists()]
    assert not missing


def test_every_module_that_a_document_runs_is_there() -> None:
    texts = [(ROOT / document).read_text() for document in DOCUMENTS]
    modules = {name for text in texts for name in re.findall(r"python\s+-m\s+((?:bench|fuzz)\.\w+)", text)}
    assert len(modules) > 20
    assert [name for name in modules if find_spec(name) is None] == []


def test_document_names_real_options() -> None:
    known = {name: {"--help"} for name in cli.commands}
    for name, command in cli.commands.items():
        known[name].update(*(param.opts for param in command.params))
    shown = {
        (name, option)
        for document in DOCUMENTS
        for name, rest in re.findall(r"\bnimblec\s+(\w+)([^`|\n]*)", (ROOT / document).read_text())
        if name in known
        for option in re.findall(r"(?<!\S)(--[a-z-]+|-[a-z]\b)", rest)
    }
    assert len(shown) > 8
    assert sorted((name, option) for name, option in shown if option not in known[name]) == []


OF_OTHER_COMMANDS = {
    "--count",  # bench.soak
    "--help",
    "--markdown",  # bench
    "--no-compile",  # pip
    "--raw-binary",  # flatc
    "--strict-json",
    "--write",  # docs/walkthrough.py
}


def test_every_option_in_the_text_is_one_of_a_command() -> None:
    params = [param for command in cli.commands.values() for param in command.params]
    known = {option for param in params for option in (*param.opts, *param.secondary_opts)}
    names = ("README.md", "docs/guide.md", "docs/how-it-works.md", "docs/troubleshooting.md")
    texts = [(ROOT / document).read_text() for document in names]
    shown = {option for text in texts for option in re.findall(r"(?<=[`\s])--[a-z][a-z-]+", text)}
    assert len(shown) > 30
    assert shown - known - OF_OTHER_COMMANDS == set()


def test_every_name_of_the_interface_in_a_document_is_there() -> None:
    owners = {
        "nimblec": nimblec,
        "nimblert": nimblert,
        "executable": nimblert.Executable,
        "exe": nimblert.Executable,
        "pool": nimblert.ExecutablePool,
    }
    texts = [GENERATED.sub("", (ROOT / document).read_text()) for document in DOCUMENTS]
    named = {pair for text in texts for pair in re.findall(rf"(?<![\w/.])({'|'.join(owners)})\.(\w+)", text)}
    named -= {("nimblert", "call")}  # of a metric, nimblert.call.duration
    missing = [pair for pair in sorted(named) if not hasattr(owners[pair[0]], pair[1]) and not is_module(*pair)]
    assert len(named) > 25
    assert missing == []


def is_module(package: str, name: str) -> bool:
    return package in {"nimblec", "nimblert"} and find_spec(f"{package}.{name}") is not None


def test_every_error_is_one_of_the_readme() -> None:
    named = re.findall(r"`(nimblec|nimblert)\.(\w+Error)`", readme_tables.README.read_text())
    kinds = [getattr({"nimblec": nimblec, "nimblert": nimblert}[package], name) for package, name in named]
    assert kinds.pop() is nimblert.NimbleError
    assert set(kinds) <= set(nimblert.NimbleError.__subclasses__())
    for package in (nimblec, nimblert):
        errors = [getattr(package, name) for name in package.__all__ if name.endswith("Error")]
        assert all(issubclass(error, (*kinds,)) for error in errors if error is not nimblert.NimbleError)


def test_the_readme_has_the_size_of_the_plan_cache() -> None:
    assert f"(up to {LIMIT_NBYTES // 10**9} GB;" in readme_tables.README.read_text()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_heading_that_a_link_leads_to_is_there(document: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", (ROOT / document).read_text()):
        page = (ROOT / document).parent / target if target else ROOT / document
        headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{target}#{anchor}"


def said(node: ast.AST) -> str:
    """Return the text of a string in the code, with an ellipsis for each value put into it; "" for all else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(said(part) or "…" for part in node.values)
    return ""


def test_every_message_of_troubleshooting_is_one_of_the_tool() -> None:
    sources = [path for folder in ("nimblec", "runtime/nimblert") for path in (ROOT / folder).rglob("*.py")]
    texts = {said(node) for path in sources for node in ast.walk(ast.parse(path.read_text()))}
    quoted = re.findall(r"^\| `(.*?)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    unknown = []
    for message in quoted:
        pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)
        if not any(pattern.search(text) for text in texts):
            unknown.append(message)
    assert len(quoted) > 30
    assert not unknown


def test_document_names_real_modules() -> None:
    text = DOCUMENT.read_text()
    folder, names = Path(), re.findall(r"`([\w/]+\.py)`", text)
    assert len(names) > 20
    for name in names:
        if "/" in name:
            folder = (ROOT / name).parent
        assert (folder / Path(name).name).exists() or (ROOT / name).exists(), name


@pytest.mark.parametrize("document", readme_tables.DOCUMENTS, ids=lambda path: path.name)
def test_the_tables_are_what_their_commands_print(document: Path) -> None:
    text = document.read_text()
    assert text.count("<!-- table: python ") == text.count("<!-- end of table -->") > 0
    assert readme_tables.filled(text) == text, "run python -m bench.readme_tables"


def test_the_readme_is_short() -> None:
    assert len(readme_tables.README.read_text().splitlines()) <= 200


def test_a_table_without_results_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\n<!-- table: python -m bench.nothing -->\nold\n<!-- end of table -->\nb\n"
    monkeypatch.setattr(readme_tables, "printed", lambda _: "")
    assert readme_tables.filled(text) == text
    monkeypatch.setattr(readme_tables, "printed", lambda command: f"{command}\n")
    assert readme_tables.filled(text) == text.replace("old", "python -m bench.nothing")


def test_readme_names_commands_and_options() -> None:
    text = readme_tables.README.read_text()
    said = {"--output", "--verbose", "--quiet", "--debug"}  # on every other command line too
    missing = [name for name in cli.commands if f"`nimblec {name} " not in text]
    for option in cli.commands["compile"].params:
        long = max(option.opts, key=len)
        if long.startswith("-") and long not in said and f"`{long}" not in text:
            missing.append(long)
    assert not missing


def test_every_test_that_a_promise_of_serving_names_is_there() -> None:
    named = re.findall(r"`((?:nimblert|serving)/test_\w+\.py)`", (ROOT / "docs" / "serving.md").read_text())
    assert len(named) > 8
    assert [name for name in named if not (ROOT / "tests" / name).exists()] == []
