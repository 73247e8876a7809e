"""Text of the scratchpad items: a question with four choices, the running state up to the answer, the answer.

An item is a pure function of ``(seed, index, length)``, drawn from ``numpy.random.Philox.random_raw`` as in streams.py,
and plain ASCII, so that a byte tokenizer makes one token of each character::

    Q: a3+2 b0+1 c5+4; 24 rounds; b? A)4 B)7 C)1 D)9     prompt: start and step of each register, what is asked
    24:a5b1c9                                            scratchpad: every round adds each step, modulo 10
    ...
    01:a1b4c1
    =b4A                                                 the register that was asked for, and the choice it is
    Answer: A                                            gold

The trained checkpoints write the scratchpad themselves, then the answer, then ``<eos>``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["LETTERS", "LONGEST", "SHORTEST", "ScratchpadItem", "make_item"]

LETTERS = "ABCD"
REGISTERS = "abcdefgh"
MOST_ROUNDS = 99
MODULUS = 10
LARGEST_STEP = 5
TAIL = len("=b4A\nAnswer: A\n")
SHORTEST, LONGEST = 25, 2000  # tokens of the completion


@dataclass(frozen=True)
class ScratchpadItem:
    """One question.

    Attributes:
        prompt: the question with its choices, ending in a line break; ``<bos>`` goes in front.
        scratchpad: what a perfect model writes before the answer, ending in a line break.
        gold: letter of the right choice, ``A`` to ``D``.
        value: the right value, a digit.
        n_rounds: lines of running state.
    """

    prompt: str
    scratchpad: str
    gold: str
    value: int
    n_rounds: int

    @property
    def completion(self) -> str:
        """What a perfect model generates after the prompt, without ``<eos>``."""
        return f"{self.scratchpad}Answer: {self.gold}\n"


def _line(number: int, values: list[int]) -> str:
    return f"{number:02d}:" + "".join(f"{name}{value}" for name, value in zip(REGISTERS, values, strict=False)) + "\n"


def make_item(seed: int, index: int, *, length: int) -> ScratchpadItem:
    """The item with this index, with a completion of about ``length`` tokens (within one line of running state).

    Args:
        seed: non-negative, below 2**64.
        index: non-negative.
        length: tokens of scratchpad and answer, SHORTEST to LONGEST.

    Raises:
        ValueError: a length out of range.
    """
    if not SHORTEST <= length <= LONGEST:
        raise ValueError(f"length: expected {SHORTEST} to {LONGEST} tokens, got {length}")
    raw = np.random.Philox(key=[seed, index]).random_raw(64)
    uniforms = iter((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def below(n: int) -> int:
        return int(next(uniforms) * n)

    room = length - TAIL
    sizes = range(2, len(REGISTERS) + 1)
    fewest = next((n for n in sizes if (4 + 2 * n) * MOST_ROUNDS >= room), sizes[-1])
    most = max(n for n in sizes if 4 + 2 * n <= max(room, 8))
    n_registers = fewest + below(most - fewest + 1)
    n_rounds = min(max(round(room / (4 + 2 * n_registers)), 1), MOST_ROUNDS)
    start = [below(MODULUS) for _ in range(n_registers)]
    step = [1 + below(LARGEST_STEP) for _ in range(n_registers)]
    asked = below(n_registers)
    lines, values = [], start
    for number in range(n_rounds, 0, -1):
        values = [(value + add) % MODULUS for value, add in zip(values, step, strict=True)]
        lines.append(_line(number, values))
    value = values[asked]
    others = [digit for digit in range(MODULUS) if digit != value]
    choices = [others.pop(below(len(others))) for _ in range(len(LETTERS) - 1)]
    place = below(len(LETTERS))
    choices.insert(place, value)
    gold, name = LETTERS[place], REGISTERS[asked]
    registers = " ".join(f"{n}{a}+{s}" for n, a, s in zip(REGISTERS, start, step, strict=False))
    offered = " ".join(f"{letter}){choice}" for letter, choice in zip(LETTERS, choices, strict=True))
    return ScratchpadItem(
        prompt=f"Q: {registers}; {n_rounds:02d} rounds; {name}? {offered}\n",
        scratchpad="".join(lines) + f"={name}{value}{gold}\n",
        gold=gold,
        value=value,
        n_rounds=n_rounds,
    )
