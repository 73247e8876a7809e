"""Reports of a synthetic run folder: they hold its data, agree with its verdicts, need nothing outside."""

import io
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations, product
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from rich.console import Console

from driftgate.accuracy import records as rec
from driftgate.errors import InputError
from driftgate.reports import figures, junit, markdown, page, render_all, tables

LENGTH, STEPS, SEQUENCES, LAYERS = 16, 512, 2, (0, 2, 4)
# fmt: off
EXACT, SPLIT, CACHED, SMALL, WEIRD, CONTROL = (
    "fp32@16", "nvfp4/fp32@16", "nvfp4/fp32@16+cached", "fp8/fp16@16", "a<b>|$x & 'c'_*", "nvfp4@16")
LEVELS = {EXACT: 0.0, SPLIT: 3e-4, CACHED: 3.4e-4, SMALL: 2e-5, WEIRD: 8e-6, CONTROL: 2e-3}
RATIOS = {EXACT: (.531, .573), SPLIT: (.137, .178), CACHED: (.137, .191), SMALL: (.176, .21),
          WEIRD: (.3, .35), CONTROL: (.1, .14)}  # state, traffic
CHECKS = {EXACT: "pass", SPLIT: "pass", CACHED: "inconclusive", SMALL: "fail", WEIRD: "invalid",
          CONTROL: "fail"}
QUANTILES = {"p99": .99, "p95": .95, "p90": .9, "median": .5, "p10": .1, "p5": .05, "p1": .01}


def make_steps() -> pd.DataFrame:
    """Steps whose KL rises inside each window, and for the control with position."""
    random = np.random.default_rng(7)
    nll = random.gamma(2.0, 1.0, (SEQUENCES, STEPS))
    position, offset = np.arange(64, 64 + STEPS), np.arange(STEPS) % LENGTH
    frames = []
    for plan, sequence in product(LEVELS, range(SEQUENCES)):
        shape = (position / 64) ** 0.6 if plan == CONTROL else 0.2 + offset / LENGTH
        kl = LEVELS[plan] * shape * random.lognormal(0, 0.5, STEPS)
        frames.append(pd.DataFrame({
            "plan": plan, "sequence": sequence, "position": position, "window_offset": offset, "kl": kl,
            "same_top": kl < 2e-3, "delta_p": -kl / 2, "nll_plan": nll[sequence] + kl,
            "nll_baseline": nll[sequence]}))
    return pd.concat(frames, ignore_index=True)


def make_plan(plan: str, steps: pd.DataFrame) -> rec.PlanRecord:
    """The record of a plan, its KL computed from its steps."""
    steps = steps[steps["plan"] == plan]
    kl, zero, control, weird = steps["kl"], plan == EXACT, plan == CONTROL, plan == WEIRD
    mean, low, high = (float(kl.mean()) * factor for factor in (1, 0.8, 1.2))
    error = float(np.sqrt(LEVELS[plan]))
    unknown = dict.fromkeys(
        ("read_error_max", "checkpoint_error_max", "trajectory_error_max", "output_error_max"))
    return rec.PlanRecord(
        role="control" if control else "candidate",
        kl=rec.KlRecord(
            mean=mean, ci_low=low, ci_high=high, geo_mean=mean * 0.9, geo_ci_low=low * 0.9,
            geo_ci_high=high * 0.9, max=float(kl.max()), min=float(kl.min()),
            p99_9=None if weird else float(kl.quantile(.999)), p0_1=float(kl.quantile(.001)),
            **{name: float(kl.quantile(q)) for name, q in QUANTILES.items()},
            n_steps=len(kl), n_effective=61.0 if plan == SMALL else 512.0, n_nonfinite=0,
            first_nonfinite_step=None, n_negative=0),
        same_top_p=rec.ProportionRecord(value=1 - 20 * mean, ci_low=1 - 25 * mean, ci_high=1 - 15 * mean),
        delta_p=rec.DeltaP(mean=-mean / 2, rms=mean, max=mean * 3, min=None if weird else -mean * 4),
        ppl=rec.PerplexityRecord(
            plan=8.1 * (1 + mean), baseline=8.1, ratio=1 + mean, ratio_ci_low=1 + low,
            ratio_ci_high=1 + high),
        drift=rec.DriftRecord(
            slope=None if zero else 0.6 if control else 0.02, slope_ci_low=None if zero else 0.01,
            slope_ci_high=None if zero else 0.7, excess_slope=0.55 if control else None,
            law="growing" if control else "flat", by_position=[],
            by_window_offset=[rec.OffsetPoint(offset=h, mean=group.mean(), n=len(group))
                              for h, group in kl.groupby(steps["window_offset"])]),
        state=rec.StateRecord(layers=[
            rec.LayerState(layer=layer, read_error=error * (1 + layer), output_error=error / 5,
                           checkpoint_error=0.0 if "/fp32" in plan else error / 3, trajectory_error=error / 2,
                           **unknown) for layer in LAYERS]),
        counters=rec.CounterRecord(low_precision_reads=2880, flushes=192, requantizations=192),
        bytes=rec.BytesRecord(checkpoint=2097152, read_copy=0, buffer=135168, traffic_per_step=2.4e6,
                              state_ratio=RATIOS[plan][0], traffic_ratio=RATIOS[plan][1]),
        tasks={"recall": make_task(plan, lost=3, gained=1), "tracking": make_task(plan, lost=1, gained=2)},
    )


def make_task(plan: str, *, lost: int, gained: int) -> rec.TaskRecord:
    """A paired comparison on 200 items; some answers of one plan were cut off."""
    lost, gained = {EXACT: (0, 0), CONTROL: (18, 2)}.get(plan, (lost, gained))
    delta = (gained - lost) / 200
    return rec.TaskRecord(
        n=200, repeats=2, accuracy=0.74 + delta, baseline_accuracy=0.74, delta=delta, ci_low=delta - 0.018,
        ci_high=delta + 0.016, lost=lost, gained=gained, p_value=1.0, cap_hits=4 if plan == SMALL else 0,
        unparsed=0, verdict="fail" if plan == CONTROL else "pass")


def make_run() -> rec.RunData:
    """A run with every verdict, a control, an exact plan, nulls, and a plan name full of markup."""
    steps = make_steps()
    results = rec.Results(
        verdict="fail",
        model={"name": "embedded-gdn", "parameters": 1_250_000, "layers": list(LAYERS)},
        backend=rec.Backends(
            drift="torch", tasks="triton-interpret",
            cross_check=rec.CrossCheck(
                steps=48, max_abs_difference=1.9e-6, by_plan={SPLIT: 1.9e-6, EXACT: 0.0})),
        plans={plan: make_plan(plan, steps) for plan in LEVELS},
        bitwise=[
            rec.BitwiseRecord(invariant="I1", recurrence="gdn", case={"L": 16, "heads": 2}, equal=True,
                              n_different=0, max_ulp=0, first_different=None),
            rec.BitwiseRecord(invariant="I2", recurrence="gdn", case={"L": 7}, equal=False, n_different=12,
                              max_ulp=3, first_different={"step": 9, "index": [0, 1]})],
        noise_floor=rec.NoiseFloor(kl_mean=3.1e-10, kl_max=4.4e-9),
        verdicts=[
            rec.VerdictRecord(plan=plan, check="kl_mean", value=LEVELS[plan], verdict=verdict,
                              limit=None if verdict == "invalid" else 1e-3,
                              reason=f"bound of {plan} <i>against</i> the limit")
            for plan, verdict in CHECKS.items()],
    )
    manifest = rec.Manifest(
        command=["driftgate", "run", "quick"], suite={"name": "quick", "steps": STEPS},
        policy={"checks": {"kl_mean": {"limit": 1e-3, "reason": "half of FP8 weights"}}},
        versions={"torch": "2.13.0"}, device={"name": "cpu"}, backend={"drift": "torch"},
        hashes={"model": "sha256:" + "ab" * 32}, seeds={"run": 0}, plans={plan: {} for plan in LEVELS},
        streams={"sequences": SEQUENCES}, timing={"drift": 12.5}, created="2030-01-02T03:04:05+00:00")
    items = pd.DataFrame({
        "plan": ["baseline"], "task": ["recall"], "item_id": ["r1"], "repeat": [0], "answer": ["A"],
        "gold": ["A"], "correct": [True], "n_tokens": [1], "capped": [False], "parse_reason": ["ok"]})
    return rec.RunData(results=results, manifest=manifest, steps=steps, items=items)
# fmt: on


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored run with all of its reports."""
    out = tmp_path_factory.mktemp("run")
    rec.save_run(out, make_run())
    written = render_all(out)
    assert sorted(written) == sorted(path for path in out.rglob("*.*") if path.suffix not in (".parquet", ".json"))
    return out


@pytest.fixture(scope="module")
def run(folder: Path) -> rec.RunData:
    return rec.load_run(folder)


def with_results(run: rec.RunData, **changes: object) -> rec.RunData:
    """The same run with other results."""
    return replace(run, results=run.results.model_copy(update=changes))


def only(run: rec.RunData, *plans: str) -> rec.RunData:
    """The same run with fewer plans."""
    return with_results(run, plans={plan: run.results.plans[plan] for plan in plans})


def legend_texts(figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


class Page(HTMLParser):
    """What a browser would ask for, ids, links to them, tags and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.requests: list[str] = []
        self.ids: list[str] = []
        self.anchors: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                value = value or ""
                if not value.startswith("data:image/"):
                    (self.anchors if value.startswith("#") else self.requests).append(value)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_render_all_writes_every_file_and_leaves_no_temporary(folder: Path) -> None:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    pictures = [f"figures/{entry.name}.png" for entry in figures.FIGURES]
    data = ["items.parquet", "manifest.json", "results.json", "steps.parquet"]
    assert names == sorted([*pictures, *data, "report.html", "report.md", "junit.xml"])


def test_render_all_refuses_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"results\.json"):
        render_all(tmp_path)


def test_kl_against_position_draws_what_the_steps_hold(run: rec.RunData) -> None:
    figure = figures.kl_against_position(run)
    main, below = figure.axes
    assert main.get_yscale() == main.get_xscale() == "log"
    drawn = {line.get_color() for line in main.lines if len(line.get_xdata()) > 2}
    assert len(drawn) == 5, "five of six plans have a KL above 0"
    mean = np.mean([line.get_ydata() for line in main.lines if to_hex(line.get_color()) == "#56b4e9"])
    assert mean == pytest.approx(run.results.plans[CONTROL].kl.mean, rel=0.5)
    assert "(nats per step)" in main.get_ylabel() and "(nats per token)" in below.get_ylabel()
    assert below.get_xlabel() == "position (tokens)"
    assert f"{EXACT}: exactly 0" in legend_texts(figure)
    assert any("(control)" in text and "slope 0.60" in text for text in legend_texts(figure))
    assert [line for line in main.lines if set(line.get_ydata()) == {run.results.noise_floor.kl_mean}]


def test_plans_differ_in_colour_and_in_line_style(run: rec.RunData) -> None:
    main = figures.kl_by_window_offset(run).axes[0]
    curves = [line for line in main.lines if len(line.get_xdata()) == LENGTH]
    assert len({line.get_color() for line in curves}) == len(curves) == 5
    assert len({line.get_marker() for line in curves}) == len(curves)


def test_exact_zeros_are_drawn_as_hollow_marks_on_the_lower_edge(run: rec.RunData) -> None:
    plan = run.results.plans[SPLIT].model_copy(deep=True)
    plan.drift.by_window_offset[15].mean = 0.0
    plan.drift.by_window_offset[3].mean = None
    axes = figures.kl_by_window_offset(with_results(run, plans={SPLIT: plan})).axes[0]
    curve, zeros = axes.lines[0], axes.lines[1]
    assert list(zeros.get_xdata()) == [15.0] and zeros.get_fillstyle() == "none"
    assert np.isnan(curve.get_ydata()).sum() == 2


def test_state_errors_print_zero_as_zero_and_unknown_as_na(run: rec.RunData) -> None:
    plan = run.results.plans[SPLIT].model_copy(deep=True)
    plan.state.layers[0].read_error = None
    figure = figures.state_error_by_layer(with_results(run, plans={SPLIT: plan}))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[:4] == ["read error", "checkpoint error", "trajectory error", "output error"]
    cells = [[text.get_text() for text in axes.texts] for axes in figure.axes[:4]]
    assert cells[1] == ["0"] * len(LAYERS)
    assert cells[0] == ["n/a", "5.2e-02", "8.7e-02"]


def test_state_errors_leave_out_a_panel_without_numbers(run: rec.RunData) -> None:
    plan = run.results.plans[EXACT].model_copy(deep=True)
    for layer in plan.state.layers:
        layer.read_error = None
    figure = figures.state_error_by_layer(with_results(run, plans={EXACT: plan}))
    kinds = [axes.get_title(loc="left") for axes in figure.axes]
    assert kinds == ["checkpoint error", "trajectory error", "output error"]


def test_task_accuracy_shows_baseline_chance_interval_and_flips(run: rec.RunData) -> None:
    figure = figures.task_accuracy(run)
    assert [axes.get_title(loc="left").split()[0] for axes in figure.axes] == ["recall", "tracking"]
    recall = figure.axes[0]
    pairs = [list(line.get_xdata()) for line in recall.lines if len(line.get_xdata()) == 2]
    assert sorted(low for low, high in pairs if low == high) == [25.0, 74.0], "chance and baseline are upright lines"
    control = recall.lines[10]
    assert list(control.get_xdata()) == pytest.approx([74 - 8 - 1.8, 74 - 8 + 1.6])
    assert "18 lost, 2 gained" in [text.get_text() for text in recall.texts]
    assert "%" in figure.axes[-1].get_xlabel()


def test_kl_against_bytes_rings_candidates_that_nothing_beats(run: rec.RunData) -> None:
    axes = figures.kl_against_bytes(run).axes[0]
    rings = [float(line.get_xdata()[0]) for line in axes.lines if line.get_markersize() == 12]
    best = [SPLIT, SMALL, WEIRD, EXACT]
    assert sorted(rings) == sorted(RATIOS[plan][0] for plan in best), "no control, no plan beaten at equal bytes"


@pytest.mark.parametrize("entry", figures.FIGURES, ids=lambda entry: entry.name)
def test_labels_are_whole_apart_and_defined(run: rec.RunData, entry: figures.FigureEntry, monkeypatch) -> None:
    drawn = []
    original = Text.draw

    def draw(self: Text, renderer) -> None:
        if self.get_visible() and self.get_text().strip():
            drawn.append((self.get_text(), self.get_window_extent(renderer)))
        original(self, renderer)

    monkeypatch.setattr(Text, "draw", draw)
    figure = entry.draw(run)
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    assert len(drawn) > 20
    assert [t for t, box in drawn if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height] == []
    clashes = [(a[0], b[0]) for a, b in combinations(drawn, 2) if a[1].shrunk(0.9, 0.9).overlaps(b[1])]
    assert clashes == []
    assert [t for t, _ in drawn if re.search(r"\b(nan|inf|none)\b", t, re.IGNORECASE)] == []


@pytest.mark.parametrize("entry", figures.FIGURES, ids=lambda entry: entry.name)
def test_each_figure_names_its_backend(run: rec.RunData, entry: figures.FigureEntry) -> None:
    backend = getattr(run.results.backend, entry.source)
    assert f"backend: {backend}" in entry.draw(run).get_suptitle()
    assert figures.caption(run, entry).endswith(f"Backend: {backend}.")


@pytest.mark.parametrize("draw", [figures.kl_against_position, figures.kl_by_window_offset, figures.kl_against_bytes])
def test_bit_equal_plans_alone_are_no_figure(run: rec.RunData, draw) -> None:
    with pytest.raises(figures.NoDataError, match="exactly 0"):
        draw(only(run, EXACT))


def test_reports_say_why_a_figure_is_missing_and_drop_its_old_picture(run: rec.RunData, tmp_path: Path) -> None:
    bare = run.results.plans[SPLIT].model_copy(update={"tasks": {}})
    small = with_results(run, plans={SPLIT: bare})
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "task_accuracy.png").write_bytes(b"of an older run")
    figures.render(small, tmp_path)
    assert not (tmp_path / "figures" / "task_accuracy.png").exists()
    for module in (markdown, page):
        text = module.render(small, tmp_path).read_text(encoding="utf-8")
        assert "Not drawn: the run holds no task with an accuracy." in text


def test_a_run_without_steps_renders_its_tasks_alone(run: rec.RunData, tmp_path: Path) -> None:
    plan = run.results.plans[SPLIT].model_copy(deep=True)
    plan.kl = rec.KlRecord(
        **dict.fromkeys(rec.KlRecord.model_fields) | {"n_steps": 0, "n_nonfinite": 0, "n_negative": 0}
    )
    plan.drift.by_window_offset.clear()
    plan.state.layers.clear()
    bare = replace(with_results(run, plans={SPLIT: plan}), steps=run.steps[:0])
    assert [drawing.entry.name for drawing in figures.draw_all(bare) if drawing.figure] == ["task_accuracy"]
    text = markdown.render(bare, tmp_path).read_text(encoding="utf-8")
    assert text.count("Not drawn: the run holds no KL.") == 3
    assert "Not drawn: the run holds no state errors." in text


def test_steps_that_are_not_finite_enter_no_curve(run: rec.RunData) -> None:
    steps = run.steps.copy()
    steps.loc[steps.index[steps["plan"] == SPLIT][:5], "kl"] = [np.inf, np.nan, np.inf, np.nan, np.inf]
    main = figures.kl_against_position(only(replace(run, steps=steps), SPLIT)).axes[0]
    assert np.isfinite(main.lines[0].get_ydata()).all()


def test_drawing_leaves_the_users_settings_alone(run: rec.RunData) -> None:
    before = dict(matplotlib.rcParams)
    figures.kl_against_bytes(run)
    assert dict(matplotlib.rcParams) == before


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


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_text_reports_have_no_undefined_word(folder: Path, name: str) -> None:
    text = (folder / name).read_text(encoding="utf-8")
    text = re.sub(r"<(script|style|svg)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert "n/a" in text
    assert not re.search(r"\b(nan|NaN|None|null|inf)\b", text)


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_text_reports_show_every_section(folder: Path, name: str) -> None:
    text = (folder / name).read_text(encoding="utf-8")
    words = [
        "Checks",
        "Bit-exact cases",
        "Backends and cross-check",
        "Noise floor",
        "Counters and bytes",
        "Manifest",
        "1.9e-06",
        "3.10e-10",
        "up to 3 ulp",
        "half of FP8 weights",
        "2,097,152",
        "61 effective steps",
        "4 answers cut off",
    ]
    assert [word for word in words if word not in text] == []


def test_markdown_prints_the_table_in_the_words_of_llama_cpp(folder: Path, run: rec.RunData) -> None:
    text = (folder / "report.md").read_text(encoding="utf-8")
    block = text[text.index(f"### {SPLIT} (") :].split("```")[1]
    kl = run.results.plans[SPLIT].kl
    assert re.search(rf"^Mean    KLD: +{kl.mean:.6f} \[{kl.ci_low:.6f}, {kl.ci_high:.6f}\]$", block, re.MULTILINE)
    for words in (
        "Maximum KLD:",
        "99.9%   KLD:",
        "99.0%   KLD:",
        "Median  KLD:",
        " 0.1%   KLD:",
        "Minimum KLD:",
        "Mean    Δp:",
        "RMS Δp    :",
        "Same top p:",
        "Mean PPL(Q)/PPL(base)",
    ):
        assert block.count(words) == 1, words


def test_markdown_prints_undefined_and_zero_apart(run: rec.RunData) -> None:
    weird = markdown.write_kl_block(run.results.plans[WEIRD])
    assert re.search(r"^99.9%   KLD: +n/a$", weird, re.MULTILINE) and re.search(
        r"^Minimum Δp: +n/a$", weird, re.MULTILINE
    )
    assert re.search(r"^Maximum KLD: +0$", markdown.write_kl_block(run.results.plans[EXACT]), re.MULTILINE)


def test_markdown_tables_keep_their_columns_under_any_plan_name(folder: Path) -> None:
    lines = (folder / "report.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("## Plans") + 2
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in lines[start : start + 2 + len(LEVELS)]}
    assert len(widths) == 1


def test_junit_counts_agree_with_results(folder: Path, run: rec.RunData) -> None:
    suite = ElementTree.parse(folder / "junit.xml").getroot().find("testsuite")
    assert suite is not None
    kinds = {}
    for case in suite.findall("testcase"):
        outcome = [child.tag for child in case if child.tag != "system-out"]
        kinds[case.get("classname", "").removeprefix("driftgate.")] = outcome[0] if outcome else "pass"
    wanted = {"pass": "pass", "fail": "failure", "invalid": "error", "inconclusive": "skipped"}
    expected = {plan: "skipped" if plan == CONTROL else wanted[verdict] for plan, verdict in CHECKS.items()}
    assert kinds == expected
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["6", "1", "1", "2"]


def test_junit_fails_when_only_the_run_fails(run: rec.RunData, tmp_path: Path) -> None:
    passed = [record.model_copy(update={"verdict": "pass"}) for record in run.results.verdicts]
    suite = ElementTree.parse(junit.render(with_results(run, verdicts=passed), tmp_path)).getroot().find("testsuite")
    assert suite is not None and suite.get("failures") == "1"
    assert "1 bit-exact cases differ" in (suite[-2][0].get("message") or "")


def test_junit_survives_characters_that_xml_has_not(run: rec.RunData, tmp_path: Path) -> None:
    odd = [run.results.verdicts[3].model_copy(update={"reason": "bell \x07 ends ]]> here"})]
    root = ElementTree.parse(junit.render(with_results(run, verdicts=odd), tmp_path)).getroot()
    assert "bell \ufffd ends ]]> here" in root.findall(".//failure")[0].get("message", "")


def test_summary_table_fits_eighty_columns_with_whole_plan_names(run: rec.RunData) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(tables.summary_table(run))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for plan in LEVELS:
        row = next(line for line in text.splitlines() if line.startswith(plan))
        assert row.split()[-1] == tables.plan_verdict(run, plan)


def test_the_terminal_explains_its_marks_and_the_cross_check(run: rec.RunData) -> None:
    def shown(data: rec.RunData) -> str:
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(tables.summary_table(data))
        return " ".join(console.export_text().split())

    assert shown(run).count("†") == 3 and tables.MARK_LEGEND in shown(run), "two plans and the legend"
    assert "†" not in shown(only(run, EXACT, SPLIT))
    assert any(tables.CROSS_CHECK_NOTE in line for line in tables.run_lines(run))
    bare = with_results(run, backend=run.results.backend.model_copy(update={"cross_check": None}))
    assert not any(tables.CROSS_CHECK_NOTE in line for line in tables.run_lines(bare))


def test_reports_explain_the_drift_law_the_cross_check_and_the_zigzag(folder: Path) -> None:
    from driftgate.accuracy.drift_law import GROWING_SLOPE

    for name in ("report.html", "report.md"):
        text = (folder / name).read_text(encoding="utf-8")
        assert f"lies above {GROWING_SLOPE}, so that the KL doubles when the length grows 16-fold" in text
        assert tables.CROSS_CHECK_NOTE in text
        assert "zigzag with period 2" in text
    assert 16**GROWING_SLOPE == 2


def test_a_control_is_not_judged_on_its_tasks(run: rec.RunData) -> None:
    control = run.results.plans[CONTROL].model_copy(deep=True)
    for task in control.tasks.values():
        task.verdict = "inconclusive"
    shown = {
        row.name: [cell.lines[-1] for heading, cell in row.cells.items() if heading.startswith("Task ")]
        for row in tables.plan_rows(with_results(run, plans={SPLIT: run.results.plans[SPLIT], CONTROL: control}))
    }
    assert shown == {SPLIT: ["pass", "pass"], CONTROL: ["control, not judged"] * 2}


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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (float("nan"), "n/a"),
        (float("inf"), "n/a"),
        (0.0, "0"),
        (1.234e-9, "1.23e-09"),
        (0.5, "5.00e-01"),
    ],
)
def test_format_kl(value: float | None, text: str) -> None:
    assert tables.format_kl(value) == text


def test_a_plan_has_the_gravest_verdict_of_its_checks_and_a_control_has_none(run: rec.RunData) -> None:
    first = run.results.verdicts[0]
    more = [*run.results.verdicts, first.model_copy(update={"verdict": "inconclusive"})]
    found = {plan: tables.plan_verdict(with_results(run, verdicts=more), plan) for plan in LEVELS}
    assert found == CHECKS | {EXACT: "inconclusive", CONTROL: "control"}


def test_reports_import_no_torch() -> None:
    code = "import sys, driftgate.reports; print(sorted({'torch', 'triton', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
