"""Four-choice questions from the user's file, a folder or a hub id, read through ``datasets``; every cell verbatim.

| what is given | how it is read |
| --- | --- |
| ``FILE.csv`` | all columns as text, and no word stands for an empty cell: else "10" becomes 10.0 and "NA" null |
| ``FILE.jsonl`` | line by line, each its own JSON object: a table reader turns "10" and dates into other types |
| ``FILE.parquet`` | as stored |
| ``FOLDER`` or ``OWNER/NAME``, then ``[:CONFIG[:SPLIT]]`` | a dataset repository, CSV as above; only an id is fetched |

Two shapes of a row: GPQA's (Question, Correct Answer, Incorrect Answer 1 to 3; never the Pre-Revision columns), and
question, options, answer. Notable: a local file is cached in a temporary folder alone, so that no stale copy is read
and no gated text stays behind.
"""

from __future__ import annotations

import csv
import hashlib
import json
import tempfile
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driftgate.errors import EmptyRunError, InputError

__all__ = ["EQUAL_CHOICES", "LETTERS", "Item", "load_questions", "shipped_questions"]

LETTERS = "ABCD"
EQUAL_CHOICES = "equal_choices"
"""Flag of an item in which two choices read the same: the gold letter may not be the only right one."""

GPQA_CHOICES = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
FORMATS = (".csv", ".jsonl", ".parquet")
EXPECTED = f"expected Question, {', '.join(GPQA_CHOICES)}, or question, options, answer"


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question.

    Attributes:
        item_id: its Record ID or id, else the beginning of the sha256 of the question.
        question: verbatim.
        choices: four, verbatim, in the order of the file (GPQA's shape: the right one first).
        gold: index of the right choice, 0 to 3.
        subdomain, domain: as the file says; empty where it does not.
        flags: ``equal_choices`` or nothing.
    """

    item_id: str
    question: str
    choices: tuple[str, str, str, str]
    gold: int
    subdomain: str = ""
    domain: str = ""
    flags: tuple[str, ...] = ()


def shipped_questions() -> Path:
    """The questions that come with the package; CARD.md beside them says what they are."""
    return Path(__file__).parents[1] / "data" / "questions.jsonl"


def load_questions(data: str | None = None) -> list[Item]:
    """All questions of a file, folder or hub id, in its order.

    Args:
        data: as the table above says; None for the questions that come with the package.

    Raises:
        InputError: missing, not readable, other columns, a cell that is no text, a gold answer outside A to D, or two
            rows with one id.
        EmptyRunError: it holds no question.
    """
    source = str(shipped_questions()) if data is None else data
    items = [_make_item(row, f"{source}, row {number}") for number, row in _read_rows(source)]
    if not items:
        raise EmptyRunError(f"{source} holds no question; give a file with at least one row")
    seen: set[str] = set()
    for item in items:
        if item.item_id in seen:
            raise InputError(
                f"{source}: two rows have the id {item.item_id}; answers are kept by id, so make them differ"
            )
        seen.add(item.item_id)
    return items


def _read_rows(source: str) -> list[tuple[int, dict[str, Any]]]:
    """Number (from 1) and cells of every row."""
    path = Path(source)
    if not source.strip():
        raise InputError(f"--data is empty; give a {', '.join(FORMATS)} file or leave it out")
    if path.is_file() and path.suffix.lower() not in FORMATS:
        raise InputError(f"{source}: questions are read from {', '.join(FORMATS)} files; convert it to one of them")
    if path.is_file() and path.stat().st_size == 0:
        raise InputError(f"{source} is empty; {EXPECTED}")
    if path.is_file():
        return _read_file(path)
    name = source.split(":")[0]
    if Path(name).is_dir():
        return _read_repository(source, local=True)
    is_hub_id = name.count("/") == 1 and not name.startswith((".", "/", "~")) and path.suffix.lower() not in FORMATS
    if not is_hub_id:
        raise InputError(f"{source} does not exist; give a {', '.join(FORMATS)} file or a hub id OWNER/NAME[:CONFIG]")
    return _read_repository(source, local=False)


def _read_file(path: Path) -> list[tuple[int, dict[str, Any]]]:
    options: dict[str, Any] = {"path": path.suffix.lower().removeprefix(".")}
    if options["path"] == "csv":
        options |= _csv_options(_read_header(path))
    elif options["path"] == "jsonl":
        options |= {"path": "text", "encoding": "utf-8-sig"}
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / f"questions{path.suffix.lower()}"  # the user's own name may hold signs of a pattern
        link.symlink_to(path.resolve())
        splits = _load(str(path), data_files={"train": str(link)}, cache_dir=folder, **options)
    rows = [row for split in splits.values() for row in split]
    if options["path"] != "text":
        return list(enumerate(rows, 1))
    lines = [(number, row["text"]) for number, row in enumerate(rows, 1) if row["text"].strip()]
    return [(number, _parse_line(line, f"{path}, line {number}")) for number, line in lines]


def _read_repository(source: str, *, local: bool) -> list[tuple[int, dict[str, Any]]]:
    """Rows of one split of a folder or hub dataset."""
    name, config, split = (*source.split(":", 2), None, None)[:3]
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"path": name, "name": config or None, "cache_dir": folder if local else None}
        splits = _load(source, **options)
        if not splits:
            return []
        chosen = split or next(iter(splits))
        if chosen not in splits or (len(splits) > 1 and not split):
            raise InputError(
                f"{source} has the splits {', '.join(splits)}; name one: {name}:{config or 'CONFIG'}:SPLIT"
            )
        with suppress(_OtherFormatError):  # other formats come with types of their own, which _text judges
            splits = _load(source, **options, **_csv_options(list(splits[chosen].column_names)))
    return list(enumerate(splits[chosen], 1))


class _OtherFormatError(Exception):
    """The data are not CSV."""


def _load(source: str, **options: Any) -> dict[str, Any]:
    """``datasets.load_dataset`` by split, in memory; what it raises as one line.

    Args:
        source: as the user named it.
        options: of ``load_dataset``; with a ``cache_dir`` the data lie on this machine.

    Raises:
        InputError: it could not be loaded.
        _OtherFormatError: options of CSV do not fit.
    """
    import datasets
    import pandas as pd

    with _quiet(datasets), warnings.catch_warnings(action="ignore"):
        warnings.simplefilter("error", pd.errors.ParserWarning)  # a row with more cells than the header has columns
        try:
            return dict(datasets.load_dataset(keep_in_memory=True, **options))
        except Exception as error:  # pandas, pyarrow, fsspec and the hub raise whatever they like
            if "corresponds to no data" in str(error):  # a header alone
                return {}
            if "keep_default_na' key" in str(error):
                raise _OtherFormatError from error
            cause = textwrap.shorten(str(error.__cause__ or error), 300, placeholder=" ...") or type(error).__name__
            if options["cache_dir"] is not None:
                raise InputError(f"{source} cannot be read: {cause}; mend it or write it anew") from error
            offline = " while an *_OFFLINE variable is set" if datasets.config.HF_HUB_OFFLINE else ""
            raise InputError(f"{source} cannot be fetched{offline}: {cause}; give a file, or fetch it once") from error


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """No progress bars and no log lines of ``datasets``: errors are told in one line of our own."""
    level, bars = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(50)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()


def _csv_options(columns: list[str]) -> dict[str, Any]:
    from datasets import Features, Value

    return {
        "features": Features({name: Value("string") for name in columns}),
        "keep_default_na": False,
        "index_col": False,  # else rows that all end in a comma lose their first cell
        "encoding": "utf-8-sig",
    }


def _read_header(path: Path) -> list[str]:
    """Names of the columns of a CSV file, without those that have none."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            header = next(csv.reader(stream), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is no CSV file in UTF-8: {error}; save it as CSV (UTF-8)") from error
    for name in header:
        if name and header.count(name) > 1:
            raise InputError(f"{path}: the column {name} is there twice; keep one of them")
    return [name for name in header if name]


def _parse_line(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is no JSON: {error}; write one JSON object a line") from error
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected a JSON object, got {type(row).__name__}; write one object a line")
    return row


def _make_item(row: Mapping[str, Any], where: str) -> Item:
    """One row of either shape, checked."""
    lower = {str(name).lower(): cell for name, cell in row.items()}
    if "Question" in row and all(name in row for name in GPQA_CHOICES):
        question = _text(row["Question"], f"{where}, Question")
        choices = [_text(row[name], f"{where}, {name}") for name in GPQA_CHOICES]
        gold = 0
    elif all(name in lower for name in ("question", "options", "answer")):
        question = _text(lower["question"], f"{where}, question")
        choices = _read_options(lower["options"], where)
        gold = _read_gold(lower["answer"], where)
    else:
        columns = textwrap.shorten(", ".join(map(str, row)), 200, placeholder=" ...")
        raise InputError(f"{where}: {EXPECTED}; got {columns}")
    given = (row.get("Record ID"), lower.get("id"))
    named = [_text(str(cell), f"{where}, id") for cell in given if cell not in (None, "")]
    return Item(
        item_id=named[0] if named else hashlib.sha256(question.encode()).hexdigest()[:16],
        question=question,
        choices=(choices[0], choices[1], choices[2], choices[3]),
        gold=gold,
        subdomain=str(lower.get("subdomain") or ""),
        domain=str(lower.get("high-level domain") or lower.get("domain") or ""),
        flags=(EQUAL_CHOICES,) if len(set(choices)) < len(choices) else (),
    )


def _text(cell: Any, where: str) -> str:
    """A cell as it stands; a number is no longer what was written, so it is refused."""
    if not isinstance(cell, str):
        kind = "nothing" if cell is None else type(cell).__name__
        raise InputError(f"{where}: expected text, got {kind}; store the cell as text")
    if not cell.strip():
        raise InputError(f"{where} is empty; fill it or leave the row out")
    if any("\ud800" <= character <= "\udfff" for character in cell):
        raise InputError(f"{where} holds half a character (a lone surrogate); mend the text")
    return cell


def _read_options(cell: Any, where: str) -> list[str]:
    """Four choices; a CSV cell holds them as a JSON list."""
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except ValueError:
            cell = None
    if not isinstance(cell, list) or len(cell) != len(LETTERS):
        raise InputError(f"{where}, options: expected a list of {len(LETTERS)} texts")
    return [_text(choice, f"{where}, options") for choice in cell]


def _read_gold(cell: Any, where: str) -> int:
    """A letter or an index; never an index that is written as text, which could be one of the choices."""
    if isinstance(cell, str) and len(cell) == 1 and cell in LETTERS:
        return LETTERS.index(cell)
    if isinstance(cell, int) and not isinstance(cell, bool) and 0 <= cell < len(LETTERS):
        return cell
    raise InputError(f"{where}, answer: expected A to D, or a number 0 to 3, got {cell!r}")
