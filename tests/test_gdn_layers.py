"""Layers of a pool are independent, in the kernels as in the twin; a flush without a step writes the copy too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from driftgate.kernels.contract import HeadShape, ReplayOptions
from driftgate.kernels.gdn import reference
from driftgate.kernels.pool import StatePool
from driftgate.quant.codecs import encode_rows

SHAPE = HeadShape(key_heads=1, value_heads=2, d_k=16, d_v=16)
PLAN = ReplayOptions(recurrence="fp8", read="nvfp4", length=4)


def run_steps(kernels: Any, pool: StatePool, layer: int, n_steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    slots = torch.arange(pool.n_slots)
    outputs = []
    for _ in range(n_steps):
        q, k = (torch.randn(pool.n_slots, 1, 16, generator=generator) for _ in range(2))
        v = torch.randn(pool.n_slots, 2, 16, generator=generator)
        g, beta = (
            -0.1 * torch.rand(pool.n_slots, 2, generator=generator),
            torch.rand(pool.n_slots, 2, generator=generator),
        )
        outputs.append(kernels.replay_step(q, k, v, g, beta, pool=pool, layer=layer, slots=slots))
        pool.advance(slots)
    return torch.stack(outputs)


def everything(pool: StatePool, layer: int) -> list[torch.Tensor]:
    stored = [t for states in (pool.checkpoint, pool.copy) if states is not None for t in states.tensors()]
    buffers = [b for b in (pool.keys, pool.values, pool.log_decay, pool.beta, pool.corrections) if b is not None]
    return [t[layer].clone() for t in (*stored, *buffers)]


def compare_layers(kernels: Any) -> dict[str, Any]:
    """The second layer of two against the only layer of one, and what happened to the first."""
    one, two = StatePool(SHAPE, PLAN, n_slots=1), StatePool(SHAPE, PLAN, n_slots=1, n_layers=2)
    before = everything(two, 0)
    expected, got = run_steps(kernels, one, 0, 6), run_steps(kernels, two, 1, 6)
    untouched = all(torch.equal(a, b) for a, b in zip(before, everything(two, 0), strict=True))
    same = all(torch.equal(a, b) for a, b in zip(everything(one, 0), everything(two, 1), strict=True))
    kernels.flush_now(two, torch.arange(1))
    kernels.flush_now(one, torch.arange(1))
    copies = []
    for layer in range(2):
        checkpoint = two.checkpoint.read(layer, torch.arange(1))
        wanted = encode_rows(two.copy.format, checkpoint)
        stored = (two.copy.codes, two.copy.block_scales, two.copy.row_scales)
        copies.append(all(torch.equal(a[layer], b) for a, b in zip(stored, wanted, strict=True)))
    flushed = all(torch.equal(a, b) for a, b in zip(everything(one, 0), everything(two, 1), strict=True))
    return {
        "outputs": torch.equal(expected, got),
        "untouched": untouched,
        "same": same,
        "flushed": flushed,
        "copies": copies,
        "moved": bool((got != 0).any()),
    }


GOOD = {"outputs": True, "untouched": True, "same": True, "flushed": True, "copies": [True, True], "moved": True}


def compare_kernel_layers() -> dict[str, Any]:
    from driftgate.kernels.gdn import decode

    return compare_layers(decode)


def test_layers_of_the_twin() -> None:
    assert compare_layers(reference) == GOOD


def test_layers_of_the_kernels(interpreted: Any) -> None:
    assert interpreted(__file__, "compare_kernel_layers") == GOOD


@pytest.mark.parametrize("memoise", [False, True])
def test_a_copied_slot_reads_what_its_source_holds(memoise: bool) -> None:
    pool = StatePool(SHAPE, ReplayOptions(recurrence="fp8", read="fp8", length=1), n_slots=2)
    if memoise:
        pool.memoise_reads()
    both = torch.arange(2)
    pool.write(0, both, torch.randn(2, 2, 16, 16, generator=torch.Generator().manual_seed(0)))
    pool.start(both, tokens=3)
    first = pool.checkpoint.read(0, both)
    pool.copy_slot(0, 1)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(pool.checkpoint.read(0, both)[1], first[0])
