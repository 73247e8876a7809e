r"""Reading the letter out of a generated answer, with a reason where there is none.

The last answer statement outside ``<think>…</think>`` counts: ``Answer: C``, ``**Answer:** C``, ``ANSWER: $C$``,
``the answer is (C)``, ``\boxed{C}``. Where there is none, a line that is only the letter, or ``(C)`` at an end of the
last line. A letter counts only as a word of its own: "Answer: Arsenic" is not A, nor is "Answer: a base".

| reason | when |
| --- | --- |
| ok | a letter was read |
| ambiguous | the statement offers several |
| truncated | thinking did not end, or the answer was cut off before a letter was sure |
| none | the model ended without a letter |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["ParseReason", "Reading", "read_letter"]


class ParseReason(StrEnum):
    """Why an answer counts as it does; ``nonfinite``: the logits were not finite."""

    OK = "ok"
    NONE = "none"
    TRUNCATED = "truncated"
    AMBIGUOUS = "ambiguous"
    NONFINITE = "nonfinite"


@dataclass(frozen=True)
class Reading:
    """A letter A to D, or None and why."""

    letter: str | None
    reason: ParseReason


_QUOTES = r"\"'“‘(\[{<_"
_CLOSE = r"[\"'”’)\]}>_]*"
_STATEMENT = re.compile(
    rf"""\b(?:(?i:answer(?:\s++(?:option|choice|letter))?|(?:correct|right|best)\s++(?:option|choice|letter))|boxed)\b
    \s*+(?::|：|=|[-–—]|(?i:is|(?:would|should|must)\s++be)\b)\s*+[:：]?\s*+
    (?i:(?:either|option|choice|letter)\s++)?
    [\s{_QUOTES}]*+(?P<letter>[A-Da-d])(?![\w^=+]|['’]\w|[-/]\w\w)(?P<close>{_CLOSE})""",
    re.VERBOSE,
)
_SECOND = re.compile(
    rf"[ \t{_QUOTES}]*+(?:[,/&|;]|\b(?:or|and)\b)?(?:[ \t]*+\b(?:or|and)\b)?[ \t]*+"
    rf"(?:(?:maybe|possibly|perhaps|option|choice)[ \t]++)?[ \t{_QUOTES}]*+"
    rf"(?P<letter>[A-D])(?![\w-]|['’]\w){_CLOSE}(?=[ \t]*+(?:[.,;:!?/|&\n]|\Z|\bor\b|\band\b))"
)
_OPEN_END = re.compile(r"[ \t]*+(?:[,/&|;]|or\b|and\b)?[ \t]*+\Z")
_ARTICLE = re.compile(r"[ \t]++(?!(?:is|because|since|as|for|with|due|or|and)\b)[A-Za-z]")
_THINK = re.compile(r"(</?think>)")
_WRAPPED = re.compile(r"\\(?:text\w*|math\w*|boldsymbol|bm|operatorname)\s*\{([^{}]*)\}")
_BOXED = re.compile(r"\\f?boxed\s*\{([^{}]*)\}")
_MARKS = re.compile(r"\*+|__|[`$]|\\[()\[\],;! ]")
_ONLY_LETTER = re.compile(rf"[\s{_QUOTES}]*([A-D])[.:]?{_CLOSE}[.:]?\s*")
_IN_BRACKETS = re.compile(r"\(([A-D])\)")
_AT_AN_END = re.compile(r"\s*\([A-D]\)|.*\([A-D]\)(?:[\s.!]*$|\s+is\s+(?:the\s+)?(?:correct|right|best)\b)")


def read_letter(text: str, *, capped: bool = False, thinking: bool = False) -> Reading:
    """The letter that a completion gives as its answer.

    Args:
        text: decoded completion, its last stop token left out.
        capped: it ended because it was as long as allowed.
        thinking: the prompt had opened ``<think>``.
    """
    spoken = _leave_out_thinking(text, thinking)
    if spoken is None:
        return Reading(None, ParseReason.TRUNCATED)
    plain = _plain(spoken)
    statements = [s for s in map(_judge, _STATEMENT.finditer(plain)) if s is not None]
    if statements:
        ended, reading = statements[-1]
        return reading if ended or not capped else Reading(None, ParseReason.TRUNCATED)
    return Reading(None, ParseReason.TRUNCATED) if capped else _read_bare(plain)


def _leave_out_thinking(text: str, thinking: bool) -> str | None:
    """What stands outside ``<think>…</think>``, None where the thinking does not end."""
    spoken: list[str] = []
    for piece in _THINK.split(text):
        if piece == "<think>":
            thinking = True
        elif piece == "</think>":
            if not thinking:  # the template had opened it
                spoken.clear()
            thinking = False
        elif not thinking:
            spoken.append(piece)
    return None if thinking else " ".join(spoken)


def _plain(text: str) -> str:
    r"""Markdown and LaTeX taken off; ``\boxed{C}`` becomes a statement of its own line."""
    for _ in range(4):  # as deep as anyone nests them
        text = _WRAPPED.sub(r"\1", text)
    return _MARKS.sub("", _BOXED.sub(r" boxed: \1\n", _MARKS.sub("", text)))


def _judge(match: re.Match[str]) -> tuple[bool, Reading] | None:
    """Whether a statement ends before the text does, and what it says; None where it names no letter after all.

    "Answer: A" at the very end of a text that was cut off may be the beginning of "Arsenic".
    """
    text, end, letter = match.string, match.end(), match["letter"]
    second = _SECOND.match(text, end)
    if second is not None and second["letter"] != letter.upper():
        return second.end() < len(text), Reading(None, ParseReason.AMBIGUOUS)
    if not match["close"] and (letter == "A" or letter.islower()) and _ARTICLE.match(text, end):
        return None
    return bool(match["close"]) or _OPEN_END.match(text, end) is None, Reading(letter.upper(), ParseReason.OK)


def _read_bare(plain: str) -> Reading:
    """The letter of an answer without a statement."""
    lines = [line for line in plain.splitlines() if line.strip()]
    if lines and _AT_AN_END.match(lines[-1]):
        found = set(_IN_BRACKETS.findall(lines[-1]))
    else:
        found = set([match[1] for match in map(_ONLY_LETTER.fullmatch, lines) if match][-1:])
    if len(found) == 1:
        return Reading(found.pop(), ParseReason.OK)
    return Reading(None, ParseReason.AMBIGUOUS if found else ParseReason.NONE)
