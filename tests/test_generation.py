"""The baseline's own generation as a stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from driftgate.accuracy.generation import continue_streams
from driftgate.accuracy.sampling import gumbel_rows, item_key
from driftgate.kernels.contract import Backend

SIZES = {"length": 24, "seed": 5, "backend": Backend.TORCH, "vocab_size": 60}


def test_streams_do_not_depend_on_the_batch_and_stay_in_the_vocabulary(tiny_model):
    """Rows of a linear layer are equal at one thread, whatever the batch (16 rows at least)."""
    prompt = (1, 7)
    together = continue_streams(tiny_model, [prompt] * 3, batch=3, **SIZES)
    apart = continue_streams(tiny_model, [prompt] * 3, batch=2, **SIZES)
    assert np.array_equal(together, apart)
    assert (together.shape, together.dtype) == ((3, 24), np.int64)
    assert (together[:, :2] == prompt).all()
    assert (together >= 0).all() and (together < 60).all()
    assert len({tuple(row) for row in together}) == 3


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_stream_does_not_depend_on_how_many_there_are(tiny_model, batch):
    prompt = (1,)
    many = continue_streams(tiny_model, [prompt] * 5, batch=4, **SIZES)
    few = continue_streams(tiny_model, [prompt] * 2, batch=batch, **SIZES)
    assert np.array_equal(few, many[:2])
    other = continue_streams(tiny_model, [prompt] * 2, batch=batch, **(SIZES | {"seed": 6}))
    assert not np.array_equal(few, other)


def test_tokens_are_the_gumbel_maximum_of_the_models_own_logits(tiny_model):
    streams = continue_streams(tiny_model, [(1,)] * 2, batch=2, **SIZES)
    with torch.no_grad():
        logits = tiny_model(torch.from_numpy(streams), use_cache=False).logits[..., :60].double()
    for number, stream in enumerate(streams):
        key = torch.tensor([item_key(f"stream {number}", 0)])
        for position in range(1, 24):
            scores = logits[number, position - 1] + gumbel_rows(5, key, torch.tensor([position - 1]), 60)[0]
            assert scores[stream[position]] >= scores.max() - 1e-4  # prefill and decode differ by about 1e-5


def test_starts_of_unequal_lengths_are_kept_and_gone_on_with(tiny_model):
    """Of a stream that is long enough nothing is sampled; the others are what they are without it."""
    starts = [(1,), (5, 6, 7), tuple(range(24)), tuple(range(30, 56))]
    found = continue_streams(tiny_model, starts, batch=2, **SIZES)
    assert found.shape == (4, 24)
    for start, stream in zip(starts, found, strict=True):
        assert tuple(stream[: len(start)]) == start[:24]
    assert np.array_equal(found[:2], continue_streams(tiny_model, starts[:2], batch=1, **SIZES))
    assert np.array_equal(found[:1], continue_streams(tiny_model, [(1,)] * 1, batch=1, **SIZES))
    whole = continue_streams(tiny_model, starts[2:], batch=1, **SIZES)
    assert np.array_equal(whole, found[2:])


def test_every_decode_step_is_told(tiny_model):
    """Three streams in batches of two: two batches of 22 steps, as the last token is not fed."""
    steps = []
    continue_streams(tiny_model, [(1,)] * 3, batch=2, progress=steps.append, **SIZES)
    assert steps == [1] * (2 * (24 - 2))
