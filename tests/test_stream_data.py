"""The user's text as streams: every token of the file, exactly one BOS, nothing cut off in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from driftgate.accuracy.models import check_model, load_tokenizer, text_config
from driftgate.errors import DriftgateError, UsageError
from driftgate.evals.checkpoints import find_checkpoint
from driftgate.evals.model_text import read_text
from driftgate.evals.stream_data import read_streams
from driftgate.evals.tasks.item_task import ModelText
from driftgate.main_job import choose_suite

BOS = 257
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


@pytest.fixture
def text() -> ModelText:
    folder = find_checkpoint("tiny-gdn")
    return read_text(folder, text_config(check_model(folder)), name="tiny-gdn")


def read(
    tmp_path: Path, text: ModelText, content: str, *, name: str = "a.txt", **sizes: object
) -> list[tuple[int, ...]]:
    (tmp_path / name).write_text(content, encoding="utf-8")
    return read_streams(tmp_path / name, text, **({"n": 2, "length": 5, "generate": False} | sizes))


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_windows_of_a_text_follow_one_another_and_begin_with_bos(tmp_path, text):
    assert read(tmp_path, text, "abcdefghij") == [(BOS, *b"abcd"), (BOS, *b"efgh")]


def test_a_tokenizer_without_bos_gets_none(tmp_path, text):
    plain = ModelText(name="plain", tokenizer=text.tokenizer, vocab_size=259)
    assert read(tmp_path, plain, "abcdefghij") == [tuple(b"abcde"), tuple(b"fghij")]


@pytest.mark.parametrize("key", ["prompt", "text"])
def test_lines_are_streams(tmp_path, text, key):
    content = lines({key: "abcdef"}, {key: "ghij"})
    assert read(tmp_path, text, content, name="a.jsonl") == [(BOS, *b"abcd"), (BOS, *b"ghij")]


def test_chats_go_through_the_template_and_have_one_bos(tmp_path, text):
    """Row 12 of the public faults: tokenizer and template both write BOS."""
    tokenizer = load_tokenizer(find_checkpoint("tiny-gdn"))
    tokenizer.chat_template = "<bos>" + CHAT
    chatty = ModelText(name="chatty", tokenizer=tokenizer, vocab_size=259, bos_id=tokenizer("<bos>")["input_ids"][0])
    content = lines({"messages": [{"role": "u", "content": "hi"}]})
    found = read(tmp_path, chatty, content, name="a.jsonl", n=1, length=99, generate=True)
    assert found == [(BOS, *b"<u>hi<a>")]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "with one at the least"),
        ("hi", "a list of role and content"),
        ({"role": "u", "content": "hi"}, "a list of role and content"),
        (["hi"], "every message to have a role and a content"),
        ([{"content": "hi"}], "every message to have a role and a content"),
        ([{"role": "u"}], "every message to have a role and a content"),
        ([{"role": "u", "content": None}], "every message to have a role and a content"),
    ],
)
def test_messages_that_are_none_are_one_line(tmp_path, messages, says):
    """A template writes nothing for a role that is not there, and says nothing."""
    tokenizer = load_tokenizer(find_checkpoint("tiny-gdn"))
    tokenizer.chat_template = CHAT
    chatty = ModelText(name="chatty", tokenizer=tokenizer, vocab_size=259)
    with pytest.raises(DriftgateError, match=says) as caught:
        read(tmp_path, chatty, lines({"messages": messages}), name="a.jsonl", n=1, length=99, generate=True)
    assert caught.value.exit_code == 4


def test_a_call_of_a_tool_needs_no_content(tmp_path):
    tokenizer = load_tokenizer(find_checkpoint("tiny-gdn"))
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{% endfor %}"
    chatty = ModelText(name="chatty", tokenizer=tokenizer, vocab_size=259)
    row = {"messages": [{"role": "a", "content": None, "tool_calls": [{"type": "function"}]}]}
    found = read(tmp_path, chatty, lines(row), name="a.ndjson", n=1, length=9, generate=True)
    assert found == [tuple(b"<a>")]


@pytest.mark.parametrize(("name", "content"), [("a.txt", "abc" * 9), ("a.jsonl", lines({"text": "abcabc"}))])
def test_a_token_that_the_model_has_no_row_for_is_named_before_it_is_loaded(tmp_path, text, name, content):
    narrow = ModelText(name="narrow", tokenizer=text.tokenizer, vocab_size=99)
    with pytest.raises(DriftgateError, match="the token 'c' with id 99, outside the 99 of narrow") as caught:
        read(tmp_path, narrow, content, name=name, n=1)
    assert caught.value.exit_code == 4


def test_a_byte_order_mark_is_no_text_and_a_line_separator_ends_no_line(tmp_path, text):
    content = "\ufeff" + json.dumps({"text": "ab\u2028d"}, ensure_ascii=False) + "\n"
    found = read(tmp_path, text, content, name="a.JSONL", n=1, length=7)
    assert found == [(BOS, *"ab\u2028d".encode())]


def test_lines_that_are_short_are_left_for_the_baseline_to_go_on(tmp_path, text):
    assert read(tmp_path, text, lines({"text": "ab"}), name="a.jsonl", n=1, generate=True) == [(BOS, *b"ab")]


@pytest.mark.parametrize(
    ("name", "content", "sizes", "says", "code"),
    [
        ("a.txt", "abcdefg", {}, r"has 7 tokens, 2 streams of 5 need 8; give fewer --sequences or --steps", 4),
        ("a.txt", " \n", {}, r"a\.txt is empty", 5),
        ("a.jsonl", "", {}, r"is empty", 5),
        ("a.jsonl", lines({"text": "abcdef"}), {}, r"has 1 lines, not 2 streams; give --sequences 1", 4),
        ("a.jsonl", lines({"text": "abc"}), {"n": 1}, r"line 1 has 4 tokens, a stream needs 5; .* --generate", 4),
        ("a.jsonl", lines({"text": "abcd"}), {"n": 1, "generate": True}, r"has 5 tokens already", 4),
        ("a.jsonl", "{", {"n": 1}, r"line 1 is no JSON", 4),
        ("a.jsonl", lines([1]), {"n": 1}, r"expected an object with one of messages, prompt, text", 4),
        ("a.jsonl", lines({"text": "a", "prompt": "b"}), {"n": 1}, r"one of messages, prompt, text", 4),
        ("a.jsonl", lines({"text": 3}), {"n": 1}, r"expected a text, got int", 4),
        ("a.jsonl", lines({"messages": []}), {"n": 1}, r"is a chat, and tiny-gdn has no chat template", 4),
        ("a.jsonl", '{"text": "abc\\ud800"}', {"n": 1}, r"line 1 holds half a character \('\\ud800'\)", 4),
        ("a.jsonl", "[" * 100_000, {"n": 1}, r"line 1 is no JSON", 4),
        ("a.json", '[{"text": "abcdef"}]', {"n": 1}, r"a\.json: streams are read from a text or a JSONL file", 4),
        ("a.txt", "abcdefghij", {"generate": True}, r"is a text, .* give --generate a JSONL file", 4),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, text, name, content, sizes, says, code):
    with pytest.raises(DriftgateError, match=says) as caught:
        read(tmp_path, text, content, name=name, **sizes)
    assert caught.value.exit_code == code
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_one_line(tmp_path, text):
    with pytest.raises(DriftgateError, match=r"missing\.txt does not exist"):
        read_streams(tmp_path / "missing.txt", text, n=1, length=5, generate=False)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DriftgateError, match=r"b\.txt is no readable UTF-8 text"):
        read_streams(tmp_path / "b.txt", text, n=1, length=5, generate=False)
    without = ModelText(name="mute", tokenizer=None, vocab_size=9)
    with pytest.raises(DriftgateError, match="model mute has no tokenizer"):
        read_streams(tmp_path / "b.txt", without, n=1, length=5, generate=False)


@pytest.mark.parametrize("option", [{"repeats": 3}, {"limit": 2}, {"temperature": 0.0}, {"mode": "generate"}])
def test_options_of_items_want_a_task_with_items(option):
    (name,) = option
    with pytest.raises(UsageError, match=f"--{name} is for tasks with items of their own"):
        choose_suite("quick", option)


def test_data_is_the_stream_unless_a_task_takes_it():
    assert choose_suite("quick", {"data": "x.txt", "tasks": []}).stream == "data"
    assert choose_suite("quick", {"data": "x.csv", "tasks": ["gpqa"]}).stream == "tasks"
    with pytest.raises(UsageError, match="--data and task recall"):
        choose_suite("quick", {"data": "x.txt", "tasks": ["recall"]})
    with pytest.raises(UsageError, match="--generate goes on from the lines of a JSONL file"):
        choose_suite("quick", {"generate": True})
