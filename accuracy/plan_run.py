"""One plan on the rows of a certificate's inputs: its pool, its flushes, its comparisons.

Notable: flushes are predicted here, by counting, not read from the pool. Buffers start full of NaN, so what is read
past the cursor shows. The first difference of a run keeps what ``causes.py`` needs to say what it looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from driftgate.accuracy.bits import BitTally
from driftgate.accuracy.cases import FORCED_AT
from driftgate.accuracy.causes import Evidence
from driftgate.accuracy.step_data import StepData
from driftgate.kernels.contract import ReplayOptions
from driftgate.kernels.pool import StatePool, StoredStates
from driftgate.quant.codecs import decode_rows

__all__ = ["Kernels", "PlanRun"]

SEED = 11


class Kernels(Protocol):
    """What is certified: a module or object with the three functions of ``driftgate.kernels.<recurrence>``."""

    decode_step: Callable[..., torch.Tensor]
    replay_step: Callable[..., torch.Tensor]
    flush_now: Callable[..., None]


class PlanRun:
    """A plan on the rows of the data.

    Args:
        kernels: what takes the steps.
        options: the plan.
        data: inputs, slots and first states.
        seed: of stochastic rounding.
        tokens: that every sequence has seen before the first step.
        first_sequence: added to the rows' numbers, which are the ids of the sequences.
        adopt: keep the checkpoint's elements in storage with gaps between the slots, ``gaps``.
        forced_at: by row, the step before which its flush is forced.

    Attributes:
        pool: holds the states.
        live: rows with a slot; methods count rows by their order in it.
        tally: of the comparisons made with ``compare`` and ``compare_stored``.
        flushes: of live rows so far.
    """

    def __init__(
        self,
        kernels: Kernels,
        options: ReplayOptions,
        data: StepData,
        *,
        seed: int = SEED,
        tokens: int = 0,
        first_sequence: int = 0,
        adopt: bool = False,
        forced_at: Mapping[int, int] = FORCED_AT,
    ) -> None:
        self.kernels, self.options, self.data = kernels, options, data
        self.forced_at = forced_at
        self.tally = BitTally()
        self.evidence: Evidence | None = None
        self.live = data.live_rows
        self.slots = data.slots[self.live].long()
        self.pool = pool = StatePool(
            data.shape,
            options,
            recurrence=data.recurrence,
            n_slots=data.n_slots,
            activation_dtype=data.activation,
            seed=SEED,
            device=data.slots.device,
        )
        self.gaps = _adopt_with_gaps(pool.checkpoint) if adopt else None
        pool.audit()
        sequences = torch.tensor([data.sources[row] for row in self.live], device=self.slots.device)
        pool.start(self.slots, tokens=0, sequences=sequences)
        used = data.states.flatten(1).any(dim=1).nonzero()[:, 0]  # a large pool holds zeros already
        pool.write(0, used, data.states[used])
        pool.seed.fill_(seed)  # so all runs start from the same bits
        pool.start(self.slots, tokens=tokens, sequences=sequences + first_sequence)
        for buffer in pool.buffers().values():
            buffer.fill_(torch.nan)
        self.before = tuple(t[0].clone() for t in pool.checkpoint.tensors())
        self.tokens = tokens
        self.cursor = [0] * len(self.live)
        self.since = [0] * len(self.live)
        self.folded_from = list(self.since)
        self.flushes = 0
        self._remember()

    def step(self, t: int) -> tuple[torch.Tensor, list[int]]:
        """Take step t; the output of all rows [B, HV, d_v], and the live rows (by their order) that flushed."""
        options = self.options
        sources = [self.data.sources[row] for row in self.live]
        forced = [i for i, row in enumerate(sources) if not options.step_by_step and self.forced_at.get(row) == t]
        if forced:
            self.pool.force_flush(self.slots[forced])
        tracked = bool(options.track) and (self.tokens + t + 1) % options.track == 0
        flushed = [
            i
            for i, cursor in enumerate(self.cursor)
            if cursor >= options.length - 1 or tracked or i in forced or options.step_by_step
        ]
        self._remember()
        take = self.kernels.decode_step if options.step_by_step else self.kernels.replay_step
        out = take(**self.data.inputs(t), pool=self.pool, layer=0, slots=self.data.slots)
        self.pool.advance(self.data.slots)
        for i in range(len(self.live)):
            self.cursor[i] = 0 if i in flushed else self.cursor[i] + 1
            self.since[i] = t + 1 if i in flushed else self.since[i]
        self.flushes += len(flushed)
        return out, flushed

    def flush_now(self, i: int, *, t: int) -> bool:
        """After step t, fold the buffer of a live row without a step; whether there was anything to fold."""
        if not self.cursor[i]:
            return False
        slots = self.data.slots[self.live[i] : self.live[i] + 1]
        self.kernels.flush_now(self.pool, slots, **self.data.fold_constants())
        self.cursor[i] = 0
        self.since[i] = t + 1
        self.flushes += 1
        return True

    def _remember(self) -> None:
        """What the next step finds; between flushes neither moves."""
        self.anchor = self.pool.checkpoint.read(0, self.slots).clone()
        self.read = self.pool.read_states.read(0, self.slots).clone()
        self.folded_from = list(self.since)

    def stored(self, states: StoredStates) -> tuple[torch.Tensor, ...]:
        """Copies of what is stored, [live rows, HV, ...]."""
        return tuple(t[0][self.slots] for t in states.tensors())

    def compare(
        self, what: str, expected: torch.Tensor, got: torch.Tensor, *, step: int, rows: Sequence[int] | None = None
    ) -> None:
        """Compare entries ``rows`` (by the order of live rows; None: all) of two tensors [live rows, HV, ...]."""
        rows = range(len(self.live)) if rows is None else rows
        if not rows:
            return
        chosen, known = list(rows), self.tally.first is not None
        self.tally.compare(what, expected[chosen], got[chosen], step=step, rows=[self.live[i] for i in chosen])
        if self.tally.first is not None and not known:
            i, head = self.live.index(self.tally.first["row"]), self.tally.first["head"]
            self._keep_evidence(what, step, i, head, expected[i, head], got[i, head])

    def compare_stored(self, what: str, states: StoredStates, expected: Sequence[torch.Tensor], *, step: int) -> None:
        """Compare what is stored of the live rows with codes and scales [live rows, HV, ...]."""
        got = self.stored(states)
        known = self.tally.first is not None
        for one, other in zip(expected, got, strict=True):
            self.tally.compare(what, one, other, step=step, rows=self.live)
        if self.tally.first is not None and not known:
            i, head = self.live.index(self.tally.first["row"]), self.tally.first["head"]
            values = [
                _decode(states, [part[i, head] for part in parts], self.data.shape.d_k) for parts in (expected, got)
            ]
            self._keep_evidence(what, step, i, head, *values)

    def _keep_evidence(
        self, what: str, step: int, i: int, head: int, expected: torch.Tensor, got: torch.Tensor
    ) -> None:
        self.evidence = Evidence(
            what=what,
            options=self.options,
            row=self.live[i],
            head=head,
            first_step=self.folded_from[i],
            last_step=step,
            anchor=self.anchor[i, head],
            read=self.read[i, head],
            expected=expected.clone(),
            got=got.clone(),
        )

    def check_output(self, out: torch.Tensor, t: int) -> None:
        """Outputs [B, HV, d_v] of live rows are finite, those of padded rows zero."""
        self.tally.require_finite("output", out[self.live], step=t, rows=self.live)
        padded = self.data.padded_rows
        self.tally.compare("padding", torch.zeros_like(out[padded]), out[padded], step=t, rows=padded)

    def check_unused(self, step: int) -> None:
        """Slots of no row hold what they held."""
        unused = self.data.unused_slots
        for old, new in zip(self.before, self.pool.checkpoint.tensors(), strict=True):
            self.tally.compare("unused slot", old[unused], new[0][unused], step=step, rows=[-1] * len(unused))


def _decode(states: StoredStates, parts: Sequence[torch.Tensor], d_k: int) -> torch.Tensor:
    """Values [d_v, d_k] of one head as ``StoredStates.tensors`` lists its parts."""
    given = iter(parts)
    whole = [None if t is None else next(given) for t in (states.codes, states.block_scales, states.row_scales)]
    codes, block_scales, row_scales = whole
    assert codes is not None
    return decode_rows(states.format, codes, block_scales, row_scales, d_k)


def _adopt_with_gaps(states: StoredStates) -> torch.Tensor:
    """Move the elements to storage whose slots lie 64 bytes and more apart; the gaps, bytes [n_slots, n].

    The distance is a multiple of 16 bytes, as it has to be, and of 16 elements only where these are bytes: a compiler
    may take another layout where it knows less of the alignment.
    """
    codes = states.tensors()[0]
    size = codes.element_size()
    inner = codes[0, 0].numel() * size
    step = inner + 64 + -inner % 16
    step += 16 if size > 1 and step // size % 16 == 0 else 0
    storage = torch.full((codes.shape[1], step), 0x7F, dtype=torch.uint8, device=codes.device)
    whole = storage.view(codes.dtype)
    strides = (whole.numel(), whole.stride(0), *codes.stride()[2:])
    states.adopt(whole.as_strided(codes.shape, strides))
    return storage[:, inner:]
