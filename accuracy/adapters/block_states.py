"""The recurrent states of all blocks, where the model's layers compute, and the kernels that step them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch

from driftgate.accuracy.adapters.blocks import Block
from driftgate.accuracy.adapters.decode_functions import StepInputs
from driftgate.accuracy.adapters.recorded import DeviceWork, GraphRecorder
from driftgate.kernels.contract import Backend, HeadShape, Recurrence, ReplayOptions
from driftgate.kernels.pool import StatePool

__all__ = ["BlockStates", "Observer", "find_device", "on_device"]

Observer = Callable[[int, StepInputs, torch.Tensor], None]


class BlockStates:
    """Pools of all blocks.

    Args:
        blocks: in row order; their rows are set and their pools made here.
        shape, recurrence: of every recurrent layer.
        layer_indices, devices: decoder-layer index of each recurrent layer, and where it computes.
        n_sequences: of every block.
        activation_dtype: of the inputs.
        seed: of plans with stochastic rounding.
        backend: which code takes the steps.
        record: record each step as a graph where that is possible.

    Attributes:
        observers: called inside each layer's step with (layer, inputs, outputs [rows, HV, d_v]): device work alone,
            since it is recorded with the step; set before the first step.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        shape: HeadShape,
        recurrence: Recurrence,
        layer_indices: Sequence[int],
        devices: Sequence[torch.device],
        n_sequences: int,
        activation_dtype: torch.dtype,
        seed: int,
        backend: Backend,
        record: bool,
    ) -> None:
        self.blocks, self.shape, self.recurrence, self.backend = blocks, shape, recurrence, backend
        self.layer_indices, self.devices, self.n_layers = layer_indices, devices, len(devices)
        self.activation_dtype, self.seed = activation_dtype, seed
        self.observers: list[Observer] = []
        self._kernels: Any = import_module(f"driftgate.kernels.{recurrence.value}").implementation(backend)
        self._recorder = GraphRecorder(enabled=record and backend is Backend.TRITON)
        slots = torch.arange(n_sequences, dtype=torch.int32)
        self._slots = {device: slots.to(device) for device in devices}
        self._constants: list[Mapping[str, torch.Tensor]] = [{} for _ in devices]
        self._steps: dict[int, DeviceWork] = {}
        for i, block in enumerate(blocks):
            block.rows = slice(i * n_sequences, (i + 1) * n_sequences)
            self.open_block(block, n_slots=n_sequences)
        pools = self.pools()
        self._advance = [
            self.record(partial(self._advance_pools, [p for p in pools if p.device == device]), device)
            for device in dict.fromkeys(p.device for p in pools)
        ]

    def open_block(self, block: Block, *, n_slots: int) -> None:
        """Make a block's pools where the recurrent layers compute."""
        block.open(self.layer_indices, self.devices, partial(self.make_pool, n_slots=n_slots))

    def make_pool(
        self,
        options: ReplayOptions,
        layers: Sequence[int] | None = None,
        device: torch.device | None = None,
        *,
        n_slots: int,
    ) -> StatePool:
        """A pool of recurrent layers by their numbers, None for all, on a device, None for that of the first layer."""
        layers = range(self.n_layers) if layers is None else layers
        pool = StatePool(
            self.shape,
            options,
            recurrence=self.recurrence,
            n_slots=n_slots,
            n_layers=len(layers),
            layer_numbers=layers,
            activation_dtype=self.activation_dtype,
            seed=self.seed,
            device=self.devices[0] if device is None else device,
        )
        if self.backend is Backend.TORCH:
            pool.memoise_reads()
        return pool

    def record(self, function: DeviceWork, device: torch.device) -> DeviceWork:
        """Device work that comes again each step, as one launch where kernels are compiled; see ``GraphRecorder``."""
        return self._recorder.record(function, device)

    def pools(self) -> list[StatePool]:
        """Pools of all blocks."""
        return [pool for block in self.blocks for pool in block.pools]

    def start(self, tokens: Sequence[torch.Tensor], sequences: torch.Tensor) -> None:
        """Empty every block's buffers; tokens: [n_sequences] seen so far, of each block; sequences: [n_sequences]."""
        for block, seen in zip(self.blocks, tokens, strict=True):
            for pool in block.pools:
                pool.start(self._slots[pool.device], tokens=seen, sequences=sequences)

    def write(self, layer: int, states: torch.Tensor) -> None:
        """Take over a layer's states of all rows [rows, HV, d_v, d_k] float32, as ``StatePool.write`` does."""
        slots = self._slots[self.devices[layer]].long()
        for block in self.blocks:
            block.write(layer, slots, states[block.rows])

    def read(self, layer: int) -> torch.Tensor:
        """Dequantised checkpoints of a layer of all blocks' rows, [rows, HV, d_v, d_k] float32."""
        slots = self._slots[self.devices[layer]].long()
        return torch.cat([block.read_checkpoint(layer, slots) for block in self.blocks])

    def fold(self) -> None:
        """Fold every buffer into its checkpoint."""
        for pool in self.pools():
            with on_device(pool.device):
                self._kernels.flush_now(pool, self._slots[pool.device], **self._fold_constants(pool))

    def advance(self) -> None:
        """Move the cursors once all layers took their step."""
        for advance in self._advance:
            advance()

    def step(self, layer: int, inputs: StepInputs) -> torch.Tensor:
        """A layer's step of all rows; o [rows, HV, d_v], which the layer's next step may overwrite."""
        self._constants[layer] = inputs.constants
        if layer not in self._steps:
            self._steps[layer] = self.record(partial(self._take_step, layer, inputs), self.devices[layer])
        with on_device(self.devices[layer]):
            out = self._steps[layer](*inputs.tensors())
        assert out is not None
        return out

    def run_kernel(
        self, inputs: StepInputs, pool: StatePool, layer: int, slots: torch.Tensor, *, alternative: bool = False
    ) -> torch.Tensor:
        """One step of rows that all belong to one pool, ``layer`` counted in it; o [rows, HV, d_v]."""
        take = self._kernels.decode_step if pool.options.step_by_step else self._kernels.replay_step
        extra = {"alternative": True} if alternative else {}
        return take(**inputs.arguments(), pool=pool, layer=layer, slots=slots, **extra)  # type: ignore[no-any-return]

    def _take_step(self, layer: int, like: StepInputs, *tensors: torch.Tensor) -> torch.Tensor:
        """As ``step``, from tensors in the order of ``like``."""
        inputs, slots = like.with_tensors(tensors), self._slots[self.devices[layer]]
        out = torch.zeros_like(inputs.values)
        for block in self.blocks:
            part = inputs.take_rows(block.rows)
            taken = [
                self.run_kernel(part, pool, own, slots, alternative=block.alternative)
                for pool, own in block.places(layer)
            ]
            out[block.rows] = block.join(taken)
        for observe in self.observers:
            observe(layer, inputs, out)
        return out

    def _advance_pools(self, pools: Sequence[StatePool]) -> None:
        for pool in pools:
            pool.advance(self._slots[pool.device])

    def _fold_constants(self, pool: StatePool) -> dict[str, torch.Tensor]:
        """What ``flush_now`` needs of a pool's layers: known from their first step on, when nothing is buffered yet."""
        if self.recurrence.delta_rule:
            return {}
        none = torch.zeros(self.shape.value_heads, device=pool.device)
        return {"A": torch.stack([self._constants[layer].get("A", none) for layer in pool.layer_numbers])}


def find_device(mixer: torch.nn.Module, otherwise: torch.device) -> torch.device:
    """Where a mixer computes: where its weights lie, or what accelerate says of weights that it keeps aside."""
    for weight in mixer.parameters():
        if not weight.is_meta:
            return weight.device
    for module in mixer.modules():
        hook = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):  # accelerate's SequentialHook holds several
            place = getattr(one, "execution_device", None)
            if place is not None:
                return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    return otherwise


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current GPU, whatever their tensors lie on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
