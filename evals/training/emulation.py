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

from driftgate.accuracy.adapters.decode_functions import DecodeFunction, StepInputs
from driftgate.accuracy.adapters.families import find_family
from driftgate.kernels.contract import HeadShape, Recurrence

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

    function: DecodeFunction
    shape: HeadShape
    plans: Sequence[EmulatedPlan]
    n_sequences: int
    n_layers: int
    step: int = 0
    calls: int = 0
    states: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer, self.calls = self.calls % self.n_layers, self.calls + 1
        inputs = self.function.read(*args, shape=self.shape, **kwargs)
        if len(self.states) <= layer:
            stored = args[0] if self.function.recurrence is Recurrence.MAMBA2 else kwargs["initial_state"]
            if stored is None:
                raise ValueError("decode starts after one prefilled token")
            first = self.function.turn_states(stored).float().contiguous().clone()
            self.states.append((first, self._store(first.clone(), self.plans)[1]))
        recurrence, read = self.states[layer]
        for plan, rows in self._rows():
            if plan.zero:
                recurrence[rows] = 0.0
                read[rows] = 0.0
        terms = _Terms.make(inputs, self.function.recurrence, self.shape)
        out, exact = terms.advance(read), terms.advance(recurrence)
        for plan, rows in self._rows():
            if (self.step + 1) % plan.period == 0:
                out[rows] = exact[rows]
                state, copy = self._store(recurrence[rows], [plan])
                recurrence[rows] = state
                read[rows] = copy
        return self.function.answer((out + terms.skip).to(inputs.values.dtype), args, kwargs)

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


@dataclass(frozen=True)
class _Terms:
    """One step of any recurrence, by value head, float32: S = exp(g) S + u kᵀ, then S q.

    u = beta (v - S k) under the delta rule (beta is not None), else v. ``skip`` is added to what is read.
    """

    q: Tensor  # [rows, HV, d_k]
    k: Tensor
    v: Tensor  # [rows, HV, d_v]
    factor: Tensor  # exp(g), [rows, HV, 1 or d_v, 1 or d_k]
    beta: Tensor | None  # [rows, HV]
    skip: Tensor | float

    @classmethod
    def make(cls, inputs: StepInputs, recurrence: Recurrence, shape: HeadShape) -> _Terms:
        streams = {name: x.float() for name, x in inputs.streams.items()}
        repeats = shape.value_heads // shape.key_heads
        if recurrence is Recurrence.MAMBA2:
            if "z" in streams:
                raise ValueError("a gate inside the recurrence is not emulated")
            q, k = (streams[name].repeat_interleave(repeats, dim=1) for name in ("C", "B"))
            dt = streams["dt"]
            factor = (dt * inputs.constants["A"]).exp()[..., None, None]
            skip = inputs.constants["D"][:, None] * streams["x"] if "D" in inputs.constants else 0.0
            return cls(q, k * dt[..., None], streams["x"], factor, None, skip)
        q, k = (streams[name].repeat_interleave(repeats, dim=1) for name in ("q", "k"))
        q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
        k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
        decay = streams["g"].exp()
        factor = decay[..., None, :] if recurrence is Recurrence.KDA else decay[..., None, None]
        return cls(q, k, streams["v"], factor, streams["beta"], 0.0)

    def advance(self, state: Tensor) -> Tensor:
        """One step in place on [rows, HV, d_v, d_k]; returns S q [rows, HV, d_v]."""
        state.mul_(self.factor)
        u = self.v
        if self.beta is not None:
            u = (u - (state @ self.k[..., None]).squeeze(-1)) * self.beta[..., None]
        state.addcmul_(u[..., None], self.k[..., None, :])
        return (state @ self.q[..., None]).squeeze(-1)


@contextmanager
def _installed(model: Any, emulator: _Emulator) -> Iterator[None]:
    module, name = sys.modules[type(model).__module__], emulator.function.name
    original = getattr(module, name)
    setattr(module, name, emulator)
    try:
        yield
    finally:
        setattr(module, name, original)


@torch.no_grad()
def decode_logits(
    model: Any,
    token_ids: Tensor,
    plans: Sequence[EmulatedPlan] = PLANS,
    *,
    tokens: Tensor | None = None,
    sampled: Tensor | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (position, logits [plans, sequences, vocabulary]) for decoding token_ids [S, T].

    The first token is prefilled; logits at position p predict token p + 1. An id below 0 is not given: each plan
    feeds its own most likely token there; where ``sampled`` [S] is true, one that is drawn with noise that all plans
    share. ``tokens`` [plans, S, T], if given, receives what each plan was fed.
    """
    n_sequences, length = token_ids.shape
    family = find_family(model.config)
    mixers = family.find_mixers(model)
    emulator = _Emulator(family.decode, family.head_shape(mixers[0]), plans, n_sequences, len(mixers))
    fed = token_ids.repeat(len(plans), 1) if tokens is None else tokens.view(-1, length)
    fed.copy_(token_ids.repeat(len(plans), 1))
    generator = torch.Generator().manual_seed(0)
    with _installed(model, emulator):
        outputs = model(fed[:, :1], use_cache=True)
        for position in range(1, length):
            name = "cache" if getattr(outputs, "cache", None) is not None else "past_key_values"
            kept = getattr(outputs, name)
            column, logits = fed[:, position], outputs.logits[:, -1].float()
            if sampled is not None:
                noise = -torch.empty(n_sequences, logits.shape[-1]).exponential_(generator=generator).log()
                noise = (noise.to(logits.device) * sampled[:, None]).repeat(len(plans), 1)
                logits = logits + noise
            column.copy_(torch.where(column < 0, logits.argmax(-1), column))
            outputs = model(column[:, None], use_cache=True, **{name: kept})
            emulator.step += 1
            yield position, outputs.logits[:, -1].float().reshape(len(plans), n_sequences, -1)
    if emulator.calls != len(mixers) * (length - 1):
        raise RuntimeError(f"the emulator saw {emulator.calls} calls, expected {len(mixers) * (length - 1)}")
