"""What a run would need of this machine's memory, from its sizes alone: refused before it is full.

Notable: a low estimate, right to about a factor of two. It counts what grows with the steps, so no weights and no
states, and leaves out what lies on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftgate.errors import InputError

if TYPE_CHECKING:
    from driftgate.evals.suite import Suite

__all__ = ["available_memory", "check_memory", "format_bytes", "needed_memory"]

STREAM_BYTES = 50
"""Of one token of one task stream while the streams are drawn (measured)."""
STEP_BYTES, CELL_BYTES, ROW_BYTES = 10_000, 72, 140
"""Of a step for its small tensors, of a step of one row for its figures, of a row of the steps frame and one copy."""
_FIXED_BLOCKS = 3
"""Blocks of rows beside those of the plans: the baseline, itself again, another launch."""
_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "float32": 4, "bfloat16": 2, "float16": 2}
_WITHOUT_KEYS = ("linear_attention", "moe", "mlp")
"""Kinds of layers without attention."""
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def needed_memory(suite: Suite, config: Any, *, device: str = "cpu", dtype: str | None = None) -> int:
    """Bytes of this machine that grow with the steps of a run: streams, key-value cache, figures, steps frame.

    Args:
        suite: sizes and plans.
        config: of the language model, as transformers reads it.
        device: ``cpu``, or where the key-value cache lies else.
        dtype: of activations, None for the checkpoint's own.
    """
    length, plans = suite.steps + suite.prefill, len(suite.plans)
    rows = min(suite.batch, suite.sequences) * (plans + _FIXED_BLOCKS)
    batches = -(-suite.sequences // suite.batch)
    item = _ITEM_BYTES.get(dtype or str(getattr(config, "dtype", "")).removeprefix("torch."), 4)
    cache = 4 * _kept_keys(config) * item * rows * length  # K, V; each copied as it grows
    figures = batches * suite.steps * (STEP_BYTES + CELL_BYTES * rows)
    frame = ROW_BYTES * plans * suite.sequences * suite.steps
    return int(STREAM_BYTES * suite.sequences * length + cache * (device == "cpu") + figures + frame)


def _kept_keys(config: Any) -> int:
    """Key elements that the attention layers of a model keep of a token, 0 where it has none."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    layers = sum(kind not in _WITHOUT_KEYS for kind in kinds)
    if not layers:
        return 0
    heads: int = config.num_attention_heads
    head: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return layers * (getattr(config, "num_key_value_heads", None) or heads) * head


def available_memory() -> int | None:
    """Bytes that this process may still take: of the machine, or of its control group where that is less."""
    try:
        fields: Mapping[str, str] = dict(
            line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        )
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return None
    try:
        return min(free, int(_CGROUP.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no control group, or "max"
        return free


def check_memory(suite: Suite, config: Any, *, device: str = "cpu", dtype: str | None = None) -> int:
    """``needed_memory``, where this machine has it.

    Raises:
        InputError: this machine does not have them.
    """
    needed, free = needed_memory(suite, config, device=device, dtype=dtype), available_memory()
    if free is not None and needed > free:
        raise InputError(
            f"{suite.sequences} streams of {suite.steps} steps need about {format_bytes(needed)} of memory, "
            f"{format_bytes(free)} are free; give fewer --steps, --sequences or --batch"
        )
    return needed


def format_bytes(size: int) -> str:
    """A size with two significant digits or more, in decimal units."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}" if value < 1000 else f"{value:.3e} {units[0]}"
