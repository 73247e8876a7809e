"""What a family record says, and the catalogue of families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from driftgate.accuracy.adapters.decode_functions import DecodeFunction, StepInputs
from driftgate.errors import InputError
from driftgate.kernels.contract import HeadShape, Recurrence

__all__ = ["FAMILIES", "Family", "StepInputs", "find_family", "load_families"]

RECURRENT_KINDS = ("linear_attention", "hybrid", "hybrid_sliding")
"""Names of layer types, as transformers has them from version 5 on, that hold a recurrence."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family of transformers.

    Attributes:
        name: as users know it.
        model_types: ``config.model_type`` values of its checkpoints.
        module: modeling module that holds the decode function as a global, and the mixers.
        decode: the function that driftgate takes the place of.
        find_fault: why the installed transformers cannot decode a config's model, with the mend; None if it can.
    """

    name: str
    model_types: tuple[str, ...]
    module: str
    decode: DecodeFunction
    find_fault: Callable[[Any], str | None] = lambda _config: None

    @property
    def recurrence(self) -> Recurrence:
        """Which recurrence its mixers have."""
        return self.decode.recurrence

    def head_shape(self, mixer: torch.nn.Module) -> HeadShape:
        """Heads of one mixer."""
        return self.decode.head_shape(mixer)

    def find_mixers(self, model: torch.nn.Module) -> list[Any]:
        """Recurrent mixers of a model, by layer index. A mixer's own module holds the decode function."""
        mixers: list[Any] = [
            m
            for m in model.modules()
            if type(m).__module__ == self.module and hasattr(m, "layer_idx") and hasattr(m, "conv1d")
        ]
        return sorted(mixers, key=lambda m: int(m.layer_idx))

    def has_recurrence(self, config: Any) -> bool:
        """Whether a config of this family asks for recurrent layers; one that lists no layer types has no others."""
        text = getattr(config, "text_config", config)
        kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
        return kinds is None or any(kind in RECURRENT_KINDS for kind in kinds)


_NAMES = (
    "mamba2",
    "nemotron_h",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "zamba2",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
    "olmo_hybrid",
    "kimi_linear",
    "glm5_next",
)
"""A new family: one file beside this one, its name here."""


FAMILIES: dict[str, Family] = {}
"""By name; filled by ``load_families``."""


def load_families() -> dict[str, Family]:
    """All families, by name."""
    if not FAMILIES:
        FAMILIES.update({name: import_module(f"driftgate.accuracy.adapters.{name}").FAMILY for name in _NAMES})
    return FAMILIES


def find_family(config: Any) -> Family:
    """The family of a model's config.

    Args:
        config: a transformers config, composite ones included.

    Raises:
        InputError: no family covers it; lists those that are. Or the installed transformers cannot decode it.
    """
    families = load_families()
    text = getattr(config, "text_config", config)
    for family in families.values():
        if {config.model_type, text.model_type} & set(family.model_types):
            if fault := family.find_fault(text):
                raise InputError(f"model type {config.model_type!r}: {fault}")
            return family
    covered = ", ".join(sorted(t for f in families.values() for t in f.model_types))
    raise InputError(
        f"model type {config.model_type!r} has no recurrent layers that driftgate knows; covered: {covered}"
    )
