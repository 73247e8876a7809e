"""The torch twins of all recurrences: against loops over heads in FP64, and the law by which a cached fold leaks.

The loops are written from the equations and share no code with the twins: a step multiplies a head's state from the
right by T = D (I - β k kᵀ), with D = α I, Diag(α) in KDA, and T = D in Mamba-2, and adds a matrix of rank one.
"""

from __future__ import annotations

import copy
import importlib
import math
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from driftgate.accuracy.step_data import StepData, draw_inputs
from driftgate.kernels.contract import Fold, HeadShape, Readout, Recurrence, ReplayOptions
from driftgate.kernels.pool import StatePool

SHAPE = HeadShape(key_heads=2, value_heads=4, d_k=24, d_v=16)
ROUNDOFF = 2.0**-24
EVERY = list(Recurrence)
DELTA = [Recurrence.GDN, Recurrence.KDA]
by_name = {"ids": lambda x: x.value}


def find_twin(recurrence: Recurrence) -> ModuleType:
    return importlib.import_module(f"driftgate.kernels.{recurrence.value}.reference")


def make_data(
    recurrence: Recurrence, n_steps: int, *, n_rows: int = 2, seed: int = 0, activation: torch.dtype = torch.float64
) -> StepData:
    """In FP64, so that the buffer holds the very inputs."""
    return draw_inputs(SHAPE, activation, n_rows=n_rows, n_steps=n_steps, seed=seed, recurrence=recurrence)


def make_pool(data: StepData, options: ReplayOptions, states: torch.Tensor | None = None, **fields: Any) -> StatePool:
    pool = StatePool(
        data.shape,
        options,
        recurrence=data.recurrence,
        n_slots=data.n_slots,
        activation_dtype=data.activation,
        **fields,
    )
    pool.write(0, torch.arange(data.n_slots), data.states if states is None else states)
    return pool


def run(data: StepData, pool: StatePool, n_steps: int | None = None, slots: torch.Tensor | None = None) -> torch.Tensor:
    """Outputs of the live rows, [steps, live, HV, d_v] float64."""
    twin, slots = find_twin(data.recurrence), data.slots if slots is None else slots
    take = twin.decode_step if pool.options.step_by_step else twin.replay_step
    outs = []
    for t in range(data.n_steps if n_steps is None else n_steps):
        outs.append(take(**data.inputs(t), pool=pool, layer=0, slots=slots, compute_dtype=torch.float64))
        pool.advance(slots)
    return torch.stack(outs)[:, data.live_rows]


def flush(data: StepData, pool: StatePool, slots: torch.Tensor) -> None:
    find_twin(data.recurrence).flush_now(pool, slots, compute_dtype=torch.float64, **data.fold_constants())


def live_slots(data: StepData) -> torch.Tensor:
    return data.slots[data.live_rows].long()


@dataclass
class HeadStep:
    """One step of one head, from the equations: S = S·T + added, o = (S·query + skip)·gate. All float64."""

    decay: np.ndarray
    transition: np.ndarray
    added: np.ndarray
    query: np.ndarray
    skip: np.ndarray
    gate: np.ndarray


def head_step(data: StepData, t: int, row: int, i: int) -> HeadStep:
    """Step t of value head i of a row."""
    x = {name: stream[t, row].double().numpy() for name, stream in data.streams.items()}
    d_k, d_v = data.shape.d_k, data.shape.d_v
    j = i // (data.shape.value_heads // data.shape.key_heads)
    if data.recurrence is Recurrence.MAMBA2:
        A, D = (float(data.constants[name][i].double()) for name in ("A", "D"))
        key, value, query, dt = x["B"][j], x["x"][i], x["C"][j], float(x["dt"][i])
        decay = np.eye(d_k) * math.exp(A * dt)
        gate = np.array([z / (1 + math.exp(-z)) for z in x["z"][i]])
        return HeadStep(decay, decay, dt * np.outer(value, key), query, D * value, gate)
    key, query = (v[j] / math.sqrt(sum(e * e for e in v[j]) + 1e-6) for v in (x["k"], x["q"]))
    beta, value, g = float(x["beta"][i]), x["v"][i], x["g"][i]
    decay = np.diag([math.exp(e) for e in np.broadcast_to(g, d_k)])
    transition = decay @ (np.eye(d_k) - beta * np.outer(key, key))
    none, one = np.zeros(d_v), np.ones(d_v)
    return HeadStep(decay, transition, beta * np.outer(value, key), query * d_k**-0.5, none, one)


def over_heads(data: StepData, function: Any) -> np.ndarray:
    """[live, HV, ...] of function(row, head)."""
    heads = range(data.shape.value_heads)
    return np.array([[function(row, i) for i in heads] for row in data.live_rows])


def exact(data: StepData, n_steps: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """States [steps + 1, live, HV, d_v, d_k], the first as drawn, and outputs [steps, live, HV, d_v]; float64."""
    n_steps = data.n_steps if n_steps is None else n_steps

    def run_head(row: int, i: int) -> tuple[np.ndarray, np.ndarray]:
        states, outs = [data.states[int(data.slots[row]), i].double().numpy()], []
        for t in range(n_steps):
            step = head_step(data, t, row, i)
            states.append(states[-1] @ step.transition + step.added)
            outs.append((states[-1] @ step.query + step.skip) * step.gate)
        return np.array(states), np.array(outs)

    found = [[run_head(row, i) for i in range(data.shape.value_heads)] for row in data.live_rows]
    states, outs = (np.array([[head[n] for head in row] for row in found]) for n in (0, 1))
    return np.moveaxis(states, 2, 0), np.moveaxis(outs, 2, 0)


def difference(a: torch.Tensor, b: np.ndarray) -> float:
    return float(np.abs(a.double().numpy() - b).max())


@pytest.mark.parametrize("readout", [Readout.OUTPUT_ONLY, Readout.EXACT_READOUT], **by_name)
@pytest.mark.parametrize("recurrence", EVERY, **by_name)
def test_replay_is_the_recurrence(recurrence: Recurrence, readout: Readout) -> None:
    data = make_data(recurrence, 12)
    pool = make_pool(data, ReplayOptions(length=12, readout=readout))
    if pool.corrections is not None:
        pool.corrections = pool.corrections.double()
    outs = run(data, pool)
    # everything is FP64 until the flush of the twelfth step has its output
    assert difference(outs, exact(data)[1]) < 1e-12
    states = exact(data)[0]
    assert difference(pool.checkpoint.read(0, live_slots(data)), states[-1]) <= 2 * ROUNDOFF * np.abs(states[-1]).max()


@pytest.mark.parametrize("recurrence", DELTA, **by_name)
def test_corrections_lie_in_fp32(recurrence: Recurrence) -> None:
    data = make_data(recurrence, 12)
    outs = run(data, make_pool(data, ReplayOptions(length=12)))
    expected = exact(data)[1]
    size = np.abs(expected).max() + float(data.values[:, data.live_rows].abs().max())
    assert 1e-12 < difference(outs, expected) < 12 * ROUNDOFF * size


@pytest.mark.parametrize("recurrence", EVERY, **by_name)
def test_baseline_is_the_recurrence(recurrence: Recurrence) -> None:
    data = make_data(recurrence, 9)
    outs = run(data, make_pool(data, ReplayOptions()))
    states, expected = exact(data)
    steps = [head_step(data, t, row, i) for t in range(9) for row in data.live_rows for i in range(4)]
    reads = max(np.linalg.norm(step.query) * max(1.0, np.abs(step.gate).max()) for step in steps)
    assert difference(outs, expected) < 9 * ROUNDOFF * np.linalg.norm(states, axis=-1).max() * reads


@pytest.mark.parametrize("recurrence", EVERY, **by_name)
def test_flush_without_a_step_is_the_recurrence(recurrence: Recurrence) -> None:
    data = make_data(recurrence, 3)
    pool = make_pool(data, ReplayOptions(length=8))
    run(data, pool)
    flush(data, pool, data.slots[data.live_rows])
    got = pool.checkpoint.read(0, live_slots(data))
    assert torch.equal(got, torch.from_numpy(exact(data)[0][-1]).float())


@pytest.mark.parametrize("amplitude", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize("recurrence", DELTA, **by_name)
def test_epsilon_is_inside_the_root(recurrence: Recurrence, amplitude: float) -> None:
    data = make_data(recurrence, 3)
    data.streams["k"].mul_(amplitude)
    outs = run(data, make_pool(data, ReplayOptions(length=3, readout=Readout.EXACT_READOUT)))
    assert difference(outs, exact(data)[1]) < 1e-12


def test_optional_inputs_of_mamba2() -> None:
    """D and z left out are D = 0 and a gate of 1."""
    data = make_data(Recurrence.MAMBA2, 5)
    twin, slots = find_twin(data.recurrence), data.slots
    pool = make_pool(data, ReplayOptions(length=5))
    plain = []
    for t in range(5):
        inputs = {name: x for name, x in data.inputs(t).items() if name not in ("D", "z")}
        plain.append(twin.replay_step(**inputs, pool=pool, layer=0, slots=slots, compute_dtype=torch.float64))
        pool.advance(slots)
    states = exact(data)[0]
    steps = [over_heads(data, partial(lambda t, row, i: head_step(data, t, row, i).query, t)) for t in range(5)]
    expected = np.array([(s @ q[..., None])[..., 0] for s, q in zip(states[1:], steps, strict=True)])
    assert difference(torch.stack(plain)[:, data.live_rows], expected) < 1e-12
    with_both = exact(data)[1]
    assert np.abs(with_both - expected).max() > 0.1


def test_another_scale_and_no_norm() -> None:
    """scale multiplies q; without the norm q and k are taken as they are."""
    data = make_data(Recurrence.GDN, 1)
    k, q = (0.2 * data.streams[name] for name in ("k", "q"))
    live = data.live_rows
    pool = make_pool(data, ReplayOptions(length=1))
    before = data.states[live_slots(data)].double()
    inputs = data.inputs(0) | {"k": k[0], "q": q[0]}
    options = {"scale": 0.3, "qk_l2norm": False, "compute_dtype": torch.float64}
    got = find_twin(data.recurrence).replay_step(**inputs, pool=pool, layer=0, slots=data.slots, **options)[live]
    k, q = (x[0, live].repeat_interleave(2, dim=1) for x in (k, q))
    state = before * data.streams["g"][0, live].double().exp()[..., None, None]
    read = torch.einsum("bhvk,bhk->bhv", state, k)
    u = data.streams["beta"][0, live].double()[..., None] * (data.streams["v"][0, live] - read)
    state = state + torch.einsum("bhv,bhk->bhvk", u, k)
    assert (got - 0.3 * torch.einsum("bhvk,bhk->bhv", state, q)).abs().max() < 1e-12


@pytest.mark.parametrize("h", [1, 2, 5, 15])
@pytest.mark.parametrize("fold", list(Fold), **by_name)
@pytest.mark.parametrize("readout", [Readout.OUTPUT_ONLY, Readout.EXACT_READOUT], **by_name)
@pytest.mark.parametrize("recurrence", EVERY, **by_name)
def test_the_law_of_the_leak(recurrence: Recurrence, readout: Readout, fold: Fold, h: int) -> None:
    """e' = e·M_h T_{h+1} + E·(M_h - P_h)·T_{h+1}, with a checkpoint error e and a read error E = copy - checkpoint.

    The second term is there with a cached fold alone, and never in Mamba-2, where M_h = P_h. The output of the flush
    step is e'·q away from the exact one, to FP64 accuracy once û is kept in FP64; the state is stored in FP32.
    """
    data = make_data(recurrence, h + 1, seed=h)
    slots = live_slots(data)
    noise = 0.05 * torch.randn(data.states.shape, generator=torch.Generator().manual_seed(1))
    options = ReplayOptions(read="nvfp4", length=h + 1, readout=readout, fold=fold)
    pool = make_pool(data, options, data.states + noise)
    if pool.corrections is not None:
        pool.corrections = pool.corrections.double()
    checkpoint = pool.checkpoint.read(0, slots).double()
    e = (checkpoint - data.states[slots].double()).numpy()
    big_e = (pool.copy.read(0, slots).double() - checkpoint).numpy()
    outs = run(data, pool)
    states, expected_outs = exact(data)

    def leak(row: int, i: int) -> np.ndarray:
        n = data.live_rows.index(row)
        steps = [head_step(data, t, row, i) for t in range(h + 1)]
        m = np.linalg.multi_dot([np.eye(SHAPE.d_k), np.eye(SHAPE.d_k), *(s.transition for s in steps[:-1])])
        p = np.linalg.multi_dot([np.eye(SHAPE.d_k), np.eye(SHAPE.d_k), *(s.decay for s in steps[:-1])])
        read = big_e[n, i] @ (m - p) @ steps[-1].transition if fold is Fold.CACHED else np.zeros_like(big_e[n, i])
        return np.stack([e[n, i] @ m @ steps[-1].transition, read])

    carried, read = np.moveaxis(over_heads(data, leak), 2, 0)
    if fold is Fold.CACHED and recurrence.delta_rule:
        assert np.abs(read).max() > 1e-3
    else:
        assert not read.any()
    last = partial(head_step, data, h)
    queries, gates = (over_heads(data, lambda row, i, n=n: getattr(last(row, i), n)) for n in ("query", "gate"))
    error = ((carried + read) @ queries[..., None])[..., 0] * gates
    assert np.abs((outs[-1].numpy() - expected_outs[-1]) - error).max() < 1e-12
    after = pool.checkpoint.read(0, slots).double().numpy()
    assert np.abs((after - states[-1]) - (carried + read)).max() <= 2 * ROUNDOFF * np.abs(after).max()


@pytest.mark.parametrize("fold", list(Fold), **by_name)
@pytest.mark.parametrize("readout", [Readout.OUTPUT_ONLY, Readout.EXACT_READOUT], **by_name)
@pytest.mark.parametrize("read", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize("recurrence", EVERY, **by_name)
def test_the_leak_is_exactly_0(recurrence: Recurrence, readout: Readout, fold: Fold, read: str) -> None:
    """With exact fold, and with either fold in Mamba-2: the bits of a checkpoint that is read in FP32 throughout."""
    data = make_data(recurrence, 10)
    pools = [
        make_pool(data, ReplayOptions(read=r, length=4, readout=o, fold=f))
        for r, o, f in ((read, readout, fold), ("fp32", Readout.EXACT_READOUT, Fold.EXACT))
    ]
    outs = [run(data, pool) for pool in pools]
    assert not torch.equal(*outs), "the copy is read between flushes"
    leaks = fold is Fold.CACHED and recurrence.delta_rule
    assert torch.equal(pools[0].checkpoint.codes, pools[1].checkpoint.codes) is not leaks


@pytest.mark.parametrize("recurrence", EVERY, **by_name)
def test_the_leak_is_gone_where_every_step_flushes(recurrence: Recurrence) -> None:
    data = make_data(recurrence, 6)
    pools = [make_pool(data, ReplayOptions(read=r, length=1, fold=Fold.CACHED)) for r in ("nvfp4", "fp32")]
    for pool in pools:
        run(data, pool)
    assert torch.equal(pools[0].checkpoint.codes, pools[1].checkpoint.codes)


@pytest.mark.parametrize("recurrence", EVERY, **by_name)
def test_two_windows_are_one_long_one(recurrence: Recurrence) -> None:
    """Flushes are where they should be: L = 3 and L = 8 give the FP64 outputs up to the rounding of the checkpoint."""
    data = make_data(recurrence, 16)
    outs = [
        run(data, make_pool(data, ReplayOptions(length=length, readout=Readout.EXACT_READOUT))) for length in (3, 8)
    ]
    states, expected = exact(data)
    steps = [head_step(data, t, row, i) for t in range(16) for row in data.live_rows for i in range(4)]
    reads = max(np.linalg.norm(step.query) * max(1.0, np.abs(step.gate).max()) for step in steps)
    bound = 16 * ROUNDOFF * np.linalg.norm(states, axis=-1).max() * reads
    assert all(difference(out, expected) < bound for out in outs)


@pytest.mark.parametrize("recurrence", EVERY, **by_name)
def test_rows_at_different_cursors(recurrence: Recurrence) -> None:
    data = make_data(recurrence, 7)
    pool, alone = (make_pool(data, ReplayOptions(length=4)) for _ in range(2))
    slots = live_slots(data)
    pool.force_flush(slots[1:])
    alone.force_flush(slots[1:])
    both = run(data, pool)
    one = data.slots.clone()
    one[data.live_rows[0]] = -1
    assert (run(data, alone, slots=one)[:, 1] - both[:, 1]).abs().max() < 1e-12
    assert pool.cursor[slots].tolist() == [3, 2]


@pytest.mark.parametrize("fold", list(Fold), **by_name)
@pytest.mark.parametrize("recurrence", EVERY, **by_name)
def test_what_lies_beyond_the_cursor_is_not_read(recurrence: Recurrence, fold: Fold) -> None:
    data = make_data(recurrence, 7)
    pools = [make_pool(data, ReplayOptions(length=4, fold=fold, read="nvfp4")) for _ in range(2)]
    for buffer in pools[1].buffers().values():
        buffer.fill_(torch.nan)
    outs = [run(data, pool) for pool in pools]
    assert torch.equal(*outs)
    assert torch.equal(pools[0].checkpoint.codes, pools[1].checkpoint.codes)


@pytest.mark.parametrize("recurrence", EVERY, **by_name)
def test_memoised_reads_change_nothing(recurrence: Recurrence) -> None:
    data = make_data(recurrence, 9)
    plain = make_pool(data, ReplayOptions(length=4, read="nvfp4", recurrence="fp8"))
    memo = copy.deepcopy(plain)
    memo.memoise_reads()
    assert torch.equal(run(data, plain), run(data, memo))
    assert torch.equal(plain.checkpoint.codes, memo.checkpoint.codes)
