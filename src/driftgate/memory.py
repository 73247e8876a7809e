"""What a run would need of the memory of this machine and its GPU, from sizes alone: refused before it is full.

Notable: an estimate, right to about a factor of two. Weights are counted from the headers of their files, states and
what grows with the steps from config and suite. A run with an ablation makes several lock steps, one after the other:
rows and cache are those of the widest, figures those that are kept at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from driftgate.accuracy.free_memory import available_memory, device_memory, format_bytes
from driftgate.errors import InputError

if TYPE_CHECKING:
    from driftgate.evals.suite import Suite

__all__ = ["available_memory", "check_memory", "count_rows", "format_bytes", "held_memory", "needed_memory"]

STREAM_BYTES = 50
"""Of one token of one task stream while the streams are drawn (measured)."""
STEP_BYTES, CELL_BYTES, ROW_BYTES = 10_000, 72, 140
"""Of a step for its small tensors, of a step of one row for its figures, of a row of the steps frame and one copy."""
_FIXED_BLOCKS = 3
"""Blocks of rows beside those of the plans: the baseline, itself again, another launch."""
_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "float32": 4, "bfloat16": 2, "float16": 2}
_WITHOUT_KEYS = ("linear_attention", "moe", "mlp")
"""Kinds of layers without attention."""


def needed_memory(suite: Suite, config: Any, *, device: str = "cpu", dtype: str | None = None) -> int:
    """Bytes of this machine that grow with the steps of a run: streams, key-value cache, figures, steps frame.

    Args:
        suite: sizes and plans.
        config: of the language model, as transformers reads it.
        device: ``cpu``, or where the key-value cache lies else.
        dtype: of activations, None for the checkpoint's own.
    """
    length, plans = suite.steps + suite.prefill, len(suite.plans)
    batches = -(-suite.sequences // suite.batch)
    cache = 2 * _cache_bytes(suite, config, dtype)  # each tensor is copied as it grows
    kept = _lock_steps(suite, config)[:3]  # the run's own, an ablation's, and the one before that
    figures = sum(batches * suite.steps * (STEP_BYTES + CELL_BYTES * rows) for rows in kept)
    frame = ROW_BYTES * plans * suite.sequences * suite.steps
    return int(STREAM_BYTES * suite.sequences * length + cache * (device == "cpu") + figures + frame)


def held_memory(suite: Suite, config: Any, *, weights: int) -> int:
    """Bytes that a run holds from its first step to its last where the model lies: weights and FP32 states of all rows.

    Args:
        suite: sizes and plans.
        config: of the language model, as transformers reads it.
        weights: bytes of all models of the run.
    """
    from driftgate.accuracy.config_shapes import read_shapes

    shapes = read_shapes(config.to_dict(), source="config.json")
    state = 4 * shapes.heads.value_heads * shapes.heads.d_v * shapes.heads.d_k * len(shapes.recurrent_layers)
    rows = count_rows(suite, config)
    return weights + 2 * rows * state  # the pools' own beside those that prefill leaves in the model's cache


def count_rows(suite: Suite, config: Any) -> int:
    """Rows of the widest forward of a run; arguments as for ``needed_memory``."""
    return max(_lock_steps(suite, config))


def _lock_steps(suite: Suite, config: Any) -> list[int]:
    """Rows of each lock step: of the plans, then of the layers or heads that an ablation measures alone."""
    widths = [len(suite.plans)]
    if suite.ablate is not None:
        from driftgate.accuracy.config_shapes import read_shapes
        from driftgate.accuracy.plans import Role
        from driftgate.evals.ablation import group_parts, list_ablation

        shapes, roles = read_shapes(config.to_dict(), source="config.json"), suite.roles()
        candidates = {name: plan for name, plan in suite.named_plans().items() if roles[name] is Role.CANDIDATE}
        parts = list_ablation(candidates, shapes.recurrent_layers)
        parts *= shapes.heads.value_heads if suite.ablate == "heads" else 1  # only how many there are counts
        widths += [len(group) for group in group_parts(parts, n_plans=len(suite.plans))]
    return [min(suite.batch, suite.sequences) * (width + _FIXED_BLOCKS) for width in widths]


def _cache_bytes(suite: Suite, config: Any, dtype: str | None) -> int:
    """Bytes of keys and values of all rows at the end of a stream."""
    item = _ITEM_BYTES.get(dtype or str(getattr(config, "dtype", "")).removeprefix("torch."), 4)
    return 2 * _kept_keys(config) * item * count_rows(suite, config) * (suite.steps + suite.prefill)


def _kept_keys(config: Any) -> int:
    """Key elements that the attention layers of a model keep of a token, 0 where it has none."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    layers = sum(kind not in _WITHOUT_KEYS for kind in kinds)
    if not layers:
        return 0
    if getattr(config, "kv_lora_rank", None):  # latent attention keeps one vector in place of keys and values
        width: int = config.kv_lora_rank + config.qk_rope_head_dim
        return layers * width // 2
    heads: int = config.num_attention_heads
    head: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return layers * (getattr(config, "num_key_value_heads", None) or heads) * head


def check_memory(suite: Suite, config: Any, *, device: str = "cpu", dtype: str | None = None, held: int = 0) -> int:
    """``needed_memory``, where this machine and the device have it beside what is held.

    Args:
        suite, config, device, dtype: as for ``needed_memory``.
        held: bytes of weights and states, on the device.

    Raises:
        InputError: one of them has not.
    """
    needed, free = needed_memory(suite, config, device=device, dtype=dtype), available_memory()
    here = needed + held * (device == "cpu")
    sizes = f"{suite.sequences} streams of {suite.steps} steps"
    mend = "give fewer --steps, --sequences or --batch"
    beside = f" beside {format_bytes(held)} of weights and states" if held else ""
    if free is not None and here > free:
        raise InputError(
            f"{sizes} need about {format_bytes(needed)} of memory{beside if device == 'cpu' else ''}, "
            f"{format_bytes(free)} are free; {mend}"
        )
    if device != "cpu":
        cache, left = _cache_bytes(suite, config, dtype), device_memory(device)
        if left is not None and cache + held > left:
            raise InputError(
                f"{sizes} need about {format_bytes(cache)} of memory{beside}, {format_bytes(left)} are free on "
                f"{device}; {mend}"
            )
    return needed
