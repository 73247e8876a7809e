"""Task streams as text that a model reads and writes: one token for each character, for any tokenizer that has them.

Scoring works on this text alone: which events a text holds, what it states about a key, which signs lead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from driftgate.errors import InputError
from driftgate.evals.tasks.item_task import ModelText
from driftgate.evals.tasks.streams import BOS, DIGITS, FILLER, GROUPS, PAIR_KEYS, QUESTION, SIGNS

__all__ = ["ALPHABET", "NOTES", "OTHER", "StreamText", "count_events", "last_statement", "leading_signs"]

OTHER = "\0"
"""Stands for a token that is no character of a stream."""
NOTES = "".join(chr(c) for part in ((QUESTION,), SIGNS, DIGITS, GROUPS, PAIR_KEYS) for c in part)
"""Characters of questions and their answers."""
ALPHABET = NOTES + "".join(map(chr, FILLER))
_SIGNS = "".join(map(chr, SIGNS))
# a question takes the answer behind it with it, which is no event; the '?' of the next question stays
_UNITS = re.compile(rf"\?[A-Za-z][^?]?|([a-z])([{re.escape(_SIGNS)}])")


@dataclass(frozen=True)
class StreamText:
    """Translates between streams and the token ids of a model.

    Attributes:
        to_model: token id of each character of ALPHABET.
        bos_id: token in front of a stream, None for none.
    """

    to_model: dict[str, int]
    bos_id: int | None

    @classmethod
    def of(cls, text: ModelText, *, task: str) -> StreamText:
        """The translation for a model; without a tokenizer, ids are taken for byte values.

        Raises:
            InputError: a character is not one token of its own.
        """
        if text.tokenizer is None:
            to_model = {c: ord(c) for c in ALPHABET}
        else:
            encoded = {c: text.tokenizer.encode(c, add_special_tokens=False) for c in ALPHABET}
            to_model = {c: ids[0] for c, ids in encoded.items() if len(ids) == 1}
        usable = {token for token in to_model.values() if token < text.vocab_size}
        if len(usable) < len(ALPHABET):
            raise InputError(
                f"task {task}: model {text.name} has no token of its own for each of {ALPHABET!r}; take a model with "
                "bytes or single characters among its tokens, or another --task"
            )
        return cls(to_model, text.bos_id)

    def encode(self, stream: Iterable[int]) -> tuple[int, ...]:
        """Token ids of a stream as ``generate_streams`` makes it."""
        front = () if self.bos_id is None else (self.bos_id,)
        tokens: tuple[int, ...] = ()
        for token in stream:
            tokens += front if token == BOS else (self.to_model[chr(token)],)
        return tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """One character for each token, OTHER where a stream has none like it."""
        from_model = {token: c for c, token in self.to_model.items()}
        return "".join(from_model.get(token, OTHER) for token in token_ids)


def count_events(text: str) -> list[tuple[int, str, str]]:
    """Events of a stream's text in order: (index after the event, group letter, sign); questions hold no events."""
    return [(m.end(), m[1], m[2]) for m in _UNITS.finditer(text) if m[1]]


def last_statement(text: str, key: str) -> str | None:
    """Sign that a block of questions and answers gives last for a key, None where it gives none."""
    found = re.findall(rf"\?{re.escape(key)}([{re.escape(_SIGNS)}])", text)
    return found[-1] if found else None


def leading_signs(counts: Sequence[int]) -> tuple[str, int]:
    """Signs with the greatest count, and how far the greatest is ahead of the next: 0 where several lead.

    Args:
        counts: of each sign, in the order of ``SIGNS``.
    """
    ranked = np.sort(counts)[::-1]
    return "".join(s for s, n in zip(_SIGNS, counts, strict=True) if n == ranked[0]), int(ranked[0] - ranked[1])
