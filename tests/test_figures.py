"""Figures of a run: they hold its data, name units and backends, and say why where there is none."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from PIL import Image
from report_cases import (
    CONTROL,
    EXACT,
    LAYERS,
    LENGTH,
    LEVELS,
    RATIOS,
    SMALL,
    SPLIT,
    WEIRD,
    make_many,
    make_run,
    only,
    with_results,
)

from driftgate.accuracy import records as rec
from driftgate.reports import figures, markdown, page
from driftgate.reports.drawing import plan_style, write_png


@pytest.fixture(scope="module")
def run() -> rec.RunData:
    return make_run()


@pytest.fixture(scope="module")
def many() -> rec.RunData:
    return make_many()


def legend_texts(figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


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
    assert [below.xaxis.get_major_formatter()(x) for x in (1.0, 1024.0)] == ["1", "1024"], "positions are whole numbers"
    assert f"{EXACT}: exactly 0" in legend_texts(figure)
    assert any("(control)" in text and "slope 0.60" in text for text in legend_texts(figure))


@pytest.mark.parametrize(("floor", "drawn"), [(1e-8, True), (3.1e-10, False)])
def test_a_noise_floor_that_would_take_most_of_the_axis_is_told_and_not_drawn(run: rec.RunData, floor, drawn) -> None:
    near = with_results(run, noise_floor=rec.NoiseFloor(kl_mean=floor, kl_max=floor))
    for draw in (figures.kl_against_position, figures.kl_by_window_offset):
        figure = draw(near)
        lines = [line for line in figure.axes[0].lines if set(line.get_ydata()) == {floor}]
        assert bool(lines) == drawn
        assert [text for text in legend_texts(figure) if f"noise floor of FP32: {floor:.1e}" in text]


def test_many_plans_have_a_panel_for_each_pair_of_formats(many: rec.RunData) -> None:
    titles = ["nvfp4 (control)", "fp8 (control)", "nvfp4/fp32", "fp8/fp32"]
    for draw, below in ((figures.kl_against_position, 1), (figures.kl_by_window_offset, 0)):
        figure = draw(many)
        assert [axes.get_title(loc="left") for axes in figure.axes[:4]] == titles
        assert len(figure.axes) == 4 + below
        curves = [[line for line in axes.lines if len(line.get_xdata()) > 2] for axes in figure.axes[:4]]
        assert [len(lines) for lines in curves] == [5, 5, 4, 4]
        colours = [{to_hex(line.get_color()) for line in lines} for lines in curves]
        assert [len(found) for found in colours] == [5, 5, 4, 4], "a colour for each length"
        assert colours[2] == colours[3] < colours[0] == colours[1], "the same in every panel"
        assert legend_texts(figure)[:5] == ["@1", "@4", "@8", "@16", "@32"]
        assert len({axes.get_ylim() for axes in figure.axes[:4]}) == 1


def test_a_plan_that_is_exact_among_many_is_told_in_its_panel(many: rec.RunData) -> None:
    steps = many.steps.copy()
    steps.loc[steps["plan"] == "fp8/fp32@8", "kl"] = 0.0
    plans = {name: plan.model_copy(deep=True) for name, plan in many.results.plans.items()}
    plans["fp8/fp32@8"].drift.by_window_offset.clear()
    figure = figures.kl_against_position(replace(with_results(many, plans=plans), steps=steps))
    assert figure.axes[3].get_title(loc="left") == "fp8/fp32; exactly 0: @8"


def test_many_plans_differ_in_colour_or_mark(many: rec.RunData) -> None:
    looks = [plan_style(many, name) for name in many.results.plans]
    assert len({(look.colour, look.marker) for look in looks}) == len(looks) == 18


def test_an_accuracy_has_no_axis_beyond_what_can_be(run: rec.RunData) -> None:
    plan = run.results.plans[SPLIT].model_copy(deep=True)
    for record in plan.tasks.values():
        record.ci_low, record.ci_high, record.repeats = -0.9, 0.9, 1
    recall = figures.task_accuracy(with_results(run, plans={SPLIT: plan})).axes[0]
    low, high = recall.get_xlim()
    assert low >= -3 and high <= 103
    assert recall.get_title(loc="left") == "recall (200 items, 1 repeat)"


def test_pictures_are_small_and_keep_their_colours(run: rec.RunData, tmp_path: Path) -> None:
    figure, whole = figures.kl_against_position(run), io.BytesIO()
    figure.savefig(whole, format="png")
    small = write_png(figure, tmp_path / "small.png")
    assert small.stat().st_size < len(whole.getvalue()) / 2
    before, after = (np.asarray(Image.open(place).convert("RGB")).astype(int) for place in (whole, small))
    change = np.abs(before - after).max(axis=-1)
    assert (change > 8).mean() < 0.005, "edges of marks, smoothed by other shades"
    assert change.mean() < 0.1


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


def test_kl_against_bytes_counts_bytes_and_draws_the_front(run: rec.RunData) -> None:
    state, traffic = figures.kl_against_bytes(run).axes
    assert "KiB per sequence" in traffic.get_xlabel()
    record = run.results.plans[SPLIT].bytes
    marks = [float(x) for line in traffic.lines for x in line.get_xdata() if len(line.get_xdata()) == 1]
    assert record.traffic_per_step / 1024 in marks
    front = next(line for line in state.lines if line.get_drawstyle() == "steps-post")
    assert list(front.get_xdata()) == sorted(RATIOS[plan][0] for plan in (SPLIT, SMALL, WEIRD)), "exact is no number"


def test_output_errors_stand_against_what_was_read(run: rec.RunData) -> None:
    axes = figures.output_error_against_state_error(run).axes[0]
    assert "relative" in axes.get_xlabel() and "relative" in axes.get_ylabel()
    marks = {
        (float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in axes.lines if len(line.get_xdata()) == 1
    }
    layer = run.results.plans[SMALL].state.layers[1]
    assert (np.hypot(layer.read_error, layer.checkpoint_error), layer.output_error) in marks
    assert len(marks) == len(LAYERS) * (len(LEVELS) - 1), "the exact plan has no error to draw"


def test_a_state_that_is_exact_lies_on_the_left_edge(run: rec.RunData) -> None:
    plan = run.results.plans[SPLIT].model_copy(deep=True)
    for layer in plan.state.layers:
        layer.read_error = None
    figure = figures.output_error_against_state_error(
        with_results(run, plans={SPLIT: plan, SMALL: run.results.plans[SMALL]})
    )
    hollow = [line for line in figure.axes[0].lines if line.get_fillstyle() == "none"]
    assert [list(line.get_xdata()) for line in hollow] == [[0.0]] * len(LAYERS)
    assert f"{SPLIT}: state error exactly 0 (left edge)" in legend_texts(figure)


def test_the_tolerance_ladder_shows_multiples_of_the_bound_and_tells_the_rest(run: rec.RunData) -> None:
    axes = figures.tolerance_ladder(run).axes[0]
    marks = sorted(float(line.get_xdata()[0]) for line in axes.lines if len(line.get_xdata()) == 1)
    assert marks == pytest.approx([0.2, 0.2, 4.0, 4.0])
    assert [list(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) == 2] == [[1.0, 1.0]]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [
        "gdn output_only",
        "gdn exact_readout (2 exact)",
        "gdn state_output tf32",
        "gdn unstable (2 not finite)",
    ]
    with pytest.raises(figures.NoDataError, match="driftgate certify"):
        figures.tolerance_ladder(with_results(run, tolerance=[]))


@pytest.mark.parametrize("plans", ["few", "many"])
@pytest.mark.parametrize("entry", figures.FIGURES, ids=lambda entry: entry.name)
def test_labels_are_whole_apart_and_defined(run, many, entry: figures.FigureEntry, plans: str, monkeypatch) -> None:
    run = {"few": run, "many": many}[plans]
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
    assert len(drawn) > 10
    assert [t for t, box in drawn if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height] == []
    clashes = [(a[0], b[0]) for a, b in combinations(drawn, 2) if a[1].shrunk(0.9, 0.9).overlaps(b[1])]
    assert clashes == []
    assert [t for t, _ in drawn if re.search(r"\b(nan|inf|none)\b", t, re.IGNORECASE)] == []


@pytest.mark.parametrize("entry", figures.FIGURES, ids=lambda entry: entry.name)
def test_each_figure_names_its_backend(run: rec.RunData, entry: figures.FigureEntry) -> None:
    backend = "triton-interpret" if entry.source == "tolerance" else getattr(run.results.backend, entry.source)
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
    bare = replace(with_results(run, plans={SPLIT: plan}, tolerance=[]), steps=run.steps[:0])
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
