"""The architecture of tiny-gdn, its initial values and its byte tokenizer."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

__all__ = ["build_model", "build_tokenizer", "make_config", "save_tokenizer"]

VOCAB_SIZE = 264
SPECIALS = ("<pad>", "<bos>", "<eos>", "<unused0>", "<unused1>", "<unused2>", "<unused3>", "<unused4>")


def make_config(*, initializer_range: float = 0.02) -> Qwen3_5TextConfig:
    """One cheap attention layer without positions, then three Gated DeltaNet layers; about 0.9 M parameters.

    A model of linear layers alone fails in transformers' cache. The attention is layer 0, where a token knows nothing
    of its neighbours, so that it can count tokens but can bind no key to its value.
    """
    return Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        layer_types=["full_attention", "linear_attention", "linear_attention", "linear_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        tie_word_embeddings=True,
        initializer_range=initializer_range,
        max_position_embeddings=262_144,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.0},
        pad_token_id=256,
        bos_token_id=257,
        eos_token_id=258,
    )


def build_model(
    *,
    seed: int,
    dt_range: tuple[float, float] = (1e-4, 5e-2),
    beta_range: tuple[float, float] | None = None,
    initializer_range: float = 0.02,
) -> Qwen3_5ForCausalLM:
    """A freshly initialised model.

    Args:
        seed: of torch's generator.
        dt_range: decay per token of the slowest and the fastest head (A = 1, dt log-spaced between them).
            transformers' own default forgets within a few tokens and does not train.
        beta_range: write strengths of the first and the last head at the start, log-spaced, set through one
            constant feature of the embeddings; None leaves all at about 0.5.
        initializer_range: standard deviation of the weight matrices.
    """
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(make_config(initializer_range=initializer_range))
    with torch.no_grad():
        if beta_range is not None:
            model.model.embed_tokens.weight[:, 0] = 2.5 * initializer_range
        for layer in model.model.layers[1:]:
            mixer = layer.linear_attn
            heads = mixer.dt_bias.shape[0]
            dt = torch.logspace(math.log10(dt_range[0]), math.log10(dt_range[1]), heads)
            mixer.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
            mixer.A_log.zero_()
            if beta_range is not None:
                beta = torch.logspace(math.log10(beta_range[0]), math.log10(beta_range[1]), heads)
                mixer.in_proj_b.weight[:, 0] = torch.logit(beta) / 2.0
    return model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens: the id of a byte is its value, 256 to 263 are the specials; no text is ever unknown."""
    letters = _byte_letters()
    core = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        model_max_length=262_144,
    )


def _byte_letters() -> list[str]:
    """The printable letter that byte-level tokenizers use for each byte (the GPT-2 table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(extra)) for byte in range(256)]


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    build_tokenizer().save_pretrained(folder)
