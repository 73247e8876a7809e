"""Inputs of certificates: decode steps of a few rows, random like a trained model's or recorded from one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from driftgate.errors import EmptyRunError
from driftgate.kernels.contract import HeadShape, Recurrence
from driftgate.kernels.pool import PAD_SLOT

if TYPE_CHECKING:
    from driftgate.accuracy.observers import RecordedInputs

__all__ = ["StepData", "draw_inputs", "replay_recorded"]

_PADDED_ROW = 1


@dataclass(frozen=True, kw_only=True)
class StepData:
    """Steps of one batch: live rows, one padded row whose inputs are NaN, and two slots of no row.

    Attributes:
        recurrence: whose inputs they are.
        shape: heads.
        streams: by argument name of ``decode_step``, [steps, B, ...].
        constants: arguments that are the same at every step, by name (Mamba-2: A and D, [HV] float32).
        slots: [B] int32, -1 for the padded row.
        states: [n_slots, HV, d_v, d_k] float32, where every slot starts.
        sources: row of the data first drawn that each row is, [B]; it names the row's sequence wherever it lies.
    """

    recurrence: Recurrence
    shape: HeadShape
    streams: Mapping[str, torch.Tensor]
    slots: torch.Tensor
    states: torch.Tensor
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    sources: tuple[int, ...] = ()

    def inputs(self, t: int) -> dict[str, torch.Tensor]:
        """Keyword arguments of step t."""
        return self.stream_inputs(t) | dict(self.constants)

    def stream_inputs(self, t: int) -> dict[str, torch.Tensor]:
        """Those of step t that have a row each, [B, ...]."""
        return {name: stream[t] for name, stream in self.streams.items()}

    def fold_constants(self) -> dict[str, torch.Tensor]:
        """Keyword arguments of ``flush_now`` for one layer."""
        return {"A": self.constants["A"][None]} if "A" in self.constants else {}

    @property
    def values(self) -> torch.Tensor:
        """What a step adds to the state, [steps, B, HV, d_v]: v or x."""
        return self.streams["v" if self.recurrence.delta_rule else "x"]

    @property
    def n_steps(self) -> int:
        """Decode steps."""
        return len(self.values)

    @property
    def n_slots(self) -> int:
        """Slots of a pool for this batch."""
        return len(self.states)

    @property
    def activation(self) -> torch.dtype:
        """Type of q, k and v."""
        return self.values.dtype

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
        """The same steps with states of one value that no step changes: beta = 0 and g = 0, or dt = 0."""
        streams = dict(self.streams)
        for name in ("g", "beta", "dt"):
            if name in streams:
                streams[name] = streams[name].clone()
                streams[name][:, self.live_rows] = 0.0
        return replace(self, streams=streams, states=torch.full_like(self.states, value))

    def place(self, rows: Sequence[int | None], slots: Sequence[int], *, n_slots: int) -> StepData:
        """The same sequences in another batch.

        Args:
            rows: for each row of the new batch, the row that it is here, or None for a padded row.
            slots: slot of each live row among them, in order.
            n_slots: slots of the new pool; some of those of no row start with states of others, the rest with zeros.
        """
        streams = {}
        for name, stream in self.streams.items():
            streams[name] = torch.full_like(stream[:, :1], torch.nan).repeat(1, len(rows), *[1] * (stream.ndim - 2))
            for new, old in enumerate(rows):
                if old is not None:
                    streams[name][:, new] = stream[:, old]
        placed = torch.full((len(rows),), PAD_SLOT, dtype=self.slots.dtype)
        states = torch.zeros(n_slots, *self.states.shape[1:], device=self.states.device)
        states[: self.n_slots] = self.states[:n_slots]
        live = [new for new, old in enumerate(rows) if old is not None]
        for new, slot in zip(live, slots, strict=True):
            placed[new] = slot
            states[slot] = self.states[int(self.slots[rows[new]])]
        sources = tuple(-1 if old is None else self.sources[old] for old in rows)
        return replace(self, streams=streams, slots=placed.to(self.slots.device), states=states, sources=sources)

    def stride(self) -> StepData:
        """The same steps as columns of wider tensors full of NaN, 8 bytes off the alignment of 16."""
        streams = {}
        for name, stream in self.streams.items():
            flat, offset = stream.flatten(2), 8 // stream.element_size()
            n = flat.shape[2]
            wide = torch.full((*flat.shape[:2], n + 3 * offset), torch.nan, dtype=flat.dtype, device=flat.device)
            wide[..., offset : offset + n] = flat
            strides = (*wide.stride()[:2], *stream[0, 0].contiguous().stride())
            streams[name] = wide.as_strided(stream.shape, strides, offset)
        return replace(self, streams=streams)

    def thin(self) -> StepData:
        """The same steps with one element kept of every key and query, the greatest: no sum depends on its order."""
        streams = dict(self.streams)
        for name in ("q", "k") if self.recurrence.delta_rule else ("B", "C"):
            x = streams[name]
            kept = x.abs().argmax(-1, keepdim=True)
            streams[name] = torch.zeros_like(x).scatter(-1, kept, x.gather(-1, kept))
        return replace(self, streams=streams)


def draw_inputs(
    shape: HeadShape,
    activation: torch.dtype,
    *,
    n_rows: int,
    n_steps: int,
    seed: int,
    recurrence: Recurrence = Recurrence.GDN,
    device: torch.device | str = "cpu",
) -> StepData:
    """Random steps with the magnitudes of a trained model.

    Delta rule: q, k, v are normal; g is -10^u, u uniform, from -1e-3 to -0.2, one in eight is 0; beta is uniform in
    (0, 1). Row 0 meets g = -inf at step 1 (a document boundary) and beta = 0 at step 2, in its first head.
    Mamba-2: x, B, C, z, D are normal; dt is log-uniform from 1e-3 to 0.1, A uniform from -16 to -1. Row 0 meets
    dt = 128 and x/128 at step 1 (exp(A·dt) is 0: the state is forgotten) and dt = 0 at step 2, in its first head.

    Args:
        shape: heads.
        activation: type of q, k and v.
        n_rows: live rows.
        n_steps: decode steps.
        seed: of everything; equal for every device.
        recurrence: whose inputs.
        device: where the tensors lie.
    """
    random = torch.Generator().manual_seed(seed)
    lead = (n_steps, n_rows)
    keys, heads = (*lead, shape.key_heads, shape.d_k), (*lead, shape.value_heads)

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=random)

    def log_uniform(low: float, high: float, *dims: int) -> torch.Tensor:
        a, b = math.log10(low), math.log10(high)
        return 10 ** (a + (b - a) * torch.rand(dims, generator=random))

    constants = {}
    if recurrence.delta_rule:
        gates = (*heads, shape.d_k) if recurrence.channel_decay else heads
        streams = {name: normal(*dims) for name, dims in (("q", keys), ("k", keys), ("v", (*heads, shape.d_v)))}
        g = -log_uniform(1e-3, 0.2, *gates)
        g[torch.rand(gates, generator=random) < 0.125] = 0.0
        beta = torch.rand(heads, generator=random)
        if n_steps > 1:
            g[1, 0, 0] = -math.inf
        if n_steps > 2:
            beta[2, 0, 0] = 0.0
        gated = {"g": g, "beta": beta}
    else:
        values = (*heads, shape.d_v)
        streams = {name: normal(*dims) for name, dims in (("x", values), ("B", keys), ("C", keys), ("z", values))}
        dt = log_uniform(1e-3, 0.1, *heads)
        if n_steps > 1:
            dt[1, 0, 0] = 128.0
            streams["x"][1, 0, 0] /= 128  # so that dt·x is as large as elsewhere, and errors are not hidden behind it
        if n_steps > 2:
            dt[2, 0, 0] = 0.0
        gated = {"dt": dt}
        A = -(1 + 15 * torch.rand(shape.value_heads, generator=random))
        constants = {"A": A, "D": normal(shape.value_heads)}
    streams = {name: x.to(activation) for name, x in streams.items()} | gated
    order = [*recurrence.inputs, *(name for name in streams if name not in recurrence.inputs)]
    states = normal(n_rows + 2, shape.value_heads, shape.d_v, shape.d_k)
    return _lay_out(recurrence, shape, {name: streams[name] for name in order}, constants, states, device)


def replay_recorded(recorded: RecordedInputs, *, n_steps: int, device: torch.device | str = "cpu") -> StepData:
    """Recorded steps: up to three layers, spread over the model, are the rows; one layer alone is there twice.

    Layers of Mamba-2 have constants of their own, which a batch shares: there the first layer alone is taken.

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
    constants = recorded.inputs[0][0].constants
    n_layers = 1 if constants else n_layers
    n_rows = min(3, max(2, n_layers))
    layers = [round(row * (n_layers - 1) / (n_rows - 1)) for row in range(n_rows)]
    streams = {
        name: torch.stack(
            [torch.cat([recorded.inputs[layer][t].streams[name] for layer in layers]) for t in range(n_steps)]
        )
        for name in recorded.inputs[0][0].streams
    }
    states = recorded.initial[[*layers, layers[0], layers[-1]]]
    return _lay_out(recorded.recurrence, recorded.shape, streams, constants, states, device)


def _lay_out(
    recurrence: Recurrence,
    shape: HeadShape,
    streams: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
    states: torch.Tensor,
    device: torch.device | str,
) -> StepData:
    """Insert the padded row, and give each live row a slot that is not its number."""
    n_rows = next(iter(streams.values())).shape[1]
    live = [row for row in range(n_rows + 1) if row != _PADDED_ROW]
    order = list(range(0, n_rows + 2, 2)) + list(range(1, n_rows + 2, 2))
    taken = order[::-1][:n_rows]
    slots = torch.full((n_rows + 1,), PAD_SLOT, dtype=torch.int32)
    slots[live] = torch.tensor(taken, dtype=torch.int32)
    placed = torch.empty_like(states)
    placed[taken + [slot for slot in order if slot not in taken]] = states
    padded = {}
    for name, stream in streams.items():
        filled = torch.full((len(stream), n_rows + 1, *stream.shape[2:]), torch.nan, dtype=stream.dtype)
        filled[:, live] = stream
        padded[name] = filled.to(device)
    return StepData(
        recurrence=recurrence,
        shape=shape,
        streams=padded,
        constants={name: x.to(device) for name, x in constants.items()},
        slots=slots.to(device),
        states=placed.to(device),
        sources=tuple(range(n_rows + 1)),
    )
