"""``gate --samples``: one verdict, the same in text, JSON and exit code, with every figure that it rests on."""

from __future__ import annotations

import json

import pytest
from sample_cases import (
    flips,
    inspect_log,
    inspect_sample,
    lm_eval_rows,
    plain_rows,
    write_eval,
    write_json,
    write_lines,
)

from driftgate.accuracy.noninferiority import paired_noninferiority
from driftgate.errors import DriftgateError, EmptyRunError, InputError, UsageError
from driftgate.samples_command import gate_samples

CASES = {"pass": (0, 0, 0), "inconclusive": (10, 4, 3), "fail": (40, 2, 1)}
"""Lost and gained of 198 items, and the exit code, at a margin of 2 points."""


def plain(folder, lost: int, gained: int, **fields):
    """The two paths."""
    return sides(folder, *(plain_rows(answers, **fields) for answers in flips(lost, gained)))


def sides(folder, *rows):
    """Paths of both sides, whose lines say whose they are: equal answers are no equal files."""
    return [
        write_lines(folder / f"{name}.jsonl", [row | {"model": name} for row in own])
        for name, own in zip(("base", "cand"), rows, strict=True)
    ]


def document(capsys, *paths, **options) -> tuple[int, dict]:
    code = gate_samples(*paths, as_json=True, **options)
    return code, json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def refused(*paths, kind: type[DriftgateError] = InputError, **options) -> str:
    with pytest.raises(kind) as caught:
        gate_samples(*paths, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("verdict", CASES)
def test_text_json_and_exit_code_agree(tmp_path, capsys, verdict):
    lost, gained, code = CASES[verdict]
    paths = plain(tmp_path, lost, gained)
    assert gate_samples(*paths, margin=2) == code
    text = capsys.readouterr().out.splitlines()
    assert text[-1] == f"verdict: {verdict}"
    assert any(line.startswith(f"{verdict.upper()} task_loss:") for line in text)
    found_code, found = document(capsys, *paths, margin=2)
    assert (found_code, found["verdict"]) == (code, verdict)
    assert found["verdicts"][0]["verdict"] == found["tasks"]["samples"]["verdict"] == verdict
    assert gate_samples(*paths, margin=2, quiet=True) == code
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("format", ["lm-eval", "inspect_ai", "inspect_ai archive", "JSONL"])
def test_every_format_gives_the_same_figures(tmp_path, capsys, format):
    answers = dict(zip(("base", "cand"), flips(10, 4), strict=True))
    paths = []
    for name, given in answers.items():
        log = inspect_log([inspect_sample(i, a) for i, a in enumerate(given)])
        path = tmp_path / name
        if format == "lm-eval":
            write_lines(path, lm_eval_rows(given, metrics=("acc",), choices=4))
        elif format == "JSONL":
            write_lines(path, plain_rows(given, n_choices=4))
        else:
            write_json(path, log) if format == "inspect_ai" else write_eval(path, log)
        paths.append(path)
    code, found = document(capsys, *paths, margin=2)
    (figures,) = found["tasks"].values()
    assert (code, found["formats"]["base"]) == (3, format.split()[0])
    assert (figures["n"], figures["lost"], figures["gained"], figures["chance"]) == (198, 10, 4, 0.25)
    assert figures["p_value"] == pytest.approx(0.1796, abs=5e-5)
    assert figures["delta"] == pytest.approx(-6 / 198)


def test_the_figures_are_those_of_the_paired_test(tmp_path, capsys):
    _, found = document(capsys, *plain(tmp_path, 10, 4), margin=2)
    figures, (verdict,) = found["tasks"]["samples"], found["verdicts"]
    expected = paired_noninferiority([-1.0] * 10 + [1.0] * 4 + [0.0] * 184, 2)
    for name in ("n", "delta", "ci_low", "ci_high", "lost", "gained", "p_value", "repeats_needed"):
        assert figures[name] == pytest.approx(getattr(expected, name), rel=1e-12), name
    assert (verdict["limit"], verdict["value"]) == (2, pytest.approx(100 * expected.bound))
    assert verdict["reason"].startswith(expected.reason)


def test_nothing_flipped_is_bounded_by_one_and_a_half_points(tmp_path, capsys):
    _, found = document(capsys, *plain(tmp_path, 0, 0), margin=2)
    assert found["verdicts"][0]["value"] == pytest.approx(1.50, abs=0.005)
    assert found["tasks"]["samples"]["p_value"] == 1.0


def test_an_open_verdict_says_what_would_decide(tmp_path, capsys):
    paths = plain(tmp_path, 6, 5)
    _, found = document(capsys, *paths, margin=2)
    wanted = found["tasks"]["samples"]["repeats_needed"]
    assert wanted > 1
    gate_samples(*paths, margin=2)
    text = capsys.readouterr().out
    assert f"repeats needed: {wanted}" in text
    assert f"{wanted} repeats (now 1) would decide" in text


def test_a_bound_equal_to_the_margin_passes_and_1e_9_beyond_does_not(tmp_path, capsys):
    """No rounding on the way from the file to the exit code; the base accuracy does not enter the line."""
    paths = plain(tmp_path, 3, 0)
    bound = document(capsys, *paths, margin=50)[1]["verdicts"][0]["value"]
    assert gate_samples(*paths, margin=bound + 1e-9, quiet=True) == 0
    assert gate_samples(*paths, margin=bound - 1e-9, quiet=True) == 3


def test_a_base_that_is_never_right_passes_nothing(tmp_path, capsys):
    paths = sides(tmp_path, plain_rows("0" * 198), plain_rows("0" * 198))
    code, found = document(capsys, *paths, margin=2)
    assert (code, found["verdicts"][0]["reason"].split(":")[0]) == (3, "at_chance")


@pytest.mark.parametrize(
    ("base", "cand", "fields"),
    [
        ("0" * 20, "0" * 20, {}),
        ("0" * 198, "0" * 198, {}),
        ("0" * 198, "0" * 195 + "111", {}),
        ("01" * 99, "10" * 45 + "01" * 54, {"n_choices": 2}),
    ],
)
def test_more_repeats_are_not_advised_where_the_base_guesses(tmp_path, capsys, base, cand, fields):
    paths = sides(tmp_path, plain_rows(base, **fields), plain_rows(cand, **fields))
    code, found = document(capsys, *paths, margin=2)
    (verdict,) = found["verdicts"]
    assert (code, found["tasks"]["samples"]["repeats_needed"]) == (3, None)
    assert verdict["reason"].startswith("at_chance: the baseline answers ")
    assert verdict["reason"].count("more repeats do not help") == verdict["reason"].count("margin 2") == 1
    gate_samples(*paths, margin=2)
    text = capsys.readouterr().out
    assert "would decide" not in text and "repeats needed" not in text


def test_a_base_that_guesses_can_still_be_failed(tmp_path, capsys):
    paths = sides(tmp_path, plain_rows("01" * 99, n_choices=2), plain_rows("0" * 198, n_choices=2))
    code, found = document(capsys, *paths, margin=2)
    assert (code, "at_chance" in found["verdicts"][0]["reason"]) == (1, False)


@pytest.mark.parametrize("silent", [0, 1, 199])
def test_chance_is_that_of_the_rows_that_say_it(tmp_path, capsys, silent):
    """49 of 200 right among four options is a guess, whichever rows leave their options out."""
    rows = plain_rows("1" * 49 + "0" * 151, n_choices=4)
    for row in rows[:silent]:
        del row["n_choices"]
    code, found = document(capsys, *sides(tmp_path, rows, rows), margin=2)
    assert (code, found["tasks"]["samples"]["chance"]) == (3, 0.25)
    assert found["verdicts"][0]["reason"].startswith("at_chance: the baseline answers 24.5% right, guessing 25%")


def test_the_same_file_twice_is_exit_code_4(tmp_path, capsys):
    base, _ = plain(tmp_path, 0, 0)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(base.read_bytes())
    for other in (base, copy):
        with pytest.raises(InputError, match=r"^the two files are the same; ") as caught:
            gate_samples(base, other, margin=2)
        assert caught.value.exit_code == 4 and "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


def test_repeats_are_averaged(tmp_path, capsys):
    base, candidate = flips(10, 0)
    rows = {
        "base": plain_rows(base) + plain_rows(base, repeat=1),
        "cand": plain_rows(candidate) + plain_rows(base, repeat=1),
    }
    paths = [write_lines(tmp_path / n, r) for n, r in rows.items()]
    figures = document(capsys, *paths, margin=2)[1]["tasks"]["samples"]
    assert (figures["n"], figures["repeats"], figures["delta"]) == (198, 2, pytest.approx(-5 / 198))


def test_repeats_that_differ_between_items_are_told_as_they_are(tmp_path, capsys):
    """One item with 60 answers makes no run of 60 repeats, nor a plan for more from there."""
    once, more = (
        plain(tmp_path / "once", 6, 5),
        [{"item_id": "q197", "repeat": r, "correct": False} for r in range(1, 60)],
    )
    uneven = sides(tmp_path, *(plain_rows(answers) + more for answers in flips(6, 5)))
    wanted = document(capsys, *once, margin=2)[1]["tasks"]["samples"]["repeats_needed"]
    _, found = document(capsys, *uneven, margin=2)
    figures = found["tasks"]["samples"]
    assert [figures[f"repeats{kind}"] for kind in ("", "_least", "_greatest", "_needed")] == [1, 1, 60, wanted]
    gate_samples(*uneven, margin=2)
    text = capsys.readouterr().out
    assert "samples: 198 items, 1 to 60 repeats\n" in text
    assert f"; {wanted} repeats (now 1) would decide" in text


def test_a_warning_of_caps_stays_behind_what_would_decide(tmp_path, capsys):
    rows = [plain_rows(answers, capped=False) for answers in flips(10, 4)]
    for row in rows[1][:40]:
        row["capped"] = True
    _, found = document(capsys, *sides(tmp_path, *rows), margin=2)
    assert found["verdicts"][0]["reason"].endswith("as they are; 40 answers hit the cap, 0 of the baseline")


def cut(folder, hits: int, **policy):
    """Equal answers; the candidate hits the cap so many times, where both are wrong."""
    base, _ = flips(0, 0)
    rows = plain_rows(base, capped=False, parse_reason="ok")
    cand = [
        row | ({"capped": True, "parse_reason": "truncated"} if i >= len(rows) - hits else {})
        for i, row in enumerate(rows)
    ]
    path = folder / "caps.yaml"
    path.write_text(
        "checks: [{check: task_loss, margin: 2, reason: x}, {check: cap_hit_excess, limit: 0.05, reason: longer}]"
    )
    return *sides(folder, rows, cand), path


def test_caps_and_unread_answers_of_both_sides_are_told_and_gated(tmp_path, capsys):
    base, candidate, policy = cut(tmp_path, 40)
    code, found = document(capsys, base, candidate, policy=policy)
    figures = found["tasks"]["samples"]
    assert (code, figures["cap_hits"], figures["baseline_cap_hits"]) == (1, 40, 0)
    assert (figures["unparsed"], figures["baseline_unparsed"], figures["verdict"]) == (40, 0, "fail")
    assert figures["accuracy_completed"] == pytest.approx(150 / 158)
    assert {v["check"]: v["verdict"] for v in found["verdicts"]} == {
        "task_loss:samples": "pass", "cap_hit_excess:samples": "fail",
    }  # fmt: skip
    gate_samples(base, candidate, policy=policy)
    text = capsys.readouterr().out
    assert "cap hits: base 0, candidate 40" in text and "unparsed: base 0, candidate 40" in text
    assert "accuracy of completed answers: base 75.76 %, candidate 94.94 %" in text


def test_caps_that_no_file_records_are_unknown_and_pass_no_check(tmp_path, capsys):
    *_, policy = cut(tmp_path, 0)
    code, found = document(capsys, *plain(tmp_path, 0, 0), policy=policy)
    assert (code, found["tasks"]["samples"]["cap_hits"], found["tasks"]["samples"]["unparsed"]) == (3, None, None)
    assert found["verdicts"][1]["reason"].startswith("caps_not_recorded")
    gate_samples(*plain(tmp_path, 0, 0), margin=2)
    assert "cap hits: not recorded" in capsys.readouterr().out


def test_a_folder_of_tasks_passes_where_every_task_does(tmp_path, capsys):
    for side, lost in (("base", 0), ("cand", 40)):
        for task, answers in (("gpqa", flips(0, 0)[1]), ("gsm8k", flips(lost, 0)[1])):
            write_lines(tmp_path / side / f"samples_{task}_2025-02-01T10-11-12.5.jsonl", lm_eval_rows(answers))
    code, found = document(capsys, tmp_path / "base", tmp_path / "cand", margin=2)
    assert {name: task["verdict"] for name, task in found["tasks"].items()} == {"gpqa": "pass", "gsm8k": "fail"}
    assert (code, found["verdict"]) == (1, "fail")


def test_the_bundled_policy_says_what_it_cannot_judge(tmp_path, capsys):
    _, found = document(capsys, *plain(tmp_path, 0, 0))
    assert found["policy"] == "default"
    assert found["verdicts"][0]["limit"] == 10
    assert "kl_mean" in found["not_judged"] and "task_loss" not in found["not_judged"]


def test_a_policy_for_other_plans_passes_nothing(tmp_path, capsys):
    policy = tmp_path / "p.yaml"
    policy.write_text("checks: [{check: task_loss, margin: 2, reason: x, plans: [nvfp4*]}]")
    code, found = document(capsys, *plain(tmp_path, 0, 0), policy=policy)
    assert (code, found["verdicts"][0]["reason"].split(":")[0]) == (3, "matched_nothing")
    assert found["tasks"]["samples"]["verdict"] == "inconclusive"


def test_a_policy_without_a_check_of_answers_is_refused(tmp_path):
    policy = tmp_path / "p.yaml"
    policy.write_text("checks: [{check: kl_mean, limit: 1, reason: x}]")
    assert "no task_loss or cap_hit_excess" in refused(*plain(tmp_path, 0, 0), policy=policy)


def test_margin_and_policy_together_are_refused(tmp_path):
    refused(*plain(tmp_path, 0, 0), margin=2, policy=tmp_path / "p.yaml", kind=UsageError)


@pytest.mark.parametrize("margin", [0.0, -1.0, 100.0, float("nan")])
def test_a_margin_that_is_none_is_refused(tmp_path, margin):
    assert "--margin" in refused(*plain(tmp_path, 0, 0), margin=margin, kind=UsageError)


def test_no_scored_item_is_exit_code_5_and_prints_nothing(tmp_path, capsys):
    empty = write_lines(tmp_path / "empty.jsonl", [])
    failed = write_lines(tmp_path / "failed.jsonl", [row | {"correct": None} for row in plain_rows("111")])
    for path in (empty, failed):
        for paths in ((path, path), (write_lines(tmp_path / "base.jsonl", plain_rows("111")), path)):
            with pytest.raises(EmptyRunError) as caught:
                gate_samples(*paths, margin=2)
            assert caught.value.exit_code == 5
    assert capsys.readouterr().out == ""


def test_what_a_file_shows_is_exit_code_4(tmp_path):
    base, candidate = plain(tmp_path, 0, 0)
    short = write_lines(tmp_path / "short.jsonl", plain_rows("1" * 150))
    for paths in ((base, short), (short, candidate), (base, tmp_path / "none.jsonl")):
        with pytest.raises(InputError) as caught:
            gate_samples(*paths, margin=2)
        assert caught.value.exit_code == 4
