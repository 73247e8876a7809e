"""A tiny random model of every covered family, of its real class, whose logits depend on the recurrent states."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch

LINEAR, FULL = "linear_attention", "full_attention"
VOCAB = 96
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
PLACES = {"max_position_embeddings": 256}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
LATENT = {"num_attention_heads": 2, "num_key_value_heads": 2}
LAYERS = {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2
}  # fmt: skip
KIMI = {
    "intermediate_size": 48, "moe_intermediate_size": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "linear_head_dim": 16, "linear_num_heads": 2, "mlp_layer_types": ["dense", "sparse", "dense"],
}  # fmt: skip
VISION = dict.fromkeys(("hidden_size", "intermediate_size", "num_position_embeddings", "out_hidden_size"), 32)


@dataclass(frozen=True, kw_only=True)
class TinyFamily:
    """How a tiny model is built.

    Attributes:
        config, model: class names of transformers.
        fields: of the config.
        text: class name of the config's text part, where the class is a multimodal one; ``fields`` are then its own.
        vision: fields of the vision part.
    """

    config: str
    model: str
    fields: dict[str, Any]
    text: str = ""
    vision: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "mamba2": TinyFamily(
        config="Mamba2Config",
        model="Mamba2ForCausalLM",
        fields=BASE
        | {"num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 16, "expand": 2, "n_groups": 2}
        | {"chunk_size": 8},
    ),
    "nemotron_h": TinyFamily(
        config="NemotronHConfig",
        model="NemotronHForCausalLM",
        fields=BASE | HEADS | PLACES
        | {"head_dim": 16, "layers_block_type": [LINEAR, "moe", LINEAR, FULL, "mlp"], "intermediate_size": 48}
        | {"ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
        | {"topk_group": 1, "moe_shared_expert_intermediate_size": 16},
    ),
    "bamba": TinyFamily(
        config="BambaConfig",
        model="BambaForCausalLM",
        fields=BASE | HEADS | PLACES | MAMBA
        | {"mamba_n_groups": 2, "intermediate_size": 48, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    ),
    "falcon_h1": TinyFamily(
        config="FalconH1Config",
        model="FalconH1ForCausalLM",
        fields=BASE | HEADS | PLACES | MAMBA
        | {"mamba_n_groups": 2, "mamba_d_ssm": 64, "intermediate_size": 48, "num_hidden_layers": 2},
    ),
    "falcon_h1 with norm": TinyFamily(
        config="FalconH1Config",
        model="FalconH1ForCausalLM",
        fields=BASE | HEADS | PLACES | MAMBA
        | {"mamba_n_groups": 2, "mamba_d_ssm": 64, "intermediate_size": 48, "num_hidden_layers": 2}
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "granitemoehybrid": TinyFamily(
        config="GraniteMoeHybridConfig",
        model="GraniteMoeHybridForCausalLM",
        fields=BASE | HEADS | PLACES | MAMBA | LAYERS
        | {"mamba_n_groups": 1, "intermediate_size": 16, "shared_intermediate_size": 32, "num_local_experts": 4}
        | {"num_experts_per_tok": 2},
    ),
    "zamba2": TinyFamily(
        config="Zamba2Config",
        model="Zamba2ForCausalLM",
        fields=BASE | PLACES
        | {"tie_word_embeddings": True, "num_attention_heads": 2, "num_hidden_layers": 3}
        | {"layers_block_type": [LINEAR, "hybrid", LINEAR], "mamba_d_state": 16, "n_mamba_heads": 4}
        | {"mamba_ngroups": 2, "chunk_size": 8, "num_mem_blocks": 1, "intermediate_size": 48, "use_mem_rope": True},
    ),
    "qwen3_next": TinyFamily(
        config="Qwen3NextConfig",
        model="Qwen3NextForCausalLM",
        fields=BASE | HEADS | PLACES | DELTA | EXPERTS | LAYERS | {"head_dim": 16, "intermediate_size": 48},
    ),
    "qwen3_5": TinyFamily(
        config="Qwen3_5TextConfig",
        model="Qwen3_5ForCausalLM",
        fields=BASE | HEADS | PLACES | DELTA | LAYERS | {"head_dim": 16, "intermediate_size": 48},
    ),
    "qwen3_5 multimodal": TinyFamily(
        config="Qwen3_5Config",
        model="Qwen3_5ForConditionalGeneration",
        fields=BASE | HEADS | PLACES | DELTA | LAYERS | {"head_dim": 16, "intermediate_size": 48},
        text="Qwen3_5TextConfig",
        vision=VISION | {"depth": 1, "num_heads": 2},
    ),
    "qwen3_5_moe": TinyFamily(
        config="Qwen3_5MoeTextConfig",
        model="Qwen3_5MoeForCausalLM",
        fields=BASE | HEADS | PLACES | DELTA | EXPERTS | LAYERS | {"head_dim": 16},
    ),
    "qwen4_exp": TinyFamily(
        config="Qwen4ExpTextConfig",
        model="Qwen4ExpForCausalLM",
        fields=BASE | HEADS | PLACES | DELTA | EXPERTS
        | {"head_dim": 16, "num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR], "hc_count": 2}
        | {"hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
        | {"indexer_budget": 64, "indexer_compress_ratio": 4},
    ),
    "olmo_hybrid": TinyFamily(
        config="OlmoHybridConfig",
        model="OlmoHybridForCausalLM",
        fields=BASE | HEADS | PLACES | DELTA | LAYERS | {"linear_value_head_dim": 32, "intermediate_size": 48},
    ),
    "kimi_linear": TinyFamily(
        config="KimiLinearConfig",
        model="KimiLinearForCausalLM",
        fields=BASE | LATENT | PLACES | LAYERS | KIMI | {"num_local_experts": 4},
    ),
    "glm5_next": TinyFamily(
        config="Glm5NextConfig",
        model="Glm5NextForConditionalGeneration",
        fields=BASE | LATENT | PLACES | LAYERS | KIMI
        | {"q_lora_rank": 16, "qk_rope_head_dim": 0, "n_routed_experts": 4, "index_topk": 64, "index_head_dim": 16}
        | {"index_n_heads": 2, "index_kpool": 4, "hc_mult": 2},
        text="Glm5NextTextConfig",
        vision=VISION | {"depth": 1, "num_heads": 2},
    ),
}  # fmt: skip
if tuple(int(n) for n in version("transformers").split(".")[:2]) < (5, 23):
    del FAMILIES["falcon_h1 with norm"]  # that transformers decodes no batch of it, and driftgate says so
MAMBA2 = [name for name in FAMILIES if not {"linear_key_head_dim", "linear_head_dim"} & set(FAMILIES[name].fields)]


def make_family_model(name: str, *, seed: int = 0, **changes: object) -> Any:
    """A tiny model of a family, FP32, eager, in eval mode.

    transformers' own initialisation leaves the logits almost independent of the state, so weights are drawn anew:
    matrices N(0, 1/fan_in), convolutions 0.5 N(0, 1), dt_bias 0.5 N(0, 1) - 1, A_log U(-1, 1).
    """
    import transformers

    tiny = FAMILIES[name]
    fields = tiny.fields | changes
    if tiny.text:
        config = getattr(transformers, tiny.config)(text_config=fields, vision_config=tiny.vision)
    else:
        config = getattr(transformers, tiny.config)(**fields)
    config._attn_implementation = "eager"
    model = getattr(transformers, tiny.model)(config)
    draw_weights(model, seed=seed)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def draw_weights(model: torch.nn.Module, *, seed: int) -> None:
    """Weights whose logits depend on the state."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("A_log"):
            weight.copy_(2 * torch.rand(weight.shape, generator=generator) - 1)
        elif name.endswith("dt_bias"):
            weight.copy_(0.5 * noise - 1)
        elif "conv1d" in name:
            weight.copy_(0.5 * noise)
        elif weight.ndim >= 2:
            weight.copy_(noise / weight.shape[-1] ** 0.5)
