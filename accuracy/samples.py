"""Scored answers of any engine, two files of them, as one items frame: what ``driftgate gate --samples`` decides on.

Notable: nothing is assumed. Items are paired by id and repeat, and a pair whose question differs (its document, prompt,
options or target, as far as both files say) is an error, as is an item that one file alone has, or one file given as
both sides. What a file does not record (caps, whether an answer could be read) is unknown, not zero. No text of a
question is kept.
"""

from __future__ import annotations

import filecmp
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from driftgate.accuracy.items import BASELINE
from driftgate.errors import EmptyRunError, InputError

__all__ = ["CANDIDATE", "Sample", "SampleSet", "make_items", "pair_sets", "read_samples", "refuse_same_files"]

CANDIDATE = "candidate"
"""What the second file's answers are called where a plan's name would stand."""
_TASK_FILE = re.compile(r"samples_(?P<task>.+)_\d{4}-\d{2}-\d{2}T[\d.-]+\.jsonl")
"""How lm-eval names its files."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One scored answer.

    Attributes:
        item_id, repeat: which answer.
        score: 0 … 1; None where it was not scored.
        asked: what identifies the question, by kind (``target``, ``prompt`` …): texts or hashes, only ever compared.
        n_tokens, capped, parsed: tokens of the answer, whether it ended at a cap, whether it could be read; None where
            the file does not say.
        n_choices: options to choose from; None for free answers, or where the file does not say.
    """

    item_id: str
    repeat: int
    score: float | None
    asked: Mapping[str, str] = field(default_factory=dict)
    n_tokens: int | None = None
    capped: bool | None = None
    parsed: bool | None = None
    n_choices: int | None = None


@dataclass(frozen=True, kw_only=True)
class SampleSet:
    """All answers of one file to one task.

    Attributes:
        source: the file.
        format: how it is written, in words.
        task: as the file says, None where it does not.
        samples: of the file, each (item_id, repeat) once, all scored, none right that could not be read.
    """

    source: Path
    format: str
    task: str | None
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        if not self.samples:
            raise EmptyRunError(f"{self.source} holds zero samples; let the evaluation finish first")
        (key, times), *_ = Counter((s.item_id, s.repeat) for s in self.samples).most_common(1)
        if times > 1:
            raise InputError(
                f"{self.source}: item {key[0]}, repeat {key[1]} is there {times} times; "
                "number the repeats, or remove what a resumed evaluation wrote twice"
            )
        missing = [s.item_id for s in self.samples if s.score is None]
        if len(missing) == len(self.samples):
            raise EmptyRunError(f"{self.source}: none of {len(missing)} samples was scored; let the evaluation finish")
        if missing:
            raise InputError(
                f"{self.source}: {len(missing)} of {len(self.samples)} samples have no score, the first is item "
                f"{missing[0]}; evaluate those again"
            )
        for s in self.samples:
            if s.parsed is False and s.score:
                raise InputError(
                    f"{self.source}: item {s.item_id}, repeat {s.repeat} has no answer that could be read, and yet the "
                    f"score {s.score:g}; correct the one or the other"
                )

    @property
    def records_caps(self) -> bool:
        """Whether the file says of every answer if it ended at a cap."""
        return all(s.capped is not None for s in self.samples)

    @property
    def records_parsing(self) -> bool:
        """Whether the file says of every answer if it could be read."""
        return all(s.parsed is not None for s in self.samples)

    @property
    def chance(self) -> float:
        """Fraction that guessing gets right, the greatest 1 / options of the samples that say it; 0 where none does."""
        options = [s.n_choices for s in self.samples if s.n_choices]
        return 1 / min(options) if options else 0.0

    @property
    def repeats(self) -> tuple[int, ...]:
        """Answers to each item, ascending."""
        return tuple(sorted(Counter(s.item_id for s in self.samples).values()))


def read_samples(path: Path, *, metric: str | None = None, filter: str | None = None) -> list[SampleSet]:
    """Read a file of samples, or a folder that lm-eval wrote, one set for each task.

    Args:
        path: lm-eval's ``--log_samples`` JSONL or its ``--output_path``, an inspect_ai log (.eval or .json), or plain
            JSONL with item_id, correct and, where known, repeat, n_tokens, capped, parse_reason, target, n_choices and
            task. The content tells which.
        metric, filter: which score, where a file has several; several names may be given with commas between, for
            folders whose tasks differ.

    Raises:
        InputError: missing, unreadable, cut short, of none of these formats, or the choice of a score is open; one
            line.
        EmptyRunError: nothing in it was scored.
    """
    from driftgate.accuracy.sample_formats import read_file

    def read(file: Path, task: str | None = None) -> list[SampleSet]:
        named = _TASK_FILE.fullmatch(file.name)
        return read_file(file, metric=metric, filter=filter, task=named["task"] if named else task)

    if not path.is_dir():
        return read(path)
    files = sorted(path.rglob("samples_*.jsonl"))
    if not files:
        raise InputError(f"{path} holds no samples_*.jsonl; run lm-eval with --log_samples, or give a file")
    sets = [found for file in files for found in read(file, file.stem.removeprefix("samples_"))]
    (task, times), *_ = Counter(s.task for s in sets).most_common(1)
    if times > 1:
        raise InputError(f"{path} holds {times} files of task {task}; give a folder or file of one evaluation")
    return sets


def pair_sets(base: list[SampleSet], candidate: list[SampleSet]) -> dict[str, tuple[SampleSet, SampleSet]]:
    """The two sides of each task.

    Raises:
        InputError: a task that one side alone has.
    """
    if len(base) == len(candidate) == 1 and None in (base[0].task, candidate[0].task):
        return {base[0].task or candidate[0].task or "samples": (base[0], candidate[0])}
    sides = [{s.task or "samples": s for s in sets} for sets in (base, candidate)]
    for own, other, sets in ((sides[0], sides[1], candidate), (sides[1], sides[0], base)):
        for task in own:
            if task not in other:
                raise InputError(
                    f"task {task} of {own[task].source} is not in {sets[0].source} (it has {', '.join(other)}); "
                    "compare evaluations of the same tasks"
                )
    return {task: (own, sides[1][task]) for task, own in sides[0].items()}


def refuse_same_files(pairs: Mapping[str, tuple[SampleSet, SampleSet]]) -> None:
    """Refuse one evaluation given as both sides: it loses nothing against itself, and that says nothing.

    Args:
        pairs: as ``pair_sets`` gives them.

    Raises:
        InputError: the files of every task are one file, or hold equal bytes.
    """
    sources = list(dict.fromkeys((own.source, other.source) for own, other in pairs.values()))
    try:
        same = all(filecmp.cmp(own, other, shallow=False) for own, other in sources)
    except OSError as error:
        raise InputError(f"cannot read {error.filename} again: {error.strerror}; leave both files in place") from error
    if same:
        own, other = sources[0]
        raise InputError(
            f"the two files are the same; {own} and {other} hold equal bytes, give the candidate's own answers, or let "
            "each line say whose it is"
        )


def make_items(task: str, base: SampleSet, candidate: SampleSet) -> pd.DataFrame:
    """Items frame of two sides, ``baseline`` and ``candidate``; what a side does not record reads as harmless.

    Raises:
        InputError: an item that one side alone has, or that is another question there.
    """
    sides = [{(s.item_id, s.repeat): s for s in sets.samples} for sets in (base, candidate)]
    _check_same_questions(base, candidate, *sides)
    columns = ("plan", "task", "item_id", "repeat", "answer", "gold", "correct", "n_tokens", "capped", "parse_reason")
    rows = [
        (plan, task, s.item_id, s.repeat, None, None, s.score, s.n_tokens, bool(s.capped),
         "none" if s.parsed is False else "ok")
        for plan, side in zip((BASELINE, CANDIDATE), sides, strict=True)
        for s in side.values()
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


def _check_same_questions(
    base: SampleSet,
    candidate: SampleSet,
    own: Mapping[tuple[str, int], Sample],
    other: Mapping[tuple[str, int], Sample],
) -> None:
    for sets, alone, there in (
        (base, own.keys() - other.keys(), candidate),
        (candidate, other.keys() - own.keys(), base),
    ):
        if alone:
            item, repeat = min(alone)
            raise InputError(
                f"{len(alone)} answers of {sets.source} are not in {there.source}, the first is item {item}, repeat "
                f"{repeat}; answer the same items on both sides"
            )
    for key, sample in own.items():
        kinds = _differing(sample.asked, other[key].asked)
        if kinds:
            raise InputError(
                f"item {key[0]} has another {' and '.join(kinds)} in {candidate.source} than in {base.source}: it is "
                "not the same question; use one data set, prompt and seed on both sides"
            )


def _differing(one: Mapping[str, str], two: Mapping[str, str]) -> list[str]:
    return [kind for kind, text in one.items() if kind in two and two[kind] != text]
