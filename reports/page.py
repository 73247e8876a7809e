"""report.html: one file with everything in it; no request leaves it, and it reads without JavaScript.

Notable: figures are inline SVG in the page's own colours, so that light and dark need one drawing. Jinja
escapes every value; only the figures, drawn here, enter as markup. A content policy in the page forbids any
request.
"""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from driftgate.accuracy.records import RunData, write_text
from driftgate.reports.figures import caption, draw_all
from driftgate.reports.markdown import BLOCK_NOTE, write_kl_block
from driftgate.reports.numbers import format_number
from driftgate.reports.open_checks import counts_as_pass, disagreement, group_open_checks, headline
from driftgate.reports.sections import list_sections
from driftgate.reports.serving import describe_serving
from driftgate.reports.svg import to_svg
from driftgate.reports.tables import list_plan_notes, plan_rows

__all__ = ["render"]

_PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(run: RunData, out: Path) -> Path:
    """Write ``report.html`` into the run folder ``out`` and return its path."""
    rows = plan_rows(run)
    blocks = [(name, plan.role, write_kl_block(plan)) for name, plan in run.results.plans.items()]
    text = _PAGES.get_template("report.html.jinja").render(
        verdict=run.results.verdict,
        headline=headline(run),
        extra=[told for told in (counts_as_pass(run), disagreement(run)) if told is not None],
        open_checks=group_open_checks(run),
        facts=_list_facts(run),
        headings=list(rows[0].cells) if rows else [],
        rows=rows,
        notes=list_plan_notes(run),
        figures=_embed_figures(run),
        sections=list_sections(run),
        blocks=blocks,
        block_note=BLOCK_NOTE,
        serving=describe_serving(run),
    )
    path = Path(out) / "report.html"
    write_text(path, text)
    return path


def _embed_figures(run: RunData) -> list[dict[str, str]]:
    """Figures as the template reads them; the heading stands above, so the drawing goes without its title."""
    figures = []
    for number, drawing in enumerate(draw_all(run)):
        key, title = drawing.entry.name.replace("_", "-"), drawing.entry.title
        svg = ""
        if drawing.figure is not None:
            drawing.figure.suptitle("")
            svg = Markup(to_svg(drawing.figure, key=f"f{number}", description=title))
        told = {"caption": caption(run, drawing.entry), "absent": drawing.absent}
        figures.append({"key": key, "title": title, "svg": svg, **told})
    return figures


def _break_plan(name: str) -> Markup:
    """A plan name that may break after its options, and nowhere else unless it must."""
    return Markup("+<wbr>").join(name.split("+"))


def _list_facts(run: RunData) -> list[tuple[str, str]]:
    """What the reader must know before the first number: model, backends, command, time."""
    backend = run.results.backend
    return [
        ("Model", format_number(run.results.model.get("name"))),
        ("Backend", f"drift {backend.drift}, tasks {backend.tasks}"),
        ("Command", " ".join(run.manifest.command)),
        ("Created", run.manifest.created),
    ]


def _break_command(text: str) -> Markup:
    """A command line that breaks before a flag and nowhere else."""
    return Markup(" ").join(Markup('<span class="flag">{}</span>').format(part) for part in re.split(r" (?=--)", text))


_PAGES.filters.update(break_plan=_break_plan, break_command=_break_command)
