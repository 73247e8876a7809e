"""Cases of single values for every recurrence: gates at their limits, tiny keys, roundings that must not happen.

Run under Triton's interpreter through ``kernel_cases.run_edge`` (test_kernel_faults.py); most run on a GPU as well.
A case raises AssertionError where the kernel is wrong, or returns what ``Comparison.result`` gives.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from kernel_cases import (
    ROUNDOFF,
    Comparison,
    draw_steps,
    find_kernels,
    find_twin,
    lengths,
    make_options,
    make_pool,
    take_steps,
)

from driftgate.accuracy.step_data import StepData
from driftgate.kernels.contract import ReplayOptions
from driftgate.kernels.kda.gates import compute_log_decay
from driftgate.kernels.mamba2.gates import compute_dt


def set_gate(data: StepData, *, log_decay: float, steps: slice = slice(None)) -> None:
    """Every log decay of some steps; in Mamba-2 dt = 1e4 for -inf, else A = log_decay and dt = 1."""
    if data.recurrence.delta_rule:
        data.streams["g"][steps, data.live_rows] = log_decay
    elif log_decay == -torch.inf:
        data.streams["dt"][steps, data.live_rows] = 1e4
    else:
        data.streams["dt"][steps, data.live_rows] = 1.0
        data.constants["A"].fill_(log_decay)


def forgetting(*, recurrence: str, options: dict[str, Any], kernels: str | None = None) -> None:
    """Row 25: a decay of exp(-inf) forgets what was before: no NaN, outputs do not depend on the first state."""
    plan, data = make_options(**options), draw_steps(recurrence, n_steps=5)
    set_gate(data, log_decay=-torch.inf, steps=slice(1, 2))
    outs = []
    for factor in (1.0, -3.0):
        pool = make_pool(data, plan)
        pool.write(0, torch.arange(data.n_slots), factor * data.states)
        outs.append(take_steps(data, pool, kernels=kernels)[:, data.live_rows])
    assert bool(outs[0].isfinite().all())
    assert not torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1:], outs[1][1:])


def forgetting_one_channel() -> None:
    """Row 25, per key channel: g = -inf in channel 3 leaves the other channels of the state what they were."""
    data = draw_steps("kda", n_rows=1, n_steps=1)
    data.streams["g"].zero_()
    data.streams["g"][..., 3] = -torch.inf
    data.streams["beta"].zero_()
    pool = make_pool(data, make_options(length=1))
    take_steps(data, pool)
    slots = data.slots[data.live_rows].long()
    expected = data.states[slots].clone()
    expected[..., 3] = 0
    assert torch.equal(pool.checkpoint.read(0, slots), expected)


def steep_decay(
    *, recurrence: str, options: dict[str, Any], n_steps: int, kernels: str | None = None
) -> dict[str, Any]:
    """Row 24: log decays of -5 for 16 and 64 steps, where exp of a positive sum overflows: against the FP64 twin.

    With exact readout the bits are those of the step-by-step baseline too.
    """
    plan = make_options(**options)
    data = draw_steps(recurrence, shape=(1, 1, 16, 16), n_rows=1, n_steps=n_steps)
    set_gate(data, log_decay=-5.0)
    pool, twin, base = make_pool(data, plan), make_pool(data, plan), make_pool(data, ReplayOptions())
    got = take_steps(data, pool, kernels=kernels)
    expected = []
    for t in range(n_steps):
        step = {"pool": twin, "layer": 0, "slots": data.slots, "compute_dtype": torch.float64}
        expected.append(find_twin(recurrence).replay_step(**data.inputs(t), **step))
        twin.advance(data.slots)
    if plan.readout.value == "exact_readout":
        assert torch.equal(got, take_steps(data, base))
    live, found = data.live_rows, Comparison()
    keys, queries, gates = lengths(data, n_steps - 1, None)
    added = float(data.values[:, live].abs().max()) * keys
    greatest = float(data.states.norm(dim=-1).max()) + 1.01 * added  # 1 + exp(-5) + exp(-10) + …
    bound = 4 * (data.shape.d_k + 8) * ROUNDOFF * greatest * queries * max(gates, 1.0)
    if data.constants:
        bound += 4 * ROUNDOFF * added * float(data.constants["D"].abs().max()) * max(gates, 1.0)
    found.add("output", torch.stack(expected)[:, live], got[:, live], bound)
    return found.result()


def small_keys(*, recurrence: str, amplitude: float, kernels: str | None = None) -> dict[str, Any]:
    """Row 23: keys of amplitude 0, 1e-4, 0.1: x / sqrt(sum x² + 1e-6), finite; all zero leaves a state that decays."""
    data = draw_steps(recurrence, n_steps=2)
    data.streams["k"].mul_(amplitude)
    pool = make_pool(data, make_options(length=2))
    twin, found, live = copy.deepcopy(pool), Comparison(), data.live_rows
    got = take_steps(data, pool, kernels=kernels)
    for t in range(2):
        step = {"pool": twin, "layer": 0, "slots": data.slots, "compute_dtype": torch.float64}
        expected = find_twin(recurrence).replay_step(**data.inputs(t), **step)
        twin.advance(data.slots)
        found.add("output", expected[live], got[t, live], 1e-5)
    slots = data.slots[live].long()
    if amplitude == 0:
        decay = data.streams["g"][:, live].double().sum(0).exp()
        decay = decay[..., None, :] if data.recurrence.channel_decay else decay[..., None, None]
        expected = data.states[slots].double() * decay
        found.add("state", expected, pool.checkpoint.read(0, slots), 4 * ROUNDOFF * expected.abs() + 1e-30)
    return found.result()


def gate_keeps_its_bits(*, recurrence: str, kernels: str | None = None) -> None:
    """Rows 21, 33: β or dt of sigmoid(0.5) = 0.62245935 with BF16 activations, in step, buffer and fold."""
    data = draw_steps(recurrence, n_rows=1, n_steps=2, activation="bfloat16")
    value = torch.tensor(0.5).sigmoid()
    assert value != value.bfloat16().float()
    data.streams["beta" if data.recurrence.delta_rule else "dt"].fill_(value)
    data.states.zero_()
    pool = make_pool(data, make_options(length=3))
    slot, row = int(data.slots[data.live_rows[0]]), data.live_rows[0]
    module = find_kernels(recurrence, kernels)
    module.replay_step(**data.inputs(0), pool=pool, layer=0, slots=data.slots)
    assert bool((pool.beta[0, slot, :, 0] == value).all())
    assert torch.equal(pool.values[0, slot, :, 0], data.values[0, row])
    added = value * data.values[0, row].float() if data.recurrence.delta_rule else data.values[0, row].float()
    if data.recurrence.delta_rule:
        assert torch.equal(pool.corrections[0, slot, :, 0], added)
    pool.advance(data.slots)
    module.flush_now(pool, data.slots[[row]], **data.fold_constants())
    key = data.streams["k" if data.recurrence.delta_rule else "B"][0, row].float()
    key = key / ((key * key).sum(-1, keepdim=True) + 1e-6).sqrt() if data.recurrence.delta_rule else value * key
    expected = added[:, :, None] * key.repeat_interleave(data.shape.group, dim=0)[:, None, :]
    got = pool.checkpoint.read(0, data.slots[[row]].long())[0]
    assert bool(((got - expected).abs() <= 8 * ROUNDOFF * expected.abs()).all())


def state_keeps_its_bits(*, recurrence: str, options: dict[str, Any], kernels: str | None = None) -> None:
    """Row 34: an FP32 state of 1 + 2^-12 that nothing decays or adds to, BF16 activations: unchanged after L steps."""
    value, plan = 1.0 + 2.0**-12, make_options(**options)
    data = draw_steps(recurrence, n_steps=max(plan.length, 2), activation="bfloat16").hold(value)
    pool = make_pool(data, plan)
    take_steps(data, pool, kernels=kernels)
    assert bool((pool.checkpoint.codes == value).all())


def product_in_fp32(*, length: int, kernels: str | None = None) -> None:
    """Row 35: dt = 0.1, B = 1, x = 1 with BF16 activations, from a state of 0: FP32's 0.1, not BF16's 0.10009766."""
    data = draw_steps("mamba2", n_rows=1, n_steps=max(length, 1), activation="bfloat16")
    for name, value in (("x", 1.0), ("B", 1.0), ("dt", 0.0)):
        data.streams[name].fill_(value)
    data.streams["dt"][0] = 0.1
    data.states.zero_()
    pool = make_pool(data, make_options(length=length))
    take_steps(data, pool, kernels=kernels)
    got = pool.checkpoint.codes[0, data.slots[data.live_rows].long()]
    assert bool((got == torch.tensor(0.1)).all()), f"got {got.flatten()[0]}"


def nonfinite_sets_the_error_word(*, recurrence: str, fmt: str, length: int, kernels: str | None = None) -> None:
    """Row 18: a value that is not finite sets the word of its slot alone, for good, until the slot changes hands."""
    plan = make_options(length=length, recurrence=fmt, read=fmt)
    data = draw_steps(recurrence, n_steps=2)
    bad, good = data.live_rows
    data.values[0, bad, 1, 3] = torch.inf
    pool = make_pool(data, plan)
    take_steps(data, pool, kernels=kernels)
    assert int(pool.error[int(data.slots[bad])]) == 1
    assert int(pool.error[int(data.slots[good])]) == 0
    pool.reset(data.slots[[bad]])
    assert int(pool.error.sum()) == 0


def draws_differ(*, recurrence: str, fmt: str, length: int, kernels: str | None = None) -> None:
    """Row 16: equal states at later tokens, or of other sequences, are rounded otherwise; equal ones alike."""
    plan = make_options(length=length, recurrence=fmt, read=fmt, stochastic=True)
    data = draw_steps(recurrence, n_rows=1, n_steps=1)

    def rounded(tokens: int, sequence: int) -> torch.Tensor:
        pool, slots = make_pool(data, plan), torch.arange(data.n_slots)
        pool.start(slots, tokens=tokens, sequences=sequence)
        take_steps(data, pool, kernels=kernels)
        return pool.checkpoint.codes[0, data.slots[data.live_rows].long()]

    found = [rounded(tokens, 3) for tokens in (5, 6, 7, 8)]
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    assert torch.equal(found[0], rounded(5, 3))
    assert not torch.equal(found[0], rounded(5, 4))


def runs_are_repeatable(*, recurrence: str, device: str = "cpu") -> None:
    """The same steps twice give the same bits (I5), stochastic rounding included."""
    data = draw_steps(recurrence, n_steps=4, device=device)
    plan = make_options(length=3, recurrence="fp8", read="nvfp4", stochastic=True)
    pools = [make_pool(data, plan) for _ in range(2)]
    assert torch.equal(*(take_steps(data, pool) for pool in pools))
    assert torch.equal(pools[0].checkpoint.codes, pools[1].checkpoint.codes)


def equals_sequential(*, recurrence: str, length: int) -> None:
    """Row 38: any L >= 1, powers of two or not: with exact readout the baseline's bits at every step, twice around."""
    data = draw_steps(recurrence, shape=(1, 1, 16, 16), n_rows=1, n_steps=2 * length + 1)
    base, pool = make_pool(data, ReplayOptions()), make_pool(data, make_options(length=length, readout="exact_readout"))
    assert torch.equal(take_steps(data, base), take_steps(data, pool))
    find_kernels(recurrence).flush_now(pool, data.slots[data.live_rows], **data.fold_constants())
    assert torch.equal(base.checkpoint.codes, pool.checkpoint.codes)


def gates_at_their_limits(*, recurrence: str) -> None:
    """Row 25: raw gates of 90, 200, -200 through the gate functions and a step: decays 0 or 1, nothing infinite."""
    data = draw_steps(recurrence, n_rows=1, n_steps=3)
    raw = torch.tensor([90.0, 200.0, -200.0])
    shape = data.streams["dt" if recurrence == "mamba2" else "g"].shape
    raw = raw.reshape(3, *[1] * (len(shape) - 1)).expand(shape)
    if recurrence == "mamba2":
        data.streams["dt"].copy_(compute_dt(raw))
        assert bool((data.streams["dt"][:2] == raw[:2]).all())
        assert bool((data.streams["dt"][2] == 0).all())
    else:
        heads = data.shape.value_heads
        gates = raw if recurrence == "kda" else raw[..., None]
        bias = torch.zeros(heads, gates.shape[-1])
        data.streams["g"].copy_(compute_log_decay(gates, torch.zeros(heads), bias).view(shape))
        assert bool((data.streams["g"][:2] == -raw[:2]).all())
        assert bool((data.streams["g"][2] == 0).all())
    out = take_steps(data, make_pool(data, make_options(length=3)))[:, data.live_rows]
    assert bool(out.isfinite().all())
    base = take_steps(data, make_pool(data, ReplayOptions()))[:, data.live_rows]
    assert bool(((out - base).abs() <= 1e-5 * base.abs().max()).all())


def scales_of_rows_and_blocks(*, recurrence: str, fmt: str, length: int) -> None:
    """Rows 19, 20: rows 2^6 apart in one tile keep their scales; zeros and blocks of 1e-30 become zeros."""
    data = draw_steps(recurrence, shape=(1, 1, 32, 96), n_rows=1, n_steps=1).hold(0.0)
    slots = data.slots[data.live_rows].long()
    rows = torch.randn(48, 32, generator=torch.Generator().manual_seed(4))
    rows[0], rows[1, 16:] = 0.0, 1e-30
    data.states[slots] = torch.cat((rows, 64 * rows))
    pool = make_pool(data, make_options(length=length, recurrence=fmt, read=fmt))
    take_steps(data, pool)
    low, high = pool.checkpoint.read(0, slots)[0, 0].split(48)
    assert torch.equal(64 * low, high)
    assert bool(low[2:].abs().sum(-1).gt(0).all())
    assert not low[0].any()
    assert not low[1, 16:].any()
    assert int(pool.error.sum()) == 0
