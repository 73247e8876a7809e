"""The user's own text as the streams of a run: one long text cut into windows, or a JSONL file with one stream a line.

| file | a stream |
| --- | --- |
| JSONL (``.jsonl``, ``.ndjson``), each line ``{"messages": [...]}`` | the chat through the tokenizer's template |
| JSONL, each line ``{"prompt": "..."}`` or ``{"text": "..."}`` | the text |
| anything else | BOS and a window of the text; windows do not overlap |

Notable: nothing is cut off in silence and nothing is made up. Where there is too little text the error says how much is
needed; ``generate`` lets the baseline go on from where a line ends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from driftgate.errors import EmptyRunError, InputError
from driftgate.evals.tasks.item_task import ModelText
from driftgate.evals.tasks.wordings import encode

__all__ = ["read_streams"]

Tokens = tuple[int, ...]

LINES = (".jsonl", ".ndjson")
NO_TEXT = (".json", ".csv", ".tsv", ".parquet", ".gz", ".zip")
"""Files whose marks would be taken for words."""


def read_streams(path: Path, text: ModelText, *, n: int, length: int, generate: bool) -> list[Tokens]:
    """Streams of a file.

    Args:
        path: UTF-8 text or JSONL.
        text: tokenizer of the model.
        n: streams wanted.
        length: tokens of each.
        generate: streams may be shorter, since the baseline goes on from their end.

    Returns:
        n tuples of token ids, of ``length``, or with ``generate`` of 1 … length.

    Raises:
        InputError: the file is missing or no such file, the model has no tokenizer, or there is too little text.
        EmptyRunError: the file is empty.
    """
    if text.tokenizer is None:
        raise InputError(f"model {text.name} has no tokenizer, so --data cannot be read; leave it out")
    try:
        content = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"data file {path} does not exist; give a text or a JSONL file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"data file {path} is no readable UTF-8 text: {error}") from error
    if not content.strip():
        raise EmptyRunError(f"data file {path} is empty; no step would be decoded")
    if path.suffix.lower() in LINES:
        streams = _read_lines(path, content, text, n=n, length=length, generate=generate)
    elif path.suffix.lower() in NO_TEXT:
        raise InputError(f"data file {path}: streams are read from a text or a JSONL file; convert it to one of them")
    elif generate:
        raise InputError(
            f"data file {path} is a text, of which streams take whole windows; give --generate a JSONL file, or leave "
            "it out"
        )
    else:
        streams = _cut_windows(path, content, text, n=n, length=length)
    _check_vocabulary(path, streams, text)
    return streams


def _check_vocabulary(path: Path, streams: list[Tokens], text: ModelText) -> None:
    """A tokenizer may hold tokens that its model has no row for, as where some were added to it alone."""
    for token in (token for tokens in streams for token in tokens):
        if token >= text.vocab_size:
            named = text.tokenizer.convert_ids_to_tokens(token)
            raise InputError(
                f"data file {path} has the token {named!r} with id {token}, outside the {text.vocab_size} of "
                f"{text.name}; leave it out of the text, or give a checkpoint whose tokenizer and weights agree"
            )


def _cut_windows(path: Path, content: str, text: ModelText, *, n: int, length: int) -> list[Tokens]:
    lead = () if text.bos_id is None else (text.bos_id,)
    tokens = encode(text.tokenizer, content, bos=None)
    step = length - len(lead)
    if len(tokens) < n * step:
        raise InputError(
            f"data file {path} has {len(tokens)} tokens, {n} streams of {length} need {n * step}; give fewer "
            "--sequences or --steps, or more text"
        )
    return [(*lead, *tokens[i * step : (i + 1) * step]) for i in range(n)]


def _read_lines(path: Path, content: str, text: ModelText, *, n: int, length: int, generate: bool) -> list[Tokens]:
    lines = [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    if len(lines) < n:
        raise InputError(f"data file {path} has {len(lines)} lines, not {n} streams; give --sequences {len(lines)}")
    streams = []
    for number, line in lines[:n]:
        where = f"data file {path}, line {number}"
        tokens = _encode(where, _parse(where, line), text)
        if not tokens:
            raise InputError(f"{where} has no token")
        if len(tokens) < length and not generate:
            raise InputError(
                f"{where} has {len(tokens)} tokens, a stream needs {length}; give fewer --steps, or --generate to let "
                "the baseline go on"
            )
        if len(tokens) >= length and generate:
            raise InputError(f"{where} has {len(tokens)} tokens already and --generate has nothing to add to {length}")
        streams.append(tokens[:length])
    return streams


def _parse(where: str, line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is no JSON: {error}") from error
    if not isinstance(fields, dict) or len({"messages", "prompt", "text"} & fields.keys()) != 1:
        raise InputError(f"{where}: expected an object with one of messages, prompt, text")
    return fields


def _encode(where: str, fields: dict[str, Any], text: ModelText) -> Tokens:
    if "messages" not in fields:
        content = fields.get("prompt", fields.get("text"))
        if not isinstance(content, str):
            raise InputError(f"{where}: expected a text, got {type(content).__name__}")
        return _tokenize(where, content, text)
    if not getattr(text.tokenizer, "chat_template", None):
        raise InputError(f"{where} is a chat, and {text.name} has no chat template; give prompt or text")
    _check_messages(where, fields["messages"])
    template = text.tokenizer.apply_chat_template
    try:
        content = template(fields["messages"], tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything
        raise InputError(f"{where}: the chat template refuses it: {' '.join(str(error).split())}") from error
    return _tokenize(where, content, text)


def _tokenize(where: str, content: str, text: ModelText) -> Tokens:
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where} holds half a character ({error.object[error.start]!r}); correct the text") from error
    return encode(text.tokenizer, content, bos=text.bos_id)


def _check_messages(where: str, messages: object) -> None:
    """Who speaks and what: templates write nothing where one of them is missing, and say nothing."""
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: expected messages to be a list of role and content, with one at the least")
    for message in messages:
        whole = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not whole or (message.get("content") is None and not message.get("tool_calls")):
            raise InputError(f"{where}: expected every message to have a role and a content")
