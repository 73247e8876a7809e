"""Inputs of certificates: decode steps of a few rows, random like a trained model's or recorded from one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from driftgate.errors import EmptyRunError
from driftgate.kernels.contract import HeadShape
from driftgate.kernels.pool import PAD_SLOT

if TYPE_CHECKING:
    from driftgate.accuracy.observers import RecordedInputs

__all__ = ["StepData", "draw_inputs", "replay_recorded"]

_PADDED_ROW = 1


@dataclass(frozen=True, kw_only=True)
class StepData:
    """Steps of one batch: live rows, one padded row whose inputs are NaN, and two slots of no row.

    Attributes:
        shape: heads.
        q, k: [steps, B, H, d_k]; v: [steps, B, HV, d_v] of the activation type.
        g, beta: [steps, B, HV] float32.
        slots: [B] int32, -1 for the padded row.
        states: [n_slots, HV, d_v, d_k] float32, where every slot starts.
    """

    shape: HeadShape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    slots: torch.Tensor
    states: torch.Tensor

    def inputs(self, t: int) -> tuple[torch.Tensor, ...]:
        """q, k, v, g, beta of step t."""
        return self.q[t], self.k[t], self.v[t], self.g[t], self.beta[t]

    @property
    def n_steps(self) -> int:
        """Decode steps."""
        return len(self.q)

    @property
    def n_slots(self) -> int:
        """Slots of a pool for this batch."""
        return len(self.states)

    @property
    def activation(self) -> torch.dtype:
        """Type of q, k and v."""
        return self.q.dtype

    @property
    def live_rows(self) -> list[int]:
        """Rows with a slot."""
        return [row for row, slot in enumerate(self.slots.tolist()) if slot != PAD_SLOT]

    @property
    def padded_rows(self) -> list[int]:
        """Rows without a slot."""
        return [row for row, slot in enumerate(self.slots.tolist()) if slot == PAD_SLOT]

    @property
    def row_of_slot(self) -> list[int]:
        """Row of each slot, -1 for a slot of no row."""
        slots = self.slots.tolist()
        return [slots.index(slot) if slot in slots else -1 for slot in range(self.n_slots)]

    @property
    def unused_slots(self) -> list[int]:
        """Slots of no row."""
        return [slot for slot, row in enumerate(self.row_of_slot) if row < 0]

    def hold(self, value: float) -> StepData:
        """The same steps with states of one value that no step changes: beta = 0 and g = 0 for live rows."""
        g, beta = self.g.clone(), self.beta.clone()
        g[:, self.live_rows] = 0.0
        beta[:, self.live_rows] = 0.0
        return replace(self, g=g, beta=beta, states=torch.full_like(self.states, value))


def draw_inputs(
    shape: HeadShape,
    activation: torch.dtype,
    *,
    n_rows: int,
    n_steps: int,
    seed: int,
    device: torch.device | str = "cpu",
) -> StepData:
    """Random steps with the magnitudes of a trained model.

    q, k, v are normal; g is -10^u, u uniform, from -1e-3 to -0.2, one in eight is 0; beta is uniform in (0, 1). Row 0
    meets g = -inf at step 1 (a document boundary) and beta = 0 at step 2, in its first head.

    Args:
        shape: heads.
        activation: type of q, k and v.
        n_rows: live rows.
        n_steps: decode steps.
        seed: of everything; equal for every device.
        device: where the tensors lie.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=random)

    def uniform(*dims: int) -> torch.Tensor:
        return torch.rand(dims, generator=random)

    heads, key_heads, d_k, d_v = shape.value_heads, shape.key_heads, shape.d_k, shape.d_v
    q, k = normal(n_steps, n_rows, key_heads, d_k), normal(n_steps, n_rows, key_heads, d_k)
    v = normal(n_steps, n_rows, heads, d_v)
    low, high = math.log10(1e-3), math.log10(0.2)
    g = -(10 ** (low + (high - low) * uniform(n_steps, n_rows, heads)))
    g[uniform(n_steps, n_rows, heads) < 0.125] = 0.0
    beta = uniform(n_steps, n_rows, heads)
    if n_steps > 1:
        g[1, 0, 0] = -math.inf
    if n_steps > 2:
        beta[2, 0, 0] = 0.0
    states = normal(n_rows + 2, heads, d_v, d_k)
    return _lay_out(shape, (q.to(activation), k.to(activation), v.to(activation), g, beta), states, device)


def replay_recorded(recorded: RecordedInputs, *, n_steps: int, device: torch.device | str = "cpu") -> StepData:
    """Recorded steps: up to three layers, spread over the model, are the rows; one layer alone is there twice.

    Args:
        recorded: inputs and first states.
        n_steps: steps wanted; fewer if fewer were recorded.
        device: where the tensors lie.

    Raises:
        EmptyRunError: nothing was recorded.
    """
    n_layers = len(recorded.inputs)
    n_steps = min([n_steps, *(len(steps) for steps in recorded.inputs)])
    if not n_layers or not n_steps:
        raise EmptyRunError("no recorded steps to certify on; record at least one step of one layer")
    n_rows = min(3, max(2, n_layers))
    layers = [round(row * (n_layers - 1) / (n_rows - 1)) for row in range(n_rows)]
    streams = tuple(
        torch.stack([torch.cat([getattr(recorded.inputs[layer][t], name) for layer in layers]) for t in range(n_steps)])
        for name in ("q", "k", "v", "g", "beta")
    )
    states = recorded.initial[[*layers, layers[0], layers[-1]]]
    return _lay_out(recorded.shape, streams, states, device)


def _lay_out(
    shape: HeadShape, streams: Sequence[torch.Tensor], states: torch.Tensor, device: torch.device | str
) -> StepData:
    """Insert the padded row, and give each live row a slot that is not its number."""
    n_rows = streams[0].shape[1]
    live = [row for row in range(n_rows + 1) if row != _PADDED_ROW]
    order = list(range(0, n_rows + 2, 2)) + list(range(1, n_rows + 2, 2))
    taken = order[::-1][:n_rows]
    slots = torch.full((n_rows + 1,), PAD_SLOT, dtype=torch.int32)
    slots[live] = torch.tensor(taken, dtype=torch.int32)
    placed = torch.empty_like(states)
    placed[taken + [slot for slot in order if slot not in taken]] = states
    padded = []
    for stream in streams:
        filled = torch.full((len(stream), n_rows + 1, *stream.shape[2:]), torch.nan, dtype=stream.dtype)
        filled[:, live] = stream
        padded.append(filled.to(device))
    q, k, v, g, beta = padded
    return StepData(shape=shape, q=q, k=k, v=v, g=g, beta=beta, slots=slots.to(device), states=placed.to(device))
