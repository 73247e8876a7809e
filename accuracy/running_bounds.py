"""Bounds of T1: how far many steps in FP32 may lie from the recurrence in FP64; nothing here is measured or tuned.

Notable: bounds run along with the FP64 side, by row, head and entry of a value, so they follow decays and are no larger
than what a step reads and adds. e = 2^-24; twice the first order of every FP32 term is taken, which covers higher
orders and the approximate exp, square root and quotient of a GPU.

State. Let E bound the norm of the error of a row of S. A step multiplies it by Diag(α)(I - βkkᵀ), whose norm is at most
max α (|k| <= 1 and 0 <= β <= 2), and adds what it rounds itself: α, off by α(|g| + 8)·e, and its product with S; the
sum S k, off by (d_k + 8)·e of Σ|S||k|; keys, whose norm is off by (d_k/2 + 8)·e; u, and u kᵀ + S.

Readout from h buffered entries, for x = k and q, with the exact coefficients c_j = (w_j ⊙ k_j)·x, their sums of
magnitudes b_j = Σ w_j|k_j||x|, and D_j the bound of û_j, which was read the same way:
    error of R(x) <= E_c max(P)|x| + Σ_j (D_j |c_j| + (|u_j| + D_j)((1 + η)² - 1) b_j) + sums and decays in FP32
    error of û = β·error of R(k) + u's own;   error of o = error of R(q) + error of û·|k·q| + sums in FP32
η is what an operand of the product that ``state_output`` takes is rounded by: 2^-10 in TF32, which hardware may
truncate, 2^-8 in BF16. In Mamba-2 û is x itself, D_j = 0. A readout may build the state as well: the greater of the two
errors is taken.

y adds D·x, rounded twice; silu(z) multiplies all, off by (|z| + 8)·e. An output is rounded once to its type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from driftgate.kernels.contract import Dot

__all__ = ["ROUNDOFF", "ExactStep", "RunningBounds", "bound_elements"]

_OPERAND = {Dot.IEEE: 0.0, Dot.TF32: 2.0**-10, Dot.BF16: 2.0**-8}
ROUNDOFF = 2.0**-24
"""Unit roundoff of FP32."""
_TWICE = 2 * ROUNDOFF


@dataclass(frozen=True, kw_only=True)
class ExactStep:
    """One step in FP64, as its formula uses it.

    Attributes:
        before, after: states [rows, HV, d_v, d_k].
        q, k: [rows, HV, d_k], normalised where the recurrence does; k is dt·B in Mamba-2.
        u: what is added with k, [rows, HV, d_v].
        g: log decays [rows, HV, 1] or [rows, HV, d_k].
        beta: [rows, HV]; of no use without the delta rule.
    """

    before: torch.Tensor
    after: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    u: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


class RunningBounds:
    """Bounds of one plan on some rows, taken along step by step.

    Args:
        state: where the rows start, [rows, HV, d_v, d_k] float64; kernels start from the same bits.
        delta_rule: whether u depends on the state.
        dot: precision of the readout's matrix product.

    Attributes:
        state: greatest error of an element of S_t, [rows, HV, d_v].
    """

    def __init__(self, state: torch.Tensor, *, delta_rule: bool, dot: Dot) -> None:
        self.delta_rule, self.d_k = delta_rule, state.shape[-1]
        self.operands = (1 + _OPERAND[dot]) ** 2 - 1
        self.state = torch.zeros_like(state[..., 0])
        self.checkpoint, self.of_checkpoint = state.clone(), self.state.clone()
        self.entries: list[tuple[ExactStep, torch.Tensor]] = []
        self.since = torch.zeros(len(state), dtype=torch.int64, device=state.device)
        self.t = 0

    def take(self, step: ExactStep, flushed: Sequence[int]) -> torch.Tensor:
        """Take a step that flushed these rows; what S_t q may be off by, [rows, HV, d_v]."""
        self.state = self._step_state(step)
        of_output: torch.Tensor = self.state * step.q.norm(dim=-1, keepdim=True)
        of_output = of_output + _TWICE * self._terms * _sum(step.after.abs(), step.q.abs())
        if len(flushed) < len(self.since):
            read, correction = self._read(step)
            kept = torch.ones(len(self.since), dtype=torch.bool, device=self.since.device)
            kept[list(flushed)] = False
            of_output = torch.where(kept[:, None, None], torch.maximum(of_output, read), of_output)
        else:
            correction = torch.zeros_like(step.u)
        self.entries.append((step, correction))
        self.t += 1
        self.fold(flushed, step.after)
        return of_output

    def fold(self, rows: Sequence[int], state: torch.Tensor) -> None:
        """These rows hold S_t in their checkpoints now and no entries."""
        index = list(rows)
        self.checkpoint[index] = state[index]
        self.of_checkpoint[index] = self.state[index]
        self.since[index] = self.t
        oldest = self.t - int(self.since.min())
        self.entries = self.entries[len(self.entries) - oldest :]

    @property
    def _terms(self) -> float:
        """Roundings of a sum over d_k of products with a vector that was itself made from a sum of d_k squares."""
        return (1.5 if self.delta_rule else 1.0) * self.d_k + 16

    def _step_state(self, step: ExactStep) -> torch.Tensor:
        decay, key = step.g.exp(), step.k.norm(dim=-1, keepdim=True)
        off = _off_by(step.g, 9)
        error: torch.Tensor = decay.amax(-1, keepdim=True) * self.state
        local: torch.Tensor = (step.before.abs() * off[..., None, :]).norm(dim=-1) + ROUNDOFF * step.after.norm(dim=-1)
        local = local + ROUNDOFF * (0.5 * self.d_k + 10) * step.u.abs() * key
        if self.delta_rule:
            read = _sum(step.before.abs() * decay[..., None, :], step.k.abs())
            local = local + ROUNDOFF * self._terms * step.beta[..., None] * read * key
        return error + 2 * local

    def _read(self, step: ExactStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Errors of an output and of û by a readout from the checkpoint and the buffer, [rows, HV, d_v] each."""
        ages = range(self.t - len(self.entries), self.t)
        used = [(self.since <= j)[:, None, None] for j in ages]
        sums = step.g
        of_read = [torch.zeros_like(step.u), torch.zeros_like(step.u)]
        vectors = (step.k, step.q)
        n = len(self.entries) + 1
        for (entry, correction), mine in zip(reversed(self.entries), reversed(used), strict=True):
            w, off = sums.exp(), _off_by(sums, n + self._terms)
            for i, x in enumerate(vectors):
                weighed = entry.k.abs() * x.abs()
                exact = (w * entry.k * x).sum(-1, keepdim=True).abs()
                rounded = (weighed * (self.operands * w + 2 * off)).sum(-1, keepdim=True)
                error = correction * exact + (entry.u.abs() + correction) * rounded
                of_read[i] = of_read[i] + torch.where(mine, error, 0.0)
            sums = sums + torch.where(mine, entry.g, 0.0)
        P, off = sums.exp(), _off_by(sums, n + self._terms)
        for i, x in enumerate(vectors):
            of_read[i] = of_read[i] + self.of_checkpoint * P.amax(-1, keepdim=True) * x.norm(dim=-1, keepdim=True)
            of_read[i] = of_read[i] + 2 * _sum(self.checkpoint.abs() * off[..., None, :], x.abs())
        of_u = torch.zeros_like(step.u)
        if self.delta_rule:
            of_u = step.beta[..., None] * of_read[0] + 2 * _TWICE * step.u.abs()
        own, magnitudes = (step.k * step.q).sum(-1, keepdim=True).abs(), (step.k * step.q).abs().sum(-1, keepdim=True)
        return of_read[1] + of_u * own + _TWICE * self._terms * step.u.abs() * magnitudes, of_u


def bound_elements(
    expected: torch.Tensor,
    *,
    activation: torch.dtype,
    read: torch.Tensor,
    skip: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
) -> torch.Tensor:
    """Error of each element of an output.

    Args:
        expected: [..., d_v] float64.
        activation: type that an output is rounded to.
        read: what S q may be off by, [..., d_v].
        skip: D·x, None without.
        z: of the gate silu(z), None without.

    Returns:
        Absolute bounds [..., d_v], float64.
    """
    rounding = 2.0**-8 if activation == torch.bfloat16 else ROUNDOFF
    bound, magnitude = read, expected.abs()
    if skip is not None:
        bound = bound + 2 * _TWICE * skip.abs()
    if z is not None:
        bound = bound * torch.nn.functional.silu(z).abs() + _TWICE * (z.abs() + 8) * magnitude
    return (bound + _TWICE * magnitude) * (1 + rounding) + rounding * magnitude


def _sum(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """S x, [..., d_v]."""
    return (state * x[..., None, :]).sum(-1)


def _off_by(g: torch.Tensor, roundings: float) -> torch.Tensor:
    """e·(|g| + roundings)·exp(g), 0 at -inf: what exp(g) times something is off by, of that, to first order."""
    return torch.nan_to_num(g.exp() * (g.abs() + roundings) * ROUNDOFF, nan=0.0)
