"""Checkpoints whose weights are stored in FP8 or NVFP4: dequantised while they load, or refused in one line.

Notable: driftgate measures the recurrent state, so weights are wanted as the values that they stand for, in the model's
dtype. Left compressed, they would be expanded in the middle of the first forward, or go through other matrix products.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from driftgate.errors import InputError

__all__ = ["check_dequantized", "check_quantization", "dequantize_at_load"]

COVERED = ("compressed-tensors", "fp8")
"""Values of ``quant_method``: that of llm-compressor (FP8, NVFP4, integers), and FP8 in blocks as DeepSeek has it."""


def check_quantization(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse weights that transformers would not dequantise.

    Args:
        folder: of the checkpoint.
        config: what its config.json holds.

    Raises:
        InputError: modelopt, which transformers loads without its scales; a package is missing; or another method.
    """
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
