"""One layer of a dump under one plan: its inputs on their device, its pool, and the same recurrence in FP64."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from driftgate.accuracy.dump_layers import LayerDump
from driftgate.errors import InputError
from driftgate.kernels.contract import Backend, Dot, Fold, Readout, ReplayOptions
from driftgate.kernels.pool import StatePool
from driftgate.kernels.twin import Step, contract, decay, normalise

__all__ = ["Exact", "Steps", "Track", "find_flushes", "reference_of"]


def find_flushes(options: ReplayOptions, n_steps: int, *, start: int = 0) -> list[bool]:
    """Which steps flush, by counting: a natural flush finds L - 1 entries, ``+track=N`` forces one at multiples of N.

    Args:
        options: the plan.
        n_steps: decode steps.
        start: tokens seen before the first.
    """
    found, cursor = [], 0
    for t in range(n_steps):
        tracked = bool(options.track) and (start + t + 1) % options.track == 0
        found.append(options.step_by_step or cursor >= options.length - 1 or tracked)
        cursor = 0 if found[-1] else cursor + 1
    return found


def reference_of(options: ReplayOptions) -> ReplayOptions:
    """The exact-fold recurrence without a copy whose checkpoints a plan's are compared with.

    For an FP32 checkpoint that is the baseline, and at L = 1 the step-by-step kernel in the checkpoint's format, for
    then nothing is folded; else the shared plan of that format with the same flushes.
    """
    fmt, stochastic = options.recurrence, options.stochastic
    if fmt == "fp32":
        return ReplayOptions()
    if options.length == 1:
        return ReplayOptions(read=fmt, recurrence=fmt, stochastic=stochastic)
    return replace(
        options, read=fmt, fold=Fold.EXACT, readout=Readout.OUTPUT_ONLY, buffer="fp32", dot=Dot.IEEE,
    )  # fmt: skip


class Steps:
    """A layer's inputs on their device, step by step, and what a pool for them is."""

    def __init__(
        self, layer: LayerDump, *, n_steps: int, start: int, backend: Backend, device: torch.device | str, seed: int
    ) -> None:
        self.layer, self.n_steps, self.start = layer, n_steps, start
        self.backend, self.device, self.seed = backend, torch.device(device), seed
        self.recurrence, self.shape = layer.recurrence, layer.shape
        self.streams = {
            name: x[:, :n_steps].transpose(0, 1).contiguous().to(self.device) for name, x in layer.streams.items()
        }
        self.constants = {name: x.to(self.device) for name, x in layer.constants.items()}
        self.initial = layer.initial_state.to(self.device)
        self.n_rows = len(self.initial)
        self.slots = torch.arange(self.n_rows, dtype=torch.int32, device=self.device)
        self.kernels: Any = import_module(f"driftgate.kernels.{self.recurrence.value}").implementation(backend)

    def inputs(self, t: int) -> dict[str, Any]:
        """Keyword arguments of step t."""
        extra = {"qk_l2norm": self.layer.qk_l2norm, "scale": self.layer.scale} if self.recurrence.delta_rule else {}
        return {name: x[t] for name, x in self.streams.items()} | self.constants | extra

    def make_pool(self, options: ReplayOptions) -> StatePool:
        """A pool of the layer's sequences in their first state.

        Draws of stochastic rounding depend on the seed, the sequence and the decoder layer.

        Raises:
            InputError: the first states are beyond the recurrence's format, and there is no copy to make of them.
        """
        pool = StatePool(
            self.shape, options, recurrence=self.recurrence, n_slots=self.n_rows,
            activation_dtype=self.layer.activation, seed=self.seed, device=self.device,
        )  # fmt: skip
        if self.backend is Backend.TORCH:
            pool.memoise_reads()
        slots = self.slots.long()
        pool.start(slots, tokens=self.start, sequences=slots + (self.layer.layer << 32))
        try:
            pool.write(0, slots, self.initial)
        except ValueError as error:
            name = self.layer.full_name("initial_state")
            raise InputError(f"{name}: beyond {options.recurrence}; leave such plans out ({error})") from error
        return pool


class Exact:
    """The recurrence in FP64, whatever is stored, and how a step acts on an error of the state."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.take: Step = import_module(f"driftgate.kernels.{steps.recurrence.value}.reference").step
        self.state = steps.initial.double()
        self._at, self._of_step = -1, tuple[torch.Tensor, ...]()

    def step(self, t: int) -> torch.Tensor:
        """Output [sequences, HV, d_v] of step t, not rounded."""
        q, k, v, g, beta = self._terms(t)
        self.state, _ = self.take(self.state, k, v, g, beta)
        out = contract(self.state, q)
        if "D" in self.steps.constants:
            out = out + self.steps.constants["D"].double()[:, None] * v
        if "z" in self.steps.streams:
            out = out * torch.nn.functional.silu(self.steps.streams["z"][t].double())
        return out

    def carry(self, error: torch.Tensor, t: int) -> torch.Tensor:
        """error·T_t: what is left of an error of the state after step t of the delta rule."""
        _, k, v, g, beta = self._terms(t)
        carried, _ = self.take(error, k, torch.zeros_like(v), g, beta)
        return carried

    def fade(self, error: torch.Tensor, t: int) -> torch.Tensor:
        """error·D_t: the decay alone."""
        return decay(error, self._terms(t)[3])

    def _terms(self, t: int) -> tuple[torch.Tensor, ...]:
        """q, k, v, g, beta of step t as the recurrence takes them, [sequences, HV, ...] float64."""
        if self._at != t:
            self._at, self._of_step = t, self._make_terms(t)
        return self._of_step

    def _make_terms(self, t: int) -> tuple[torch.Tensor, ...]:
        x = {name: stream[t].double() for name, stream in self.steps.streams.items()}
        layer, group = self.steps.layer, self.steps.shape.group
        if not self.steps.recurrence.delta_rule:
            k, q = (x[name].repeat_interleave(group, dim=1) for name in ("B", "C"))
            dt = x["dt"]
            return q, dt[..., None] * k, x["x"], self.steps.constants["A"].double() * dt, dt
        scale = self.steps.shape.d_k**-0.5 if layer.scale is None else layer.scale
        q, k = ((normalise(x[name]) if layer.qk_l2norm else x[name]) for name in ("q", "k"))
        return (q * scale).repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1), x["v"], x["g"], x["beta"]


class Track:
    """One plan on a layer: its pool and its last step."""

    def __init__(self, steps: Steps, options: ReplayOptions) -> None:
        self.steps, self.options = steps, options
        self.pool = steps.make_pool(options)
        self.flushes = find_flushes(options, steps.n_steps, start=steps.start)
        self.out = torch.zeros(0)

    def step(self, t: int) -> torch.Tensor:
        """Take step t; outputs [sequences, HV, d_v]."""
        kernels, slots = self.steps.kernels, self.steps.slots
        take = kernels.decode_step if self.options.step_by_step else kernels.replay_step
        self.out = take(**self.steps.inputs(t), pool=self.pool, layer=0, slots=slots)
        self.pool.advance(slots)
        return self.out

    def checkpoint(self) -> torch.Tensor:
        """States as they read back, [sequences, HV, d_v, d_k] float32."""
        return self.pool.checkpoint.read(0, self.steps.slots.long())

    def copy(self) -> torch.Tensor | None:
        """The copy as steps read it, likewise."""
        return None if self.pool.copy is None else self.pool.copy.read(0, self.steps.slots.long())

    def read_offset(self) -> torch.Tensor:
        """E: what steps between flushes read, less the checkpoint; float64."""
        copy = self.copy()
        checkpoint = self.checkpoint().double()
        return torch.zeros_like(checkpoint) if copy is None else copy.double() - checkpoint
