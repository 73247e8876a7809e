"""How a four-choice question is put: wordings by name, the chat template, the first token, the tokens of the letters.

| name | whose wording |
| --- | --- |
| simple-evals | github.com/openai/simple-evals, common.py: QUERY_TEMPLATE_MULTICHOICE |
| lm-eval | EleutherAI/lm-evaluation-harness: gpqa zeroshot for scored choices, cot_zeroshot for generated answers |
| short | of this project |

Notable: lm-eval strips and rewrites the choices before it asks; here cells stay as they are.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from driftgate.errors import InputError, unknown_name
from driftgate.evals.tasks.item_task import Mode
from driftgate.evals.tasks.question_file import LETTERS

__all__ = [
    "WORDINGS",
    "LetterTokens",
    "Rendered",
    "Wording",
    "encode",
    "find_letters",
    "find_wording",
    "own_bos",
    "render",
]

_SIMPLE_EVALS = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n\n"
    "{question}\n\nA) {A}\nB) {B}\nC) {C}\nD) {D}"
)
_LM_EVAL = "What is the correct answer to this question:{question}\nChoices:\n(A) {A}\n(B) {B}\n(C) {C}\n(D) {D}\n"
_SHORT = "{question}\nA) {A}\nB) {B}\nC) {C}\nD) {D}\nAnswer:"


@dataclass(frozen=True, kw_only=True)
class Wording:
    """How a question is put.

    Attributes:
        name: on the command line.
        scored, generated: templates with {question} and {A} to {D}, for the two modes.
        lead: what stands between the prompt and the scored letter.
        chat_lead: the same at the beginning of an assistant's turn.
    """

    name: str
    scored: str
    generated: str
    lead: str
    chat_lead: str

    def fill(self, question: str, choices: Sequence[str], *, mode: Mode) -> str:
        """The prompt in plain text, choices in the order given."""
        template = self.scored if mode == "loglikelihood" else self.generated
        return template.format(question=question, **dict(zip(LETTERS, choices, strict=True)))


WORDINGS = {
    wording.name: wording
    for wording in (
        Wording(
            name="simple-evals",
            scored=_SIMPLE_EVALS,
            generated=_SIMPLE_EVALS,
            lead="\n\nAnswer: ",
            chat_lead="Answer: ",
        ),
        Wording(
            name="lm-eval",
            scored=_LM_EVAL + "Answer:",
            generated=_LM_EVAL + "Let's think step by step: ",
            lead=" (",
            chat_lead="(",
        ),
        Wording(name="short", scored=_SHORT, generated=_SHORT, lead=" ", chat_lead=""),
    )
}


def find_wording(name: str) -> Wording:
    """The wording with this name; an unknown one raises UsageError with the nearest names."""
    if name not in WORDINGS:
        raise unknown_name("wording", name, WORDINGS)
    return WORDINGS[name]


@dataclass(frozen=True)
class Rendered:
    """A prompt as the model reads it.

    Attributes:
        text: chat template applied where there is one.
        chat: there was one.
        thinking: the template has opened ``<think>``, so the model begins inside it.
    """

    text: str
    chat: bool
    thinking: bool


def render(tokenizer: Any, content: str) -> Rendered:
    """One user turn through the tokenizer's chat template, or the text itself.

    Raises:
        InputError: the template does not take a single user turn.
    """
    if not getattr(tokenizer, "chat_template", None):
        return Rendered(content, chat=False, thinking=False)
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # templates are programs and raise what they like
        line = textwrap.shorten(str(error), 200, placeholder=" ...") or type(error).__name__
        raise InputError(f"the chat template of the tokenizer cannot be used: {line}; mend it or remove it") from error
    return Rendered(text, chat=True, thinking=text.rfind("<think>") > text.rfind("</think>"))


def encode(tokenizer: Any, text: str, *, bos: int | None) -> tuple[int, ...]:
    """Token ids of a text, with exactly one first token ``bos``, or none where it is None.

    A chat template may write that token itself, and so may the tokenizer: neither adds a second one here.
    """
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    if bos is None:
        return ids
    start = next((i for i, token in enumerate(ids) if token != bos), len(ids))
    return (bos, *ids[start:])


def own_bos(tokenizer: Any) -> int | None:
    """The token with which the tokenizer itself begins a text, None where it adds none."""
    first = tokenizer("a")["input_ids"][:1]
    return tokenizer.bos_token_id if first == [tokenizer.bos_token_id] else None


@dataclass(frozen=True)
class LetterTokens:
    """Tokens of A, B, C, D as they follow a prompt, and the tokens before them."""

    prompt: tuple[int, ...]
    letters: tuple[int, ...]


def find_letters(tokenizer: Any, text: str, *, bos: int | None, vocab_size: int) -> LetterTokens:
    """Tokenize prompt and letter together: what is scored is what the tokenizer writes, " A", "A" or "(A".

    Raises:
        InputError: a letter is not one token of its own there.
    """
    whole = [encode(tokenizer, text + letter, bos=bos) for letter in LETTERS]
    prompt, letters = whole[0][:-1], tuple(ids[-1] for ids in whole)
    for letter, ids in zip(LETTERS, whole, strict=True):
        if not prompt or ids[:-1] != prompt or letters.count(ids[-1]) > 1 or ids[-1] >= vocab_size:
            raise InputError(
                f"the letter {letter} is not one token after {text[-12:]!r} with this tokenizer; "
                "use another --prompt, or let the model generate (mode: generate)"
            )
    return LetterTokens(prompt, letters)
