"""The model's own part of a forward: rows, positions, padding mask and cache, whatever the release calls them."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from driftgate.accuracy.adapters.families import Family
from driftgate.errors import InputError

__all__ = ["CACHE_NAMES", "ModelRows"]

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What models call their cache: the first from 5.24 on, before it the last in those of Mamba layers alone."""


class ModelRows:
    """Forwards of a model whose rows are sequences, repeated.

    Args:
        model: of the family.
        family: how its recurrent states lie in its cache.
        mixers: its recurrent mixers, by layer.
        row_sequence: [n_rows] int64, sequence of each row after a prefill.

    Attributes:
        cache: the model's cache, None before a prefill.
    """

    def __init__(self, model: Any, family: Family, mixers: list[Any], *, row_sequence: torch.Tensor) -> None:
        takes = inspect.signature(model.forward).parameters
        self._model, self._family = model, family
        self._layers = [int(m.layer_idx) for m in mixers]
        self._row_sequence, self._device = row_sequence, row_sequence.device
        self._cache_name = next(name for name in CACHE_NAMES if name in takes)
        self._takes_positions = "position_ids" in takes
        self._has_bias = any(getattr(getattr(m, "in_proj", None), "bias", None) is not None for m in mixers)
        self._position = torch.zeros(0)
        self._mask: torch.Tensor | None = None
        self.cache: Any = None

    def prefill(self, token_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Begin anew: token_ids [n, T] int64, padded at the left, lengths [n] int64; logits [n, vocab] after the last.

        Raises:
            InputError: padded tokens would change a row.
        """
        width = token_ids.shape[1]
        behind = torch.arange(width, device=self._device) - (width - lengths)[:, None]
        # a mask of ones takes other paths in transformers: rows of one length go without, as they would alone
        mask = (behind >= 0).long() if bool((lengths < width).any()) else None
        if mask is not None and self._has_bias:
            raise InputError(
                f"{self._family.name}: the input projection has a bias, which transformers lets padding bring into the "
                "convolution; decode prompts of one length together"
            )
        out = self._forward(token_ids, behind.clamp(min=0), mask)
        lost, padded = ~torch.isfinite(out.logits[:, -1]).all(dim=-1), lengths < width
        if mask is not None and bool((lost & padded).any()) and not bool((lost & ~padded).any()):
            raise InputError(
                f"{self._family.name}: the installed transformers makes NaN of prompts of unequal lengths; decode "
                "prompts of one length together, or install a later transformers"
            )
        self.cache = next(out[name] for name in CACHE_NAMES if out.get(name) is not None)
        self.cache.reorder_cache(self._row_sequence)
        places = getattr(self.cache, "position_ids", None)  # [3, n, T]: Qwen4-Exp before 5.24 keeps them there
        if places is not None:
            self.cache.position_ids = places[:, self._row_sequence]
        self._position = lengths[self._row_sequence][:, None].clone()
        self._mask = None if mask is None else mask[self._row_sequence]
        return out.logits[:, -1]  # type: ignore[no-any-return]

    def feed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Go on: token_ids [n_rows, T] int64; logits [n_rows, vocab] after the last.

        Raises:
            RuntimeError: before a prefill.
        """
        if self.cache is None:
            raise RuntimeError("call prefill before step")
        n = token_ids.shape[1]
        if self._mask is not None:
            self._mask = torch.nn.functional.pad(self._mask, (0, n), value=1)
        positions = self._position + torch.arange(n, device=self._device)
        out = self._forward(token_ids, positions, self._mask, **{self._cache_name: self.cache})
        self._position += n
        return out.logits[:, -1]  # type: ignore[no-any-return]

    def take_state(self, layer: int) -> torch.Tensor:
        """The recurrent states of a layer [n_rows, HV, d_v, d_k] float32, which the cache then no longer has.

        Raises:
            InputError: the model left NaN or infinity there, as one in FP16 may.
        """
        own = self.cache.layers[self._layers[layer]].recurrent_states
        states = self._family.decode.turn_states(own[0]).float()
        if not bool(torch.isfinite(states).all()):
            dtype = str(self._model.dtype).removeprefix("torch.")
            raise InputError(
                f"{self._family.name}: the model's own state of layer {self._layers[layer]} is NaN or infinite after "
                f"the prompt in {dtype}; give --dtype bf16 or fp32, or another checkpoint"
            )
        # not read while driftgate decodes: one element seen with the shape of all rows
        own[0] = torch.zeros((), dtype=own[0].dtype, device=own[0].device).expand(own[0].shape)
        return states

    def give_state(self, layer: int, states: torch.Tensor) -> None:
        """Put recurrent states back, as ``take_state`` has them: a forward of several tokens starts from them."""
        own = self.cache.layers[self._layers[layer]].recurrent_states
        own[0] = self._family.decode.turn_states(states).to(own[0].dtype).contiguous()

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, **options: Any
    ) -> Any:
        if self._takes_positions:
            options["position_ids"] = positions
        if mask is not None:
            options["attention_mask"] = mask
        return self._model(input_ids=token_ids, use_cache=True, logits_to_keep=1, **options)
