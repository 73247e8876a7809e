"""report.html: one file that asks for nothing, in a parser and in Chromium."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from browser_cases import Browser, needs_chromium, start_browser
from report_cases import (
    SMALL,
    WEIRD,
    Page,
    make_many,
    store_run,
)

from driftgate.accuracy import records as rec
from driftgate.reports import figures, page, tables
from driftgate.reports.svg import to_svg


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def run(folder: Path) -> rec.RunData:
    return rec.load_run(folder)


def test_page_asks_for_nothing_outside(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert Page(text).requests == []
    assert not re.search(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//|url\(\s*["']?(?!#)|@import""", text)


def test_page_anchors_lead_somewhere_and_ids_are_unique(folder: Path) -> None:
    seen = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert len(seen.ids) == len(set(seen.ids))
    assert {anchor[1:] for anchor in seen.anchors} <= set(seen.ids)
    assert all(re.fullmatch(r"[A-Za-z][\w.-]*", name) for name in seen.ids)


def test_page_holds_every_figure_and_both_colour_schemes(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert Page(text).tags.count("svg") == len(figures.FIGURES)
    assert "prefers-color-scheme: dark" in text and "var(--ink)" in text


def test_page_escapes_what_plans_and_reasons_say(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "<i>against" not in text and "a<b>" not in text
    assert "&lt;i&gt;against&lt;/i&gt;" in text and WEIRD in Page(text).text


def test_page_shows_the_verdict_before_any_number(folder: Path) -> None:
    seen = Page((folder / "report.html").read_text(encoding="utf-8")).text
    assert seen.index("1 fail, 1 invalid, 1 inconclusive, 2 pass") < seen.index("Mean KL (nats)")
    assert seen.index(f"bound of {SMALL}") < seen.index("Mean KL (nats)")


def test_the_plan_table_of_the_page_fits_1280_pixels(run: rec.RunData) -> None:
    """Measured in Chromium: 7.4 px a character, 6 px a small one, 16 px of padding a column, 1214 px in all."""
    rows = tables.plan_rows(run)
    names = 15 * 15 + 100  # the greatest width of a plan's name, and its verdict
    columns = [
        max(max(7.4 * len(row.cells[h].lines[0]), *(6 * len(x) for x in row.cells[h].lines[1:]), 0) for row in rows)
        for h in rows[0].cells
    ]
    assert len(columns) == 8
    assert names + sum(width + 16 for width in columns) <= 1214


def test_a_drawing_keeps_its_numbers_and_loses_what_nobody_reads(run: rec.RunData) -> None:
    """Labels are text as it was written; places are rounded; ids are those that something refers to, each once."""
    figure = figures.kl_against_bytes(run)
    figure.axes[0].set_title("0.123456 & <b> 1.000001")
    plain = io.StringIO()
    figure.savefig(plain, format="svg")
    svg = to_svg(figure, key="f0", description="KL")
    assert "0.123456 &amp; &lt;b&gt; 1.000001" in svg
    assert len(svg) < len(plain.getvalue()) / 3
    seen = Page(svg)
    assert len(seen.ids) == len(set(seen.ids)) and set(seen.ids) == {a[1:] for a in seen.anchors} | clips(svg)
    assert all(name.startswith("f0-") for name in seen.ids)
    assert not re.search(r"<[^>]*\d\.\d{3}", svg), "no place finer than a hundredth of a point"
    assert seen.tags.count("g") == svg.count("</g>")
    assert to_svg(figure, key="f0", description="KL") == svg


def clips(svg: str) -> set[str]:
    return set(re.findall(r"url\(#([^)]+)\)", svg))


def test_the_page_of_many_plans_is_small(tmp_path: Path) -> None:
    written = page.render(make_many(), tmp_path)
    assert written.stat().st_size < 500_000


LOOKS = {"light": (1280, False), "dark": (1280, True), "narrow": (400, False), "narrow and dark": (400, True)}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start_browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@needs_chromium
@pytest.mark.parametrize("look", LOOKS)
def test_the_page_opens_without_a_complaint_and_asks_for_nothing(browser: Browser, folder: Path, look: str) -> None:
    width, dark = LOOKS[look]
    browser.open(folder / "report.html", width=width, dark=dark)
    browser.evaluate("new Promise(done => requestAnimationFrame(done))")
    assert browser.complaints() == []
    assert browser.requests() == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out sideways"


@needs_chromium
def test_a_request_and_a_broken_script_are_seen(browser: Browser, tmp_path: Path) -> None:
    """The two tests above would see what they look for."""
    page_with_faults = tmp_path / "faulty.html"
    page_with_faults.write_text("<img src='missing.png'><script>console.error('no'); broken()</script>")
    browser.open(page_with_faults)
    assert [url.rpartition("/")[2] for url in browser.requests()] == ["missing.png"]
    told = " ".join(browser.complaints())
    assert "'no'" in told and "broken is not defined" in told


@needs_chromium
def test_every_figure_is_visible_and_holds_ink_where_its_data_are(browser: Browser, folder: Path) -> None:
    browser.open(folder / "report.html")
    script = """[...document.querySelectorAll(".drawing svg")].map(svg => {
      const box = svg.getBoundingClientRect(), style = getComputedStyle(svg);
      const inside = mark => { const b = mark.getBoundingClientRect();
        const across = b.left >= box.left - 1 && b.right <= box.right + 1;
        return across && b.top >= box.top - 1 && b.bottom <= box.bottom + 1; };
      const marks = [...svg.querySelectorAll("use")], shades = [...svg.querySelectorAll("[id*=QuadMesh] path")];
      return {name: svg.getAttribute("aria-label"), width: box.width, height: box.height,
              shown: style.display !== "none" && style.visibility === "visible" && style.opacity === "1",
              marks: marks.length + shades.length, outside: marks.filter(mark => !inside(mark)).length};
    })"""
    found = browser.evaluate(script)
    assert [figure["name"] for figure in found] == [entry.title for entry in figures.FIGURES]
    for figure in found:
        assert figure["shown"] and figure["width"] > 300 and figure["height"] > 100, figure
        assert figure["marks"] > 5 and figure["outside"] == 0, figure


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_on_its_ground(browser: Browser, folder: Path, dark: bool) -> None:
    """WCAG's contrast of at least 4.5 for text of the page and of the figures, in both colour schemes."""
    browser.open(folder / "report.html", dark=dark)
    script = """(() => {
      const probe = name => { const e = document.createElement("i"); e.style.color = `var(--${name})`;
        document.body.append(e); const c = getComputedStyle(e).color.match(/[\\d.]+/g).slice(0, 3).map(Number);
        e.remove(); return c; };
      const names = ["paper", "page", "ink", "muted", "link", "pass", "fail", "warn", "plain"];
      return Object.fromEntries(names.map(name => [name, probe(name)]));
    })()"""
    colours = browser.evaluate(script)

    def light(name: str) -> float:
        parts = [c / 255 for c in colours[name]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for ground, text in product(("paper", "page"), ("ink", "muted", "link")):
        low, high = sorted((light(ground), light(text)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (ground, text)
    for badge in ("pass", "fail", "warn", "plain"):
        assert 1.05 / (light(badge) + 0.05) >= 4.5, f"white on {badge}"
    assert (light("paper") < 0.1) == dark


@needs_chromium
def test_the_plan_table_sorts_by_every_column_both_ways(browser: Browser, folder: Path, run: rec.RunData) -> None:
    browser.open(folder / "report.html")
    heads = "document.querySelectorAll('table.sortable thead th')"
    rows = "[...document.querySelectorAll('table.sortable tbody tr')]"
    names = f"{rows}.map(row => row.cells[0].querySelector('code').textContent)"
    expected = sorted(run.results.plans, key=lambda plan: run.results.plans[plan].kl.mean)
    for _ in range(2):
        browser.evaluate(f"{heads}[2].querySelector('button').click()")
        assert browser.evaluate(names) == expected
        expected = expected[::-1]
    for column in range(browser.evaluate(f"{heads}.length")):
        browser.evaluate(f"{heads}[{column}].querySelector('button').click()")
        values = browser.evaluate(
            f"{rows}.map(row => row.cells[{column}].dataset.value ?? row.cells[{column}].textContent)"
        )
        assert browser.evaluate(f"{heads}[{column}].getAttribute('aria-sort')") == "ascending"
        if column > 1:
            known = [float(value) for value in values if value != ""]
            assert known == sorted(known)
            assert values[len(known) :] == [""] * (len(values) - len(known)), "unknown values stand last"
    assert sorted(browser.evaluate(names)) == sorted(run.results.plans)


@needs_chromium
def test_the_verdict_is_seen_first_and_serving_last(browser: Browser, folder: Path) -> None:
    browser.open(folder / "report.html")
    assert browser.evaluate("document.querySelector('h1').getBoundingClientRect().bottom") < 200
    assert browser.evaluate("[...document.querySelectorAll('main > section')].at(-1).id") == "serving"
    assert browser.evaluate("[...document.querySelectorAll('main > section')][0].id") == "plans"
