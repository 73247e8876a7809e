"""The hook in transformers: same logits through our kernels, nothing left behind, nothing else disturbed."""

from __future__ import annotations

import inspect
import sys

import numpy as np
import pytest
import torch

from driftgate.accuracy.adapters import find_family, hooks, wrap
from driftgate.accuracy.adapters.model_rows import CACHE_NAMES, ModelRows
from driftgate.accuracy.adapters.wrapping import ROW_MULTIPLE, Block, WrappedModel
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.errors import InputError
from driftgate.kernels.contract import Backend, HeadShape

SEQUENCES, STEPS = 3, 64
MODULE, FUNCTION = "transformers.models.qwen3_5.modeling_qwen3_5", "torch_recurrent_gated_delta_rule"
TOLERANCE = 5e-5
"""Measured for this family: 6.7e-6 at 20 steps (two orders of additions in FP32); rounding grows with the steps."""


@pytest.fixture(scope="module")
def token_ids() -> torch.Tensor:
    """[SEQUENCES, STEPS + 2] random tokens."""
    return torch.from_numpy(np.random.default_rng(5).integers(3, 96, (SEQUENCES, STEPS + 2)))


@pytest.fixture(autouse=True)
def clean():
    """Every test ends with the original function in place and no context set."""
    original = getattr(sys.modules.get(MODULE), FUNCTION, None)
    yield
    assert hooks._ACTIVE.get() is None
    assert hooks._ORIGINALS == {}
    if original is not None:
        assert getattr(sys.modules[MODULE], FUNCTION) is original


@torch.no_grad()
def step_plain(model: torch.nn.Module, column: torch.Tensor, position: int, before):
    """One token [rows] through transformers alone; ``before`` is the output of the step before."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    positions = torch.full((len(column), 1), position)
    return model(input_ids=column[:, None], position_ids=positions, use_cache=True, **{name: before[name]})


@torch.no_grad()
def decode_plain(model: torch.nn.Module, token_ids: torch.Tensor, *, prefill: int, padded_to: int = 0) -> torch.Tensor:
    """Teacher-forced logits [sequences, steps, vocab] of transformers alone, in as many rows as a wrapped model has."""
    n = len(token_ids)
    rows = token_ids[torch.arange(max(n, padded_to)) % n]
    out = model(input_ids=rows[:, :prefill], use_cache=True)
    logits = []
    for position in range(prefill, rows.shape[1]):
        out = step_plain(model, rows[:, position], position, out)
        logits.append(out.logits[:n, -1])
    return torch.stack(logits, dim=1)


def make_wrapped(model: torch.nn.Module, *plans: str, n_sequences: int = SEQUENCES) -> WrappedModel:
    blocks = [Block(name=p, options=PrecisionPlan.parse(p).options) for p in plans or ("baseline",)]
    return wrap(model, blocks, n_sequences=n_sequences, backend=Backend.TORCH)


def decode_wrapped(wrapped: WrappedModel, token_ids: torch.Tensor, *, prefill: int) -> torch.Tensor:
    """Teacher-forced logits [blocks, sequences, steps, vocab]."""
    wrapped.prefill(token_ids[:, :prefill])
    steps = [wrapped.step(token_ids[:, position]).clone() for position in range(prefill, token_ids.shape[1])]
    return torch.stack(steps, dim=2)


@pytest.mark.parametrize("prefill", [1, 2])
def test_the_baseline_decodes_as_transformers_does(tiny_model, token_ids, prefill):
    plain = decode_plain(tiny_model, token_ids, prefill=prefill, padded_to=ROW_MULTIPLE)
    with make_wrapped(tiny_model) as wrapped:
        ours = decode_wrapped(wrapped, token_ids, prefill=prefill)[0]
    assert wrapped.kernel_calls == wrapped.n_layers * (token_ids.shape[1] - prefill)
    assert plain.abs().max() > 1
    assert (ours - plain).abs().max() <= TOLERANCE


def test_every_block_decodes_all_sequences(tiny_model, token_ids):
    plain = decode_plain(tiny_model, token_ids[:, :20], prefill=2, padded_to=ROW_MULTIPLE)
    with make_wrapped(tiny_model, "baseline", "fp32@1", "fp32@5", "fp32@5+exact_readout+track=4") as wrapped:
        ours = decode_wrapped(wrapped, token_ids[:, :20], prefill=2)
    assert ours.shape == (4, *plain.shape)
    assert (ours - plain).abs().max() <= TOLERANCE


def test_the_prefill_is_the_models_own(tiny_model, token_ids):
    with torch.no_grad():
        plain = tiny_model(input_ids=token_ids[:, :9], logits_to_keep=1).logits[:, -1]
    with make_wrapped(tiny_model) as wrapped:
        ours = wrapped.prefill(token_ids[:, :9])
    assert torch.equal(ours, plain)
    assert wrapped.kernel_calls == 0


def test_the_model_is_bit_identical_once_the_wrapper_has_gone(tiny_model, token_ids):
    before = decode_plain(tiny_model, token_ids[:, :20], prefill=2)
    with make_wrapped(tiny_model) as wrapped:
        decode_wrapped(wrapped, token_ids[:, :20], prefill=2)
    assert torch.equal(decode_plain(tiny_model, token_ids[:, :20], prefill=2), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tiny_model.modules())


def test_a_plain_model_of_the_class_decodes_undisturbed_in_between(tiny_model, make_model, token_ids):
    other = make_model(seed=1)
    alone = decode_plain(other, token_ids, prefill=2)
    with make_wrapped(tiny_model) as wrapped:
        unmixed = decode_wrapped(wrapped, token_ids, prefill=2)[0]
        wrapped.prefill(token_ids[:, :2])
        with torch.no_grad():
            out = other(input_ids=token_ids[:, :2], use_cache=True)
            ours, theirs = [], []
            for position in range(2, token_ids.shape[1]):
                calls = wrapped.kernel_calls
                out = step_plain(other, token_ids[:, position], position, out)
                assert wrapped.kernel_calls == calls
                theirs.append(out.logits[:, -1])
                ours.append(wrapped.step(token_ids[:, position])[0].clone())
    assert torch.equal(torch.stack(theirs, dim=1), alone)
    assert torch.equal(torch.stack(ours, dim=1), unmixed)


def test_two_wrapped_models_of_one_class_keep_their_own_states(tiny_model, make_model, token_ids):
    models = [tiny_model, make_model(seed=1)]
    alone = []
    for model in models:
        with make_wrapped(model) as wrapped:
            alone.append(decode_wrapped(wrapped, token_ids[:, :20], prefill=2))
    with make_wrapped(models[0]) as first, make_wrapped(models[1]) as second:
        for wrapped in (first, second):
            wrapped.prefill(token_ids[:, :2])
        steps = [[w.step(token_ids[:, p]).clone() for w in (first, second)] for p in range(2, 20)]
    together = [torch.stack(logits, dim=2) for logits in zip(*steps, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    assert not torch.equal(*alone)


def test_a_model_that_is_wrapped_twice_decodes_through_the_inner_wrapper(tiny_model, token_ids):
    with make_wrapped(tiny_model) as outer:
        with make_wrapped(tiny_model) as inner:
            decode_wrapped(inner, token_ids[:, :6], prefill=2)
            assert hooks._ACTIVE.get() is None
        assert (outer.kernel_calls, inner.kernel_calls) == (0, 4 * inner.n_layers)
        decode_wrapped(outer, token_ids[:, :6], prefill=2)
        assert outer.kernel_calls == 4 * outer.n_layers


@pytest.mark.parametrize("where", ["kernel", "observer", "layer after the mixer"])
def test_an_exception_inside_forward_leaves_nothing_behind(tiny_model, token_ids, monkeypatch, where):
    before = decode_plain(tiny_model, token_ids[:, :8], prefill=2)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("on purpose")

    with make_wrapped(tiny_model) as wrapped:
        wrapped.prefill(token_ids[:, :2])
        wrapped.step(token_ids[:, 2])
        with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="on purpose"):
            if where == "kernel":
                broken.setattr(wrapped.states._kernels, "decode_step", fail)
            elif where == "observer":
                broken.setattr(wrapped, "observers", [fail])
            else:
                broken.setattr(tiny_model.model.layers[0].mlp, "forward", fail)
            wrapped.step(token_ids[:, 3])
        assert hooks._ACTIVE.get() is None
        assert wrapped._hook._tokens == []
        again = decode_wrapped(wrapped, token_ids[:, :8], prefill=2)[0]
    with make_wrapped(tiny_model) as fresh:
        assert torch.equal(decode_wrapped(fresh, token_ids[:, :8], prefill=2)[0], again)
    assert torch.equal(decode_plain(tiny_model, token_ids[:, :8], prefill=2), before)


def test_an_exception_in_the_with_block_takes_the_hook_off(tiny_model):
    with pytest.raises(KeyError), make_wrapped(tiny_model):
        raise KeyError


def test_logits_depend_on_the_state(tiny_model, token_ids):
    with make_wrapped(tiny_model) as wrapped:
        true = decode_wrapped(wrapped, token_ids, prefill=2)[0]
        wrapped.prefill(token_ids[:, :2])
        zeroed = []
        pool, slots = wrapped.blocks[0].pool, torch.arange(SEQUENCES)
        for position in range(2, token_ids.shape[1]):
            for layer in range(wrapped.n_layers):
                pool.write(layer, slots, torch.zeros_like(pool.checkpoint.read(layer, slots)))
            zeroed.append(wrapped.step(token_ids[:, position])[0].clone())
    change = (torch.stack(zeroed, dim=1) - true).abs().amax(dim=(0, 2))
    assert change.max() > 0.1
    assert (change > 0.01).all()


def test_the_models_own_state_is_not_read_while_it_decodes_here(tiny_model, token_ids):
    with make_wrapped(tiny_model) as wrapped:
        true = decode_wrapped(wrapped, token_ids[:, :12], prefill=2)
        wrapped.prefill(token_ids[:, :2])
        for index in wrapped.layer_indices:
            wrapped._rows.cache.layers[index].recurrent_states[0] = torch.tensor(torch.nan).expand(
                wrapped._rows.cache.layers[index].recurrent_states[0].shape
            )
        poisoned = torch.stack([wrapped.step(token_ids[:, p]).clone() for p in range(2, 12)], dim=2)
    assert torch.equal(poisoned, true)


def test_blocks_can_be_fed_tokens_of_their_own(tiny_model, token_ids):
    with make_wrapped(tiny_model, "baseline", "fp32@1") as wrapped:
        wrapped.prefill(token_ids[:, :2])
        same = wrapped.step(torch.stack((token_ids[:, 2], token_ids[:, 2]))).clone()
        different = wrapped.step(torch.stack((token_ids[:, 3], token_ids[:, 4]))).clone()
        wrapped.prefill(token_ids[:, :2])
        wrapped.step(token_ids[:, 2])
        expected = wrapped.step(token_ids[:, 4])[1]
    assert torch.equal(same[0], same[1])
    assert torch.equal(different[1], expected)
    assert not torch.equal(different[0], different[1])


def test_decoding_prints_nothing(tiny_model, token_ids, capfd):
    capfd.readouterr()
    with make_wrapped(tiny_model) as wrapped:
        decode_wrapped(wrapped, token_ids[:, :4], prefill=2)
    assert capfd.readouterr() == ("", "")


def test_layers_and_shape_are_those_of_the_checkpoint(tiny_model):
    wrapped = make_wrapped(tiny_model)
    assert wrapped.layer_indices == [0, 2]
    assert wrapped.shape == HeadShape(key_heads=2, value_heads=4, d_k=16, d_v=16)
    assert wrapped.n_rows % ROW_MULTIPLE == 0


def test_a_layer_that_takes_another_path_is_an_error(tiny_model, token_ids):
    with make_wrapped(tiny_model) as wrapped:
        wrapped.prefill(token_ids[:, :2])
        wrapped.step(token_ids[:, 2])
        wrapped._layers_done = 0
        first = wrapped._hook._mixers[0]
        forward, first.forward = first.forward, lambda hidden_states, **_: torch.zeros_like(hidden_states)
        try:
            with pytest.raises(RuntimeError, match="1 of 2 recurrent layers went through driftgate's kernels"):
                wrapped.step(token_ids[:, 3])
        finally:
            first.forward = forward


def test_a_step_before_the_prefill_is_refused(tiny_model, token_ids):
    with make_wrapped(tiny_model) as wrapped, pytest.raises(RuntimeError, match="call prefill before step"):
        wrapped.step(token_ids[:, 0])


def test_another_number_of_sequences_is_refused(tiny_model, token_ids):
    with make_wrapped(tiny_model) as wrapped, pytest.raises(ValueError, match="expected 3 sequences, got 2"):
        wrapped.prefill(token_ids[:2, :2])


def test_a_model_without_recurrent_layers_is_refused(make_model):
    model = make_model(layer_types=["full_attention"] * 3)
    with pytest.raises(InputError, match="no recurrent layer of family qwen3_5"):
        make_wrapped(model)


def test_an_unknown_family_lists_those_that_are_covered():
    from transformers import LlamaConfig

    with pytest.raises(InputError, match=r"'llama' has no recurrent layers .* covered: bamba, .* qwen3_5_text"):
        find_family(LlamaConfig())


def test_a_composite_model_is_known_by_its_text_part():
    from transformers import LlavaConfig, Qwen3_5TextConfig

    tiny = Qwen3_5TextConfig(num_hidden_layers=1, layer_types=["linear_attention"])
    assert find_family(LlavaConfig(text_config=tiny)).name == "qwen3_5"
    with pytest.raises(InputError, match="'llava' has no recurrent layers"):
        find_family(LlavaConfig())


LENGTHS = (5, 9, 2)


def decode_padded(wrapped: WrappedModel, token_ids: torch.Tensor, *, filler: int) -> torch.Tensor:
    """Prompts of LENGTHS tokens, then 20 more tokens of each row; logits [blocks, sequences, steps, vocab]."""
    width = max(LENGTHS)
    prompts = torch.full((SEQUENCES, width), filler)
    for row, n in enumerate(LENGTHS):
        prompts[row, width - n :] = token_ids[row, :n]
    first = wrapped.prefill(prompts, lengths=torch.tensor(LENGTHS))
    steps = [wrapped.step(torch.stack([token_ids[r, n + t] for r, n in enumerate(LENGTHS)])) for t in range(20)]
    return torch.stack([first.expand(len(wrapped.blocks), -1, -1), *(s.clone() for s in steps)], dim=2)


def test_unequal_prompts_decode_as_each_alone(tiny_model, token_ids):
    plans = ("baseline", "fp32@5+track=4")
    with make_wrapped(tiny_model, *plans) as wrapped:
        together = decode_padded(wrapped, token_ids, filler=7)
        assert wrapped.blocks[1].pool.tokens[:SEQUENCES].tolist() == [n + 20 for n in LENGTHS]
        assert torch.equal(decode_padded(wrapped, token_ids, filler=11), together)
    for row, n in enumerate(LENGTHS):
        with make_wrapped(tiny_model, *plans, n_sequences=1) as wrapped:
            first = wrapped.prefill(token_ids[row : row + 1, :n])
            steps = [wrapped.step(token_ids[row : row + 1, n + t])[:, 0].clone() for t in range(20)]
        alone = torch.stack([first.expand(2, -1), *steps], dim=1)
        assert (together[:, row] - alone).abs().max() <= TOLERANCE


def test_track_and_random_draws_count_the_tokens_of_their_own_row(tiny_model, token_ids):
    plan = "fp8@4+sr+track=6"
    with make_wrapped(tiny_model, plan) as wrapped:
        decode_padded(wrapped, token_ids, filler=7)
        pool = wrapped.blocks[0].pool
        cursors, tokens = pool.cursor[:SEQUENCES].tolist(), pool.noise(0, torch.arange(SEQUENCES)).tokens.tolist()
    expected = []
    for n in LENGTHS:
        cursor = 0
        for seen in range(n + 1, n + 21):
            cursor = 0 if cursor == 3 or seen % 6 == 0 else cursor + 1
        expected.append(cursor)
    assert (cursors, tokens) == (expected, [n + 20 for n in LENGTHS])


def test_lengths_that_are_all_the_width_change_no_bit(tiny_model, token_ids):
    with make_wrapped(tiny_model, "baseline", "nvfp4@4") as wrapped:
        plain = decode_wrapped(wrapped, token_ids[:, :12], prefill=5)
        first = wrapped.prefill(token_ids[:, :5], lengths=torch.full((SEQUENCES,), 5))
        steps = [wrapped.step(token_ids[:, p]).clone() for p in range(5, 12)]
        assert torch.equal(first, wrapped.prefill(token_ids[:, :5]))
    assert torch.equal(torch.stack(steps, dim=2), plain)


@pytest.mark.parametrize("lengths", [[5, 0, 2], [5, 6, 2], [5, 5]])
def test_lengths_that_do_not_fit_are_refused(tiny_model, token_ids, lengths):
    with make_wrapped(tiny_model) as wrapped, pytest.raises(ValueError, match=r"lengths: expected 3 numbers from 1 to"):
        wrapped.prefill(token_ids[:, :5], lengths=torch.tensor(lengths))


def test_a_state_that_the_model_itself_loses_is_one_line(tiny_model, monkeypatch):
    """FP16 overflows in a prefill; there is nothing to compare then."""
    forward = ModelRows._forward

    def overflow(self: ModelRows, *args: object, **options: object):
        out = forward(self, *args, **options)
        cache = next(out[name] for name in CACHE_NAMES if out.get(name) is not None)
        cache.layers[self._layers[0]].recurrent_states[0][0, 0, 0, 0] = torch.inf
        return out

    monkeypatch.setattr(ModelRows, "_forward", overflow)
    with wrap(tiny_model, ["baseline"]) as wrapped:
        with pytest.raises(InputError, match="give --dtype bf16 or fp32") as caught:
            wrapped.prefill(torch.tensor([[1, 2, 3]]))
        assert len(str(caught.value).splitlines()) == 1
