"""The embedded checkpoints: they load offline, their tokenizer is exact, and their answers come from the state."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driftgate.evals.checkpoints import find_checkpoint, list_checkpoints
from driftgate.evals.tasks import make_streams

NAME = "tiny-gdn"
GOLDEN = Path(__file__).parent / "golden" / "quant"
TEXT = "a+ ?Q3 \n\tüñí 漢字 🙂 \x00\x7f  two  spaces 'tis"


@cache
def load_model() -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(
        list_checkpoints()[NAME], local_files_only=True, attn_implementation="eager"
    ).eval()


@cache
def load_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(list_checkpoints()[NAME], local_files_only=True)


def test_checkpoints_are_found() -> None:
    folder = find_checkpoint(NAME)
    assert folder is not None
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "CARD.md"} <= {
        path.name for path in folder.iterdir()
    }


def test_an_unknown_checkpoint_is_none() -> None:
    assert find_checkpoint("no-such-checkpoint") is None


@pytest.mark.parametrize("name", sorted(list_checkpoints()))
def test_weights_are_small(name: str) -> None:
    assert (list_checkpoints()[name] / "model.safetensors").stat().st_size <= 8 * 2**20


def test_weights_are_finite() -> None:
    assert all(torch.isfinite(value).all() for value in load_model().state_dict().values())


def test_architecture() -> None:
    config = load_model().config
    assert type(load_model()).__name__ == "Qwen3_5ForCausalLM"
    assert config.layer_types == ["full_attention"] + ["linear_attention"] * 3
    assert config.max_position_embeddings == 262_144


def test_positions_do_not_matter_to_the_attention() -> None:
    """No rotary dimension, so no position is out of the trained range."""
    assert load_model().model.rotary_emb.inv_freq.numel() == 0


@pytest.mark.parametrize("text", [TEXT, "", "".join(map(chr, range(0x250)))])
def test_tokens_are_bytes(text: str) -> None:
    tokenizer = load_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text


def test_special_tokens() -> None:
    tokenizer = load_tokenizer()
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257, 258)
    assert len(tokenizer) == load_model().config.vocab_size == 264


@torch.no_grad()
def test_answers_are_right() -> None:
    """Measured at this length: tracking 0.98 of 168, recall 1.0 of 144; the bounds lie 4 sd of 80 items below 0.97."""
    streams = make_streams(tasks=("recall", "tracking"), n_sequences=6, length=1024, seed=31)
    logits = load_model()(torch.from_numpy(streams.token_ids), use_cache=False).logits
    right: dict[str, list[bool]] = {"recall": [], "tracking": []}
    for question in streams.questions:
        four = logits[question.sequence, question.position, list(question.choices)]
        right[question.task].append(int(four.argmax()) == question.gold)
    assert np.mean(right["tracking"]) > 0.89
    assert np.mean(right["recall"]) > 0.89


def test_without_its_state_the_model_knows_nothing() -> None:
    from driftgate.evals.training.emulation import EmulatedPlan, decode_logits

    streams = make_streams(tasks=("recall", "tracking"), n_sequences=12, length=96, seed=32)
    plans = (EmulatedPlan("baseline", "fp32", "fp32", 1), EmulatedPlan("zero state", "fp32", "fp32", 1, True))
    moved = 0.0
    right = np.zeros(2)
    for position, logits in decode_logits(load_model(), torch.from_numpy(streams.token_ids), plans):
        moved = max(moved, float((logits[0] - logits[1]).abs().max()))
        for question in streams.questions:
            if question.position == position:
                four = logits[:, question.sequence, list(question.choices)].argmax(-1).numpy()
                right += four == question.gold
    share = right / len(streams.questions)
    chance_sd = np.sqrt(3 / 16 / len(streams.questions))
    assert moved > 0.1
    assert share[0] > 0.6
    assert abs(share[1] - 0.25) < 5 * chance_sd


@torch.no_grad()
def test_emulated_baseline_is_the_model() -> None:
    """Step by step against chunks of 64: FP32 sums in another order; measured 2e-5 on logits up to 21, bound 10x."""
    from driftgate.evals.training.emulation import EmulatedPlan, decode_logits

    token_ids = torch.from_numpy(make_streams(tasks=(), n_sequences=2, length=128, seed=33).token_ids)
    whole = load_model()(token_ids, use_cache=False).logits
    plans = (EmulatedPlan("baseline", "fp32", "fp32", 1), EmulatedPlan("fp32@16", "fp32", "fp32", 16))
    for position, logits in decode_logits(load_model(), token_ids, plans):
        assert (logits - whole[:, position]).abs().max() < 2e-4


@pytest.mark.parametrize("format_name", ["nvfp4", "e4m3"])
def test_emulated_formats_agree_with_golden_vectors(format_name: str) -> None:
    """Reciprocals may differ by one ulp from the exact rule, so a code may move by one at a tie: 0.1 % of values."""
    from driftgate.evals.training.emulation import quantize_fp8_rows, quantize_nvfp4_rows

    with np.load(GOLDEN / "state_scaled.npz", allow_pickle=False) as data:
        x = torch.from_numpy(data["x"])
        name = "nvfp4/row/dk/deq" if format_name == "nvfp4" else "e4m3/row/encode/deq"
        expected = torch.from_numpy(data[name])
    got = (quantize_nvfp4_rows if format_name == "nvfp4" else quantize_fp8_rows)(x)
    differs = (got - expected).abs() > 1e-6 * expected.abs()
    assert differs.float().mean() <= 1e-3


def test_training_chunks_equal_transformers() -> None:
    """Outputs and gradients of the training path against the chunked function that transformers ships (FP32)."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    from driftgate.evals.training.chunk_gdn import chunk_gated_delta_rule

    torch.manual_seed(0)
    shapes = [(2, 192, 4, 64)] * 3
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    g = (-0.1 * torch.rand(2, 192, 4)).requires_grad_()
    beta = torch.rand(2, 192, 4, requires_grad=True)
    weight = torch.randn(2, 192, 4, 64)
    results = []
    for function in (chunk_gated_delta_rule, torch_chunk_gated_delta_rule):
        out = function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
        results.append((out.detach(), *torch.autograd.grad((out * weight).sum(), (q, k, v, g, beta))))
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
