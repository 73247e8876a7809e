"""The torch twin: against a loop over single numbers' formulas in FP64, and the law by which a cached fold leaks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from driftgate.accuracy.step_data import StepData, draw_inputs
from driftgate.kernels.contract import Fold, HeadShape, Readout, ReplayOptions
from driftgate.kernels.gdn import decode, reference
from driftgate.kernels.pool import StatePool

SHAPE = HeadShape(key_heads=2, value_heads=4, d_k=24, d_v=16)
ROUNDOFF = 2.0**-24


def make_data(n_steps: int, *, n_rows: int = 2, seed: int = 0, activation: torch.dtype = torch.float64) -> StepData:
    """In FP64, so that the buffer holds the very inputs."""
    return draw_inputs(SHAPE, activation, n_rows=n_rows, n_steps=n_steps, seed=seed)


def make_pool(data: StepData, options: ReplayOptions, states: torch.Tensor | None = None) -> StatePool:
    pool = StatePool(data.shape, options, n_slots=data.n_slots, activation_dtype=data.activation)
    pool.write(0, torch.arange(data.n_slots), data.states if states is None else states)
    return pool


def run(data: StepData, pool: StatePool, n_steps: int, **options: Any) -> torch.Tensor:
    """Outputs of the live rows, [steps, live, HV, d_v]."""
    take = reference.decode_step if pool.options.step_by_step else reference.replay_step
    outs = []
    for t in range(n_steps):
        outs.append(take(*data.inputs(t), pool=pool, layer=0, slots=data.slots, compute_dtype=torch.float64, **options))
        pool.advance(data.slots)
    return torch.stack(outs)[:, data.live_rows]


def live_slots(data: StepData) -> torch.Tensor:
    return data.slots[data.live_rows].long()


def transitions(data: StepData, t: int) -> tuple[torch.Tensor, torch.Tensor]:
    """D_t and T_t = D_t (I - β k kᵀ), [live, HV, d_k, d_k] float64."""
    live = data.live_rows
    k = data.k[t, live].double()
    k = (k / ((k * k).sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(SHAPE.group, dim=1)
    eye = torch.eye(SHAPE.d_k, dtype=torch.float64)
    decay = data.g[t, live].double().exp()[..., None, None] * eye
    rank_one = data.beta[t, live].double()[..., None, None] * k[..., :, None] * k[..., None, :]
    return decay, decay @ (eye - rank_one)


def exact_states(data: StepData, n_steps: int) -> list[torch.Tensor]:
    """S_t = S_{t-1} T_t + β v kᵀ of the live rows in FP64, S_0 first."""
    live = data.live_rows
    states = [data.states[live_slots(data)].double()]
    for t in range(n_steps):
        k = data.k[t, live].double()
        k = (k / ((k * k).sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(SHAPE.group, dim=1)
        write = data.beta[t, live].double()[..., None, None] * data.v[t, live].double()[..., :, None] * k[..., None, :]
        states.append(states[-1] @ transitions(data, t)[1] + write)
    return states


def exact_outputs(data: StepData, n_steps: int) -> torch.Tensor:
    q = data.q[:n_steps, data.live_rows].double()
    q = q / ((q * q).sum(-1, keepdim=True) + 1e-6).sqrt() * SHAPE.d_k**-0.5
    q = q.repeat_interleave(SHAPE.group, dim=2)
    states = torch.stack(exact_states(data, n_steps)[1:])
    return (states @ q[..., None])[..., 0]


@pytest.mark.parametrize("readout", list(Readout))
def test_replay_is_the_recurrence(readout: Readout) -> None:
    data, options = make_data(12), ReplayOptions(length=12, readout=readout)
    outs = run(data, make_pool(data, options), 12)
    # û lies in FP32; everything else is FP64 until the flush of the twelfth step has its output
    size = exact_outputs(data, 12).abs().max() + data.v[:, data.live_rows].abs().max()
    bound = 1e-13 if readout is Readout.EXACT_READOUT else 12 * ROUNDOFF * size
    assert (outs - exact_outputs(data, 12)).abs().max() < bound


def test_baseline_is_the_recurrence() -> None:
    data = make_data(9)
    outs = run(data, make_pool(data, ReplayOptions()), 9)
    states = torch.stack(exact_states(data, 9))
    assert (outs - exact_outputs(data, 9)).abs().max() < 9 * ROUNDOFF * states.norm(dim=-1).max()


def test_tensor_read_is_the_stored_checkpoint() -> None:
    data = make_data(3)
    pool = make_pool(data, ReplayOptions(length=3))
    run(data, pool, 3)
    got = pool.checkpoint.read(0, live_slots(data))
    want = exact_states(data, 3)[-1]
    assert torch.equal(got, want.float())


@pytest.mark.parametrize("h", [1, 2, 5, 15])
@pytest.mark.parametrize("readout", list(Readout))
def test_a_cached_fold_leaks_by_the_law(readout: Readout, h: int) -> None:
    """e' = e·M_h T_{h+1} + E·(M_h - P_h)·T_{h+1}, with a checkpoint error e and a read error E = copy - checkpoint."""
    data = make_data(h + 1, seed=h)
    slots = live_slots(data)
    options = ReplayOptions(read="nvfp4", length=h + 1, readout=readout, fold=Fold.CACHED)
    noise = 0.05 * torch.randn(data.states.shape, generator=torch.Generator().manual_seed(1))
    pool = make_pool(data, options, data.states + noise)
    checkpoint = pool.checkpoint.read(0, slots).double()
    e = checkpoint - exact_states(data, 0)[0]
    big_e = pool.copy.read(0, slots).double() - checkpoint
    run(data, pool, h + 1)
    after = pool.checkpoint.read(0, slots).double() - exact_states(data, h + 1)[-1]
    eye = torch.eye(SHAPE.d_k, dtype=torch.float64).expand_as(transitions(data, 0)[0])
    m, p = eye, eye
    for t in range(h):
        decay, transition = transitions(data, t)
        m, p = m @ transition, p @ decay
    last = transitions(data, h)[1]
    expected = e @ m @ last + big_e @ (m - p) @ last
    assert expected.abs().max() > 1e-3
    # û is stored in FP32 and so is the state: h + 1 roundings of numbers no greater than this
    greatest = max(s.abs().max() for s in exact_states(data, h + 1)) + 4 * data.v[:, data.live_rows].abs().max()
    assert (after - expected).abs().max() < (h + 1) * ROUNDOFF * greatest


@pytest.mark.parametrize("readout", list(Readout))
@pytest.mark.parametrize("read", ["nvfp4", "fp8", "bf16"])
def test_an_exact_fold_leaks_nothing(readout: Readout, read: str) -> None:
    data = make_data(10)
    pools = [
        make_pool(data, ReplayOptions(read=r, length=4, readout=o))
        for r, o in ((read, readout), ("fp32", Readout.EXACT_READOUT))
    ]
    outs = [run(data, pool, 10) for pool in pools]
    assert not torch.equal(*outs), "the copy is read between flushes"
    assert torch.equal(pools[0].checkpoint.codes, pools[1].checkpoint.codes)


def test_the_leak_is_gone_where_every_step_flushes() -> None:
    data = make_data(6)
    pools = [make_pool(data, ReplayOptions(read=r, length=1, fold=Fold.CACHED)) for r in ("nvfp4", "fp32")]
    for pool in pools:
        run(data, pool, 6)
    assert torch.equal(pools[0].checkpoint.codes, pools[1].checkpoint.codes)


def test_two_windows_are_one_long_one() -> None:
    """Flushes are where they should be: L = 3 and L = 8 give the FP64 outputs up to the rounding of the checkpoint."""
    data = make_data(16)
    outs = [
        run(data, make_pool(data, ReplayOptions(length=length, readout=Readout.EXACT_READOUT)), 16) for length in (3, 8)
    ]
    greatest = max(s.norm(dim=-1).max() for s in exact_states(data, 16))
    assert (outs[0] - outs[1]).abs().max() < 16 * ROUNDOFF * greatest


def test_rows_at_different_cursors() -> None:
    data = make_data(7)
    pool = make_pool(data, ReplayOptions(length=4))
    alone = make_pool(data, ReplayOptions(length=4))
    slots = live_slots(data)
    pool.force_flush(slots[1:])
    alone.force_flush(slots[1:])
    both = run(data, pool, 7)
    one = data.slots.clone()
    one[data.live_rows[0]] = -1
    outs = []
    for t in range(7):
        outs.append(reference.replay_step(*data.inputs(t), pool=alone, layer=0, slots=one, compute_dtype=torch.float64))
        alone.advance(one)
    assert (torch.stack(outs)[:, data.live_rows[1]] - both[:, 1]).abs().max() < 1e-12
    assert pool.cursor[slots].tolist() == [3, 2]


@pytest.mark.parametrize("fold", list(Fold))
def test_what_lies_beyond_the_cursor_is_not_read(fold: Fold) -> None:
    data = make_data(7)
    pools = [make_pool(data, ReplayOptions(length=4, fold=fold, read="nvfp4")) for _ in range(2)]
    for buffer in (pools[1].keys, pools[1].values, pools[1].log_decay, pools[1].beta, pools[1].corrections):
        if buffer is not None:
            buffer.fill_(torch.nan)
    outs = [run(data, pool, 7) for pool in pools]
    assert torch.equal(*outs)
    assert torch.equal(pools[0].checkpoint.codes, pools[1].checkpoint.codes)


def test_memoised_reads_change_nothing() -> None:
    data = make_data(9)
    plain = make_pool(data, ReplayOptions(length=4, read="nvfp4", recurrence="fp8"))
    memo = copy.deepcopy(plain)
    memo.memoise_reads()
    assert torch.equal(run(data, plain, 9), run(data, memo, 9))
    assert torch.equal(plain.checkpoint.codes, memo.checkpoint.codes)


WRONG = {
    "q": ("q", lambda x: x[:, :, :-1], "q: expected shape"),
    "k type": ("k", lambda x: x.double(), "k: expected torch.float32"),
    "v rows": ("v", lambda x: x[:-1], "v: expected shape"),
    "g type": ("g", lambda x: x.bfloat16(), "g: expected torch.float32"),
    "beta heads": ("beta", lambda x: x[:, :1], "beta: expected shape"),
}


@pytest.mark.parametrize("module", [decode, reference], ids=["kernel", "twin"])
@pytest.mark.parametrize("length", [0, 2])
@pytest.mark.parametrize("wrong", WRONG)
def test_inputs_that_do_not_fit_are_refused(module: Any, length: int, wrong: str) -> None:
    argument, change, message = WRONG[wrong]
    data = make_data(1, activation=torch.float32)
    pool = make_pool(data, ReplayOptions(length=length))
    before = copy.deepcopy(pool)
    inputs = dict(zip(("q", "k", "v", "g", "beta"), data.inputs(0), strict=True))
    inputs[argument] = change(inputs[argument])
    take = module.replay_step if length else module.decode_step
    with pytest.raises(ValueError, match=message):
        take(**inputs, pool=pool, layer=0, slots=data.slots)
    assert torch.equal(pool.checkpoint.codes, before.checkpoint.codes)
    assert torch.equal(pool.cursor, before.cursor)


SLOTS = {
    "too large": ([0, 4, -1], {}, "slots: expected 0 to 3"),
    "negative": ([0, -2, -1], {}, "slots: expected 0 to 3"),
    "twice": ([2, 2, -1], {}, "slots: expected each slot once"),
    "float": ([0.0, 1.0, 2.0], {}, "slots: expected .* int32 or int64"),
    "a real slot for padding": ([0, 1, 3], {"pad_slot": 3}, "pad_slot: expected"),
    "layer": ([0, 1, 2], {"layer": 1}, "layer: expected 0 to 0"),
}


@pytest.mark.parametrize("module", [decode, reference], ids=["kernel", "twin"])
@pytest.mark.parametrize("wrong", SLOTS)
def test_slots_that_do_not_fit_are_refused(module: Any, wrong: str) -> None:
    slots, options, message = SLOTS[wrong]
    data = make_data(1, activation=torch.float32)
    pool = make_pool(data, ReplayOptions(length=2))
    with pytest.raises(ValueError, match=message):
        module.replay_step(*data.inputs(0), pool=pool, slots=torch.tensor(slots), **({"layer": 0} | options))
    assert pool.keys.abs().sum() == 0


@pytest.mark.parametrize("module", [decode, reference], ids=["kernel", "twin"])
def test_a_step_of_the_other_kind_is_refused(module: Any) -> None:
    data = make_data(1, activation=torch.float32)
    with pytest.raises(ValueError, match=r"pool: expected a replay plan .* call decode_step"):
        module.replay_step(*data.inputs(0), pool=make_pool(data, ReplayOptions()), layer=0, slots=data.slots)
    pool = make_pool(data, ReplayOptions(length=2, read="fp8"))
    with pytest.raises(ValueError, match=r"pool: expected the step-by-step baseline .* call replay_step"):
        module.decode_step(*data.inputs(0), pool=pool, layer=0, slots=data.slots)
