"""Letters read out of generated text: the forms that models write, and the ones that only look like an answer."""

from __future__ import annotations

import pytest

from driftgate.evals.tasks.extraction import ParseReason, Reading, read_letter

READABLE = {
    "Answer: C": "C",
    "Some steps.\n\nAnswer: B\n": "B",
    "**Answer:** C": "C",
    "**Answer: C**": "C",
    "ANSWER: $C$": "C",
    "Answer: $\\boxed{C}$": "C",
    "Answer: \\(C\\)": "C",
    "Answer: `D`": "D",
    "Answer: 'D'": "D",
    "Answer: (C)": "C",
    "Answer: [B]": "B",
    "answer: c": "C",
    "answer:C.": "C",
    "Answer: C) 5 m/s": "C",
    "Answer: C. Because 2 + 2 = 4": "C",
    "Answer: A because the others are wrong": "A",
    "Answer: A, since B is wrong": "A",
    "Answer: C, as A and B are too small": "C",
    "Answer：D": "D",
    "Answer:\n\nC": "C",
    "Answer - B": "B",
    "Answer choice: B": "B",
    "Final answer: option D": "D",
    "The answer is (C).": "C",
    "The correct answer is **B**.": "B",
    "The correct option is A.": "A",
    "The answer is: B": "B",
    "The answer must be D, I think": "D",
    "so the best choice is \\textbf{(B)}": "B",
    "\\boxed{C}": "C",
    "\\boxed{\\text{C}}": "C",
    "$$\\boxed{\\mathbf{(C)}}$$": "C",
    "\\boxed{C) 5 m/s}": "C",
    "Answer: A\nWait, no.\nAnswer: C": "C",
    "Answer: A ... \\boxed{D}": "D",
    "\\boxed{42} so Answer: B": "B",
    "Answer: C\n\nNote: (A) and (B) are far off": "C",
    "Answer: C\nThe answer: this was found by hand": "C",
    "<think>maybe Answer: A</think>Answer: C": "C",
    "<think>Answer: A</think>\n\n<think>Answer: B</think>\n**Answer:** D": "D",
    "it may be Answer: A</think>\nAnswer: C": "C",
    "(C)": "C",
    "C": "C",
    "**C**": "C",
    "C\n\nbecause of the sign": "C",
    "(B) 5 m/s": "B",
    "It must be (B).": "B",
    "Therefore (D) is correct": "D",
    "(A) is wrong.\nSo it is (B).": "B",
    "Answer: A <|im_end|>": "A",
    "Answer: A (arsenic)": "A",
    "Answer: B 5 m/s": "B",
}

UNREADABLE = {
    "": "none",
    "Answer: Arsenic": "none",
    "Answer: a base": "none",
    "Answer: A base": "none",
    "The answer is a compound of carbon": "none",
    "Answer: AB": "none",
    "Answer: E": "none",
    "Answer: D-glucose": "none",
    "Answer: C-14": "none",
    "Answer: B12": "none",
    "Answer: C=O": "none",
    "Answer: D'Alembert": "none",
    "Answer: not A": "none",
    "Answer: $LETTER": "none",
    "I cannot tell.": "none",
    "\\boxed{3.2}": "none",
    "carbon (C) is lighter than boron by far": "none",
    "Dalton weighed it": "none",
    "<think>Answer: A</think>": "none",
    "<think>Answer: A</think>Answer: Arsenic": "none",
    "Answer: A or B": "ambiguous",
    "Answer: either A or B": "ambiguous",
    "Answer: A and B": "ambiguous",
    "Answer: A, B, or C": "ambiguous",
    "Answer: **A** / **B**": "ambiguous",
    "Answer: B (or possibly D)": "ambiguous",
    "Answer: A/B/C/D": "ambiguous",
    "\\boxed{A, B}": "ambiguous",
    "\\boxed{A \\text{ and } B}": "ambiguous",
    "Answer: C\nOn reflection, answer: A or D": "ambiguous",
    "It is (A) or (B).": "ambiguous",
    "<think>Answer: A": "truncated",
    "Answer: B\n<think>hm, Answer: A": "truncated",
    "<think>one</think><think>Answer: C": "truncated",
}


def test_row_16_the_table_is_long_enough():
    assert len(READABLE) + len(UNREADABLE) >= 25
    assert set(UNREADABLE.values()) == set(ParseReason) - {"ok", "nonfinite"}


@pytest.mark.parametrize("text", list(READABLE))
def test_row_16_a_letter_is_read(text):
    assert read_letter(text) == Reading(READABLE[text], ParseReason.OK)


@pytest.mark.parametrize("text", list(UNREADABLE))
def test_row_16_without_a_letter_there_is_a_reason(text):
    assert read_letter(text) == Reading(None, ParseReason(UNREADABLE[text]))


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: A", None),  # may go on as "Arsenic"
        ("Answer: A or", None),
        ("so far (B)", None),
        ("C", None),
        ("thinking of carbon", None),
        ("", None),
        ("Answer: A\nMore", "A"),
        ("Answer: (A)", "A"),
        ("\\boxed{A}", "A"),
    ],
)
def test_row_16_an_answer_that_was_cut_off_counts_only_where_it_is_sure(text, letter):
    expected = Reading(letter, ParseReason.OK) if letter else Reading(None, ParseReason.TRUNCATED)
    assert read_letter(text, capped=True) == expected


def test_row_16_a_template_that_opened_the_thinking_is_not_read_as_an_answer():
    assert read_letter("Answer: A", thinking=True) == Reading(None, ParseReason.TRUNCATED)
    assert read_letter("Answer: A</think>Answer: B", thinking=True) == Reading("B", ParseReason.OK)
    assert read_letter("Answer: A</think>no idea", thinking=True) == Reading(None, ParseReason.NONE)


def test_a_long_text_takes_no_long_time():
    """Statements are found in one pass: no pattern tries the same characters in many ways."""
    for text in ("answer " * 20_000, "(" * 50_000, "Answer: " + " " * 50_000, "\\boxed{" * 10_000, "<think>" * 20_000):
        assert read_letter(text).letter is None
