"""Files in GPQA's format with cells that readers are known to change, and small tokenizers of every kind."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

EXPERT = (
    "Feedback", "Validator Revision Suggestion", "Is First Validation", "Post hoc agreement", "Sufficient Expertise?",
    "Understand the question?", "Question Difficulty", "Validator Answered Correctly", "Self-reported time (minutes)",
    "Probability Correct", "Manual Correctness Adjustment", "Expert Validator",
)  # fmt: skip
OTHER = (
    "Feedback", "Validator Answered Correctly", "Explanation", "Self-reported time (minutes)", "Websites visited",
    "Probability Correct", "Manual Correctness Adjustment", "Non-Expert Validator",
)  # fmt: skip
ANSWERS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
COLUMNS = (
    "Pre-Revision Question", *(f"Pre-Revision {name}" for name in ANSWERS), "Pre-Revision Explanation",
    "Self-reported question-writing time (minutes)", "Question", *ANSWERS, "Explanation",
    "Revision Comments (from Question Writer)", "Subdomain", "Writer's Difficulty Estimate", "Extra Revised Question",
    "Extra Revised Explanation", *(f"Extra Revised {name}" for name in ANSWERS), "Non-Expert Validator Accuracy",
    "Majority Non-Expert Vals Incorrect", "Expert Validator Accuracy", "Record ID", "High-level domain",
    "Question Writer", *(f"{name}_EV_{i}" for i in (1, 2) for name in EXPERT),
    *(f"{name}_NEV_{i}" for i in (1, 2, 3) for name in OTHER), "Expert Validator Disagreement Category",
    "Canary String",
)  # fmt: skip
"""As the CSV files of Idavidrein/gpqa name them."""

ODD = (
    ("rec01", 'Which of these\nis "right",\n\nafter all?', ("10", "1e-3", "NA", "[c]")),
    ("rec02", "Braces {A} and $x_1$, a tab\tand  two blanks ", ("007", "null", "nan", " None")),
    ("rec03", "2020-01-01", ("True", "2020-01-01 00:00:00", "-", "10.0")),
    ("rec04", "Naïve Å and 水\u2028here", ("same", "same", "∞", "[c] [title]")),
    ("rec05", "carriage\r\nreturn", ("0x1F", "1_000", "#N/A", "\\frac{1}{2}")),
)
"""Record id, question, choices; the first choice is right."""


def gpqa_row(record: str, question: str, choices: tuple[str, ...], *, domain: str = "Physics") -> dict[str, str]:
    """One row with every column filled; the Pre-Revision cells say something else."""
    row = dict.fromkeys(COLUMNS, "")
    row |= {name: f"before: {name}" for name in COLUMNS if name.startswith("Pre-Revision")}
    row |= {name: "1.0" for name in COLUMNS if "Accuracy" in name or "time" in name}
    row |= dict(zip(ANSWERS, choices, strict=True))
    return row | {"Record ID": record, "Question": question, "Subdomain": "Optics", "High-level domain": domain}


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_gpqa(path: Path, *, n: int | None = None) -> Path:
    """The odd rows in GPQA's CSV layout, or ``n`` plain ones."""
    plain = [(f"rec{i:03d}", f"Question {i}?", (f"{i}", f"{i} a", f"{i} b", f"{i} c")) for i in range(n or 0)]
    return write_csv(path, [gpqa_row(*row) for row in (ODD if n is None else plain)])


BOS, EOS = "<s>", "</s>"
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT_WITH_BOS = "{{ bos_token }}" + CHAT
CHAT_THINKS = CHAT + "{{ '<think>\\n' }}"


def make_tokenizer(*, add_bos: bool = False, chat: str | None = None, merges: tuple[tuple[str, str], ...] = ()) -> Any:
    """A byte-level tokenizer; ``merges`` are pairs of characters that become one token, such as " A"."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pairs = [(a.replace(" ", "Ġ"), b.replace(" ", "Ġ")) for a, b in merges]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in pairs)]
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(t, special=True) for t in (BOS, EOS, "<think>", "</think>")])
    if add_bos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, inner.token_to_id(BOS))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=BOS, eos_token=EOS, chat_template=chat)
