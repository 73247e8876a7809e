"""FlushSchedule on its own: what a captured step needs of it, and windows against counting.

When steps flush is in test_pool.py, what windows keep in test_verify.py.
"""

from __future__ import annotations

import pytest
import torch

from driftgate.kernels import ReplayOptions
from driftgate.kernels.schedule import PAD_SLOT, FlushSchedule

PLANS = {
    "baseline": {},
    "L = 1": {"length": 1},
    "forced flushes": {"length": 5, "track": 3},
    "windows": {"length": 8, "window": 3},
}
NAMES = ("cursor", "flush", "tokens", "base")


def make(plan: str, *, device: str = "cpu", n_slots: int = 3) -> FlushSchedule:
    return FlushSchedule(ReplayOptions(**PLANS[plan]), n_slots=n_slots, device=device)


@pytest.mark.parametrize("plan", PLANS)
def test_no_move_asks_the_device_for_a_value(plan: str) -> None:
    """Tensors on ``meta`` have no values: whatever would wait for a GPU fails there."""
    schedule = make(plan, device="meta")
    slots = torch.empty(2, dtype=torch.int32, device="meta")
    schedule.start(slots, tokens=3)
    schedule.force_flush(slots)
    schedule.advance(slots)
    schedule.empty_buffers(slots)
    if "window" in PLANS[plan]:
        schedule.commit(slots, lengths=slots.clone(), n=slots.clone())
    with pytest.raises(RuntimeError, match="meta"):
        schedule.cursor.tolist()


@pytest.mark.parametrize("plan", PLANS)
def test_every_move_is_written_in_place(plan: str) -> None:
    """A CUDA Graph replays on the tensors that it was captured with."""
    schedule = make(plan)
    tensors = {name: getattr(schedule, name) for name in NAMES}
    slots = torch.tensor([2, PAD_SLOT, 0], dtype=torch.int32)
    live = slots[[0, 2]]
    schedule.start(live, tokens=torch.tensor([5, 7]))
    schedule.advance(slots)
    assert schedule.tokens[:3].tolist() == [8, 0, 6]
    schedule.force_flush(live)
    schedule.empty_buffers(live)
    if "window" in PLANS[plan]:
        lengths = torch.full((3,), 3, dtype=torch.int32)
        schedule.commit(slots, lengths, torch.tensor([1, 0, 2], dtype=torch.int32))
        assert schedule.tokens[:3].tolist() == [10, 0, 7]
    assert all(getattr(schedule, name) is tensor for name, tensor in tensors.items())


@pytest.mark.parametrize("kept", [(3, 3, 3), (1, 2, 3), (0, 1, 0), (2, 2, 1)])
@pytest.mark.parametrize(("length", "window"), [(8, 3), (6, 3), (7, 2)])
def test_windows_keep_the_ring_that_counting_gives(length: int, window: int, kept: tuple[int, ...]) -> None:
    """A list of the buffered entries: a window that finds no room for itself and the next one folds what there is."""
    schedule = FlushSchedule(ReplayOptions(length=length, window=window), n_slots=1)
    slots, places = torch.tensor([0], dtype=torch.int32), length + window - 1
    base, entries, tokens = 0, 0, 0
    for i in range(12):
        n, taken = min(kept[i % 3], window), window - (i % 2)
        n = min(n, taken)
        if entries + taken + window > length:
            base, entries = (base + entries) % places, 0
        entries, tokens = entries + n, tokens + n
        schedule.commit(slots, torch.tensor([taken], dtype=torch.int32), torch.tensor([n], dtype=torch.int32))
        assert [int(getattr(schedule, name)[0]) for name in ("cursor", "base", "tokens")] == [entries, base, tokens]
        assert int(schedule.flush[0]) == (entries >= length - 1)
