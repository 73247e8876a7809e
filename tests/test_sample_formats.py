"""Files of samples: each format is told by its content, and what cannot be read is one line."""

from __future__ import annotations

import json

import pytest
from sample_cases import (
    inspect_log,
    inspect_sample,
    lm_eval_rows,
    plain_rows,
    write_eval,
    write_json,
    write_lines,
)

from driftgate.accuracy.samples import make_items, read_samples
from driftgate.errors import EmptyRunError, InputError


def read(path, **options):
    (found,) = read_samples(path, **options)
    return found


def scores(found) -> list[float]:
    return [s.score for s in found.samples]


def refused(path, kind=InputError, **options) -> str:
    """The one line of a refusal; it names the file."""
    with pytest.raises(kind) as caught:
        read_samples(path, **options)
    message = str(caught.value)
    assert "\n" not in message and path.name in message
    return message


class TestLmEval:
    def test_fields_of_a_generation_task(self, tmp_path):
        path = write_lines(tmp_path / "x.jsonl", lm_eval_rows("10-", filters=("strict-match",)))
        found = read(path)
        assert (found.format, found.task, scores(found)) == ("lm-eval", None, [1.0, 0.0, 0.0])
        assert [s.item_id for s in found.samples] == ["0", "1", "2"]
        assert [s.parsed for s in found.samples] == [True, True, False]
        assert (found.records_caps, found.records_parsing, found.chance) == (False, True, 0.0)

    def test_options_of_a_multiple_choice_task_are_counted(self, tmp_path):
        found = read(write_lines(tmp_path / "x.jsonl", lm_eval_rows("1100", metrics=("acc",), choices=4)))
        assert (found.chance, found.records_parsing) == (0.25, True)

    def test_requests_of_the_prior_are_no_options(self, tmp_path):
        """acc_mutual_info asks every option once more without a context."""
        rows = lm_eval_rows("10", metrics=("acc",), choices=2)
        for row in rows:
            row["arguments"] |= {"gen_args_2": {"arg_0": "", "arg_1": " A"}, "gen_args_3": {"arg_0": "", "arg_1": " B"}}
        assert read(write_lines(tmp_path / "x.jsonl", rows)).chance == 0.5

    def test_a_right_answer_that_was_not_extracted_is_refused(self, tmp_path):
        rows = lm_eval_rows("1-", filters=("strict-match",))
        rows[1]["exact_match"] = 1.0
        assert "item 1, repeat 0 has no answer" in refused(write_lines(tmp_path / "x.jsonl", rows))

    def test_a_file_without_extraction_says_nothing_of_parsing(self, tmp_path):
        assert not read(write_lines(tmp_path / "x.jsonl", lm_eval_rows("10"))).records_parsing

    def test_several_metrics_are_listed_and_chosen(self, tmp_path):
        rows = lm_eval_rows("10", metrics=("acc", "acc_norm"), choices=4)
        rows[0]["acc_norm"] = 0.0
        path = write_lines(tmp_path / "x.jsonl", rows)
        assert "choose one --metric of acc, acc_norm" in refused(path)
        assert "--metric of acc, acc_norm" in refused(path, metric="exact_match")
        assert scores(read(path, metric="acc")) == [1.0, 0.0]
        assert scores(read(path, metric="acc_norm")) == [0.0, 0.0]

    def test_several_filters_are_listed_and_chosen(self, tmp_path):
        rows = lm_eval_rows("10", filters=("strict-match", "flexible-extract"))
        rows[2]["exact_match"] = 0.0
        path = write_lines(tmp_path / "x.jsonl", rows)
        assert "choose one --filter of strict-match, flexible-extract" in refused(path)
        assert scores(read(path, filter="strict-match")) == [1.0, 0.0]
        assert scores(read(path, filter="flexible-extract", metric="exact_match")) == [0.0, 0.0]

    def test_a_metric_as_lm_eval_names_it_in_its_results(self, tmp_path):
        path = write_lines(tmp_path / "x.jsonl", lm_eval_rows("10", metrics=("acc", "acc_norm"), choices=4))
        assert scores(read(path, metric="acc,none")) == [1.0, 0.0]

    def test_files_of_older_versions_have_no_list_of_metrics_and_no_hashes(self, tmp_path):
        rows = lm_eval_rows("10", metrics=("acc",), choices=4)
        for row in rows:
            for key in ("metrics", "doc_hash", "prompt_hash", "target_hash", "filter"):
                del row[key]
            row["arguments"] = [[a["arg_0"], a["arg_1"]] for a in row["arguments"].values()]
        found = read(write_lines(tmp_path / "x.jsonl", rows))
        assert (scores(found), found.chance) == ([1.0, 0.0], 0.25)
        rows[1]["arguments"][0][0] = "Another question?"
        other = read(write_lines(tmp_path / "y.jsonl", rows))
        with pytest.raises(InputError, match="item 1 has another prompt"):
            make_items("t", found, other)

    @pytest.mark.parametrize("value", [1.5, -0.1, [0.2, 3], "much", float("inf")])
    def test_a_metric_that_is_no_score_is_refused(self, tmp_path, value):
        rows = lm_eval_rows("11")
        rows[1]["exact_match"] = value
        assert "line 2: exact_match is no score of 0 to 1" in refused(write_lines(tmp_path / "x.jsonl", rows))

    def test_a_score_between_is_kept(self, tmp_path):
        rows = lm_eval_rows("11", metrics=("f1",))
        rows[1]["f1"] = 0.4
        assert scores(read(write_lines(tmp_path / "x.jsonl", rows))) == [1.0, 0.4]

    def test_the_same_document_twice_is_refused(self, tmp_path):
        rows = lm_eval_rows("101")
        assert "item 0, repeat 0 is there 2 times" in refused(write_lines(tmp_path / "x.jsonl", [*rows, rows[0]]))

    def test_a_folder_is_one_task_a_file(self, tmp_path):
        model = tmp_path / "out" / "org__model"
        write_lines(model / "samples_gpqa_diamond_2025-02-01T10-11-12.123456.jsonl", lm_eval_rows("10"))
        write_lines(model / "samples_gsm8k_2025-02-01T10-11-12.123456.jsonl", lm_eval_rows("111"))
        found = read_samples(tmp_path / "out")
        assert [(s.task, len(s.samples)) for s in found] == [("gpqa_diamond", 2), ("gsm8k", 3)]

    def test_tasks_of_a_folder_may_have_metrics_of_their_own(self, tmp_path):
        write_lines(tmp_path / "samples_a_2025-02-01T10-11-12.jsonl", lm_eval_rows("10", metrics=("acc", "acc_norm")))
        write_lines(tmp_path / "samples_b_2025-02-01T10-11-12.jsonl", lm_eval_rows("11"))
        found = read_samples(tmp_path, metric="acc,exact_match")
        assert [scores(s) for s in found] == [[1.0, 0.0], [1.0, 1.0]]

    def test_two_evaluations_of_a_task_in_a_folder_are_refused(self, tmp_path):
        for day in ("01", "02"):
            write_lines(tmp_path / f"samples_gpqa_2025-02-{day}T10-11-12.jsonl", lm_eval_rows("10"))
        assert "holds 2 files of task gpqa" in refused(tmp_path)

    def test_a_folder_without_samples_is_refused(self, tmp_path):
        write_json(tmp_path / "results_2025.json", {"results": {}})
        assert "no samples_*.jsonl; run lm-eval with --log_samples" in refused(tmp_path)


class TestInspect:
    @pytest.mark.parametrize("kind", ["json", "eval", "chunked"])
    def test_fields_of_a_log(self, tmp_path, kind):
        log = inspect_log([inspect_sample(i, a, epoch=e) for e in (1, 2) for i, a in enumerate("10-")])
        path = tmp_path / "log"
        write_json(path, log) if kind == "json" else write_eval(path, log, chunked=kind == "chunked")
        found = read(path)
        assert (found.format, found.task, found.chance) == ("inspect_ai", "gpqa", 0.25)
        assert [(s.item_id, s.repeat, s.score) for s in found.samples][3:] == [
            ("0", 2, 1.0),
            ("1", 2, 0.0),
            ("2", 2, 0.0),
        ]
        assert [s.parsed for s in found.samples[:3]] == [True, True, False]
        assert {(s.n_tokens, s.capped) for s in found.samples} == {(3, False)}

    @pytest.mark.parametrize("cap", [{"limit": {"type": "token", "limit": 9}}, "max_tokens", "model_length"])
    def test_caps_are_told_by_limit_and_stop_reason(self, tmp_path, cap):
        sample = inspect_sample(1, "0", **(cap if isinstance(cap, dict) else {}))
        if isinstance(cap, str):
            sample["output"]["choices"][0]["stop_reason"] = cap
        found = read(write_json(tmp_path / "x.json", inspect_log([inspect_sample(0, "1"), sample])))
        assert [s.capped for s in found.samples] == [False, True]

    @pytest.mark.parametrize(
        ("value", "score"),
        [
            ("C", 1.0),
            ("I", 0.0),
            ("P", 0.5),
            ("N", 0.0),
            (True, 1.0),
            (0.25, 0.25),
            (1, 1.0),
            ("yes", 1.0),
            ("0.5", 0.5),
        ],
    )
    def test_values_are_those_of_inspect(self, tmp_path, value, score):
        sample = inspect_sample(0, "1")
        sample["scores"]["choice"]["value"] = value
        assert scores(read(write_json(tmp_path / "x.json", inspect_log([sample])))) == [score]

    def test_scorers_and_parts_of_a_score_are_listed_and_chosen(self, tmp_path):
        sample = inspect_sample(0, "1")
        sample["scores"]["judge"] = {"value": {"style": 0.5, "truth": 1}}
        path = write_json(tmp_path / "x.json", inspect_log([sample]))
        assert "--metric of choice, judge/style, judge/truth" in refused(path)
        assert scores(read(path, metric="judge/style")) == [0.5]

    def test_ids_of_messages_are_no_part_of_a_question(self, tmp_path):
        """They are drawn anew at each run; roles and contents are what was asked."""
        one, two = (read(write_json(tmp_path / f"{a}.json", inspect_log([inspect_sample(0, a)]))) for a in "10")
        assert len(make_items("gpqa", one, two)) == 2
        other = inspect_sample(0, "1")
        other["input"][0]["content"] = "Another?"
        three = read(write_json(tmp_path / "o.json", inspect_log([other])))
        with pytest.raises(InputError, match="item 0 has another prompt"):
            make_items("gpqa", one, three)

    def test_options_in_another_order_are_another_question(self, tmp_path):
        shuffled = inspect_sample(0, "1", choices=["two", "one", "three", "four"], target="B")
        one, two = (
            read(write_json(tmp_path / f"{i}.json", inspect_log([s])))
            for i, s in enumerate((inspect_sample(0, "1"), shuffled))
        )
        with pytest.raises(InputError, match="item 0 has another options and target"):
            make_items("gpqa", one, two)

    @pytest.mark.parametrize("status", ["started", "cancelled", "error"])
    def test_a_log_that_is_not_complete_is_refused(self, tmp_path, status):
        path = write_json(tmp_path / "x.json", inspect_log([inspect_sample(0, "1")], status=status))
        assert f"status {status}" in refused(path)

    def test_a_crashed_archive_has_no_header(self, tmp_path):
        import zipfile

        with zipfile.ZipFile(tmp_path / "x.eval", "w") as archive:
            archive.writestr("samples/0_epoch_1.json", json.dumps(inspect_sample(0, "1")))
        assert "no header.json" in refused(tmp_path / "x.eval")

    def test_an_archive_that_this_python_cannot_unpack_says_how(self, tmp_path):
        """99 stands for zstd (93), which zipfile reads from Python 3.14 on; the number is in two places."""
        path = write_eval(tmp_path / "x.eval", inspect_log([inspect_sample(0, "1")]))
        data = bytearray(path.read_bytes())
        for mark, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
            place = data.find(mark)
            while place >= 0:
                data[place + offset : place + offset + 2] = (99).to_bytes(2, "little")
                place = data.find(mark, place + 1)
        path.write_bytes(bytes(data))
        assert "inspect log convert --to json" in refused(path)

    def test_a_cut_archive_is_refused(self, tmp_path):
        path = write_eval(tmp_path / "x.eval", inspect_log([inspect_sample(i, "1") for i in range(50)]))
        data = bytearray(path.read_bytes())
        data[200:400] = bytes(200)
        path.write_bytes(bytes(data))
        assert "damaged archive" in refused(path)

    def test_samples_that_failed_are_named(self, tmp_path):
        broken = inspect_sample(7, "1", error={"message": "out of memory"}, scores=None)
        path = write_json(tmp_path / "x.json", inspect_log([inspect_sample(0, "1"), broken]))
        assert "1 of 2 samples have no score, the first is item 7" in refused(path)

    @pytest.mark.parametrize("scores", [None, {}, {"choice": {"value": float("nan")}}])
    def test_a_log_of_failures_is_an_empty_run(self, tmp_path, scores):
        log = inspect_log([inspect_sample(i, "1", scores=scores) for i in range(3)])
        assert "none of 3 samples was scored" in refused(write_json(tmp_path / "x.json", log), EmptyRunError)

    def test_a_log_without_samples_is_an_empty_run(self, tmp_path):
        assert "zero samples" in refused(write_json(tmp_path / "x.json", inspect_log([])), EmptyRunError)

    def test_a_right_sample_without_an_answer_is_refused(self, tmp_path):
        sample = inspect_sample(7, "1")
        sample["scores"]["choice"]["answer"] = ""
        message = refused(write_json(tmp_path / "x.json", inspect_log([inspect_sample(0, "1"), sample])))
        assert "item 7, repeat 1 has no answer that could be read, and yet the score 1" in message

    def test_a_filter_is_refused(self, tmp_path):
        path = write_json(tmp_path / "x.json", inspect_log([inspect_sample(0, "1")]))
        assert "leave --filter out" in refused(path, filter="none")


class TestPlain:
    def test_fields(self, tmp_path):
        rows = plain_rows("10", n_tokens=5, capped=False, parse_reason="ok", n_choices=4, text="passed over")
        rows[1] |= {"repeat": 0, "capped": True, "parse_reason": "truncated", "item_id": 7}
        found = read(write_lines(tmp_path / "x.jsonl", rows))
        assert (found.format, found.chance, scores(found)) == ("JSONL", 0.25, [1.0, 0.0])
        assert [(s.item_id, s.n_tokens, s.capped, s.parsed) for s in found.samples] == [
            ("q0", 5, False, True), ("7", 5, True, False),
        ]  # fmt: skip

    def test_what_is_not_said_is_unknown(self, tmp_path):
        found = read(write_lines(tmp_path / "x.jsonl", plain_rows("10")))
        assert (found.records_caps, found.records_parsing, found.chance, found.task) == (False, False, 0.0, None)

    def test_answers_that_could_not_be_read_and_are_wrong_are_kept(self, tmp_path):
        rows = [*plain_rows("0", parse_reason="none"), {"item_id": "a", "correct": False, "answer": ""}]
        rows.append({"item_id": "b", "correct": True, "answer": None, "parse_reason": "ok"})
        found = read(write_lines(tmp_path / "x.jsonl", rows))
        assert ([s.parsed for s in found.samples], scores(found)) == ([False, False, True], [0.0, 0.0, 1.0])

    def test_chance_is_the_greatest_of_the_rows_that_say_it(self, tmp_path):
        rows = [r | n for r, n in zip(plain_rows("101"), ({"n_choices": 4}, {}, {"n_choices": 10}), strict=True)]
        assert read(write_lines(tmp_path / "x.jsonl", rows)).chance == 0.25

    def test_tasks_of_one_file(self, tmp_path):
        rows = plain_rows("10", task="a") + plain_rows("111", task="b")
        assert [(s.task, len(s.samples)) for s in read_samples(write_lines(tmp_path / "x.jsonl", rows))] == [
            ("a", 2),
            ("b", 3),
        ]

    @pytest.mark.parametrize(
        ("row", "says"),
        [
            ({"item_id": "q1"}, "line 2: correct"),
            ({"correct": True}, "line 2: item_id"),
            ({"item_id": "q1", "correct": 1.01}, "line 2: correct is no score"),
            ({"item_id": "q1", "correct": "yep"}, "line 2: correct"),
            ({"item_id": "q1", "correct": True, "repeat": -1}, "line 2: repeat"),
            ({"item_id": "q1", "correct": True, "n_choices": 1}, "line 2: n_choices"),
            ({"item_id": "q1", "correct": True, "parse_reason": "none"}, "item q1, repeat 0 has no answer"),
            ({"item_id": "q1", "correct": 0.5, "parse_reason": "truncated"}, "item q1, repeat 0 has no answer"),
            ({"item_id": "q1", "correct": True, "answer": None}, "item q1, repeat 0 has no answer"),
            ({"item_id": "q1", "correct": True, "answer": ""}, "item q1, repeat 0 has no answer"),
        ],
    )
    def test_a_wrong_line_is_named(self, tmp_path, row, says):
        assert says in refused(write_lines(tmp_path / "x.jsonl", [*plain_rows("1"), row]))

    @pytest.mark.parametrize("flag", ["metric", "filter"])
    def test_a_choice_that_says_nothing_is_refused(self, tmp_path, flag):
        assert f"leave --{flag} out" in refused(write_lines(tmp_path / "x.jsonl", plain_rows("1")), **{flag: "acc"})


class TestFiles:
    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ('{"results": {}}', "none of the known formats"),
            ("[1, 2]", "no JSON object"),
            ("no json", "line 1 is no JSON"),
            ('{"item_id": "q0", "correct": true}\n{"item_id": "q1", "cor', "line 2 is no JSON"),
        ],
    )
    def test_other_content_is_refused(self, tmp_path, text, says):
        path = tmp_path / "x.jsonl"
        path.write_text(text)
        assert says in refused(path)

    @pytest.mark.parametrize(
        "fields",
        [{"item_id": "\ud800"}, {"task": "a\udfff"}, {"doc_id": "\ud800"}, {"doc_id": 1, "filter": "\ud800"},
         {"doc_id": 1, "metrics": ["\ud800"]}, {"doc_id": 1, "\ud800": 1.0}],
    )  # fmt: skip
    def test_a_name_with_half_a_surrogate_pair_is_refused(self, tmp_path, fields):
        rows = lm_eval_rows("11") if "doc_id" in fields else plain_rows("11")
        path = write_lines(tmp_path / "x.jsonl", [rows[0], rows[1] | fields])
        assert f"{path}, line 2: a name holds a lone surrogate" in refused(path)

    def test_half_a_surrogate_pair_within_an_answer_is_no_name(self, tmp_path):
        assert scores(read(write_lines(tmp_path / "x.jsonl", plain_rows("1", answer="\ud83d", target="\ud83d"))))

    @pytest.mark.parametrize(
        ("place", "log"),
        [
            ("sample 1", inspect_log([inspect_sample("\ud800", "1")])),
            ("sample 1", inspect_log([inspect_sample(0, "1", scorer="\ud800")])),
            ("header", inspect_log([inspect_sample(0, "1")], task="\ud800")),
            ("header", inspect_log([inspect_sample(0, "1")], status="\ud800")),
        ],
    )
    def test_a_log_with_half_a_surrogate_pair_in_a_name_is_refused(self, tmp_path, place, log):
        path = write_json(tmp_path / "x.json", log)
        assert f"{path}, {place}" in refused(path)

    @pytest.mark.parametrize("depth", [250, 900, 990, 100_000])
    @pytest.mark.parametrize("line", [1, 3])
    @pytest.mark.parametrize("name", ["target", "item_id", "doc"])
    def test_a_deeply_nested_line_is_named(self, tmp_path, depth, line, name):
        """From the depth at which only hashing would fail to that at which reading does."""
        rows = lm_eval_rows("111") if name == "doc" else plain_rows("111")
        lines = [json.dumps(row) for row in rows]
        lines[line - 1] = json.dumps(rows[line - 1] | {name: "HERE"}).replace('"HERE"', "[" * depth + "]" * depth)
        path = tmp_path / "x.jsonl"
        path.write_text("\n".join(lines))
        assert f"{path}, line {line}: nested deeper than 200 levels" in refused(path)

    def test_a_line_nested_as_deep_as_is_read(self, tmp_path):
        text = json.dumps(plain_rows("1", target="HERE")[0])
        for depth in (199, 200):  # within the object of the line
            path = tmp_path / f"{depth}.jsonl"
            path.write_text(text.replace('"HERE"', "[" * depth + "]" * depth))
        assert scores(read(tmp_path / "199.jsonl")) == [1.0]
        refused(tmp_path / "200.jsonl")

    @pytest.mark.parametrize("kind", ["json", "eval"])
    def test_a_deeply_nested_log_is_named(self, tmp_path, kind):
        sample = inspect_sample(0, "1")
        for _ in range(300):
            sample["input"] = [sample["input"]]
        path = tmp_path / "x"
        (write_json if kind == "json" else write_eval)(path, inspect_log([sample]))
        place = "line 1" if kind == "json" else "samples/0_epoch_1.json"
        assert f"{path}, {place}: nested deeper than 200 levels" in refused(path)

    def test_blank_lines_are_passed_over(self, tmp_path):
        path = tmp_path / "x.jsonl"
        path.write_text('\n{"item_id": "q0", "correct": true}\n\n')
        assert scores(read(path)) == [1.0]

    def test_a_missing_file_and_other_bytes_are_named(self, tmp_path):
        assert "does not exist" in refused(tmp_path / "none.jsonl")
        path = tmp_path / "x.jsonl"
        path.write_bytes(b"\xff\xfe\x00")
        assert "is no text" in refused(path)

    @pytest.mark.parametrize("text", ["", "\n \n"])
    def test_an_empty_file_is_an_empty_run(self, tmp_path, text):
        path = tmp_path / "x.jsonl"
        path.write_text(text)
        assert "is empty" in refused(path, EmptyRunError)
