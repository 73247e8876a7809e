"""Lock step of a tiny random model: what must be equal is equal to the bit, what must be counted is counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from driftgate.accuracy.adapters.hooks import DecodeHook
from driftgate.accuracy.adapters.wrapping import WrappedModel
from driftgate.accuracy.lockstep import (
    AGAIN,
    BASELINE_NAME,
    Counters,
    LockstepResult,
    LockstepRunner,
    Mismatch,
    Probe,
)
from driftgate.accuracy.observers import _Clock
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.errors import EmptyRunError, InputError, UsageError
from driftgate.kernels.contract import Backend, HeadShape
from driftgate.kernels.pool import StatePool

VOCAB, SEQUENCES, STEPS, LAYERS = 96, 3, 70, 2
NAMES = (
    "fp32@1",
    "fp32@16",
    "fp32@16+exact_readout",
    "fp32@7",
    "fp8@1",
    "nvfp4@16",
    "nvfp4/fp32@16",
    "nvfp4/fp32@16+cached",
    "nvfp4/fp8@5+track=8",
)
EXACT = ("fp32@1", "fp32@16+exact_readout")
PROBES = tuple(
    Probe(sequence=sequence, position=position, token_ids=ids)
    for sequence, position, ids in [(2, 70, (3, 9, 5)), (0, 1, (7,)), (1, 33, (4, 4)), (0, 70, (90, 80, 70))]
)


def make_runner(model: torch.nn.Module, *names: str, batch: int = SEQUENCES, **options: int | None) -> LockstepRunner:
    plans = {name: PrecisionPlan.parse(name) for name in names}
    return LockstepRunner(model, plans, batch=batch, backend=Backend.TORCH, **options)


@pytest.fixture(scope="module")
def token_ids() -> np.ndarray:
    """[5, STEPS + 1] random tokens."""
    return np.random.default_rng(3).integers(3, VOCAB, (5, STEPS + 1))


@pytest.fixture(scope="module")
def result(tiny_model, token_ids) -> LockstepResult:
    """All plans on three sequences in one batch."""
    runner = make_runner(tiny_model, *NAMES)
    return runner.run(token_ids[:SEQUENCES], probes=PROBES, record_steps=6, keep_logits=STEPS)


def differing_figures(a: LockstepResult, b: LockstepResult, name: str) -> list[str]:
    """Figures of a plan whose bits differ between two runs."""
    arrays = ("kl", "same_top", "delta_p", "nll", "window_offset")
    wrong = [k for k in arrays if getattr(a, k)[name].tobytes() != getattr(b, k)[name].tobytes()]
    others = ("different_logits", "counters", "state")
    return wrong + [k for k in others if getattr(a, k)[name] != getattr(b, k)[name]]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def after_prefill(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Call ``change(blocks by name)`` whenever a wrapped model has prefilled."""
    original = WrappedModel.prefill

    def prefill(self: WrappedModel, ids: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        logits = original(self, ids, **options)
        change({block.name: block for block in self.blocks})
        return logits

    monkeypatch.setattr(WrappedModel, "prefill", prefill)


# what must be equal


def test_the_baseline_equals_itself(result):
    assert result.again is None


@pytest.mark.parametrize("name", EXACT)
def test_plans_that_promise_bits_have_no_different_logit(result, name):
    assert result.different_logits[name] == 0
    assert not result.kl[name].any()
    assert result.same_top[name].all()
    assert result.state[name] == result.state["fp32@1"]


def test_stochastic_rounding_depends_on_seed_and_sequence_and_on_no_batch(tiny_model, token_ids):
    name = "nvfp4/fp8@4+sr"
    ids = token_ids[:SEQUENCES, :24]
    first, again = (make_runner(tiny_model, name, seed=1).run(ids) for _ in range(2))
    assert differing_figures(first, again, name) == []
    other = make_runner(tiny_model, name, seed=2).run(ids)
    assert not np.array_equal(first.kl[name], other.kl[name])
    alone = make_runner(tiny_model, name, batch=1, seed=1).run(ids)  # other rows of a batch round a little otherwise
    assert np.abs(first.kl[name] - alone.kl[name]).mean() < np.abs(first.kl[name] - other.kl[name]).mean() / 3
    twice = make_runner(tiny_model, name, seed=1).run(ids[[0, 0, 0]])
    assert not np.array_equal(twice.kl[name][0], twice.kl[name][1])


def test_plans_that_this_backend_or_a_model_cannot_run_are_refused(tiny_model, token_ids):
    with pytest.raises(UsageError, match=r"spec=2.*certify"):
        make_runner(tiny_model, "fp32@4+spec=2").run(token_ids[:1])
    with pytest.raises(InputError, match=r"TF32 needs tensor cores"):
        make_runner(tiny_model, "fp32@4+state_output+dot=tf32").run(token_ids[:1])


def test_all_logits_were_compared(result):
    assert result.n_logits == SEQUENCES * STEPS * VOCAB


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations_keep_the_promises(make_model, token_ids, dtype):
    narrow = make_runner(make_model().to(dtype), *EXACT, "nvfp4@16").run(token_ids[:SEQUENCES, :36])
    assert narrow.again is None
    assert [narrow.different_logits[name] for name in EXACT] == [0, 0]
    assert narrow.different_logits["nvfp4@16"] > 0.5 * narrow.n_logits
    assert narrow.state[EXACT[1]][0].mean["checkpoint_error"] == 0.0


@pytest.mark.parametrize("name", [n for n in NAMES if n not in EXACT])
def test_every_other_plan_is_seen_to_differ(result, name):
    assert result.different_logits[name] > 0.5 * result.n_logits


def test_another_order_of_additions_is_tiny_and_formats_are_not(result):
    assert 0 < result.noise_kl.mean() < 1e-10
    assert 0 < result.kl["fp32@16"].mean() < 1e-10
    for name in ("fp8@1", "nvfp4@16", "nvfp4/fp32@16"):
        assert result.kl[name].mean() > 1e-5


def test_no_plan_had_a_nonfinite_element(result):
    assert not any(c.nonfinite_states for c in result.counters.values())


# state errors


@pytest.mark.parametrize("name", ["fp32@1", "fp32@16", "fp32@16+exact_readout", "fp32@7", "nvfp4/fp32@16"])
def test_exact_fold_of_an_fp32_recurrence_has_no_checkpoint_error(result, name):
    for layer in result.state[name]:
        assert layer.mean["checkpoint_error"] == layer.greatest["checkpoint_error"] == 0.0


@pytest.mark.parametrize("name", ["fp8@1", "nvfp4@16", "nvfp4/fp8@5+track=8", "nvfp4/fp32@16+cached"])
def test_every_other_recurrence_has_one(result, name):
    for layer in result.state[name]:
        assert 1e-4 < layer.mean["checkpoint_error"] <= layer.greatest["checkpoint_error"] < 0.5


def test_the_first_layer_sees_the_baselines_inputs(result):
    assert result.state["nvfp4/fp32@16"][0].mean["trajectory_error"] == 0.0
    assert result.state["nvfp4/fp32@16"][1].mean["trajectory_error"] > 1e-4
    first = result.state["nvfp4@16"][0]
    assert first.mean["trajectory_error"] == first.mean["checkpoint_error"]


@pytest.mark.parametrize("name", NAMES)
def test_read_error_is_that_of_the_copy(result, name):
    for layer in result.state[name]:
        if name.startswith("nvfp4/"):
            assert 0.05 < layer.mean["read_error"] <= layer.greatest["read_error"] < 0.2  # E2M1: about 9 %
        else:
            assert layer.mean["read_error"] is layer.greatest["read_error"] is None


def test_output_error_is_zero_only_where_outputs_are(result):
    errors = {name: result.state[name][0].mean["output_error"] for name in NAMES}
    assert {name for name, e in errors.items() if e == 0} == set(EXACT)
    assert 0 < errors["fp32@16"] < 1e-5 < 1e-3 < errors["nvfp4/fp32@16"]


def test_layers_are_named_as_in_the_checkpoint(result):
    assert result.layer_indices == [0, 2]
    assert {name: len(layers) for name, layers in result.state.items()} == dict.fromkeys(NAMES, LAYERS)


def test_no_flush_gives_no_flush_error(tiny_model, token_ids):
    runner = make_runner(tiny_model, "nvfp4/fp32@16")
    (layer, _) = runner.run(token_ids[:SEQUENCES, :16]).state["nvfp4/fp32@16"]
    assert layer.mean["checkpoint_error"] is layer.mean["trajectory_error"] is layer.mean["read_error"] is None
    assert layer.mean["output_error"] > 0


# counters and window offsets


@pytest.mark.parametrize(
    ("name", "flushes", "reads", "requantizations"),
    [  # of one row and layer in 70 steps that follow one prefilled token
        ("fp32@1", 70, 0, 0),
        ("fp32@16", 4, 0, 0),  # steps 16 32 48 64
        ("fp32@7", 10, 0, 0),
        ("fp8@1", 70, 70, 70),
        ("nvfp4@16", 4, 70, 4),
        ("nvfp4/fp32@16", 4, 66, 4),
        ("nvfp4/fp32@16+cached", 4, 66, 4),
        ("nvfp4/fp8@5+track=8", 17, 70, 17),  # steps 5 7, then 12 15, 20 23, 28 31, 36 39, 44 47, 52 55, 60 63, 68
    ],
)
def test_counters_equal_a_hand_count(result, name, flushes, reads, requantizations):
    each = SEQUENCES * LAYERS
    assert result.counters[name] == Counters(
        low_precision_reads=each * reads, flushes=each * flushes, requantizations=each * requantizations
    )


@pytest.mark.parametrize("name", ["fp32@1", "fp32@7", "fp32@16", "nvfp4@16", "nvfp4/fp32@16"])
def test_window_offsets_cycle(result, name):
    length = PrecisionPlan.parse(name).options.length
    assert (result.window_offset[name] == np.arange(STEPS) % length).all()


def test_window_offsets_follow_forced_flushes(result):
    expected = [0, 1, 2, 3, 4, 0, 1] + [0, 1, 2, 3, 4, 0, 1, 2] * 8
    assert (result.window_offset["nvfp4/fp8@5+track=8"] == expected[:STEPS]).all()


@pytest.mark.parametrize("prefill", [0, 1, 6, 8, 13])
@pytest.mark.parametrize("text", ["baseline", "fp32@1", "fp32@5", "fp32@5+track=8", "fp32@16+track=3"])
def test_the_host_clock_ticks_as_the_pool_does(text, prefill):
    options, slots = PrecisionPlan.parse(text).options, torch.zeros(1, dtype=torch.int32)
    pool = StatePool(HeadShape(key_heads=1, value_heads=1, d_k=16, d_v=16), options, n_slots=1)
    pool.start(slots, tokens=prefill)
    clock = _Clock(options)
    clock.tokens = prefill
    for _ in range(40):
        assert clock.tick() == bool(pool.flush[0])
        pool.advance(slots)


# figures


def test_figures_are_those_of_the_logits(result, token_ids):
    following = token_ids[0, 2:]
    base = log_softmax(result.first_logits[BASELINE_NAME])
    picked = np.arange(STEPS - 1), following
    np.testing.assert_allclose(result.nll[BASELINE_NAME][0, :-1], -base[:-1][picked], rtol=1e-12)
    for name in NAMES:
        own = log_softmax(result.first_logits[name])
        kl = (np.exp(base) * (base - own)).sum(axis=-1)
        np.testing.assert_allclose(result.kl[name][0], kl, rtol=1e-9, atol=1e-14)
        np.testing.assert_allclose(result.nll[name][0, :-1], -own[:-1][picked], rtol=1e-12)
        np.testing.assert_allclose(
            result.delta_p[name][0, :-1], (np.exp(own) - np.exp(base))[:-1][picked], rtol=1e-9, atol=1e-14
        )
        assert (result.same_top[name][0] == (own.argmax(-1) == base.argmax(-1))).all()


def test_positions_are_those_of_the_tokens_that_were_fed(result):
    assert (result.positions == np.arange(1, STEPS + 1)).all()


def test_the_last_step_has_no_next_token(result):
    for name in (BASELINE_NAME, *NAMES):
        assert np.isnan(result.nll[name][:, -1]).all()
        assert np.isfinite(result.nll[name][:, :-1]).all()


def test_probes_return_their_logits_in_the_callers_order(result, tiny_model, token_ids):
    names = ("fp8@1", "nvfp4/fp32@16")
    turned = make_runner(tiny_model, *names).run(token_ids[[2, 1, 0]], keep_logits=STEPS).first_logits
    for name in (BASELINE_NAME, *names):
        probes, first = result.probes[name], result.first_logits[name]
        assert probes.shape == (4, 3)
        assert (probes[0] == turned[name][69, [3, 9, 5]]).all()
        assert probes[1, 0] == first[0, 7]
        assert np.isnan(probes[1, 1:]).all()
        assert probes[2, 0] == probes[2, 1]
        assert (probes[3] == first[69, [90, 80, 70]]).all()


def test_a_probe_may_be_asked_twice(tiny_model, token_ids):
    probes = [PROBES[1], PROBES[3], PROBES[1]]
    answers = make_runner(tiny_model, "fp32@7").run(token_ids[:2], probes=probes).probes["fp32@7"]
    assert answers[0, 0] == answers[2, 0] != answers[1, 0]
    assert np.isfinite(answers[1]).all()


@pytest.mark.parametrize(("sequence", "position"), [(3, 5), (-1, 5), (0, 0), (0, 71)])
def test_a_probe_outside_the_decoded_steps_is_refused(tiny_model, token_ids, sequence, position):
    probe = Probe(sequence=sequence, position=position, token_ids=(1,))
    with pytest.raises(ValueError, match=r"probes: expected sequences 0 to 2 and positions 1 to 70"):
        make_runner(tiny_model, "fp32@7").run(token_ids[:3], probes=[probe])


def test_only_the_true_vocabulary_is_compared(tiny_model, token_ids):
    tokens = token_ids[:SEQUENCES, :12] % 50
    whole, cut = (
        make_runner(tiny_model, "nvfp4@16", vocab_size=size).run(tokens, keep_logits=2) for size in (None, 50)
    )
    assert (whole.n_logits, cut.n_logits) == (SEQUENCES * 11 * VOCAB, SEQUENCES * 11 * 50)
    assert (cut.first_logits["nvfp4@16"] == whole.first_logits["nvfp4@16"][:, :50]).all()
    base, own = (log_softmax(cut.first_logits[n]) for n in (BASELINE_NAME, "nvfp4@16"))
    np.testing.assert_allclose(cut.kl["nvfp4@16"][0, :2], (np.exp(base) * (base - own)).sum(-1), 1e-9, 1e-14)


def test_recorded_inputs_are_the_baselines_first_sequence(result, tiny_model, token_ids):
    other = make_runner(tiny_model, "fp8@1").run(token_ids[:SEQUENCES, :8], record_steps=6).recorded
    assert result.recorded.shape == HeadShape(key_heads=2, value_heads=4, d_k=16, d_v=16)
    assert torch.equal(result.recorded.initial, other.initial)
    assert result.recorded.initial.shape == (LAYERS, 4, 16, 16)
    for mine, theirs in zip(result.recorded.inputs, other.inputs, strict=True):
        assert len(mine) == 6
        for a, b in zip(mine, theirs, strict=True):
            assert list(a.streams) == ["q", "k", "v", "g", "beta"]
            assert all(torch.equal(x, b.streams[name]) for name, x in a.streams.items())
            assert [a.streams[name].shape for name in "qvg"] == [(1, 2, 16), (1, 4, 16), (1, 4)]
            assert a.streams["g"].dtype == a.streams["beta"].dtype == torch.float32


def test_nothing_is_recorded_unless_asked_for(tiny_model, token_ids):
    short = make_runner(tiny_model, "fp32@7").run(token_ids[:1, :4])
    assert short.recorded is None
    assert short.first_logits == {}


# independence


def test_a_plan_does_not_depend_on_the_others(result, tiny_model, token_ids):
    alone = make_runner(tiny_model, "nvfp4/fp8@5+track=8").run(token_ids[:SEQUENCES])
    assert differing_figures(alone, result, "nvfp4/fp8@5+track=8") == []
    assert alone.noise_kl.tobytes() == result.noise_kl.tobytes()


def test_a_run_without_plans_still_measures_the_noise(result, tiny_model, token_ids):
    bare = make_runner(tiny_model).run(token_ids[:SEQUENCES])
    assert bare.kl == {}
    assert bare.again is None
    assert bare.noise_kl.tobytes() == result.noise_kl.tobytes()


def test_batches_are_runs_of_their_own_and_padding_enters_nothing(tiny_model, token_ids):
    names = ("nvfp4@8", "nvfp4/fp32@8")
    runner, seen = make_runner(tiny_model, *names, batch=2), []
    probes = [Probe(sequence=s, position=3 * s + 3, token_ids=tuple(range(3, 5 + s % 3))) for s in (4, 0, 3)]
    whole = runner.run(token_ids[:, :21], probes=probes, keep_logits=3, progress=seen.append)
    parts = [runner.run(token_ids[rows, :21], keep_logits=20) for rows in ([0, 1], [2, 3], [4, 0])]
    assert sum(seen) == 3 * 20
    assert whole.n_logits == 5 * 20 * VOCAB
    used = (2, 2, 1)
    for name in names:
        for figure in ("kl", "same_top", "delta_p", "nll", "window_offset"):
            joined = np.concatenate([getattr(p, figure)[name][:n] for p, n in zip(parts, used, strict=True)])
            assert getattr(whole, figure)[name].tobytes() == joined.tobytes()
        assert whole.counters[name].flushes == 5 * LAYERS * 2
        assert whole.state[name] == parts[0].state[name]
        assert (whole.first_logits[name] == parts[0].first_logits[name][:3]).all()
        last = parts[2].first_logits
        different = (last[name].view(np.int32) != last[BASELINE_NAME].view(np.int32)).sum()
        assert whole.different_logits[name] == sum(p.different_logits[name] for p in parts[:2]) + different
        assert whole.probes[name].shape == (3, 3)
        assert (whole.probes[name][0, :3] == last[name][14, 3:6]).all()
        assert (whole.probes[name][1, :2] == parts[0].first_logits[name][2, 3:5]).all()
    noise = np.concatenate([p.noise_kl[:n] for p, n in zip(parts, used, strict=True)])
    assert whole.noise_kl.tobytes() == noise.tobytes()


def test_batches_without_probes_may_stand_beside_others(tiny_model, token_ids):
    probe = Probe(sequence=2, position=3, token_ids=(4, 5))
    answers = make_runner(tiny_model, "fp32@7", batch=2).run(token_ids[:, :6], probes=[probe]).probes
    assert np.isfinite(answers["fp32@7"]).all()
    assert answers["fp32@7"].shape == (1, 2)


def test_a_poisoned_plan_fails_alone(result, tiny_model, token_ids, monkeypatch):
    def poison(blocks):
        pool = blocks["fp32@7"].pool
        state = pool.checkpoint.read(1, torch.tensor([1]))
        pool.checkpoint.write(1, torch.tensor([1]), torch.full_like(state, torch.nan), nonfinite="saturate")

    after_prefill(monkeypatch, poison)
    poisoned = make_runner(tiny_model, *NAMES).run(token_ids[:SEQUENCES])
    assert np.isnan(poisoned.kl["fp32@7"][1]).all()
    assert poisoned.kl["fp32@7"][[0, 2]].tobytes() == result.kl["fp32@7"][[0, 2]].tobytes()
    assert not poisoned.same_top["fp32@7"][1].any()
    assert {name for name, c in poisoned.counters.items() if c.nonfinite_states} == {"fp32@7"}
    assert {name: differing_figures(poisoned, result, name) for name in NAMES if name != "fp32@7"} == {
        name: [] for name in NAMES if name != "fp32@7"
    }
    assert poisoned.again is None
    assert poisoned.noise_kl.tobytes() == result.noise_kl.tobytes()


# the A/A block


@pytest.mark.parametrize(("layer", "index"), [(0, 0), (1, 2)])
def test_a_baseline_that_differs_from_itself_names_step_and_layer(tiny_model, token_ids, monkeypatch, layer, index):
    def disturb(blocks):
        pool, slots = blocks[AGAIN].pool, torch.tensor([1])
        pool.write(layer, slots, pool.checkpoint.read(layer, slots) * (1 + 2**-20))

    after_prefill(monkeypatch, disturb)
    broken = make_runner(tiny_model, "fp32@7", prefill=3).run(token_ids[:SEQUENCES, :8])
    assert broken.again == Mismatch(step=3, layer=index)


def test_a_later_difference_names_its_step(tiny_model, token_ids, monkeypatch):
    original, calls = WrappedModel.step, []

    def step(self: WrappedModel, ids: torch.Tensor) -> torch.Tensor:
        calls.append(ids)
        if len(calls) == 5:
            pool, slots = self.blocks[1].pool, torch.tensor([2])
            pool.write(1, slots, -pool.checkpoint.read(1, slots))
        return original(self, ids)

    monkeypatch.setattr(WrappedModel, "step", step)
    broken = make_runner(tiny_model, "fp32@7").run(token_ids[:SEQUENCES, :12])
    assert broken.again == Mismatch(step=5, layer=2)


def test_a_difference_of_logits_alone_names_no_layer(tiny_model, token_ids, monkeypatch):
    original = WrappedModel.step

    def step(self: WrappedModel, ids: torch.Tensor) -> torch.Tensor:
        logits = original(self, ids).clone()
        logits[1, 0, 7] = torch.nextafter(logits[1, 0, 7], torch.tensor(torch.inf))
        return logits

    monkeypatch.setattr(WrappedModel, "step", step)
    broken = make_runner(tiny_model, "fp32@7").run(token_ids[:SEQUENCES, :4])
    assert broken.again == Mismatch(step=1, layer=None)


def test_a_difference_in_a_later_batch_is_seen(tiny_model, token_ids, monkeypatch):
    seen = []

    def disturb(blocks):
        seen.append(blocks)
        if len(seen) == 2:
            pool, slots = blocks[AGAIN].pool, torch.tensor([0])
            pool.write(0, slots, -pool.checkpoint.read(0, slots))

    after_prefill(monkeypatch, disturb)
    broken = make_runner(tiny_model, "fp32@7", batch=2, prefill=2).run(token_ids[:4, :8])
    assert broken.again == Mismatch(step=2, layer=0)


# sizes


def test_a_longer_prefill_moves_the_first_step(result, tiny_model, token_ids):
    later = make_runner(tiny_model, "nvfp4/fp8@5+track=8", "fp32@1", prefill=13).run(token_ids[:SEQUENCES, :41])
    assert (later.positions == np.arange(13, 41)).all()
    assert later.different_logits["fp32@1"] == 0
    assert (later.window_offset["nvfp4/fp8@5+track=8"][:, :11] == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2]).all()
    before = result.nll[BASELINE_NAME][:, 12:39]  # chunked prefill adds in another order: 2e-5 in the logits
    np.testing.assert_allclose(later.nll[BASELINE_NAME][:, :-1], before, atol=2e-4)


@pytest.mark.parametrize(("shape", "prefill"), [((3, 1), 1), ((3, 4), 4), ((3, 4), 9), ((0, 8), 1)])
def test_no_step_is_an_empty_run(tiny_model, shape, prefill):
    with pytest.raises(EmptyRunError, match="no steps") as caught:
        make_runner(tiny_model, "fp32@7", prefill=prefill).run(np.full(shape, 5))
    assert caught.value.exit_code == 5


def test_at_least_one_token_is_prefilled(tiny_model):
    with pytest.raises(ValueError, match="prefill: expected at least 1 token, got 0"):
        make_runner(tiny_model, "fp32@7", prefill=0)


def test_a_decode_that_never_calls_a_kernel_is_noticed(tiny_model, token_ids, monkeypatch):
    def bypass(self: WrappedModel, layer: int, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]):
        return torch.zeros_like(args[2]), kwargs["initial_state"]

    monkeypatch.setattr(WrappedModel, "_decode", bypass)
    with pytest.raises(RuntimeError, match="no decode step went through driftgate's kernels"):
        make_runner(tiny_model, "fp32@7").run(token_ids[:1, :4])


def test_a_decode_by_transformers_itself_is_stopped(tiny_model, token_ids, monkeypatch):
    monkeypatch.setattr(DecodeHook, "__enter__", lambda self: self)
    monkeypatch.setattr(DecodeHook, "__exit__", lambda self, *_: None)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        make_runner(tiny_model, "fp32@7").run(token_ids[:1, :4])
