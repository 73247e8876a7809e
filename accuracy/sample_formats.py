"""The formats that samples come in: lm-eval's JSONL, inspect_ai's logs, plain JSONL; read here alone.

Sources of the field names: lm_eval/evaluator.py and loggers/evaluation_tracker.py (``save_results_samples``);
inspect_ai/log/_log.py (``EvalSample``), scorer/_metric.py (``Score``, ``value_to_float``) and
log/_recorders/chunked/format.py (names inside an .eval file).
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import re
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from driftgate.accuracy.samples import Sample, SampleSet
from driftgate.errors import EmptyRunError, InputError

__all__ = ["read_file"]

Row = dict[str, Any]
_KNOWN = "lm-eval's --log_samples JSONL, an inspect_ai log, or JSONL with item_id and correct"
_LM_EVAL_FIELDS = {
    "doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash", "prompt_hash",
    "target_hash",
}  # fmt: skip
_NOT_MATCHED = ("[invalid]", "['invalid']")
"""What lm-eval's extraction filters give where their pattern is not found."""
_INSPECT_SAMPLE = re.compile(r"samples/.+_epoch_\d+(?:\.json|/sample\.json)", re.DOTALL)
_INSPECT_WORDS = {"c": 1.0, "p": 0.5, "i": 0.0, "n": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_INSPECT_CAPS = ("max_tokens", "model_length")
_NAMES = ("doc_id", "item_id", "task", "filter", "metrics")
"""Fields of a line that are shown or looked up, beside the names of its fields."""
_DEPTH_MAX = 200
"""Levels of lists and objects; what hashes and prints them later recurses."""


@dataclass(frozen=True)
class _Choice:
    """What the user chose among the scores of a file."""

    path: Path
    metric: str | None
    filter: str | None

    def pick(self, flag: str, names: list[str]) -> str:
        """The one name that is meant: the only one there is, or the one that was chosen.

        Raises:
            InputError: none, or several; lists them.
        """
        wanted = getattr(self, flag)
        chosen = names if wanted is None else [n for n in names if n in {wanted, *wanted.split(",")}]
        if len(chosen) != 1:
            known = ", ".join(names) or "none: it has no score"
            given = "" if wanted is None else f", not {wanted}"
            raise InputError(f"{self.path}: choose one --{flag} of {known}{given}")
        return chosen[0]

    def refuse(self, *flags: str, why: str) -> None:
        """Refuse flags that say nothing about this file."""
        for flag in flags:
            if getattr(self, flag) is not None:
                raise InputError(f"{self.path}: {why}; leave --{flag} out")


def read_file(path: Path, *, metric: str | None, filter: str | None, task: str | None) -> list[SampleSet]:
    """Read one file, whichever format its content has; ``task`` as its name says.

    Raises:
        InputError, EmptyRunError: as ``read_samples``.
    """
    choice = _Choice(path, metric, filter)
    try:
        if zipfile.is_zipfile(path):
            return [_read_inspect(choice, *_open_archive(path))]
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist; give a file of samples") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text: {error}; expected {_KNOWN}") from error
    if not text.strip():
        raise EmptyRunError(f"{path} is empty; let the evaluation finish first")
    start = text[: len(text) - len(text.lstrip())].count("\n") + 1
    with suppress(ValueError):
        document = _parse(f"{path}, line {start}", text)
        if isinstance(document, dict) and {"eval", "status"} <= document.keys():
            return [_read_inspect(choice, document, document.get("samples") or [])]
    rows = list(_read_lines(path, text))
    first = rows[0][1]
    if "doc_id" in first:
        return [_read_lm_eval(choice, rows, task)]
    if "item_id" in first:
        return _read_plain(choice, rows, task)
    raise InputError(f"{path} is none of the known formats: {_KNOWN}")


def _read_lines(path: Path, text: str) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = _parse(f"{path}, line {number}", line)
        except ValueError as error:
            raise InputError(f"{path}, line {number} is no JSON ({error}); is the file cut short?") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number} is no JSON object; expected {_KNOWN}")
        _check_names(f"{path}, line {number}", *row, *(row.get(name) for name in _NAMES))
        yield number, row


def _parse(place: str, text: str | bytes) -> Any:
    """JSON of bounded depth.

    Args:
        place: file and line, for the error.
        text: one document.

    Raises:
        InputError: nested deeper than ``_DEPTH_MAX``.
        ValueError: no JSON.
    """
    try:
        document = json.loads(text)
    except RecursionError:
        document, level = None, _DEPTH_MAX + 1
    else:
        level, nodes = 0, [document]
        while level <= _DEPTH_MAX and (nodes := [n for n in nodes if isinstance(n, dict | list)]):
            nodes = [child for n in nodes for child in (n.values() if isinstance(n, dict) else n)]
            level += 1
    if level > _DEPTH_MAX:
        raise InputError(f"{place}: nested deeper than {_DEPTH_MAX} levels; leave out what is no answer")
    return document


def _check_names(place: str, *names: Any) -> None:
    """Names are shown, and half of a surrogate pair, which JSON can spell, is nothing that can be.

    Raises:
        InputError: there is one.
    """
    try:
        json.dumps(names, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{place}: a name holds a lone surrogate, which is no text; write it as UTF-8") from error


def _read_lm_eval(choice: _Choice, rows: list[tuple[int, Row]], task: str | None) -> SampleSet:
    """Lines of lm-eval: one for each document and filter, with every metric as a field of its own."""
    for number, row in rows:
        if "doc_id" not in row:
            raise InputError(f"{choice.path}, line {number} has no doc_id; do not mix files of different formats")
    wanted = choice.pick("filter", list(dict.fromkeys(str(row.get("filter", "none")) for _, row in rows)))
    own = [(number, row) for number, row in rows if str(row.get("filter", "none")) == wanted]
    names = dict.fromkeys(name for _, row in own for name in row.get("metrics") or _guess_metrics(row))
    metric = choice.pick("metric", list(names))
    samples = tuple(
        Sample(
            item_id=str(row["doc_id"]),
            repeat=0,
            score=_to_score(choice.path, f"line {number}", metric, row.get(metric)),
            asked=_identify_lm_eval(row),
            parsed=_was_parsed(row, wanted),
            n_choices=_count_choices(row),
        )
        for number, row in own
    )
    return SampleSet(source=choice.path, format="lm-eval", task=task, samples=samples)


def _guess_metrics(row: Row) -> list[str]:
    return [k for k, v in row.items() if k not in _LM_EVAL_FIELDS and isinstance(v, int | float)]


def _identify_lm_eval(row: Row) -> dict[str, str]:
    """Hashes that lm-eval wrote; of files before 0.4.3, which have none, those of the same fields."""
    asked = {kind: str(row[f"{kind}_hash"]) for kind in ("doc", "prompt", "target") if row.get(f"{kind}_hash")}
    if not asked:
        asked = {kind: _digest(row[kind]) for kind in ("doc", "target", "arguments") if kind in row}
    return {{"doc": "document", "arguments": "prompt"}.get(kind, kind): text for kind, text in asked.items()}


def _requests(row: Row) -> list[list[Any]]:
    """Arguments of each request of a document: a list of lists, or a dict of dicts since lm-eval 0.4.3."""
    arguments = row.get("arguments") or []
    entries = list(arguments.values()) if isinstance(arguments, dict) else list(arguments)
    return [list(e.values()) if isinstance(e, dict) else list(e) for e in entries if isinstance(e, dict | list)]


def _count_choices(row: Row) -> int | None:
    """Options of a multiple-choice document: requests that score a text; those without a context are its prior."""
    requests = [r for r in _requests(row) if len(r) > 1]
    scored = [r for r in requests if isinstance(r[1], str) and r[0] != ""]
    return len(scored) if len(scored) > 1 else None


def _was_parsed(row: Row, filter: str) -> bool | None:
    if _count_choices(row) is not None:
        return True
    if filter == "none" or "filtered_resps" not in row:
        return None
    return not any(str(answer) in _NOT_MATCHED for answer in row["filtered_resps"])


def _open_archive(path: Path) -> tuple[Row, list[Row]]:
    """Header and samples of an .eval file.

    Raises:
        InputError: damaged, without a header, or compressed in a way that this Python does not read.
    """
    with suppress(ImportError):
        importlib.import_module("zipfile_zstd")  # comes with inspect_ai, teaches Python below 3.14 to read its logs
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if "header.json" not in names:
                raise InputError(f"{path} has no header.json: no inspect_ai log, or one that is not complete")
            header = _parse(f"{path}, header.json", archive.read("header.json"))
            samples = [n for n in names if _INSPECT_SAMPLE.fullmatch(n)]
            return header, [_parse(f"{path}, {n}", archive.read(n)) for n in samples]
    except NotImplementedError as error:
        raise InputError(
            f"{path} is compressed with zstd: pip install zipfile-zstd, or `inspect log convert --to json {path}`"
        ) from error
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise InputError(f"{path} is a damaged archive: {error}; copy it again") from error


def _read_inspect(choice: _Choice, header: Row, samples: list[Row]) -> SampleSet:
    choice.refuse("filter", why="inspect_ai logs have no filters")
    status, task = header.get("status"), (header.get("eval") or {}).get("task")
    _check_names(f"{choice.path}, header", status, task)
    if status != "success":
        raise InputError(
            f"{choice.path}: status {status}, the log is not complete; finish it with `inspect eval-retry`"
        )
    try:
        named = [(f"sample {s['id']}, epoch {s['epoch']}", s, _inspect_scores(s)) for s in samples]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{choice.path}: a sample has no {error}; expected an inspect_ai log") from error
    for number, (_, sample, scores) in enumerate(named, start=1):
        _check_names(f"{choice.path}, sample {number} of the log", sample["id"], *scores)
    names = list(dict.fromkeys(name for *_, scores in named for name in scores))
    metric = choice.pick("metric", names) if names else ""
    return SampleSet(
        source=choice.path,
        format="inspect_ai",
        task=task,
        samples=tuple(_inspect_sample(choice.path, where, s, scores.get(metric), metric) for where, s, scores in named),
    )


def _inspect_scores(sample: Row) -> dict[str, Row]:
    """Scores of a sample by name; a score of several values gives ``scorer/key`` for each."""
    found: dict[str, Row] = {}
    for name, score in (sample.get("scores") or {}).items():
        value = score["value"]
        parts = {f"{name}/{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
        found |= {part: {**score, "value": v} for part, v in parts.items()}
    return found


def _inspect_sample(path: Path, where: str, sample: Row, score: Row | None, metric: str) -> Sample:
    output = sample.get("output") or {}
    usage = output.get("usage") or {}
    stops = [c.get("stop_reason") for c in output.get("choices") or []]
    capped = bool(sample.get("limit")) or any(stop in _INSPECT_CAPS for stop in stops)
    answer, value = (score or {}).get("answer"), (score or {}).get("value")
    return Sample(
        item_id=str(sample["id"]),
        repeat=int(sample["epoch"]),
        score=None if score is None or sample.get("error") else _to_score(path, where, metric, value),
        asked=_identify_inspect(sample),
        n_tokens=usage.get("output_tokens"),
        capped=capped if stops or capped else None,
        parsed=None if answer is None and value != "N" else value != "N" and answer != "",
        n_choices=len(sample.get("choices") or []) or None,
    )


def _identify_inspect(sample: Row) -> dict[str, str]:
    """Input without the ids of its messages, which are drawn anew at every run."""
    asked = sample.get("input")
    if isinstance(asked, list):
        asked = [[m.get("role"), m.get("content")] if isinstance(m, dict) else m for m in asked]
    fields = {"prompt": asked, "options": sample.get("choices"), "target": sample.get("target")}
    return {kind: _digest(value) for kind, value in fields.items() if value is not None}


class _PlainRow(BaseModel):
    """A line of plain JSONL; fields that say something else are passed over."""

    model_config = ConfigDict(extra="ignore")

    item_id: str | int
    repeat: int = Field(default=0, ge=0)
    correct: bool | float | None
    n_tokens: int | None = Field(default=None, ge=0)
    capped: bool | None = None
    parse_reason: str | None = None
    target: Any = None
    prompt_hash: str | None = None
    n_choices: int | None = Field(default=None, ge=2)
    task: str | None = None


def _read_plain(choice: _Choice, rows: list[tuple[int, Row]], task: str | None) -> list[SampleSet]:
    choice.refuse("metric", "filter", why="plain JSONL has one score, `correct`")
    by_task: dict[str | None, list[Sample]] = {}
    for number, row in rows:
        try:
            line = _PlainRow.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"][:1])
            raise InputError(f"{choice.path}, line {number}: {where}: {first['msg']}") from error
        asked = {"target": row.get("target"), "prompt": row.get("prompt_hash")}
        sample = Sample(
            item_id=str(line.item_id),
            repeat=line.repeat,
            score=_to_score(choice.path, f"line {number}", "correct", line.correct),
            asked={kind: _digest(value) for kind, value in asked.items() if value is not None},
            n_tokens=line.n_tokens,
            capped=line.capped,
            parsed=_was_answered(row, line.parse_reason),
            n_choices=line.n_choices,
        )
        by_task.setdefault(line.task or task, []).append(sample)
    return [
        SampleSet(source=choice.path, format="JSONL", task=name, samples=tuple(own)) for name, own in by_task.items()
    ]


def _was_answered(row: Row, parse_reason: str | None) -> bool | None:
    """As ``parse_reason`` says; without one, an ``answer`` that is there and empty is none."""
    if parse_reason is not None:
        return parse_reason == "ok"
    return False if "answer" in row and row["answer"] in (None, "") else None


def _to_score(path: Path, where: str, metric: str, value: Any) -> float | None:
    """A score as a fraction; None and NaN, which inspect_ai writes for what was not scored, are no score.

    Raises:
        InputError: no number of 0 … 1, so that a difference of two would be no loss of correct answers.
    """
    if isinstance(value, str):
        value = _INSPECT_WORDS.get(value.lower(), value)
        with suppress(ValueError):
            value = float(value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool | int | float) and 0.0 <= value <= 1.0:
        return float(value)
    raise InputError(f"{path}, {where}: {metric} is no score of 0 to 1; choose another metric")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
