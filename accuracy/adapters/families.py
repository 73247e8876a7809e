"""What a family record says, and the catalogue of families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from driftgate.errors import InputError
from driftgate.kernels.contract import HeadShape

__all__ = ["FAMILIES", "Family", "StepInputs", "find_family"]


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """Inputs of one decode step of a GDN layer.

    Attributes:
        q, k: [B, H, d_k]; v: [B, HV, d_v], as the model delivers them, before the L2 norm.
        g, beta: [B, HV] float32.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family of transformers.

    Attributes:
        name: as users know it.
        model_types: ``config.model_type`` values of its checkpoints.
        module: modeling module that holds the decode function as a global.
        function: name of that global; the mixer looks it up at every call.
        recurrence: folder of kernels/.
        head_shape: heads of one mixer module.
        read_step: the step's inputs from the arguments of the decode function.
    """

    name: str
    model_types: tuple[str, ...]
    module: str
    function: str
    recurrence: str
    head_shape: Callable[[torch.nn.Module], HeadShape]
    read_step: Callable[..., StepInputs]

    def find_mixers(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """Recurrent mixers of a model, by layer index. A mixer's own module holds the decode function."""
        mixers = [
            m
            for m in model.modules()
            if type(m).__module__ == self.module and hasattr(m, "layer_idx") and hasattr(m, "conv1d")
        ]
        return sorted(mixers, key=lambda m: int(m.layer_idx))


_NAMES = ("qwen3_5",)
"""A new family: one file beside this one, its name here."""


def _load() -> dict[str, Family]:
    return {name: import_module(f"driftgate.accuracy.adapters.{name}").FAMILY for name in _NAMES}


FAMILIES: dict[str, Family] = {}


def find_family(config: Any) -> Family:
    """The family of a model's config.

    Args:
        config: a transformers config, composite ones included.

    Raises:
        InputError: no family covers it; lists those that are.
    """
    if not FAMILIES:
        FAMILIES.update(_load())
    text = getattr(config, "text_config", config)
    for family in FAMILIES.values():
        if {config.model_type, text.model_type} & set(family.model_types):
            return family
    covered = ", ".join(sorted(t for f in FAMILIES.values() for t in f.model_types))
    raise InputError(
        f"model type {config.model_type!r} has no recurrent layers that driftgate knows; covered: {covered}"
    )
