"""The three architectures that embedded checkpoints have, where they start, and what replaces their slow functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import KimiLinearConfig, KimiLinearForCausalLM, NemotronHConfig, NemotronHForCausalLM

from driftgate.evals.training.chunk_gdn import causal_convolve, chunk_gated_delta_rule
from driftgate.evals.training.chunk_kda import chunk_kimi_delta
from driftgate.evals.training.chunk_mamba2 import chunk_selective_scan
from driftgate.evals.training.model import VOCAB_SIZE, build_model

__all__ = ["FAMILIES", "Start", "TrainedFamily", "masks"]

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "max_position_embeddings": 262_144,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
}


@dataclass(frozen=True, kw_only=True)
class Start:
    """Initial values; transformers' own forget within a few tokens and do not train.

    Args:
        seed: of torch's generator.
        decay: log decay per token of the slowest and the fastest head, log-spaced over the heads.
        beta: write strengths of the first and the last head, log-spaced, set through one constant feature of the
            embeddings; None leaves all at about 0.5. Of no effect in Mamba-2.
        deviation: standard deviation of the weight matrices.
        conv_deviation: standard deviation of the taps of the short convolutions; None for ``deviation``.
        step: GDN alone: step size of every head; A then makes its decay, which the input can change less. None: A = 1.
        by_channel: KDA alone: the decays are spread over the channels of each head instead of over the heads.
    """

    seed: int = 0
    decay: tuple[float, float] = (1e-5, 5e-2)
    beta: tuple[float, float] | None = (0.01, 0.5)
    deviation: float = 0.06
    conv_deviation: float | None = None
    step: float | None = None
    by_channel: bool = False


def _log_space(ends: tuple[float, float], n: int) -> Tensor:
    return torch.logspace(math.log10(ends[0]), math.log10(ends[1]), n)


def _invert_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


def _set_taps(model: nn.Module, start: Start) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv1d):
            nn.init.normal_(module.weight, std=start.conv_deviation or start.deviation)


def _set_step(mixer: Any, step: float, decay: tuple[float, float]) -> None:
    """One step size for all heads; A makes their decays."""
    heads = len(mixer.dt_bias)
    mixer.dt_bias.copy_(_invert_softplus(torch.full((heads,), step)))
    mixer.A_log.copy_(torch.log(_log_space(decay, heads) / step))


def _set_write_strength(embedding: Tensor, projection: Tensor, start: Start) -> None:
    """One feature of the embeddings is constant, and the projection of beta [H, hidden] reads it."""
    if start.beta is not None:
        embedding[:, 0] = 2.5 * start.deviation
        projection[:, 0] = torch.logit(_log_space(start.beta, len(projection))) / 2.0


def build_gdn(start: Start) -> Any:
    """``Qwen3_5ForCausalLM``: the architecture of model.py."""
    model = build_model(seed=start.seed, dt_range=start.decay, beta_range=start.beta, initializer_range=start.deviation)
    with torch.no_grad():
        if start.conv_deviation is not None:
            _set_taps(model, start)
        for layer in model.model.layers[1:] if start.step is not None else []:
            _set_step(layer.linear_attn, start.step, start.decay)
    return model


def build_kda(start: Start) -> Any:
    """``KimiLinearForCausalLM``: one latent attention without positions, then three KDA layers; 1 M parameters."""
    torch.manual_seed(start.seed)
    config = KimiLinearConfig(
        **SIZES,
        intermediate_size=256,
        num_hidden_layers=4,
        layer_types=["full_attention", *["linear_attention"] * 3],
        mlp_layer_types=["dense"] * 4,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        linear_head_dim=64,
        linear_num_heads=4,
        initializer_range=start.deviation,
    )
    model = KimiLinearForCausalLM(config)
    with torch.no_grad():
        _set_taps(model, start)
        for layer in model.model.layers[1:]:
            mixer = layer.self_attn
            heads, width = mixer.num_heads, mixer.head_dim
            decay = _log_space(start.decay, width if start.by_channel else heads)
            spread = decay.repeat(heads) if start.by_channel else decay.repeat_interleave(width)
            mixer.forget_gate.dt_bias.copy_(_invert_softplus(spread))
            mixer.forget_gate.A_log.zero_()
            _set_write_strength(model.model.embed_tokens.weight, mixer.b_proj.weight, start)
    return model


def build_mamba2(start: Start) -> Any:
    """``NemotronHForCausalLM``: one attention without positions, then three pairs of Mamba-2 and MLP; about 1 M.

    The step size is near 0.3 at the start, and A makes the decay, so that slow heads write as strongly as fast ones.
    """
    torch.manual_seed(start.seed)
    config = NemotronHConfig(
        **SIZES,
        layers_block_type=["full_attention", *["linear_attention", "mlp"] * 3],
        intermediate_size=384,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=128,
        n_groups=2,
        use_conv_bias=False,
        chunk_size=64,
        time_step_min=1e-6,  # prefill clamps to it, decode does not
        rescale_prenorm_residual=False,
        initializer_range=start.deviation,
    )
    model = NemotronHForCausalLM(config)
    with torch.no_grad():
        _set_taps(model, start)
        for layer in model.model.layers:
            if layer.block_type == "linear_attention":
                mixer = layer.mixer
                _set_step(mixer, 0.3, start.decay)
    return model


@dataclass(frozen=True, kw_only=True)
class TrainedFamily:
    """One architecture.

    Attributes:
        checkpoint: name of the folder that ships.
        title: what the card calls its layers.
        module: modeling module of transformers.
        recurrence: the global of that module that runs the recurrence over whole sequences.
        chunked: what replaces it while training; takes ``read_noise`` besides its arguments.
        build: a freshly initialised model.
    """

    checkpoint: str
    title: str
    module: str
    recurrence: str
    chunked: Callable[..., Any]
    build: Callable[[Start], Any]

    @contextmanager
    def training_functions(self, read_noise: Tensor | None = None) -> Iterator[None]:
        """Swap the slow functions for those with a cheap backward pass, and back.

        Args:
            read_noise: float32 [] on the model's device, looked up at every call: the states are read through copies
                whose entries are off by a normal share of themselves of this deviation, and carried on exactly.
        """
        module = import_module(self.module)
        functions = {
            self.recurrence: partial(self.chunked, read_noise=read_noise),
            "causal_conv1d_fn": causal_convolve,
        }
        originals = {name: getattr(module, name) for name in functions}
        for name, function in functions.items():
            setattr(module, name, function)
        try:
            yield
        finally:
            for name, function in originals.items():
                setattr(module, name, function)


FAMILIES = {
    "gdn": TrainedFamily(
        checkpoint="tiny-gdn",
        title="Gated DeltaNet",
        module="transformers.models.qwen3_5.modeling_qwen3_5",
        recurrence="torch_chunk_gated_delta_rule",
        chunked=chunk_gated_delta_rule,
        build=build_gdn,
    ),
    "mamba2": TrainedFamily(
        checkpoint="tiny-mamba2",
        title="Mamba-2",
        module="transformers.models.nemotron_h.modeling_nemotron_h",
        recurrence="mamba2_chunk_scan",
        chunked=chunk_selective_scan,
        build=build_mamba2,
    ),
    "kda": TrainedFamily(
        checkpoint="tiny-kda",
        title="Kimi Delta Attention",
        module="transformers.models.kimi_linear.modeling_kimi_linear",
        recurrence="chunk_kimi_delta_attention",
        chunked=chunk_kimi_delta,
        build=build_kda,
    ),
}


def masks() -> dict[str, None]:
    """``attention_mask`` for whole sequences without padding: causal by itself, and nothing for the model to look up.

    Given this, transformers asks the device for no value, so that a training step can be captured as one graph.
    """
    return {"full_attention": None, "linear_attention": None, "mlp": None}
