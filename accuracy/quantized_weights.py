"""Checkpoints whose weights are stored in FP8 or NVFP4: dequantised while they load, or refused in one line.

Notable: driftgate measures the recurrent state, so weights are wanted as the values that they stand for, in the model's
dtype. Left compressed, they would be expanded in the middle of the first forward, or go through other matrix products.
Codes whose scale is missing are loaded by transformers as if they were values, without a word: they are refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from driftgate.accuracy.weight_files import FLOATS, StoredWeight, read_headers
from driftgate.errors import InputError

__all__ = ["check_dequantized", "check_quantization", "check_scales", "dequantize_at_load"]

COVERED = ("compressed-tensors", "fp8")
"""Values of ``quant_method``: that of llm-compressor (FP8, NVFP4, integers), and FP8 in blocks as DeepSeek has it."""

FP8 = ("F8_E4M3", "F8_E5M2")
"""As safetensors writes them."""
PACKED = "_packed"
"""End of the names under which compressed-tensors keeps several codes in an integer."""


def check_quantization(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse weights that transformers would not dequantise, or not as they were meant.

    Args:
        folder: of the checkpoint.
        config: what its config.json holds.

    Raises:
        InputError: modelopt, which transformers loads without its scales; a package is missing; another method; or
            codes without scales, where the weight files are there.
    """
    _check_method(folder, config)
    try:
        weights = read_headers(folder)
    except InputError:  # not fetched yet, or said by whoever reads them next
        return
    check_scales(folder, weights)


def check_scales(folder: Path, weights: Mapping[str, StoredWeight]) -> None:
    """Refuse codes without the scales that they stand for a value with.

    Args:
        folder: of the checkpoint.
        weights: every tensor of its files, by name.

    Raises:
        InputError: names the first such weight and what is missing.
    """
    for name, weight in sorted(weights.items()):
        wanted = _scales(name, weight, weights)
        if not any(name in weights for name in wanted):
            raise InputError(
                f"{folder}: {name} is stored as {weight.dtype} codes, and the weight files lack "
                f"{' or '.join(wanted)}; fetch the checkpoint again, or dequantise it to BF16 first"
            )


def _scales(name: str, weight: StoredWeight, weights: Mapping[str, StoredWeight]) -> tuple[str, ...]:
    """Names of which one has to be there; a weight's own where it needs no scale.

    compressed-tensors has ``weight_packed`` with ``weight_scale``, NVFP4 (scales in FP8) ``weight_global_scale``
    beside it; FP8 in blocks has ``weight_scale_inv``.
    """
    base = name.removesuffix(PACKED)
    if base != name:
        scale = weights.get(f"{base}_scale")
        return (f"{base}_global_scale" if scale is not None and scale.dtype in FP8 else f"{base}_scale",)
    codes = weight.dtype in FP8 or (weight.dtype not in FLOATS and name.endswith(".weight"))
    return (f"{name}_scale", f"{name}_scale_inv") if codes and "_scale" not in name else (name,)


def _check_method(folder: Path, config: Mapping[str, Any]) -> None:
    fields = config.get("quantization_config") or {}
    if not isinstance(fields, Mapping):
        raise InputError(f"{folder}/config.json: quantization_config is no mapping; fetch it again")
    method = fields.get("quant_method")
    if method == "modelopt" or (folder / "hf_quant_config.json").exists():
        raise InputError(
            f"{folder}: quant_method modelopt would be loaded without its scales; dequantise it to BF16 first"
        )
    if not fields:
        return
    if method not in COVERED:
        raise InputError(
            f"{folder}: quant_method {method} is not covered ({', '.join(COVERED)} are); dequantise it to BF16 first"
        )
    if method == "compressed-tensors" and find_spec("compressed_tensors") is None:
        raise InputError(
            f"{folder}: its weights need the package compressed-tensors; `pip install compressed-tensors`, or "
            "dequantise them to BF16 first"
        )


def dequantize_at_load(parsed: Any) -> None:
    """Ask for dense weights, in a config as transformers reads it; one without quantised weights is left alone."""
    fields = getattr(parsed, "quantization_config", None)
    if isinstance(fields, dict):
        fields["dequantize"] = True


def check_dequantized(folder: Path, model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Refuse dequantised weights of another dtype than the activations: the first forward would stop at them.

    Raises:
        InputError: names the first, and the dtype that works.
    """
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and weight.dtype not in (dtype, torch.float32):
            came = str(weight.dtype).removeprefix("torch.")
            raise InputError(
                f"{folder}: {name} is dequantised to {came} by the installed transformers, not to "
                f"{str(dtype).removeprefix('torch.')}; give --dtype bf16, or install a later transformers"
            )
