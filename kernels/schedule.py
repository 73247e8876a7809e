"""FlushSchedule: how many entries each slot has buffered, and whether its next step flushes.

Notable: a slot's cursor serves every layer and moves once per forward (``advance``, or ``commit`` after a speculative
window). Everything is a device tensor written in place, and nothing asks the device for a value on a GPU, so that one
launch serves rows at different cursors and a step can be captured in a CUDA Graph. Index ``n_slots`` of the per-slot
tensors is a dump place for padded rows.
"""

from __future__ import annotations

import torch

from driftgate.kernels.contract import ReplayOptions

__all__ = ["PAD_SLOT", "FlushSchedule"]

PAD_SLOT = -1
"""The slot of a padded row, where the caller names no other."""


class FlushSchedule:
    """Cursors of [slots] sequences under one plan.

    Args:
        options: L, forced flushes and window.
        n_slots: sequences that can be held.
        device: where the tensors lie.

    Attributes:
        cursor: [n_slots + 1] int32, buffered entries that the next step finds.
        flush: [n_slots + 1] int32, whether the next step flushes.
        tokens: [n_slots + 1] int64, tokens that a slot has seen.
        base: [n_slots + 1] int32, place of the oldest entry; moves with speculative windows alone, else 0.
    """

    def __init__(self, options: ReplayOptions, *, n_slots: int, device: torch.device | str = "cpu") -> None:
        self.options, self.n_slots, self.device = options, n_slots, torch.device(device)
        self.cursor, self.flush, self.base = (self._per_slot(torch.int32) for _ in range(3))
        self.tokens = self._per_slot(torch.int64)
        self.empty_buffers(torch.arange(n_slots, device=device))

    def _per_slot(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.n_slots + 1, dtype=dtype, device=self.device)

    def start(self, slots: torch.Tensor, *, tokens: torch.Tensor | int) -> None:
        """Set slots to cursor 0 after a prefill.

        Args:
            slots: [n] int, no padding.
            tokens: that each has seen, an int or [n] int64.

        Raises:
            ValueError: a number that is no slot; on a GPU this is not looked at, it would cost a synchronisation.
        """
        index = self._index(slots)
        self.tokens[index] = torch.as_tensor(tokens, dtype=torch.int64, device=self.device)
        self.empty_buffers(index)

    def empty_buffers(self, slots: torch.Tensor) -> None:
        """Cursor 0 for slots [n] whose entries were folded without a step."""
        index = slots.long()
        self.cursor[index] = 0
        self.base[index] = 0
        self.flush[index] = self._flushes(self.cursor[index], self.tokens[index])

    def force_flush(self, slots: torch.Tensor) -> None:
        """Make the next step of slots [n] a flush."""
        self.flush[self._index(slots)] = 1

    def advance(self, slots: torch.Tensor, *, pad_slot: int = PAD_SLOT) -> None:
        """Move the cursors once all layers took their step.

        Args:
            slots: [B] int, the slot of each row of the forward.
            pad_slot: value of ``slots`` that marks a padded row.
        """
        index = torch.where(slots == pad_slot, self.n_slots, slots).long()
        flushed = self.flush[index] != 0
        tokens = self.tokens[index] + 1
        cursor = self.cursor[index]
        if not self.options.step_by_step:
            cursor = torch.where(flushed, 0, cursor + 1)
        if self.options.window:
            self.base[index] = torch.where(flushed, 0, self.base[index])
        self.cursor[index], self.tokens[index] = cursor, tokens
        self.flush[index] = self._flushes(cursor, tokens)

    def commit(self, slots: torch.Tensor, lengths: torch.Tensor, n: torch.Tensor, *, pad_slot: int = PAD_SLOT) -> None:
        """Keep the accepted tokens of the windows that all layers verified last: once after each ``verify_window``.

        A row that flushed in the call holds no entries but the window's now: its base moves over those that were
        folded, its cursor becomes n. The cursor of any other row advances by n. Entries behind the cursor are never
        read again. With n = 0 a row goes on from the tokens that it had: one that flushed has them folded, S_h in the
        checkpoint instead of the buffer (rounded to its format, as by any flush), and no entries.
        A flush that ``force_flush`` asked for, and no step took, is forgotten.

        Args:
            slots: [B] int, the slot of each row.
            lengths: [B] int32, as ``verify_window`` had them: with the cursor they say which rows flushed.
            n: [B] int32, inputs to keep, 1 + accepted drafts, 0 to lengths.
            pad_slot: value of ``slots`` that marks a padded row.

        Raises:
            ValueError: a plan without windows, a shape or type that does not fit, or, on a CPU, a number out of range.
        """
        options, padded = self.options, slots == pad_slot
        self._check_commit(slots, lengths, n, padded)
        index = torch.where(padded, self.n_slots, slots).long()
        cursor, base = self.cursor[index], self.base[index]
        flushed = cursor + lengths + options.window > options.length
        self.base[index] = torch.where(flushed, (base + cursor) % options.places, base)
        cursor = torch.where(flushed, n, cursor + n)
        tokens = self.tokens[index] + n
        self.cursor[index], self.tokens[index] = cursor, tokens
        self.flush[index] = self._flushes(cursor, tokens)

    def _check_commit(self, slots: torch.Tensor, lengths: torch.Tensor, n: torch.Tensor, padded: torch.Tensor) -> None:
        window = self.options.window
        if not window:
            raise ValueError(f"pool: expected a plan with a window, got window = 0 at L = {self.options.length}")
        for name, counts in (("lengths", lengths), ("n", n)):
            if counts.shape != slots.shape or counts.dtype != torch.int32 or counts.device.type != self.device.type:
                expected = f"{tuple(slots.shape)} int32 on {self.device}"
                raise ValueError(
                    f"{name}: expected {expected}, got {tuple(counts.shape)} {counts.dtype} on {counts.device}"
                )
        if self.device.type == "cpu":
            wrong = (n < 0) | (n > lengths) | (lengths < 1) | (lengths > window)
            if bool((wrong & ~padded).any()):
                raise ValueError(
                    f"n: expected 0 to lengths, and lengths 1 to {window}, got n = {n[~padded].tolist()} and "
                    f"lengths = {lengths[~padded].tolist()}"
                )

    def _flushes(self, cursor: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Whether a step that finds ``cursor`` entries after ``tokens`` tokens flushes, int32."""
        options = self.options
        if options.step_by_step:
            return torch.ones_like(cursor)
        flush = cursor >= options.length - 1
        if options.track:
            flush = flush | ((tokens + 1) % options.track == 0)
        return flush.to(torch.int32)

    def _index(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots [n] as an index; one that is no slot would reach the last slot, or the dump place."""
        if slots.device.type == "cpu" and len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < self.n_slots:
            raise ValueError(f"slots: expected 0 to {self.n_slots - 1}, got {slots.tolist()}")
        return slots.long()
