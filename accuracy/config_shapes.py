"""Recurrent and attention layers of a model from its config alone: no torch, no transformers, no weights.

Notable: reads config.json as it is stored, in the words of transformers 5 and in those of older files (mamba,
attention, hybrid_override_pattern, linear_attn_config). ``adapters/`` reads the same of loaded models; tests hold the
two together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driftgate.errors import InputError
from driftgate.kernels.contract import HeadShape, Recurrence

__all__ = ["SHAPES", "ModelShapes", "read_config", "read_shapes"]

Config = Mapping[str, Any]

_RECURRENT = ("linear_attention", "mamba", "M", "hybrid")
_ATTENTION = ("full_attention", "attention", "indexed_attention", "sliding_attention", "*", "hybrid")
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """What decides the cost of a model's states.

    Attributes:
        family: its ``model_type``.
        recurrence: which.
        heads: of each recurrent layer.
        recurrent_layers, attention_layers: indices of decoder layers; a hybrid layer is in both.
        n_layers: decoder layers in all.
        kv_elements: that an attention layer caches for a token.
        conv_kernel: taps of the recurrent layers' convolution.
        activation_bytes: of an element of q, k, v, as the checkpoint is stored.
    """

    family: str
    recurrence: Recurrence
    heads: HeadShape
    recurrent_layers: tuple[int, ...]
    attention_layers: tuple[int, ...]
    n_layers: int
    kv_elements: int
    conv_kernel: int
    activation_bytes: int


class _Missing(Exception):
    """A key that a config should have; its message goes into the error that a user sees."""


def read_config(path: Path) -> dict[str, Any]:
    """A config.json.

    Raises:
        InputError: no such file, no JSON object, or no model_type.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give a config.json, its folder or an embedded checkpoint") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path} is no readable JSON: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise InputError(f"{path} names no model_type; give the config.json of a checkpoint")
    return config


def read_shapes(config: Config, *, source: str) -> ModelShapes:
    """Shapes of a config, composite ones included.

    Args:
        config: what config.json holds.
        source: names the file in errors.

    Raises:
        InputError: a family that is not covered, a key that is missing or senseless, or no recurrent layer.
    """
    text = config.get("text_config", config)
    kinds = [config["model_type"], *([text.get("model_type")] if isinstance(text, Mapping) else [])]
    family = next((kind for kind in kinds if kind in SHAPES), None)
    if family is None:
        known = ", ".join(sorted(SHAPES))
        raise InputError(f"{source}: no recurrent layers are known of model_type {kinds[0]!r}; covered: {known}")
    try:
        found = SHAPES[family](text)
    except _Missing as error:
        raise InputError(f"{source}: {error}; give the config.json that belongs to the checkpoint") from None
    except (TypeError, ValueError, ZeroDivisionError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{source}: its numbers make no layer ({reason}); correct them") from error
    if not found.recurrent_layers:
        raise InputError(f"{source}: none of its {found.n_layers} layers is recurrent; there is no state to keep")
    return found


MOST = 2**24
"""No size of a model is greater, a context of 16 million tokens among them; lists are made of layers."""


def _get(config: Config, *names: str) -> Any:
    """The first of the names that the config has."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, int) and value > MOST:
                raise _Missing(f"{name} of {value} cannot be")
            return value
    raise _Missing(f"no {' or '.join(names)}")


def _layers(kinds: list[str]) -> dict[str, Any]:
    return {
        "recurrent_layers": tuple(i for i, kind in enumerate(kinds) if kind in _RECURRENT),
        "attention_layers": tuple(i for i, kind in enumerate(kinds) if kind in _ATTENTION),
        "n_layers": len(kinds),
    }


def _kinds(config: Config) -> list[str]:
    """The kind of each layer as the config lists it."""
    return list(_get(config, "layer_types", "layers_block_type", "hybrid_override_pattern"))


def _every(config: Config) -> list[str]:
    """Qwen: an attention layer closes each group of ``full_attention_interval``, where no kinds are listed."""
    if config.get("layer_types") is not None:
        return _kinds(config)
    interval = int(_get(config, "full_attention_interval"))
    n = int(_get(config, "num_hidden_layers"))
    return ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(n)]


def _build(
    config: Config, recurrence: Recurrence, kinds: list[str], heads: HeadShape, *, kv_elements: int, conv: int
) -> ModelShapes:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return ModelShapes(
        family=str(config.get("model_type", "")),
        recurrence=recurrence,
        heads=heads,
        **_layers(kinds),
        kv_elements=kv_elements,
        conv_kernel=conv,
        activation_bytes=_WIDTHS.get(dtype, 2),
    )


def _grouped_kv(config: Config) -> int:
    """Keys and values of one token: 2·kv_heads·head_dim."""
    heads = int(_get(config, "num_attention_heads"))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    given = config.get("head_dim") or config.get("attention_head_dim")
    head_dim = int(given) if given else int(_get(config, "hidden_size")) // heads
    return 2 * kv_heads * head_dim


def _read_gdn(config: Config) -> ModelShapes:
    """Qwen3-Next and its successors, OLMo Hybrid."""
    heads = HeadShape(
        key_heads=int(_get(config, "linear_num_key_heads")),
        value_heads=int(_get(config, "linear_num_value_heads")),
        d_k=int(_get(config, "linear_key_head_dim")),
        d_v=int(_get(config, "linear_value_head_dim")),
    )
    conv = int(_get(config, "linear_conv_kernel_dim"))
    return _build(config, Recurrence.GDN, _every(config), heads, kv_elements=_grouped_kv(config), conv=conv)


def _read_kimi(config: Config) -> ModelShapes:
    """Kimi Linear, GLM-5 Next: their attention caches the latent and the rotated part of a key, not heads."""
    own = dict(config.get("linear_attn_config") or {})
    merged = {**own, **config}
    if own.get("kda_layers"):
        recurrent = {int(i) - 1 for i in own["kda_layers"]}  # counted from 1 there
        n = int(_get(config, "num_hidden_layers"))
        kinds = ["linear_attention" if i in recurrent else "full_attention" for i in range(n)]
    else:
        kinds = _kinds(config)
    n_heads = int(config.get("linear_num_heads") or _get(own, "num_heads"))
    d = int(config.get("linear_head_dim") or _get(own, "head_dim"))
    heads = HeadShape(key_heads=n_heads, value_heads=n_heads, d_k=d, d_v=d)
    latent = int(_get(config, "kv_lora_rank")) + int(config.get("qk_rope_head_dim") or 0)
    conv = int(_get(merged, "linear_conv_kernel_dim", "short_conv_kernel_size"))
    return _build(config, Recurrence.KDA, kinds, heads, kv_elements=latent, conv=conv)


def _read_mamba(
    config: Config, kinds: list[str], *, n_heads: str, head_dim: int, groups: str, state: str, conv: str,
    kv_elements: int,
) -> ModelShapes:  # fmt: skip
    """Mamba-2 under the names that a family gives its numbers."""
    heads = HeadShape(
        key_heads=int(_get(config, groups)),
        value_heads=int(_get(config, n_heads)),
        d_k=int(_get(config, state)),
        d_v=head_dim,
    )
    taps = int(_get(config, conv))
    return _build(config, Recurrence.MAMBA2, kinds, heads, kv_elements=kv_elements, conv=taps)


def _head_dim(config: Config, name: str, n_heads: str, inner: int | None = None) -> int:
    """Entries of a head, which a config may leave to be divided out ("auto")."""
    given = config.get(name)
    if given not in (None, "auto"):
        return int(given)
    if inner is None:
        inner = int(float(_get(config, "mamba_expand", "expand")) * int(_get(config, "hidden_size")))
    return inner // int(_get(config, n_heads))


def _read_mamba2(config: Config) -> ModelShapes:
    kinds = ["linear_attention"] * int(_get(config, "num_hidden_layers", "n_layer"))
    return _read_mamba(
        config, kinds, n_heads="num_heads", head_dim=_head_dim(config, "head_dim", "num_heads"), groups="n_groups",
        state="state_size", conv="conv_kernel", kv_elements=0,
    )  # fmt: skip


def _read_nemotron_h(config: Config) -> ModelShapes:
    return _read_mamba(
        config, _kinds(config), n_heads="mamba_num_heads", groups="n_groups", state="ssm_state_size",
        head_dim=_head_dim(config, "mamba_head_dim", "mamba_num_heads"), conv="conv_kernel",
        kv_elements=_grouped_kv(config),
    )  # fmt: skip


def _read_prefixed(config: Config, kinds: list[str], *, inner: int | None = None) -> ModelShapes:
    """Bamba, Falcon-H1, Granite: mamba_n_heads, mamba_d_head, mamba_n_groups, mamba_d_state."""
    return _read_mamba(
        config, kinds, n_heads="mamba_n_heads", head_dim=_head_dim(config, "mamba_d_head", "mamba_n_heads", inner),
        groups="mamba_n_groups", state="mamba_d_state", conv="mamba_d_conv", kv_elements=_grouped_kv(config),
    )  # fmt: skip


def _read_bamba(config: Config) -> ModelShapes:
    attention = set(config.get("attn_layer_indices") or ())
    n = int(_get(config, "num_hidden_layers"))
    return _read_prefixed(config, ["attention" if i in attention else "mamba" for i in range(n)])


def _read_falcon_h1(config: Config) -> ModelShapes:
    """Every layer holds both."""
    inner = config.get("mamba_d_ssm")
    return _read_prefixed(config, ["hybrid"] * int(_get(config, "num_hidden_layers")), inner=inner and int(inner))


def _read_granite(config: Config) -> ModelShapes:
    return _read_prefixed(config, _kinds(config))


def _read_zamba2(config: Config) -> ModelShapes:
    """Hybrid layers hold a Mamba-2 mixer and the shared attention, with a cache of their own.

    The attention reads twice hidden_size, so its heads are twice as wide as elsewhere.
    """
    heads = int(_get(config, "num_attention_heads"))
    head_dim = int(config.get("attention_head_dim") or 2 * int(_get(config, "hidden_size")) // heads)
    return _read_mamba(
        config, _kinds(config), n_heads="n_mamba_heads", groups="mamba_ngroups", state="mamba_d_state",
        head_dim=_head_dim(config, "mamba_headdim", "n_mamba_heads"), conv="mamba_d_conv",
        kv_elements=2 * int(config.get("num_key_value_heads") or heads) * head_dim,
    )  # fmt: skip


SHAPES: dict[str, Callable[[Config], ModelShapes]] = {
    "qwen3_next": _read_gdn,
    "qwen3_5": _read_gdn,
    "qwen3_5_text": _read_gdn,
    "qwen3_5_moe": _read_gdn,
    "qwen3_5_moe_text": _read_gdn,
    "qwen4_exp": _read_gdn,
    "qwen4_exp_text": _read_gdn,
    "olmo_hybrid": _read_gdn,
    "kimi_linear": _read_kimi,
    "glm5_next": _read_kimi,
    "glm5_next_text": _read_kimi,
    "mamba2": _read_mamba2,
    "nemotron_h": _read_nemotron_h,
    "bamba": _read_bamba,
    "falcon_h1": _read_falcon_h1,
    "granitemoehybrid": _read_granite,
    "zamba2": _read_zamba2,
}
"""By ``model_type``; a family whose config has a text part is listed under both types."""
