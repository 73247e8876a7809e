"""Two sides of samples are paired by id and repeat, and what cannot be paired is one line."""

from __future__ import annotations

import pytest
from sample_cases import inspect_log, inspect_sample, lm_eval_rows, plain_rows, write_json, write_lines

from driftgate.accuracy.samples import make_items, pair_sets, read_samples, refuse_same_files
from driftgate.errors import InputError


def both(tmp_path, base, candidate):
    return [
        read_samples(write_lines(tmp_path / f"{n}.jsonl", rows)) for n, rows in (("base", base), ("cand", candidate))
    ]


def test_items_are_paired_by_id_and_repeat_not_by_place(tmp_path):
    base, candidate = both(tmp_path, plain_rows("110"), plain_rows("110")[::-1])
    frame = make_items("t", base[0], candidate[0]).pivot(index="item_id", columns="plan", values="correct")
    assert (frame["baseline"] == frame["candidate"]).all()


@pytest.mark.parametrize("short", ["base", "cand"])
def test_items_that_one_file_alone_has_are_named(tmp_path, short):
    rows = [plain_rows("110"), plain_rows("110")]
    del rows[short == "cand"][1]
    base, candidate = both(tmp_path, *rows)
    with pytest.raises(
        InputError, match=rf"1 answers of .* are not in .*{short}\.jsonl, the first is item q1, repeat 0"
    ):
        make_items("t", base[0], candidate[0])


def test_repeats_that_one_file_alone_has_are_named(tmp_path):
    base, candidate = both(tmp_path, plain_rows("11") + plain_rows("11", repeat=1), plain_rows("11"))
    with pytest.raises(InputError, match=r"2 answers of .* the first is item q0, repeat 1"):
        make_items("t", base[0], candidate[0])


@pytest.mark.parametrize(
    ("kind", "says"), [("doc_hash", "document"), ("prompt_hash", "prompt"), ("target_hash", "target")]
)
def test_another_question_under_the_same_id_is_refused(tmp_path, kind, says):
    rows = lm_eval_rows("1101")
    rows[2][kind] = "0" * 64
    base, candidate = both(tmp_path, lm_eval_rows("1101"), rows)
    with pytest.raises(InputError, match=f"item 2 has another {says} in .*cand.jsonl than in .*base.jsonl") as caught:
        make_items("t", base[0], candidate[0])
    assert "Question" not in str(caught.value)


def test_targets_of_plain_files_are_compared_where_both_have_them(tmp_path):
    base, candidate = both(tmp_path, plain_rows("11", target="A"), plain_rows("11", target="B"))
    with pytest.raises(InputError, match="item q0 has another target"):
        make_items("t", base[0], candidate[0])
    base, candidate = both(tmp_path, plain_rows("11", target="A"), plain_rows("11"))
    assert len(make_items("t", base[0], candidate[0])) == 4


def test_files_of_different_formats_may_be_paired(tmp_path):
    base = read_samples(
        write_lines(tmp_path / "a.jsonl", [r | {"item_id": str(i)} for i, r in enumerate(plain_rows("11"))])
    )
    candidate = read_samples(write_lines(tmp_path / "b.jsonl", lm_eval_rows("10")))
    pairs = pair_sets(base, candidate)
    assert list(pairs) == ["samples"]
    assert make_items("samples", *pairs["samples"])["correct"].tolist() == [1.0, 1.0, 1.0, 0.0]


def test_a_task_that_one_side_alone_has_is_named(tmp_path):
    two = plain_rows("1", task="a") + plain_rows("1", task="b")
    base, candidate = both(tmp_path, two, plain_rows("1", task="a"))
    for sides in ((base, candidate), (candidate, base)):
        with pytest.raises(InputError, match=r"task b of .*base.jsonl is not in .*cand.jsonl \(it has a\)"):
            pair_sets(*sides)


def test_one_task_each_of_different_names_is_refused(tmp_path):
    logs = [write_json(tmp_path / f"{t}.json", inspect_log([inspect_sample(0, "1")], task=t)) for t in ("gpqa", "mmlu")]
    with pytest.raises(InputError, match="task gpqa"):
        pair_sets(*map(read_samples, logs))


def test_the_same_answer_twice_is_refused(tmp_path):
    """As a resumed evaluation leaves it, or one whose ranks padded their last batch."""
    rows = plain_rows("110")
    path = write_lines(tmp_path / "x.jsonl", [*rows, rows[1]])
    with pytest.raises(InputError, match="item q1, repeat 0 is there 2 times"):
        read_samples(path)


@pytest.mark.parametrize("way", ["path", "symlink", "copy", "folder", "copied folder"])
def test_one_evaluation_given_as_both_sides_is_refused(tmp_path, way):
    base = write_lines(tmp_path / "base" / "samples_a_2025-02-01T10-11-12.jsonl", lm_eval_rows("110"))
    other = {"path": base, "folder": base.parent}.get(way, tmp_path / "other")
    if way == "symlink":
        other.symlink_to(base)
    elif way == "copy":
        other.write_bytes(base.read_bytes())
    elif way == "copied folder":
        write_lines(other / base.name, lm_eval_rows("110"))
    sides = [read_samples(base.parent if "folder" in way else base), read_samples(other)]
    with pytest.raises(InputError, match=r"^the two files are the same; [^\n]*$"):
        refuse_same_files(pair_sets(*sides))


def test_tasks_that_are_equal_beside_one_that_is_not_are_compared(tmp_path):
    for side, answers in (("base", "11"), ("cand", "10")):
        for task, given in (("a", "11"), ("b", answers)):
            write_lines(tmp_path / side / f"samples_{task}_2025-02-01T10-11-12.jsonl", lm_eval_rows(given))
    refuse_same_files(pair_sets(read_samples(tmp_path / "base"), read_samples(tmp_path / "cand")))


def test_a_file_that_went_away_is_named(tmp_path):
    pairs = pair_sets(*both(tmp_path, plain_rows("11"), plain_rows("10")))
    (tmp_path / "cand.jsonl").unlink()
    with pytest.raises(InputError, match=r"cannot read .*cand.jsonl again"):
        refuse_same_files(pairs)
