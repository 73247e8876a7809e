"""Chunked forms that the embedded checkpoints are trained with, against the recurrences of the FP64 twins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from driftgate.evals.training.chunk_gdn import chunk_gated_delta_rule
from driftgate.evals.training.chunk_kda import LOWEST, chunk_kimi_delta
from driftgate.evals.training.chunk_mamba2 import chunk_selective_scan
from driftgate.kernels.gdn import reference as gdn
from driftgate.kernels.kda import reference as kda
from driftgate.kernels.mamba2 import reference as mamba2
from driftgate.kernels.twin import contract, normalise

BATCH, LENGTH, HEADS, D_K, D_V, GROUPS = 2, 128, 2, 8, 6, 1


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def walk(
    step: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> Tensor:
    """Outputs [B, T, H, d_v] of a twin's step, token by token, in the dtype given."""
    state = torch.zeros(BATCH, HEADS, v.shape[-1], k.shape[-1], dtype=v.dtype)
    out = []
    for t in range(v.shape[1]):
        state, _ = step(state, k[:, t], v[:, t], g[:, t], beta[:, t])
        out.append(contract(state, q[:, t]))
    return torch.stack(out, 1)


def delta_inputs(*, by_channel: bool, fastest: float) -> dict[str, Tensor]:
    shape = (BATCH, LENGTH, HEADS)
    decay = draw(*shape, D_K, seed=3) if by_channel else draw(*shape, seed=3)
    return {
        "q": draw(*shape, D_K, seed=0),
        "k": draw(*shape, D_K, seed=1),
        "v": draw(*shape, D_V, seed=2),
        "g": fastest * torch.sigmoid(2 * decay),
        "beta": torch.sigmoid(draw(*shape, seed=4)),
    }


def check(outputs: Tensor, expected: Tensor, inputs: list[Tensor], reference: list[Tensor], *, atol: float) -> None:
    """Equal outputs, and equal gradients of one weighted sum of them."""
    torch.testing.assert_close(outputs.double(), expected, rtol=1e-4, atol=atol)
    weights = draw(*expected.shape, seed=9)
    got = torch.autograd.grad((outputs.double() * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), reference)
    for mine, twin in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), twin, rtol=1e-3, atol=1e-4 * float(twin.abs().max()))


@pytest.mark.parametrize("fastest", [-0.05, -1.0, 0.999 * LOWEST])
@pytest.mark.parametrize("recurrence", ["gdn", "kda"])
def test_delta_rules_by_chunks_are_the_twins(recurrence: str, fastest: float) -> None:
    function, step = (chunk_kimi_delta, kda.step) if recurrence == "kda" else (chunk_gated_delta_rule, gdn.step)
    wide = {n: x.requires_grad_() for n, x in delta_inputs(by_channel=recurrence == "kda", fastest=fastest).items()}
    narrow = {n: x.detach().float().requires_grad_() for n, x in wide.items()}
    out, state = function(*narrow.values(), use_qk_l2norm_in_kernel=True)
    expected = walk(step, normalise(wide["q"]) * D_K**-0.5, normalise(wide["k"]), wide["v"], wide["g"], wide["beta"])
    assert state is None
    check(out, expected, list(narrow.values()), list(wide.values()), atol=1e-5)


def test_what_decays_faster_than_the_bound_still_comes_out() -> None:
    inputs = delta_inputs(by_channel=True, fastest=40 * LOWEST)
    out, _ = chunk_kimi_delta(*(x.float() for x in inputs.values()), use_qk_l2norm_in_kernel=True)
    expected = walk(
        kda.step, normalise(inputs["q"]) * D_K**-0.5, normalise(inputs["k"]), inputs["v"], inputs["g"], inputs["beta"]
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=0.02)


@pytest.mark.parametrize("fastest", [0.01, 4.0])
def test_mamba2_by_chunks_is_the_twin(fastest: float) -> None:
    shape = (BATCH, LENGTH, HEADS)
    wide = {
        "x": draw(*shape, D_V, seed=0),
        "dt": draw(*shape, seed=1),
        "A": -fastest * torch.tensor([0.1, 1.0], dtype=torch.float64),
        "B": draw(BATCH, LENGTH, GROUPS, D_K, seed=2),
        "C": draw(BATCH, LENGTH, GROUPS, D_K, seed=3),
        "D": torch.tensor([0.5, 2.0], dtype=torch.float64),
        "bias": torch.tensor([-1.0, 0.5], dtype=torch.float64),
    }
    wide = {name: x.requires_grad_() for name, x in wide.items()}
    narrow = {name: x.detach().float().requires_grad_() for name, x in wide.items()}
    x, dt, A, B, C, D, bias = narrow.values()
    out = chunk_selective_scan(x, dt, A, B, C, chunk_size=64, D=D, dt_bias=bias, dt_softplus=True)
    x, dt, A, B, C, D, bias = wide.values()
    step = torch.nn.functional.softplus(dt + bias)
    b, c = (t.repeat_interleave(HEADS // GROUPS, dim=2) for t in (B, C))
    expected = walk(mamba2.step, c, b * step[..., None], x, A * step, step) + D[:, None] * x
    check(out, expected, list(narrow.values()), list(wide.values()), atol=1e-4)


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, chunk_kimi_delta])
def test_training_forms_refuse_what_they_do_not_do(function: Callable[..., object]) -> None:
    inputs = [x.float() for x in delta_inputs(by_channel=function is chunk_kimi_delta, fastest=-1.0).values()]
    with pytest.raises(ValueError, match="keeps no state"):
        function(*inputs, output_final_state=True)
    with pytest.raises(ValueError, match="multiple of 64"):
        function(*(x[:, :100] for x in inputs))


def test_the_scan_refuses_what_it_does_not_do() -> None:
    x, dt, B = draw(1, 100, 2, 4, seed=0), draw(1, 100, 2, seed=1), draw(1, 100, 1, 4, seed=2)
    with pytest.raises(ValueError, match="multiple of 64"):
        chunk_selective_scan(x, dt, -torch.ones(2), B, B)
    with pytest.raises(ValueError, match="keeps no state"):
        chunk_selective_scan(x, dt, -torch.ones(2), B, B, return_final_states=True)
