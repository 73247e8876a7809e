"""Questions from files: every cell verbatim whatever the format, and one line for everything that does not fit."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
from collections import Counter
from pathlib import Path

import pytest
from question_cases import ANSWERS, COLUMNS, ODD, gpqa_row, write_csv, write_gpqa

from driftgate.errors import DriftgateError, EmptyRunError, InputError
from driftgate.evals.tasks.question_file import EQUAL_CHOICES, Item, load_questions, shipped_questions

GOOD = {"question": "Why?", "options": ["a", "b", "c", "d"], "answer": "C"}


def write_lines(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, object]]) -> str:
    import pandas as pd

    pd.DataFrame(rows).to_parquet(path)
    return str(path)


def write_odd(folder: Path, kind: str) -> str:
    """The odd rows in one of the formats."""
    rows = [gpqa_row(*row) for row in ODD]
    if kind == "parquet":
        return write_parquet(folder / "odd.parquet", rows)
    if kind == "jsonl":
        return write_lines(folder / "odd.jsonl", *rows)
    if kind == "csv":
        return str(write_gpqa(folder / "odd.csv"))
    write_gpqa(folder / "odd.csv")
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: odd\n  data_files: odd.csv\n---\n")
    return f"{folder}:odd"


def test_the_layout_is_that_of_the_public_file():
    assert len(COLUMNS) == len(set(COLUMNS)) == 78
    assert {"Record ID", "Canary String", "Sufficient Expertise?_EV_2", "Websites visited_NEV_3"} < set(COLUMNS)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "repository"])
def test_row_18_cells_come_back_verbatim(tmp_path, kind):
    items = load_questions(write_odd(tmp_path, kind))
    assert [(i.item_id, i.question, i.choices) for i in items] == list(ODD)
    assert {(i.gold, i.subdomain, i.domain) for i in items} == {(0, "Optics", "Physics")}


def test_row_18_equal_choices_are_flagged(tmp_path):
    flags = {i.item_id: i.flags for i in load_questions(write_odd(tmp_path, "csv"))}
    assert flags == dict.fromkeys(flags, ()) | {"rec04": (EQUAL_CHOICES,)}


@pytest.mark.parametrize("name", ["a[1].csv", "star*.csv", "UPPER.CSV"])
def test_a_file_name_is_no_pattern(tmp_path, name):
    assert len(load_questions(str(write_gpqa(tmp_path / name)))) == len(ODD)


def test_an_index_column_without_a_name_and_a_byte_order_mark_do_no_harm(tmp_path):
    path = write_csv(tmp_path / "q.csv", [{"": "7"} | gpqa_row(*row) for row in ODD])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [i.choices for i in load_questions(str(path))] == [row[2] for row in ODD]


@pytest.mark.parametrize(
    ("answer", "gold"), [("A", 0), ("D", 3), (0, 0), (3, 3)], ids=["letter A", "letter D", "index 0", "index 3"]
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_question_options_answer_is_read_too(tmp_path, kind, answer, gold):
    row = GOOD | {"answer": answer, "options": ["1", "x", "2020-01-01", "NA"]}
    write = {"jsonl": write_lines(tmp_path / "q.jsonl", row), "parquet": write_parquet(tmp_path / "q.parquet", [row])}
    (item,) = load_questions(write[kind])
    assert item == Item(item_id=item.item_id, question="Why?", choices=("1", "x", "2020-01-01", "NA"), gold=gold)


def test_options_in_a_csv_cell_are_a_json_list(tmp_path):
    row = {"Question": "Why?", "options": '["1", "2", "[c]", "NA"]', "answer": "B", "id": "mine"}
    (item,) = load_questions(str(write_csv(tmp_path / "q.csv", [row])))
    assert (item.item_id, item.choices, item.gold) == ("mine", ("1", "2", "[c]", "NA"), 1)


def test_without_a_record_id_the_question_is_the_key(tmp_path):
    first = load_questions(write_lines(tmp_path / "a.jsonl", GOOD, GOOD | {"question": "How?"}))
    again = load_questions(write_lines(tmp_path / "b.jsonl", GOOD | {"question": "How?", "options": list("wxyz")}))
    assert len({i.item_id for i in first}) == 2 and first[1].item_id == again[0].item_id
    assert "How" not in again[0].item_id


@pytest.mark.parametrize("answer", ["E", "e", "a", "", "AB", 4, -1, True, 1.0, None, "1"])
def test_row_17_a_gold_answer_outside_a_to_d_is_an_error(tmp_path, answer):
    path = write_lines(tmp_path / "q.jsonl", GOOD, GOOD | {"question": "How?", "answer": answer})
    with pytest.raises(InputError, match=r"row 2, answer: expected A to D, or a number 0 to 3") as caught:
        load_questions(path)
    assert "\n" not in str(caught.value)


def test_row_14_one_id_twice_is_an_error_within_a_file_and_over_two(tmp_path):
    rows = [gpqa_row("rec7", f"Question {i}?", ("a", "b", "c", "d")) for i in range(2)]
    with pytest.raises(InputError, match="two rows have the id rec7"):
        load_questions(str(write_csv(tmp_path / "twice.csv", rows)))
    folder = tmp_path / "both"
    folder.mkdir()
    for i, row in enumerate(rows):
        write_csv(folder / f"part{i}.csv", [row])
    with pytest.raises(InputError, match="two rows have the id rec7"):
        load_questions(str(folder))


def test_row_14_a_file_that_changed_is_read_anew(tmp_path):
    path = write_gpqa(tmp_path / "q.csv", n=10)
    assert len(load_questions(str(path))) == 10
    stat = path.stat()
    write_gpqa(path, n=198)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert len(load_questions(str(path))) == 198


@pytest.mark.parametrize("kind", ["csv", "repository"])
def test_nothing_of_a_local_file_stays_in_the_cache(tmp_path, monkeypatch, kind):
    import datasets

    source = write_odd(tmp_path, kind)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    load_questions(source)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "repository"])
def test_a_file_is_read_without_network_even_where_there_is_one(tmp_path, monkeypatch, kind):
    import datasets
    import huggingface_hub

    def connect(self: object, address: object) -> None:
        raise AssertionError(f"network: {address}")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", connect)
    assert len(load_questions(write_odd(tmp_path, kind))) == len(ODD)


def test_row_26_offline_a_hub_id_that_is_not_cached_is_one_line(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(
        InputError, match=r"nobody/nothing:main cannot be fetched while an \*_OFFLINE variable is set"
    ) as caught:
        load_questions("nobody/nothing:main")
    assert "\n" not in str(caught.value) and caught.value.exit_code == 4


@pytest.mark.parametrize("name", ["missing.csv", "sub/missing.jsonl", "./nobody/nothing", "/none/such", "squad"])
def test_row_26_a_missing_file_is_one_line(name):
    with pytest.raises(InputError, match=rf"^{re.escape(name)} does not exist; give a"):
        load_questions(name)


def as_line(**changes: object) -> bytes:
    return json.dumps(GOOD | changes).encode()


FAULTS: dict[str, tuple[bytes, str, type[DriftgateError]]] = {
    "empty.csv": (b"", "is empty; expected Question", InputError),
    "empty.jsonl": (b"", "is empty; expected Question", InputError),
    "header.csv": ((",".join(COLUMNS) + "\n").encode(), "holds no question", EmptyRunError),
    "blank.jsonl": (b"\n \n", "holds no question", EmptyRunError),
    "columns.csv": (b"a,b\n1,2\n", "row 1: expected Question, Correct Answer.*got a, b", InputError),
    "before.csv": (
        (",".join(c for c in COLUMNS if c.startswith("Pre-")) + "\n" + ",".join("abcdef") + "\n").encode(),
        "row 1: expected Question, Correct Answer",
        InputError,
    ),
    "twice.csv": (b"Question,options,answer,answer\nq,[],A,B\n", "the column answer is there twice", InputError),
    "shifted.csv": (b"Question,options,answer\nx,q,[],A\nx,q,[],A\n", "cannot be read.*Length of header", InputError),
    "ragged.csv": (b"Question,options,answer\nq,[],A\nq,[],A,B\n", "Expected 3 fields in line 3, saw 4", InputError),
    "short.csv": (f"Question,{','.join(ANSWERS)}\nq,1,2,3\n".encode(), "row 1, Incorrect Answer 3 is emp", InputError),
    "quote.csv": (b'Question,options,answer\nq,"[],A\n', "cannot be read.*EOF inside string", InputError),
    "latin.csv": ("Question,options,answer,ä\n".encode("latin-1"), "is no CSV file in UTF-8", InputError),
    "latin2.csv": (b"Question,options,answer\n" + b"x" * 10**5 + b"\xe4,[],A\n", "cannot be read.*utf-8", InputError),
    "torn.jsonl": (json.dumps(GOOD).encode() + b'\n{"question": "q', "line 2 is no JSON", InputError),
    "list.jsonl": (b"[1]\n", "line 1: expected a JSON object, got list", InputError),
    "number.jsonl": (as_line(options=[1, "2", "3", "4"]), "options: expected text, got int", InputError),
    "half.jsonl": (as_line(question="a").replace(b'"a"', b'"\\ud800"'), "question holds half a char", InputError),
    "null.jsonl": (as_line(question=None), "question: expected text, got nothing", InputError),
    "three.jsonl": (as_line(options=["a", "b", "c"]), "options: expected a list of 4", InputError),
    "text.parquet": (b"no parquet at all", "cannot be read", InputError),
    "questions.txt": (b"Why?", r"questions are read from \.csv, \.jsonl, \.parquet", InputError),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FAULTS))
def test_what_does_not_fit_is_one_line_that_names_the_file(tmp_path, name, capfd, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("datasets"), "propagate", True)
    content, message, kind = FAULTS[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(kind, match=message) as caught:
        load_questions(str(path))
    assert type(caught.value) is kind and str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_numbers_of_a_typed_file_are_refused_since_their_text_is_lost(tmp_path):
    rows = [gpqa_row(*ODD[0]) | {"Correct Answer": 10.0}]
    with pytest.raises(InputError, match="row 1, Correct Answer: expected text, got float"):
        load_questions(write_parquet(tmp_path / "q.parquet", rows))


def test_splits_of_a_repository_are_named(tmp_path):
    write_gpqa(tmp_path / "train.csv", n=3)
    write_gpqa(tmp_path / "test.csv", n=5)
    with pytest.raises(InputError, match=r"has the splits train, test; name one: .*:CONFIG:SPLIT"):
        load_questions(str(tmp_path))
    assert len(load_questions(f"{tmp_path}::test")) == 5


def test_the_shipped_set_is_balanced_and_has_no_two_equal_choices():
    items = load_questions()
    assert Counter(i.domain for i in items) == dict.fromkeys(("Physics", "Chemistry", "Biology", "Mathematics"), 12)
    assert not any(i.flags for i in items)
    assert len({i.question for i in items}) == len(items)


def test_what_the_shipped_set_computes_is_right():
    """Each expression gives the number of the right answer and of no other, from the numbers of the question."""
    names = {name: getattr(math, name) for name in ("gcd", "lcm", "sqrt", "log10", "factorial")}
    rows = [json.loads(line) for line in shipped_questions().read_text(encoding="utf-8").splitlines()]
    computed = [row for row in rows if row["Check"]]
    assert len(computed) == 35
    for row in computed:
        value = eval(row["Check"], {"__builtins__": {}}, names)
        right, *wrong = [float(row[name].split()[0]) for name in ANSWERS]
        assert math.isclose(value, right, rel_tol=1e-12), row["Record ID"]
        assert not any(math.isclose(value, other, rel_tol=1e-3) for other in wrong), row["Record ID"]
        given = re.findall(r"\d+(?:\.\d+)?", re.sub(r"H2O", "2", row["Question"]))
        assert set(given) <= set(re.findall(r"\d+(?:\.\d+)?", row["Check"])), row["Record ID"]


def test_the_shipped_set_has_a_card():
    card = (shipped_questions().parent / "CARD.md").read_text(encoding="utf-8")
    assert "They do not measure a model" in card and "no text of GPQA" in card
