"""Precision plans emulated in torch on a model of transformers, good enough to choose a checkpoint by.

Rows are [plan x sequence]; every row is decoded one token at a time with the same tokens. Two states per row and
layer: the recurrence (what the flush folds into) and the read state (the copy, or the shared checkpoint, with later
tokens replayed on it). Flushes happen every ``L`` tokens; the flush step's output is taken from the unrounded
recurrence. The figures that ship come from the kernels, not from here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["PLANS", "EmulatedPlan", "decode_logits", "quantize_fp8_rows", "quantize_nvfp4_rows"]


def _round_e2m1(x: Tensor) -> Tensor:
    size = x.abs()
    grid = torch.where(
        size < 2, torch.round(size * 2) / 2, torch.where(size < 4, torch.round(size), 2 * torch.round(size / 2))
    )
    return torch.copysign(grid.clamp_max(6.0), x)


def quantize_nvfp4_rows(x: Tensor) -> Tensor:
    """NVFP4 along the last axis, blocks of 16, one FP32 second level per row; returns dequantised FP32."""
    amax = x.abs().amax(-1, keepdim=True)
    encode = torch.where(amax > 0, 2688.0 / amax.clamp_min(1e-37), torch.ones_like(amax))
    block = x.reshape(*x.shape[:-1], -1, 16)
    scale = (block.abs().amax(-1, keepdim=True) * (encode / 6.0)[..., None]).clamp_max(448.0)
    step = scale.to(torch.float8_e4m3fn).float() / encode[..., None]
    inverse = torch.where(step > 0, 1.0 / step.clamp_min(1e-37), torch.full_like(step, 3e38))
    return (_round_e2m1(block * inverse) * step).flatten(-2)


def quantize_fp8_rows(x: Tensor) -> Tensor:
    """FP8 E4M3 along the last axis, one FP32 scale per row; returns dequantised FP32."""
    amax = x.abs().amax(-1, keepdim=True)
    encode = torch.where(amax > 0, 448.0 / amax.clamp_min(1e-37), torch.ones_like(amax))
    return (x * encode).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() / encode


_FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp32": lambda x: x,
    "fp8": quantize_fp8_rows,
    "nvfp4": quantize_nvfp4_rows,
}


@dataclass(frozen=True)
class EmulatedPlan:
    """``read``/``recurrence``@``period``; shared when both are the same. ``zero`` clears the state at each step."""

    name: str
    read: str
    recurrence: str
    period: int = 16
    zero: bool = False


PLANS = (
    EmulatedPlan("baseline", "fp32", "fp32", 1),
    EmulatedPlan("nvfp4@16", "nvfp4", "nvfp4"),
    EmulatedPlan("fp8@16", "fp8", "fp8"),
    EmulatedPlan("nvfp4/fp32@16", "nvfp4", "fp32"),
    EmulatedPlan("fp8/fp32@16", "fp8", "fp32"),
    EmulatedPlan("nvfp4/fp8@16", "nvfp4", "fp8"),
    EmulatedPlan("zero state", "fp32", "fp32", 1, True),
)


@dataclass
class _Emulator:
    """Stands in for the recurrent decode function; layers are told apart by the order of calls."""

    plans: Sequence[EmulatedPlan]
    n_sequences: int
    n_layers: int
    step: int = 0
    calls: int = 0
    states: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        layer, self.calls = self.calls % self.n_layers, self.calls + 1
        if initial_state is None:
            raise ValueError("decode starts after one prefilled token")
        if len(self.states) <= layer:
            first = initial_state.float().transpose(-1, -2).contiguous()
            self.states.append((first, self._store(first.clone(), self.plans)[1]))
        heads = value.shape[2]
        q, k = (x[:, 0].float().repeat_interleave(heads // x.shape[2], dim=1) for x in (query, key))
        q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
        k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
        v, decay, rate = value[:, 0].float(), g[:, 0].float().exp(), beta[:, 0].float()
        recurrence, read = self.states[layer]
        for plan, rows in self._rows():
            if plan.zero:
                recurrence[rows] = 0.0
                read[rows] = 0.0
        outputs = [self._advance(state, q, k, v, decay, rate) for state in (recurrence, read)]
        flushing = [plan for plan in self.plans if (self.step + 1) % plan.period == 0]
        out = outputs[1]
        for plan, rows in self._rows():
            if plan in flushing:
                out[rows] = outputs[0][rows]
                state, copy = self._store(recurrence[rows], [plan])
                recurrence[rows] = state
                read[rows] = copy
        return out[:, None].to(query.dtype), initial_state

    def _rows(self) -> Iterator[tuple[EmulatedPlan, slice]]:
        for i, plan in enumerate(self.plans):
            yield plan, slice(i * self.n_sequences, (i + 1) * self.n_sequences)

    def _store(self, state: Tensor, plans: Sequence[EmulatedPlan]) -> tuple[Tensor, Tensor]:
        copies = state.clone()
        for i, plan in enumerate(plans):
            rows = slice(i * self.n_sequences, (i + 1) * self.n_sequences)
            state[rows] = _FORMATS[plan.recurrence](state[rows])
            copies[rows] = state[rows] if plan.read == plan.recurrence else _FORMATS[plan.read](state[rows])
        return state, copies

    @staticmethod
    def _advance(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """One step in place on [rows, heads, d_v, d_k]; returns S q [rows, heads, d_v]."""
        state.mul_(decay[..., None, None])
        u = (v - (state @ k[..., None]).squeeze(-1)) * rate[..., None]
        state.addcmul_(u[..., None], k[..., None, :])
        return (state @ q[..., None]).squeeze(-1)


@contextmanager
def _installed(model: Any, emulator: _Emulator) -> Iterator[None]:
    module: Any = sys.modules[type(model).__module__]
    original = module.torch_recurrent_gated_delta_rule
    module.torch_recurrent_gated_delta_rule = emulator
    try:
        yield
    finally:
        module.torch_recurrent_gated_delta_rule = original


@torch.no_grad()
def decode_logits(model: Any, token_ids: Tensor, plans: Sequence[EmulatedPlan] = PLANS) -> Iterator[tuple[int, Tensor]]:
    """Yield (position, logits [plans, sequences, vocabulary]) for teacher-forced decoding of token_ids [S, T].

    The first token is prefilled; logits at position p predict token p + 1.
    """
    n_sequences, length = token_ids.shape
    n_layers = sum(kind == "linear_attention" for kind in model.config.layer_types)
    emulator = _Emulator(plans, n_sequences, n_layers)
    rows = token_ids.repeat(len(plans), 1)
    with _installed(model, emulator):
        outputs = model(rows[:, :1], use_cache=True)
        for position in range(1, length):
            name = "cache" if getattr(outputs, "cache", None) is not None else "past_key_values"
            kept = getattr(outputs, name)
            outputs = model(rows[:, position : position + 1], use_cache=True, **{name: kept})
            emulator.step += 1
            yield position, outputs.logits[:, -1].float().reshape(len(plans), n_sequences, -1)
    if emulator.calls != n_layers * (length - 1):
        raise RuntimeError(f"the emulator saw {emulator.calls} calls, expected {n_layers * (length - 1)}")
