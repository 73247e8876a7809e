"""Every covered family: a tiny random model of its real class decodes here as it does in transformers."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from family_cases import FAMILIES, MAMBA2, VOCAB, make_family_model

from driftgate.accuracy.adapters import families as catalogue
from driftgate.accuracy.adapters import find_family, hooks, wrap
from driftgate.accuracy.adapters.model_rows import CACHE_NAMES
from driftgate.accuracy.adapters.wrapping import ROW_MULTIPLE
from driftgate.accuracy.dump import record
from driftgate.errors import InputError, UsageError
from driftgate.kernels.contract import Backend, ReplayOptions
from driftgate.registry import CATALOGUES

SEQUENCES, STEPS, PREFILL = 2, 64, 3
TOLERANCE = 5e-5
"""Two orders of additions in FP32. Measured over 64 steps: 1.6e-5 or less."""
LENGTHS = (4, 7)


@dataclass(frozen=True)
class Plain:
    """A model and what transformers alone makes of the tokens."""

    model: Any
    token_ids: torch.Tensor
    logits: torch.Tensor


def forward(model: Any, rows: torch.Tensor, position: int, cache: Any) -> Any:
    """A forward of transformers alone behind ``position`` tokens: rows [n, T]."""
    names = inspect.signature(model.forward).parameters
    positions = torch.arange(position, position + rows.shape[1]).expand(len(rows), -1)
    more = {"position_ids": positions} if "position_ids" in names else {}
    if cache is not None:
        more[next(name for name in CACHE_NAMES if name in names)] = cache
    return model(input_ids=rows, use_cache=True, **more)


@torch.no_grad()
def decode_plain(model: Any, token_ids: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    """Logits after each piece of the tokens, [sequences, pieces, vocab], in as many rows as a wrapped model has."""
    n = len(token_ids)
    rows = token_ids[torch.arange(ROW_MULTIPLE) % n]
    cache, position, logits = None, 0, []
    for size in pieces:
        out = forward(model, rows[:, position : position + size], position, cache)
        cache = next(out[name] for name in CACHE_NAMES if out.get(name) is not None)
        position += size
        logits.append(out.logits[:n, -1])
    return torch.stack(logits, dim=1)


def decode_wrapped(model: Any, token_ids: torch.Tensor, pieces: list[int], *plans: str, **options: Any) -> torch.Tensor:
    """The same through driftgate, [plans, sequences, pieces, vocab]."""
    plans = plans or ("baseline",)
    with wrap(model, plans, n_sequences=len(token_ids), **options) as wrapped:
        position, logits = pieces[0], [wrapped.prefill(token_ids[:, : pieces[0]]).expand(len(plans), -1, -1)]
        for size in pieces[1:]:
            logits.append(wrapped.extend(token_ids[:, position : position + size]).clone())
            position += size
    return torch.stack(logits, dim=2)


@pytest.fixture(scope="module", params=FAMILIES)
def plain(request) -> Plain:
    """One family: its model, tokens, and the logits of transformers after each of them."""
    model = make_family_model(request.param)
    token_ids = torch.from_numpy(np.random.default_rng(5).integers(3, VOCAB, (SEQUENCES, PREFILL + STEPS)))
    return Plain(model, token_ids, decode_plain(model, token_ids, [PREFILL] + [1] * STEPS))


def test_the_baseline_decodes_as_transformers_does(plain):
    ours = decode_wrapped(plain.model, plain.token_ids, [PREFILL] + [1] * STEPS)[0]
    assert plain.logits.abs().max() > 1
    assert (ours - plain.logits).abs().max() <= TOLERANCE
    assert hooks._ACTIVE.get() is None
    assert hooks._ORIGINALS == {}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.model.modules())
    again = decode_plain(plain.model, plain.token_ids, [PREFILL] + [1] * STEPS)
    assert torch.equal(again, plain.logits)


def test_logits_depend_on_the_state(plain):
    with wrap(plain.model, ["baseline"], n_sequences=SEQUENCES) as wrapped:
        wrapped.prefill(plain.token_ids[:, :PREFILL])
        pool, slots = wrapped.blocks[0].pool, torch.arange(SEQUENCES)
        for position in range(PREFILL, PREFILL + 4):
            for layer in range(wrapped.n_layers):
                pool.write(layer, slots, torch.zeros_like(pool.checkpoint.read(layer, slots)))
            zeroed = wrapped.step(plain.token_ids[:, position])[0]
            assert (zeroed - plain.logits[:, position - PREFILL + 1]).abs().max() > 0.05


def test_unequal_prompts_decode_as_each_alone(plain):
    steps, width = 12, max(LENGTHS)
    rows = torch.full((SEQUENCES, width), 7)
    for row, n in enumerate(LENGTHS):
        rows[row, width - n :] = plain.token_ids[row, :n]
    with wrap(plain.model, ["baseline", "fp32@4"], n_sequences=SEQUENCES) as wrapped:
        try:
            first = wrapped.prefill(rows, lengths=torch.tensor(LENGTHS))
        except InputError as error:
            assert "makes NaN of prompts of unequal lengths" in str(error)
            with torch.no_grad():
                mask = torch.arange(width) >= width - torch.tensor(LENGTHS)[:, None]
                assert plain.model(input_ids=rows, attention_mask=mask.long()).logits[0].isnan().all()
            pytest.skip("transformers itself makes NaN of padded rows of this family: Qwen4-Exp before 5.24")
        fed = [[plain.token_ids[row, n + t] for row, n in enumerate(LENGTHS)] for t in range(steps)]
        ours = [first.expand(2, -1, -1), *(wrapped.step(torch.stack(tokens)).clone() for tokens in fed)]
        assert wrapped.blocks[1].pool.tokens[:SEQUENCES].tolist() == [n + steps for n in LENGTHS]
        more = wrapped.extend(torch.stack([plain.token_ids[row, n + steps :][:3] for row, n in enumerate(LENGTHS)]))
    for row, n in enumerate(LENGTHS):
        alone = plain.logits[row, n - PREFILL :]
        assert (torch.stack(ours, dim=2)[:, row] - alone[: steps + 1]).abs().max() <= TOLERANCE
        assert (more[:, row] - alone[steps + 3]).abs().max() <= TOLERANCE


def test_padding_that_transformers_lets_into_a_row_is_refused():
    model = make_family_model("mamba2", use_bias=True)
    rows = torch.full((SEQUENCES, 7), 7)
    with wrap(model, ["baseline"], n_sequences=SEQUENCES) as wrapped:
        wrapped.prefill(rows)
        with pytest.raises(InputError, match="the input projection has a bias"):
            wrapped.prefill(rows, lengths=torch.tensor(LENGTHS))


def test_several_tokens_go_on_from_what_was_decoded(plain):
    pieces = [PREFILL, 1, 1, 1, 4, 1, 1, 3, 1]
    expected = decode_plain(plain.model, plain.token_ids, pieces)
    ours = decode_wrapped(plain.model, plain.token_ids, pieces, "baseline", "fp32@3", "fp32@8+exact_readout")
    assert (ours - expected).abs().max() <= TOLERANCE
    assert (ours[:, :, 1:] != ours[:, :, :-1]).any(dim=-1).all()


@pytest.mark.parametrize("name", MAMBA2)
def test_a_bf16_model_decodes_to_the_bit_when_its_roundings_are_mimicked(name):
    model = make_family_model(name).to(torch.bfloat16)
    token_ids = torch.from_numpy(np.random.default_rng(6).integers(3, VOCAB, (SEQUENCES, 12)))
    pieces = [PREFILL] + [1] * 9
    expected = decode_plain(model, token_ids, pieces)
    assert torch.equal(decode_wrapped(model, token_ids, pieces, mimic=True)[0], expected)
    assert not torch.equal(decode_wrapped(model, token_ids, pieces)[0], expected)


@pytest.mark.parametrize(("name", "plan"), [("qwen3_5", "baseline"), ("kimi_linear", "baseline"), ("mamba2", "fp32@4")])
def test_a_mimic_that_would_change_nothing_or_a_plan_is_refused(name, plan):
    with pytest.raises(UsageError, match="mimic: for the baseline of Mamba-2 models alone"):
        wrap(make_family_model(name), [plan], mimic=True)


@pytest.mark.parametrize(
    ("name", "streams", "constants"),
    [
        ("qwen3_5", ["q", "k", "v", "g", "beta"], []),
        ("kimi_linear", ["q", "k", "v", "g", "beta"], []),
        ("mamba2", ["x", "B", "C", "dt"], ["A", "D"]),
        ("falcon_h1", ["x", "B", "C", "dt", "z"], ["A", "D"]),
    ],
)
def test_what_is_recorded_gives_the_layers_outputs_again(name, streams, constants):
    model = make_family_model(name)
    tokens = np.random.default_rng(7).integers(3, VOCAB, (SEQUENCES, 6))
    dump = record(model, tokens, steps=4, prefill=2)
    outputs = []
    with wrap(model, ["baseline"], n_sequences=SEQUENCES) as wrapped:
        wrapped.observers.append(lambda layer, _inputs, out: layer or outputs.append(out[:SEQUENCES].clone()))
        wrapped.prefill(torch.from_numpy(tokens[:, :2]))
        for t in range(2, 6):
            wrapped.step(torch.from_numpy(tokens[:, t]))
        pool = wrapped.states.make_pool(ReplayOptions(), n_slots=SEQUENCES)
    layer, slots = dump.layers[0], torch.arange(SEQUENCES, dtype=torch.int32)
    assert (list(layer.streams), list(layer.constants)) == (streams, constants)
    pool.write(0, slots.long(), layer.initial_state)
    kernels = import_module(f"driftgate.kernels.{layer.recurrence.value}").implementation(Backend.TORCH)
    for t, expected in enumerate(outputs):
        step = {key: x[:, t] for key, x in layer.streams.items()}
        assert torch.equal(kernels.decode_step(**step, **layer.constants, pool=pool, layer=0, slots=slots), expected)


def test_what_the_installed_transformers_cannot_decode_is_refused(monkeypatch):
    import transformers

    config = transformers.FalconH1Config(mamba_rms_norm=True)
    monkeypatch.setattr(transformers, "__version__", "5.23.0")
    assert find_family(config).name == "falcon_h1"
    monkeypatch.setattr(transformers, "__version__", "5.22.1")
    assert find_family(transformers.FalconH1Config(mamba_rms_norm=False)).name == "falcon_h1"
    with pytest.raises(InputError, match=r"transformers 5\.22\.1 decodes no batch .*; install 5\.23 or later"):
        find_family(config)


def test_the_catalogue_is_what_is_tested_and_names_what_transformers_has():
    found = {find_family(make_family_model(name).config).name for name in FAMILIES}
    assert found == set(catalogue._NAMES) == set(catalogue.FAMILIES)
    assert [row["family"] for row in CATALOGUES["families"]()] == list(catalogue.FAMILIES)
    for name, family in catalogue.FAMILIES.items():
        assert family.name == name
        assert hasattr(sys.modules[family.module], family.decode.name)
