"""Checkpoints whose weights are stored as FP8 or NVFP4 codes, and the values that the codes stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

E4M3 = torch.float8_e4m3fn
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BLOCK = 16
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]


def store_fp8(weight: torch.Tensor) -> Stored:
    """A scale for each row."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight / scale.float()).to(E4M3)
    return {"": codes, "_scale": scale}, codes.float() * scale.float()


def store_nvfp4(weight: torch.Tensor) -> Stored:
    """Two codes a byte, the first in the low half; an E4M3 scale for each 16 of a row, times one of the tensor."""
    whole = (448 * 6 / weight.abs().max()).view(1)
    blocks = weight.view(len(weight), -1, BLOCK)
    scale = (blocks.abs().amax(-1) / 6 * whole).to(E4M3)
    step = (scale.float() / whole)[..., None]
    codes = ((blocks / step).abs()[..., None] - E2M1).abs().argmin(-1)
    values = (E2M1[codes] * blocks.sign() * step).view(weight.shape)
    codes = (codes + 8 * (blocks < 0)).view(weight.shape).to(torch.uint8)
    packed = codes[:, ::2] | (codes[:, 1::2] << 4)
    return {"_packed": packed, "_scale": scale, "_global_scale": whole}, values


def store_blocks(weight: torch.Tensor) -> Stored:
    """A scale for each square; squares at the end of a row or column may be cut."""
    rows, columns = weight.shape
    n, m = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(n * BLOCK, m * BLOCK)
    padded[:rows, :columns] = weight
    squares = padded.view(n, BLOCK, m, BLOCK)
    scale = squares.abs().amax((1, 3)) / 448
    codes = (squares / scale[:, None, :, None]).to(E4M3)
    values = (codes.float() * scale[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return {"": codes.view(padded.shape)[:rows, :columns].contiguous(), "_scale_inv": scale}, values


def compressed(form: str, **weights: object) -> dict[str, Any]:
    """What llm-compressor writes into config.json."""
    group = {"targets": ["Linear"], "weights": {"type": "float", "symmetric": True, "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


SCHEMES = {
    "fp8": (store_fp8, compressed("float-quantized", num_bits=8, strategy="channel")),
    "nvfp4": (
        store_nvfp4, compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=BLOCK)
    ),
    "fp8 in blocks": (
        store_blocks,
        {
            "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head"],
        },
    ),
}  # fmt: skip


def store_quantized(model: Any, folder: Path, scheme: str) -> dict[str, torch.Tensor]:
    """Save a model with its projections as codes; the values by weight name."""
    store, fields = SCHEMES[scheme]
    model.save_pretrained(folder)
    weights, values = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight") or ".in_proj_" in name:
            parts, values[name] = store(weight.float())
            weights |= {f"{name}{end}": part for end, part in parts.items()}
        else:
            weights[name] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": fields}))
    return values
