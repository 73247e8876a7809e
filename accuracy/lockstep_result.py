"""What a run in lock step measured, and how the results of its batches become one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from driftgate.accuracy.observers import RecordedInputs, StateSums

__all__ = ["Counters", "LockstepResult", "Mismatch", "Probe", "join_results"]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Tokens whose logits are wanted at one place: the choices of a question.

    Attributes:
        sequence, position: the logits after feeding the token at ``position`` of that sequence.
        token_ids: the tokens.
    """

    sequence: int
    position: int
    token_ids: tuple[int, ...]


@dataclass(kw_only=True)
class Counters:
    """Events of one plan, counted per (row, layer, step) where its kernel was called.

    ``nonfinite_states`` counts sequences in which a state with NaN or infinity was stored.
    """

    low_precision_reads: int = 0
    flushes: int = 0
    requantizations: int = 0
    nonfinite_states: int = 0


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """First place where the baseline differed from itself.

    Attributes:
        step: position of the token that was fed.
        layer: decoder-layer index, None where only logits differ.
    """

    step: int
    layer: int | None


@dataclass(frozen=True, kw_only=True)
class LockstepResult:
    """What one run in lock step measured.

    Attributes:
        positions: [n_steps] index of the token that was fed.
        kl, same_top, delta_p, nll: by plan, [n_sequences, n_steps] float64 (same_top bool); ``nll`` has the baseline
            too. The last step has no next token: nll and delta_p are NaN there when the stream ends.
        window_offset: by plan, [n_sequences, n_steps] int.
        noise_kl: [n_sequences, n_steps], KL of the baseline under another launch.
        different_logits: by plan, number of logits whose bits differ from the baseline's.
        n_logits: logits compared for each plan.
        probes: by plan and for the baseline, [n_probes, n_token_ids] float64 logits in the order of the probes.
        counters, state: by plan; state holds one entry per recurrent layer.
        layer_indices: decoder-layer index of each recurrent layer.
        again: where the A/A block differed, None if nowhere.
        recorded: inputs of the recurrent layers for the first sequence, where asked for.
        first_logits: by plan and for the baseline, logits of the first sequence [n_kept, vocab] where asked for.
        digests: of the bits of the baseline's logits, one of each batch; equal where a rerun was bit-equal.
    """

    positions: np.ndarray
    kl: dict[str, np.ndarray]
    same_top: dict[str, np.ndarray]
    delta_p: dict[str, np.ndarray]
    nll: dict[str, np.ndarray]
    window_offset: dict[str, np.ndarray]
    noise_kl: np.ndarray
    different_logits: dict[str, int]
    n_logits: int
    probes: dict[str, np.ndarray]
    counters: dict[str, Counters]
    state: dict[str, list[StateSums]]
    layer_indices: list[int]
    again: Mismatch | None
    recorded: RecordedInputs | None
    first_logits: dict[str, np.ndarray]
    digests: list[int]


def join_results(parts: list[LockstepResult], order: np.ndarray) -> LockstepResult:
    """One result of all batches; ``order`` brings the probes of all batches back to the caller's order."""
    first = parts[0]

    def rows(pick: Callable[[LockstepResult], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {n: np.concatenate([pick(r)[n] for r in parts]) for n in pick(first)}

    def sums(name: str) -> Counters:
        total = Counters()
        for r in parts:
            for key, value in vars(r.counters[name]).items():
                setattr(total, key, getattr(total, key) + value)
        return total

    return LockstepResult(
        positions=first.positions,
        kl=rows(lambda r: r.kl),
        same_top=rows(lambda r: r.same_top),
        delta_p=rows(lambda r: r.delta_p),
        nll=rows(lambda r: r.nll),
        window_offset=rows(lambda r: r.window_offset),
        noise_kl=np.concatenate([r.noise_kl for r in parts]),
        different_logits={n: sum(r.different_logits[n] for r in parts) for n in first.different_logits},
        n_logits=sum(r.n_logits for r in parts),
        probes={n: a[order] for n, a in rows(lambda r: r.probes).items()},
        counters={n: sums(n) for n in first.counters},
        state=first.state,
        layer_indices=first.layer_indices,
        again=next((r.again for r in parts if r.again is not None), None),
        recorded=first.recorded,
        first_logits=first.first_logits,
        digests=[digest for r in parts for digest in r.digests],
    )
