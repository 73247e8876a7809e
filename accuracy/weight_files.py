"""The weight files of a checkpoint folder, by their headers alone: whether all are there and whole, and what they need.

Notable: nothing is loaded. A header says name, dtype and shape of every weight, which is enough to say how much memory
the model will take, also in another dtype, before a long load starts.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from driftgate.accuracy.free_memory import SPREAD, device_memory, format_bytes
from driftgate.errors import InputError

__all__ = ["StoredWeight", "loaded_bytes", "main_dtype", "read_headers", "refuse_too_large"]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64}
_PACKED = ".weight_packed"
"""End of the names under which compressed-tensors keeps two or more codes of 4 bits in an integer."""


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """One tensor of a weight file.

    Attributes:
        dtype: as safetensors writes it, e.g. ``BF16``.
        shape: its sizes.
        shard: name of its file.
    """

    dtype: str
    shape: tuple[int, ...]
    shard: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_headers(folder: Path) -> dict[str, StoredWeight]:
    """Every weight of a checkpoint, by name; every shard is there and whole.

    Args:
        folder: with ``model.safetensors``, or an index and the shards that it names.

    Raises:
        InputError: a shard is missing, cut short, or holds other weights than the index says; or there are no
            safetensors files.
    """
    places = _read_index(folder)
    shards = [SINGLE] if places is None else sorted(set(places.values()))
    weights: dict[str, StoredWeight] = {}
    for shard in shards:
        weights |= _read_shard(folder, shard)
    for name, shard in sorted((places or {}).items()):
        if name not in weights or weights[name].shard != shard:
            raise InputError(f"{folder / shard} has no weight {name}, which {INDEX} places there; fetch both again")
    return weights


def main_dtype(weights: Mapping[str, StoredWeight]) -> torch.dtype:
    """Floating dtype that most elements have: a few scalars in FP32 do not make a checkpoint FP32."""
    counts: Counter[str] = Counter()
    for weight in weights.values():
        if weight.dtype in FLOATS:
            counts[weight.dtype] += weight.numel
    return FLOATS[counts.most_common(1)[0][0]] if counts else torch.float32


def loaded_bytes(weights: Mapping[str, StoredWeight], dtype: torch.dtype) -> int:
    """Bytes of the weights in memory.

    Args:
        weights: of the checkpoint.
        dtype: of the model; FP8 and packed 4-bit weights are dequantised to it.
    """
    total = 0
    for name, weight in weights.items():
        if name.endswith(_PACKED):
            total += weight.numel * _BITS[weight.dtype] // 4 * dtype.itemsize
        elif weight.dtype in _BITS:
            total += weight.numel * _BITS[weight.dtype] // 8
        else:
            total += weight.numel * dtype.itemsize
    return total


def refuse_too_large(folder: Path, weights: Mapping[str, StoredWeight], *, device: str, dtype: torch.dtype) -> int:
    """Bytes that the weights will take on a device, where it has them.

    Raises:
        InputError: it has not; says how much is needed and how much is free.
    """
    needed, free = loaded_bytes(weights, dtype), device_memory(device)
    if free is not None and needed > free:
        name = str(dtype).removeprefix("torch.")
        mend = "another --device or a smaller checkpoint"
        if device.startswith("cuda") and device != SPREAD:
            mend = f"--device {SPREAD}, {mend}"
        if dtype.itemsize > 2:
            mend = f"--dtype bf16, {mend}"
        raise InputError(
            f"{folder}: its weights need {format_bytes(needed)} of memory as {name}, {format_bytes(free)} are free on "
            f"{device}; give {mend}"
        )
    return needed


def _read_index(folder: Path) -> dict[str, str] | None:
    """File of each weight, None where all are in one."""
    index = folder / INDEX
    if not index.exists():
        return None
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not places or not all(isinstance(shard, str) for shard in places.values()):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} is no weight index; fetch the checkpoint again") from error
    return dict(places)


def _read_shard(folder: Path, shard: str) -> dict[str, StoredWeight]:
    path = folder / shard
    if not path.exists():
        others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in folder.glob(pattern))
        if shard == SINGLE and others:
            raise InputError(f"{path} is missing, only {others[0]} is there; save the checkpoint as safetensors")
        raise InputError(f"{path} is missing; fetch the checkpoint again")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  no mapping
            return {
                name: StoredWeight(dtype=s.get_dtype(), shape=tuple(s.get_shape()), shard=shard)
                for name, s in slices.items()
            }
    except (SafetensorError, OSError) as error:
        reason = textwrap.shorten(str(error), 450, placeholder=" ...") or type(error).__name__
        raise InputError(f"{path} is cut short or damaged ({reason}); fetch it again") from error
