"""What the recorders for engines share: from the arguments of a decode call to a step of a dump.

Engines hand their kernels packed projections, raw gates and a pool of states with one slot a request. A layer is told
by a parameter of its own that its calls bring along (A_log or A), and counted in the order of first calls. The requests
of the first decode call are followed, by their slots, which may be others in every layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import softplus

from driftgate.accuracy.dump import DumpRecorder, save_dump
from driftgate.kernels.contract import Recurrence

__all__ = ["FIRST_SLOT", "Collector", "watch"]

FIRST_SLOT = 1
"""Slots below it are padding, in both engines."""


class Collector:
    """Follows the decode calls of an engine; writes the dump when the forward after the last recorded step begins.

    Args:
        path: the file to write.
        steps: decode steps to record.
        model: its name.
        engine: its name and version.
        layers: decoder-layer indices of the recurrent layers, in order; None to count them from 0.
        start: tokens of each prompt.
    """

    def __init__(
        self,
        path: Path,
        *,
        steps: int,
        model: str,
        engine: str,
        layers: Sequence[int] | None = None,
        start: int = 0,
    ) -> None:
        self.path, self.layers = path, layers
        self.dump = DumpRecorder(steps=steps, model=model, recorder=f"examples/record, {engine}", start=start)
        self.numbers: dict[int, int] = {}
        self.slots: dict[int, torch.Tensor] = {}
        self.written = False

    def take_gdn(self, call: dict[str, Any]) -> None:
        """A call of ``fused_recurrent_gated_delta_rule_packed_decode``, by argument name, before it is made."""
        layer, rows = self._find(call["A_log"], call["ssm_state_indices"])
        if self.written:
            return
        value_heads, d_v, d_k = call["initial_state"].shape[1:]
        packed = call["mixed_qkv"][rows]
        key_heads = (packed.shape[1] - value_heads * d_v) // (2 * d_k)
        q, k, v = packed.split([key_heads * d_k, key_heads * d_k, value_heads * d_v], dim=1)
        rate, bias = call["A_log"].float(), call["dt_bias"].float()
        inputs = {
            "q": q.unflatten(1, (key_heads, d_k)),
            "k": k.unflatten(1, (key_heads, d_k)),
            "v": v.unflatten(1, (value_heads, d_v)),
            "g": -rate.exp() * softplus(call["a"][rows].float() + bias, threshold=20.0),
            "beta": call["b"][rows].float().sigmoid(),
        }
        facts = {"qk_l2norm": bool(call["use_qk_l2norm_in_kernel"]), "scale": float(call["scale"])}
        self._add(layer, Recurrence.GDN, call["initial_state"], inputs, **facts)

    def take_mamba2(self, call: dict[str, Any]) -> None:
        """A call of ``selective_state_update``, by argument name, before it is made: one A, D and dt a head."""
        layer, rows = self._find(call["A"], call["state_batch_indices"])
        if self.written:
            return
        dt = call["dt"][rows, :, 0].float()
        if call.get("dt_bias") is not None:
            dt = dt + call["dt_bias"][:, 0].float()
        inputs = {name: call[name][rows] for name in ("x", "B", "C")}
        inputs["dt"] = softplus(dt, threshold=20.0) if call["dt_softplus"] else dt
        if call.get("z") is not None:
            inputs["z"] = call["z"][rows]
        constants = {"A": call["A"][:, 0, 0]}
        if call.get("D") is not None:
            constants["D"] = call["D"][:, 0]
        self._add(layer, Recurrence.MAMBA2, call["state"], inputs, constants=constants)

    def _find(self, parameter: torch.Tensor, slots: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Number of the layer, and rows of the followed requests."""
        number = self.numbers.setdefault(parameter.data_ptr(), len(self.numbers))
        if number == 0 and self.dump.complete and not self.written:
            save_dump(self.path, self.dump.dump())
            self.written = True
        slots = slots.flatten().long()
        followed = self.slots.setdefault(number, slots[slots >= FIRST_SLOT].clone())
        rows = (slots[None] == followed[:, None]).nonzero()[:, 1]
        if len(rows) != len(followed) and not self.written:
            raise RuntimeError("a followed request ended before all steps were there; ask for fewer, or ignore its end")
        return number, rows

    def _add(
        self, number: int, recurrence: Recurrence, pool: torch.Tensor, inputs: dict[str, torch.Tensor], **facts: Any
    ) -> None:
        layer = number if self.layers is None else self.layers[number]
        if self.dump.is_new(layer):
            self.dump.start_layer(layer, recurrence, pool[self.slots[number]], **facts)
        self.dump.add(layer, inputs)


def watch(module: ModuleType, function: str, take: Callable[[dict[str, Any]], None]) -> None:
    """Show every call of a module's global to ``take``, by argument name, before it is made."""
    original = getattr(module, function)
    signature = inspect.signature(original)

    def watched(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        take(dict(bound.arguments))
        return original(*args, **kwargs)

    setattr(module, function, watched)
