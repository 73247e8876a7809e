"""Blocks: the rows of one plan in a forward, with the pools that hold its states.

Notable: there is a pool for each precision in use (a mixed plan has several) and each device that has layers. They take
every step together: length, forced flushes and windows are the same in all layers of a plan, so their cursors are equal
and those of the first stand for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from driftgate.accuracy.plans import PrecisionPlan
from driftgate.kernels.contract import ReplayOptions
from driftgate.kernels.pool import StatePool

__all__ = ["Block"]


@dataclass(kw_only=True)
class Block:
    """Rows of one plan.

    Attributes:
        name: key of the block.
        options: what its kernel reads and writes.
        layers, head: decoder-layer indices that have other options, as ``PrecisionPlan`` keeps them.
        alternative: take another legal launch of the baseline kernel (for the noise floor).
        rows: its rows in a forward.
        pools: its states, one pool for each options that a recurrent layer has and each device; they move together.
    """

    name: str
    options: ReplayOptions
    layers: tuple[tuple[int, ReplayOptions], ...] = ()
    head: int | None = None
    alternative: bool = False
    rows: slice = field(default_factory=lambda: slice(0))
    pools: list[StatePool] = field(init=False, default_factory=list)
    _places: list[list[tuple[StatePool, int]]] = field(init=False, default_factory=list)

    @classmethod
    def of(cls, name: str, plan: PrecisionPlan, *, alternative: bool = False) -> Block:
        """The block of a plan."""
        return cls(name=name, options=plan.options, layers=plan.layers, head=plan.head, alternative=alternative)

    @property
    def plan(self) -> PrecisionPlan:
        """The plan of its rows."""
        return PrecisionPlan(options=self.options, layers=self.layers, head=self.head)

    @property
    def pool(self) -> StatePool:
        """The pool whose cursors, flush flags and token counts are those of every layer."""
        return self.pools[0]

    def open(
        self,
        layer_indices: Sequence[int],
        devices: Sequence[torch.device],
        make: Callable[[ReplayOptions, list[int], torch.device], StatePool],
    ) -> None:
        """Make the pools.

        Args:
            layer_indices: decoder-layer index of each recurrent layer.
            devices: where each recurrent layer computes.
            make: (options, numbers of the recurrent layers that have them on a device, this device) -> their pool.
        """
        layers: dict[tuple[ReplayOptions, torch.device], list[int]] = {}
        for number, (index, device) in enumerate(zip(layer_indices, devices, strict=True)):
            for options in self._all_at(index):
                layers.setdefault((options, device), []).append(number)
        pools = {(options, device): make(options, numbers, device) for (options, device), numbers in layers.items()}
        self.pools = list(pools.values())
        self._places = [
            [(pools[o, device], layers[o, device].index(number)) for o in self._all_at(index)]
            for number, (index, device) in enumerate(zip(layer_indices, devices, strict=True))
        ]

    def _all_at(self, index: int) -> list[ReplayOptions]:
        """Options of a decoder layer: its own, then those of its other heads where one head alone has its own."""
        own = self.plan.at(index)
        return [own] if self.head is None or own == self.options else [own, self.options]

    def place(self, layer: int) -> tuple[StatePool, int]:
        """The pool of a recurrent layer, counted from 0, and the layer's number in it."""
        return self._places[layer][0]

    def places(self, layer: int) -> list[tuple[StatePool, int]]:
        """Every pool that holds a recurrent layer: two where one head has options of its own, its pool first.

        Heads do not touch each other, so both pools step all of them and ``join`` takes what counts.
        """
        return self._places[layer]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the pools of a layer have, each [n, HV, ...], as one."""
        if len(parts) == 1:
            return parts[0]
        own, others = parts
        joined = others.clone()
        joined[:, self.head] = own[:, self.head]
        return joined

    def read_checkpoint(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Dequantised checkpoints of a recurrent layer, [len(slots), HV, d_v, d_k] float32 on its device."""
        return self.join([pool.checkpoint.read(own, slots.to(pool.device)) for pool, own in self.places(layer)])

    def write(self, layer: int, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Take over states of a recurrent layer, as ``StatePool.write`` does."""
        for pool, own in self.places(layer):
            pool.write(own, slots.to(pool.device), states)

    def errors(self) -> torch.Tensor:
        """Whether a slot stored a state that was not finite in any layer, [n_slots] bool."""
        place = self.pool.device
        return torch.stack([(pool.error[: pool.n_slots] != 0).to(place) for pool in self.pools]).any(dim=0)
