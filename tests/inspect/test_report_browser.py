"""The page of a plan in headless Chromium: it opens quickly, moves, searches, and runs nothing that a plan brings."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import MARKUP, large_plan, markup_plan
from searched_plan import searched_plan

from nimblec.inspect.report import html_page
from nimblert.check.verify import read_plan
from nimblert.plan import Plan

api = pytest.importorskip("playwright.sync_api", reason="needs playwright")

PAINTED = "() => new Promise(done => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"
"""Milliseconds from the start of the navigation to the first frame that shows the page."""
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        try:
            found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except api.Error as exc:
            pytest.skip(f"needs Chromium: {str(exc).splitlines()[0]}")
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Open the page of a plan; fail on an error in it, and on any request."""
    with browser.new_context(viewport={"width": 1400, "height": 900}) as context:
        page = context.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda r: None if r.url.startswith("file:") else problems.append(r.url))

        def open_page(plan: Plan, scheme: str = "light") -> Any:
            (tmp_path / "report.html").write_text(html_page(plan, name="model.plan", file_nbytes=10**6))
            page.emulate_media(color_scheme=scheme)
            page.goto((tmp_path / "report.html").as_uri())
            return page

        yield open_page
        page.wait_for_timeout(50)
        assert problems == []


def pixels(page: Any) -> bytes:
    """Return a picture of the streams."""
    page.evaluate(PAINTED)
    found: bytes = page.locator("#streams").screenshot()
    return found


def test_page_of_1000_commands_opens_within_2_s(opened: Any) -> None:
    plan = searched_plan()
    assert len(list(plan.programs[0].work)) > 950
    assert min(opened(plan).evaluate(PAINTED) for _ in range(3)) < 2000


@pytest.mark.parametrize("scheme", SCHEMES)
def test_page_moves_by_keys_and_wheel(opened: Any, scheme: str) -> None:
    page = opened(large_plan(1000), scheme)
    seen = [pixels(page)]
    for key in ("+", "+", "ArrowRight", "-"):
        page.keyboard.press(key)
        seen.append(pixels(page))
    page.locator("#streams").hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -500)
    page.keyboard.up("Control")
    page.mouse.move(0, 0)
    seen.append(pixels(page))
    assert len(set(seen)) == len(seen)
    page.keyboard.press("0")
    assert pixels(page) == seen[0]


def test_page_is_dark_where_the_system_is(opened: Any) -> None:
    colours = {
        scheme: opened(large_plan(9), scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in SCHEMES
    }
    assert colours == {"light": "rgb(255, 255, 255)", "dark": "rgb(14, 17, 22)"}


def test_page_searches_and_steps_through_what_it_found(opened: Any) -> None:
    page = opened(large_plan(1000))
    page.keyboard.press("/")
    page.keyboard.type("blocks.99")
    assert page.locator("#found").text_content() == "11 commands, 11 layers"
    titles = []
    for _ in range(2):
        page.keyboard.press("Enter")
        titles.append(page.locator("#detail h3").text_content())
    assert titles == ["Command 99: add", "Command 990: add"]
    assert page.locator("#commands tr.selected td").first.text_content() == "990"
    page.keyboard.press("Escape")
    assert page.locator("#detail").is_hidden()
    page.keyboard.press("Escape")
    assert page.locator("#search").input_value() == ""


def test_page_draws_all_rows_as_its_tables_scroll(opened: Any) -> None:
    page = opened(large_plan(1000))
    rows = page.locator("#commands tbody tr")
    assert rows.count() < 1000
    for _ in range(20):
        page.locator("#commands .scroll").evaluate("each => each.scrollTo(0, each.scrollHeight)")
        page.evaluate(PAINTED)
    assert rows.count() == 1000


def test_click_on_a_command_shows_it(opened: Any) -> None:
    page = opened(large_plan(4, stream_count=1))
    page.locator("#streams").click(position={"x": 100, "y": 34})
    assert page.locator("#detail h3").text_content() == "Command 0: add"
    assert "blocks.0" in page.locator("#detail").text_content()
    page.keyboard.press("ArrowDown")
    assert page.locator("#detail h3").text_content() == "Command 1: add"


def test_page_shows_bodies_below_the_command_that_runs_them(opened: Any) -> None:
    page = opened(read_plan(Path(__file__).parents[1] / "data" / "plan-2.2.plan"))
    page.locator("#program").select_option(label="program tail")
    first = page.locator("#commands tbody tr td:first-child").all_text_contents()
    assert [text.split(":")[0].strip() for text in first][:8] == [
        "0", "1", "↳ tail.loop", "1.0", "2", "↳ tail.else", "2.0.0", "↳ tail.then"
    ]  # fmt: skip


def test_page_runs_nothing_that_a_plan_brings(opened: Any) -> None:
    page = opened(markup_plan())
    page.locator("#streams").click(position={"x": 200, "y": 34})
    page.locator("#streams").hover(position={"x": 210, "y": 34})
    page.evaluate(PAINTED)
    assert page.locator("img").count() == 0
    assert MARKUP in page.locator("#detail").text_content()
    assert MARKUP in page.locator("#summary").text_content()


def test_page_shows_programs_without_work(opened: Any) -> None:
    plan = large_plan(1)
    empty = replace(plan.programs[0], commands=(), ops=(), arena_nbytes=0)
    page = opened(replace(plan, programs=(empty,)))
    assert "this program has no arena" in page.locator("#timeline").text_content()
