"""report.md: the verdict, the plan table, and each plan in the words of llama.cpp's perplexity tool.

Notable: the words (Mean KLD, 99.9% KLD, Same top p, RMS Δp, ...) are that tool's, the numbers are ours:
intervals are two-sided 95 % intervals for dependent steps, where that tool prints one standard error for
independent tokens.
"""

from __future__ import annotations

import re
from pathlib import Path

from driftgate.accuracy.records import PlanRecord, RunData, write_text
from driftgate.reports.figures import caption, draw_all
from driftgate.reports.numbers import NA, format_interval, format_number, format_percent, format_ratio
from driftgate.reports.open_checks import counts_as_pass, disagreement, group_open_checks, headline
from driftgate.reports.sections import list_sections
from driftgate.reports.serving import describe_serving
from driftgate.reports.tables import list_plan_notes, plan_rows

__all__ = ["render", "write_kl_block", "write_open_checks", "write_plan_table"]


def render(run: RunData, out: Path) -> Path:
    """Write ``report.md`` into the run folder ``out`` and return its path."""
    lines = [f"# driftgate: {headline(run)}", "", *write_open_checks(run), "", "## Plans", "", *write_plan_table(run)]
    lines += ["", *(f"- {_escape(note)}" for note in list_plan_notes(run)), "", "## Figures"]
    lines += _write_figures(run)
    for section in list_sections(run):
        lines += ["", f"## {section.title}", "", section.note]
        lines += ["", *_write_table(list(section.header), section.rows)] if section.rows else []
    lines += ["", "## Divergence in the words of llama.cpp", "", BLOCK_NOTE]
    for name, plan in run.results.plans.items():
        lines += ["", f"### {_escape(name)} ({plan.role})", "", "```text", write_kl_block(plan), "```"]
    lines += _write_serving(run)
    path = Path(out) / "report.md"
    write_text(path, re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n")
    return path


BLOCK_NOTE = (
    "KL(baseline‖plan) in nats per step. Brackets hold two-sided 95 % intervals that allow for dependent "
    "steps, where llama.cpp prints ± one standard error for independent tokens. Base is the FP32 state, Q "
    "the plan."
)


def write_kl_block(plan: PlanRecord) -> str:
    """Write perplexity, KL divergence and token probabilities of a plan in the words of llama.cpp."""
    kl, ppl, top = plan.kl, plan.ppl, plan.same_top_p
    ratio = format_interval(format_ratio(ppl.ratio_ci_low, digits=6), format_ratio(ppl.ratio_ci_high, digits=6))
    lines = [
        "====== Perplexity statistics ======",
        f"Mean PPL(Q)                   : {format_ratio(ppl.plan, digits=6):>10}",
        f"Mean PPL(base)                : {format_ratio(ppl.baseline, digits=6):>10}",
        f"Mean PPL(Q)/PPL(base)         : {format_ratio(ppl.ratio, digits=6):>10} {ratio}",
        "",
        "====== KL divergence statistics ======",
        f"Mean    KLD: {_kld(kl.mean):>10} {format_interval(_kld(kl.ci_low), _kld(kl.ci_high))}",
        f"Geom.   KLD: {_kld(kl.geo_mean):>10} {format_interval(_kld(kl.geo_ci_low), _kld(kl.geo_ci_high))}",
    ]
    quantiles = {
        "Maximum": kl.max,
        "99.9%  ": kl.p99_9,
        "99.0%  ": kl.p99,
        "95.0%  ": kl.p95,
        "90.0%  ": kl.p90,
        "Median ": kl.median,
        "10.0%  ": kl.p10,
        " 5.0%  ": kl.p5,
        " 1.0%  ": kl.p1,
        " 0.1%  ": kl.p0_1,
        "Minimum": kl.min,
    }
    lines += [f"{words} KLD: {_kld(value):>10}" for words, value in quantiles.items()]
    same = format_interval(format_percent(top.ci_low), format_percent(top.ci_high))
    lines += [
        f"Steps      : {kl.n_steps:>10}  (effective {format_number(kl.n_effective)}, not finite {kl.n_nonfinite})",
        "",
        "====== Token probability statistics ======",
        f"Mean    Δp: {_change(plan.delta_p.mean):>11}",
        f"Maximum Δp: {_change(plan.delta_p.max):>11}",
        f"Minimum Δp: {_change(plan.delta_p.min):>11}",
        f"RMS Δp    : {_change(plan.delta_p.rms):>11}",
        f"Same top p: {format_percent(top.value):>11} {same}",
    ]
    return "\n".join(lines)


def _kld(value: float | None) -> str:
    """Six decimals where they hold three digits, else scientific; exactly 0 is ``0``."""
    if value is None:
        return NA
    return "0" if value == 0 else f"{value:.6f}" if abs(value) >= 1e-4 else f"{value:.2e}"


def _change(fraction: float | None) -> str:
    """A difference of probabilities in per cent, with digits enough to tell a small one from 0."""
    if fraction is None:
        return NA
    return f"{100 * fraction:.3f} %" if fraction == 0 or abs(fraction) >= 1e-4 else f"{100 * fraction:.1e} %"


def write_plan_table(run: RunData) -> list[str]:
    """Lines of the plan table."""
    rows = plan_rows(run)
    headings = list(rows[0].cells) if rows else []
    return _write_table(
        ["Plan", "Role", *headings, "Verdict"],
        [[row.name, row.role, *(row.cells[heading].text for heading in headings), row.verdict] for row in rows],
    )


def write_open_checks(run: RunData) -> list[str]:
    """A line for the checks of candidates that did not pass and say the same, or one that says that all passed."""
    lines = [
        f"- **{found.verdict}** {_escape(found.plans)}: {_escape(found.checks)}: "
        + (f"{found.numbers}. " if found.numbers else "")
        + _escape(found.reason)
        for found in group_open_checks(run)
    ]
    extra = [_escape(told) for told in (counts_as_pass(run), disagreement(run)) if told is not None]
    return [*(line for told in extra for line in (told, "")), *lines] or ["Every check of every candidate passed."]


def _write_serving(run: RunData) -> list[str]:
    serving = describe_serving(run)
    lines = [
        "",
        "## How to serve this plan",
        "",
        _escape(serving.lead),
        "",
        *(f"- {_escape(n)}" for n in serving.notes),
    ]
    rows = [[plan, engine, f"`{told}`" if " --" in told else _escape(told)] for plan, engine, told in serving.rows]
    lines += ["", "| Plan | Engine | Command |", "| --- | --- | --- |"]
    lines += [f"| {_escape(plan)} | {engine} | {told} |" for plan, engine, told in rows]
    for engine, demands in serving.demands.items():
        lines += ["", f"What {engine} demands:", "", *(f"- {_escape(demand)}" for demand in demands)]
    return [*lines, "", "When not to:", "", *(f"- {_escape(reason)}" for reason in serving.when_not)]


def _write_figures(run: RunData) -> list[str]:
    lines: list[str] = []
    for drawing in draw_all(run):
        entry = drawing.entry
        lines += ["", f"### {entry.title}", ""]
        if drawing.figure is None:
            lines.append(f"Not drawn: {_escape(drawing.absent)}.")
        else:
            lines += [f"![{entry.title}](figures/{entry.name}.png)", "", caption(run, entry)]
    return lines


def _write_table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *([_escape(cell) for cell in row] for row in rows)]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def _escape(text: str) -> str:
    """Text that neither Markdown nor HTML reads as markup, on one line."""
    text = " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").split())
    return re.sub(r"[\\`*|\[\]$~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)
