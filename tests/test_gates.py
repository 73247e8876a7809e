"""The gates of KDA and Mamba-2 from what a model delivers: against plain FP64 formulas, at their limits, and in a step.

A public fault had the fold recompute a gate by another formula than the model's; here both sides start from raw gates.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from driftgate.kernels.contract import HeadShape, Recurrence, ReplayOptions
from driftgate.kernels.kda import compute_log_decay
from driftgate.kernels.kda import reference as kda
from driftgate.kernels.mamba2 import compute_dt
from driftgate.kernels.mamba2 import reference as mamba2
from driftgate.kernels.pool import StatePool

HEADS, D_K, D_V = 2, 16, 16
ROUNDOFF = 2.0**-24
EXTREMES = (-200.0, -90.0, -20.0, -1.0, 0.0, 1.0, 19.99, 20.0, 20.01, 90.0, 200.0)


def draw(*dims: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(dims, generator=torch.Generator().manual_seed(seed))


def softplus(x: float) -> float:
    """log(1 + exp(x)) without overflow or cancellation."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def kda_gate(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None) -> np.ndarray:
    """g [B, HV, d_k] float64, number by number, each form as its paper's code writes it."""
    g = np.empty(a.shape)
    bias = dt_bias.double().reshape(a.shape[1:])
    for b, i, n in np.ndindex(*a.shape):
        x, rate = float(a[b, i, n].double() + bias[i, n]), math.exp(float(A_log[i].double()))
        if lower_bound is None:
            g[b, i, n] = -rate * softplus(x)
        else:
            g[b, i, n] = lower_bound / (1 + math.exp(-rate * x)) if rate * x > -700 else 0.0
    return g


def close(got: torch.Tensor, expected: np.ndarray, *, argument: float) -> bool:
    """Equality up to FP32: a relative error of 8 roundings, and one more for each unit that exp's argument is off by.

    ``argument``: greatest number that exp is taken of; it is off by some ROUNDOFF of itself.
    """
    limit = (8 + 4 * argument) * ROUNDOFF * np.abs(expected) + 1e-37
    return bool((np.abs(got.double().numpy() - expected) <= limit).all())


@pytest.mark.parametrize("activation", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("flat", [False, True], ids=["bias-per-head", "bias-flat"])
@pytest.mark.parametrize("lower_bound", [None, -5.0, -1.0])
def test_kda_log_decay_is_the_formula(lower_bound: float | None, flat: bool, activation: torch.dtype) -> None:
    a = draw(5, HEADS, D_K, scale=3.0).to(activation)
    A_log, dt_bias = draw(HEADS, seed=1).exp().log1p(), draw(HEADS, D_K, seed=2)
    got = compute_log_decay(a, A_log, dt_bias.flatten() if flat else dt_bias, lower_bound=lower_bound)
    expected = kda_gate(a, A_log, dt_bias, lower_bound)
    assert (got.dtype, got.shape) == (torch.float32, a.shape)
    assert close(got, expected, argument=float(A_log.exp().max() * (a.float().abs().max() + 3)))
    assert float(got.max()) <= 0
    if lower_bound is not None:
        assert float(got.min()) >= lower_bound


def test_the_two_kda_formulas_are_far_apart() -> None:
    """The wrong one of the two would be seen."""
    a, A_log, dt_bias = draw(5, HEADS, D_K), draw(HEADS, seed=1), draw(HEADS, D_K, seed=2)
    plain, bounded = (compute_log_decay(a, A_log, dt_bias, lower_bound=b) for b in (None, -5.0))
    assert float((plain - bounded).abs().median()) > 0.5


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kda_log_decay_at_its_limits(lower_bound: float | None) -> None:
    a = torch.tensor(EXTREMES)[:, None, None].expand(-1, HEADS, D_K)
    got = compute_log_decay(a, torch.zeros(HEADS), torch.zeros(HEADS, D_K), lower_bound=lower_bound)
    expected = kda_gate(a, torch.zeros(HEADS), torch.zeros(HEADS, D_K), lower_bound)
    assert close(got, expected, argument=20.0)
    decay = got.exp()
    assert bool(decay.isfinite().all())
    if lower_bound is None:
        assert bool((got[-1] == -200).all()), "linear above 20"
        assert bool((decay[0] == 1).all())
        assert bool((decay[-1] == 0).all())
    else:
        assert bool((got[-1] == lower_bound).all())
        assert bool((got[0] == 0).all())


@pytest.mark.parametrize("lower_bound", [0.0, 5.0, math.nan])
def test_a_lower_bound_that_is_none_is_refused(lower_bound: float) -> None:
    with pytest.raises(ValueError, match="lower_bound: expected a number below 0"):
        compute_log_decay(draw(1, HEADS, D_K), draw(HEADS), draw(HEADS, D_K), lower_bound=lower_bound)


@pytest.mark.parametrize("activation", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.01, 0.1)], ids=["open", "limits"])
@pytest.mark.parametrize("with_softplus", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_mamba2_dt_is_the_formula(
    with_bias: bool, with_softplus: bool, limits: tuple[float, float], activation: torch.dtype
) -> None:
    dt = draw(7, HEADS, scale=4.0).to(activation)
    bias = draw(HEADS, seed=1) if with_bias else None
    got = compute_dt(dt, bias, softplus=with_softplus, limits=limits)
    expected = np.empty(dt.shape)
    for b, i in np.ndindex(*dt.shape):
        x = float(dt[b, i].double()) + (float(bias[i].double()) if bias is not None else 0.0)
        expected[b, i] = min(max(softplus(x) if with_softplus else x, limits[0]), limits[1])
    assert got.dtype == torch.float32
    if with_softplus:
        assert close(got, expected, argument=16.0)
    else:  # a sum may cancel, so the error is that of its parts
        assert np.abs(got.double().numpy() - expected).max() <= 2 * ROUNDOFF * 16
    assert not math.isclose(float(expected.min()), float(expected.max()))


def test_mamba2_dt_at_its_limits() -> None:
    dt = compute_dt(torch.tensor(EXTREMES)[:, None])
    assert bool(dt.isfinite().all())
    assert dt[-2:, 0].tolist() == [90.0, 200.0], "linear above 20"
    assert float(dt[0]) == 0.0
    assert close(dt, np.array([[softplus(x)] for x in EXTREMES]), argument=20.0)


def test_mamba2_limits_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match="limits: expected least and greatest"):
        compute_dt(draw(1, HEADS), limits=(0.1, 0.01))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kda_steps_from_raw_gates(lower_bound: float | None) -> None:
    """Five steps of replay, a flush among them, against a recurrence in numpy that starts from a, b, A_log, dt_bias."""
    n = 5
    q, k, v = (draw(n, 1, HEADS, D_K, seed=s) for s in (3, 4, 5))
    a, b = draw(n, 1, HEADS, D_K, seed=6), draw(n, 1, HEADS, seed=7)
    A_log, dt_bias, first = draw(HEADS, seed=8), draw(HEADS, D_K, seed=9), draw(1, HEADS, D_V, D_K, seed=10)
    shape = HeadShape(key_heads=HEADS, value_heads=HEADS, d_k=D_K, d_v=D_V)
    pool = StatePool(shape, ReplayOptions(length=3), recurrence=Recurrence.KDA, n_slots=1)
    pool.write(0, torch.tensor([0]), first)
    slots = torch.tensor([0])
    state = first[0].double().numpy()
    for t in range(n):
        g = compute_log_decay(a[t], A_log, dt_bias, lower_bound=lower_bound)
        out = kda.replay_step(q[t], k[t], v[t], g, b[t].sigmoid(), pool=pool, layer=0, slots=slots)
        pool.advance(slots)
        alpha = np.exp(kda_gate(a[t], A_log, dt_bias, lower_bound))[0]
        for i in range(HEADS):
            key, query = (x[t, 0, i].double().numpy() for x in (k, q))
            key, query = key / math.sqrt(key @ key + 1e-6), query / math.sqrt(query @ query + 1e-6) / D_K**0.5
            beta = 1 / (1 + math.exp(-float(b[t, 0, i].double())))
            decayed = state[i] * alpha[i]
            state[i] = decayed + beta * np.outer(v[t, 0, i].double().numpy() - decayed @ key, key)
            assert np.abs(out[0, i].double().numpy() - state[i] @ query).max() < 1e-5


def test_mamba2_steps_from_raw_gates() -> None:
    """As above, from dt before bias and softplus, and A_log; two groups of B and C."""
    n, groups = 5, 1
    x, z = (draw(n, 1, HEADS, D_V, seed=s) for s in (3, 4))
    B, C = (draw(n, 1, groups, D_K, seed=s) for s in (5, 6))
    raw, dt_bias, A_log = draw(n, 1, HEADS, seed=7), draw(HEADS, seed=8), draw(HEADS, seed=9)
    D, first = draw(HEADS, seed=10), draw(1, HEADS, D_V, D_K, seed=11)
    shape = HeadShape(key_heads=groups, value_heads=HEADS, d_k=D_K, d_v=D_V)
    pool = StatePool(shape, ReplayOptions(length=3), recurrence=Recurrence.MAMBA2, n_slots=1)
    pool.write(0, torch.tensor([0]), first)
    slots = torch.tensor([0])
    state = first[0].double().numpy()
    for t in range(n):
        dt = compute_dt(raw[t], dt_bias)
        A = -A_log.exp()
        out = mamba2.replay_step(x[t], B[t], C[t], dt, A=A, D=D, z=z[t], pool=pool, layer=0, slots=slots)
        pool.advance(slots)
        for i in range(HEADS):
            step = softplus(float(raw[t, 0, i].double() + dt_bias[i].double()))
            value, key, query = x[t, 0, i].double().numpy(), B[t, 0, 0].double().numpy(), C[t, 0, 0].double().numpy()
            state[i] = math.exp(-math.exp(float(A_log[i].double())) * step) * state[i] + step * np.outer(value, key)
            gate = z[t, 0, i].double().numpy()
            expected = (state[i] @ query + float(D[i]) * value) * gate / (1 + np.exp(-gate))
            assert np.abs(out[0, i].double().numpy() - expected).max() < 1e-4
