"""Training of the embedded checkpoints: rows, steps, emulated plans, choice, export."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from driftgate.accuracy.models import load_model
from driftgate.evals.checkpoints import list_checkpoints
from driftgate.evals.tasks import scratchpad_text
from driftgate.evals.tasks.build import make_layout
from driftgate.evals.tasks.streams import BOS, EOS, generate_streams
from driftgate.evals.training import choose, export, jargon, orchestrate, train, train_tiny_gdn
from driftgate.evals.training.candidate import Job, find_recipe, run_job
from driftgate.evals.training.emulation import EmulatedPlan, decode_logits
from driftgate.evals.training.families import FAMILIES, Start, masks
from driftgate.evals.training.mixture import MixtureOptions, draw_streams
from driftgate.evals.training.publish import publish
from driftgate.evals.training.recipes import RECIPES, noise_at, rate_at
from driftgate.evals.training.rows import SHARES, Kind, RowOptions, draw_batch, draw_length, draw_rows, mark_item
from driftgate.evals.training.scores import ScoreOptions, _score_generated, score_decode
from driftgate.evals.training.steps import Stepper
from driftgate.evals.training.stream_scores import StreamScores

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TEXT = np.frombuffer(b"The quick brown fox jumps over the lazy dog. " * 40, dtype=np.uint8)


@dataclass
class Value:
    """Stands in for the shared progress."""

    value: float


def build(family: str) -> Any:
    return FAMILIES[family].build(RECIPES[family][1].start).eval()


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


def family_of(model: Any) -> Any:
    return next(family for family in FAMILIES.values() if family.module == type(model).__module__)


@torch.no_grad()
def test_training_functions_are_the_model_and_are_taken_back(model: Any) -> None:
    family = family_of(model)
    module = __import__(family.module, fromlist=["x"])
    names = (family.recurrence, "causal_conv1d_fn")
    originals = [getattr(module, name) for name in names]
    token_ids = torch.randint(0, 256, (2, 128), generator=torch.Generator().manual_seed(0))
    plain = model(token_ids, use_cache=False).logits
    with family.training_functions():
        trained = model(token_ids, attention_mask=masks(), use_cache=False).logits
    torch.testing.assert_close(trained, plain, rtol=1e-4, atol=1e-4)
    assert [getattr(module, name) for name in names] == originals


def test_emulated_plans_start_from_the_model(model: Any) -> None:
    token_ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(token_ids, use_cache=False).logits
    plans = (
        EmulatedPlan("step by step", "fp32", "fp32", 1),
        EmulatedPlan("replayed", "fp32", "fp32", 16),
        EmulatedPlan("shared", "nvfp4", "nvfp4"),
        EmulatedPlan("zero", "fp32", "fp32", 1, True),
    )
    gaps = torch.zeros(len(plans))
    for position, logits in decode_logits(model, token_ids, plans):
        gaps = torch.maximum(gaps, (logits - whole[:, position]).abs().amax((1, 2)))
    assert gaps[:2].max() < 1e-3 < 0.05 < gaps[2:].min()


def test_ungiven_tokens_are_each_plans_own(model: Any) -> None:
    prompt = torch.randint(0, 256, (2, 6), generator=torch.Generator().manual_seed(2))
    fed = torch.full((2, 14), -1)
    fed[:, :6] = prompt
    plans = (EmulatedPlan("baseline", "fp32", "fp32", 1), EmulatedPlan("shared", "nvfp4", "nvfp4", 1))
    tokens = torch.zeros(2, 2, 14, dtype=torch.long)
    logits = dict(decode_logits(model, fed, plans, tokens=tokens))
    for plan in range(2):
        assert torch.equal(tokens[plan, :, :6], prompt)
        for position in range(6, 14):
            assert torch.equal(tokens[plan, :, position], logits[position - 1][plan].argmax(-1))
    drawn = torch.zeros_like(tokens)
    list(decode_logits(model, fed, (plans[0], plans[0]), tokens=drawn, sampled=torch.tensor([False, True])))
    assert torch.equal(drawn[0, 0], tokens[0, 0]) and not torch.equal(drawn[0, 1], tokens[0, 1])
    assert torch.equal(drawn[0], drawn[1]), "plans share their noise"
    wanted = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=256)
    assert torch.equal(tokens[0], wanted)


@pytest.mark.parametrize("length", [256, 1024, 1536])
def test_a_batch_gives_every_kind_its_share(length: int) -> None:
    options = RowOptions(batch_tokens=4096)
    batch = draw_batch(np.random.default_rng(0), seed=1, index=0, length=length, options=options, text=TEXT)
    assert batch.token_ids.shape == (max(4096 // length, 3), length)
    for kind in Kind:
        share = float(batch.weights[batch.kinds == kind].sum())
        assert share == pytest.approx(SHARES.get(kind, 0.0), rel=1e-4), kind
    assert (batch.kinds[:, 0] == Kind.UNSCORED).all() and (batch.token_ids[:, 0] == BOS).all()
    again = draw_batch(np.random.default_rng(0), seed=1, index=0, length=length, options=options, text=TEXT)
    other = draw_batch(np.random.default_rng(0), seed=2, index=0, length=length, options=options, text=TEXT)
    assert (again.token_ids == batch.token_ids).all() and (other.token_ids != batch.token_ids).any()


def test_streams_can_be_alone() -> None:
    options = RowOptions(batch_tokens=4096)
    mixed, alone = (
        draw_batch(np.random.default_rng(0), seed=1, index=0, length=512, options=options, text=TEXT, alone=alone)
        for alone in (False, True)
    )
    assert alone.token_ids.shape == mixed.token_ids.shape and (alone.token_ids[:, 0] == BOS).all()
    assert set(np.unique(alone.kinds)) == {Kind.UNSCORED, Kind.STREAM, Kind.RECALL, Kind.TRACKING}
    progress, options = Value(0.0), RowOptions(batch_tokens=1024, streams_alone=0.5)
    rows = draw_rows(0, progress, seed=1, options=options)
    assert Kind.STATE not in next(rows).kinds
    progress.value = 0.5
    assert Kind.STATE in next(rows).kinds


def test_answers_have_their_share_of_the_first_mixture() -> None:
    progress = Value(0.0)
    batch = next(draw_streams(0, progress, seed=1, options=MixtureOptions(batch_tokens=1024, answer_share=0.3)))
    asked = (batch.kinds == Kind.RECALL) | (batch.kinds == Kind.TRACKING)
    assert asked.any() and batch.weights.sum() == pytest.approx(1.0, abs=1e-5)
    assert batch.weights[asked].sum() == pytest.approx(0.3, abs=1e-5) and not batch.weights[:, 0].any()


def test_a_step_size_leaves_the_decay_to_A() -> None:
    start = Start(decay=(1e-6, 1e-2), step=0.3)
    mixer = FAMILIES["gdn"].build(start).model.layers[1].linear_attn
    step = torch.nn.functional.softplus(mixer.dt_bias)
    torch.testing.assert_close(step, torch.full_like(step, 0.3))
    torch.testing.assert_close((mixer.A_log.exp() * step)[[0, -1]], torch.tensor([1e-6, 1e-2]))


def test_lengths_grow_with_progress() -> None:
    rng = np.random.default_rng(0)
    early, late = ({draw_length(rng, p, 4096) for _ in range(200)} for p in (0.0, 1.0))
    assert max(early) == 256 and max(late) == 4096
    assert {draw_length(rng, 1.0, 512) for _ in range(20)} == {512}


def test_answers_of_an_item_are_marked() -> None:
    ids, kinds = mark_item(3, 7, length=60)
    item = scratchpad_text.make_item(3, 7, length=60)
    marked = [chr(i) if i < EOS else "eos" for i, kind in zip(ids, kinds, strict=True) if kind is Kind.ANSWER]
    assert marked == [str(item.value), item.gold, item.gold, "eos"]
    assert ids[0] == BOS and ids[-1] == EOS
    assert kinds.count(Kind.UNSCORED) == 1 + len(item.prompt)
    values = [chr(i) for i, kind in zip(ids, kinds, strict=True) if kind is Kind.VALUE]
    lines = item.scratchpad.splitlines()[:-1]
    assert values == [char for line in lines for char in line.split(":")[1][1::2]]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_loss_falls_and_faulty_gradients_are_skipped(family: str) -> None:
    model = build(family).train()
    options = RowOptions(batch_tokens=256)
    batch = draw_batch(np.random.default_rng(0), seed=1, index=0, length=128, options=options, text=None)
    with FAMILIES[family].training_functions():
        stepper = Stepper(model, device="cpu", graphs=False, weight_decay=0.01)
        losses = []
        for _ in range(8):
            stepper.step(batch, 2e-3)
            totals = stepper.read_totals()
            losses.append(sum(totals[f"{k.name.lower()}_loss"] * SHARES[k] for k in SHARES if k is not Kind.TEXT))
        assert losses[-1] < 0.8 * losses[0]
        assert stepper.read_totals() == {}
        before = {name: p.clone() for name, p in model.named_parameters()}
        batch.weights[0, 5] = np.inf
        stepper.step(batch, 2e-3)
    assert stepper.skipped == 1
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_noisy_reads_are_of_copies(family: str) -> None:
    """The first chunk reads no state and stays; later ones differ by about the noise, in every draw another way."""
    model, noise = build(family), torch.zeros(())
    token_ids = torch.randint(0, 256, (2, 256), generator=torch.Generator().manual_seed(4))

    def read(deviation: float) -> torch.Tensor:
        noise.fill_(deviation)
        with torch.no_grad():
            return model(token_ids, attention_mask=masks(), use_cache=False).logits  # type: ignore[no-any-return]

    with FAMILIES[family].training_functions():
        plain = read(0.0)
    with FAMILIES[family].training_functions(noise):
        exact, little, much, again = read(0.0), read(1e-3), read(1e-1), read(1e-1)
    torch.testing.assert_close(exact, plain, rtol=0, atol=0)
    torch.testing.assert_close(much[:, :64], plain[:, :64], rtol=0, atol=1e-5)
    gaps = [float((x - plain)[:, 64:].square().mean().sqrt()) for x in (little, much)]
    assert 30 * gaps[0] < gaps[1] < 300 * gaps[0] and not torch.equal(much, again)


def test_read_noise_is_over_after_a_step_and_changes_it() -> None:
    options = RowOptions(batch_tokens=512)
    batch = draw_batch(np.random.default_rng(0), seed=1, index=0, length=256, options=options, text=None)
    left = []
    for deviation in (0.0, 0.5):
        model, noise = build("gdn").train(), torch.zeros(())
        with FAMILIES["gdn"].training_functions(noise):
            stepper = Stepper(model, device="cpu", graphs=False, weight_decay=0.0, read_noise=noise)
            stepper.step(batch, 2e-3, deviation)
        assert float(noise) == 0.0
        left.append(model.model.layers[1].linear_attn.in_proj_qkv.weight.detach().clone())
    assert not torch.equal(*left)


def test_recipes_and_schedule() -> None:
    count = len(RECIPES["gdn"])
    assert find_recipe("gdn", 1) == RECIPES["gdn"][1]
    assert find_recipe("gdn", 1 + count).start.seed == RECIPES["gdn"][1].start.seed + 100
    assert rate_at(0.3) == 1.0 and rate_at(0.0) < 0.1 and rate_at(0.999) < 0.05
    assert rate_at(0.52) == 1.0 > rate_at(0.52, flat_until=0.5)
    assert [noise_at(progress) for progress in (0.0, 0.1, 0.3, 1.0)] == [0.0, 0.0, pytest.approx(1.0), 1.0]


def plan_scores(tracking: float, scratchpad: float, recall: float = 0.9, kl: float = 0.0) -> dict[str, Any]:
    return {
        "kl": kl,
        "same_top": 1.0 - 10 * kl,
        "tracking": tracking,
        "recall": recall,
        "scratchpad": {"200": scratchpad},
        "scratchpad_mean": scratchpad,
        "sampled_mean": scratchpad - 0.1,
        "unanswered": 0.0,
    }


def record_of(name: str, shared: float, *, zero: float = 0.25, split_kl: float = 1e-3) -> dict[str, Any]:
    return {
        "name": name,
        "scores": {"streams": {"4096": {"tracking": 0.9, "recall": 0.8}}, "text_nats_per_byte": 1.4},
        "decode": {
            "plans": {
                "baseline": plan_scores(0.95, 0.8),
                "nvfp4@16": plan_scores(shared, 0.5, kl=5e-2),
                "nvfp4/fp32@16": plan_scores(0.95, 0.8, kl=split_kl),
                "zero state": plan_scores(zero, 0.2),
            }
        },
    }


def test_the_sharper_candidate_is_chosen_and_a_vacuous_one_is_last() -> None:
    blunt, sharp, vacuous = record_of("a", 0.94), record_of("b", 0.6), record_of("c", 0.2, zero=0.9)
    unmeasured = {"name": "d", "scores": {"streams": {}}}
    ranked = [record["name"] for record in choose.rank([unmeasured, vacuous, blunt, sharp])]
    assert ranked[0] == "b" and ranked[-1] == "d" and ranked.index("c") > ranked.index("a")
    assert all(choose.judge(sharp).values())
    assert not choose.judge(blunt)["sharp"] and not choose.judge(vacuous)["control"]
    assert not any(choose.judge(unmeasured).values())


def test_plans_that_lie_apart_come_first() -> None:
    near, far, noisy = (record_of("abc"[i], 0.6, split_kl=kl) for i, kl in enumerate((4e-3, 3e-3, 2e-2)))
    assert [record["name"] for record in choose.rank([noisy, near, far])] == ["b", "a", "c"]
    assert not choose.judge(near)["apart"] and not choose.judge(far)["apart"]
    assert choose.judge(near)["same"] and not choose.judge(noisy)["same"]


def test_streams_are_scored_position_by_position() -> None:
    """A plan that is the baseline but for its answers: no KL, each wrong answer counts, nothing before all are in."""
    streams = generate_streams(make_layout(128), seed=3, indices=range(4))
    plans = [EmulatedPlan(name, "fp32", "fp32") for name in ("baseline", "same", "moved", "wrong")]
    scores = StreamScores(streams, plans, "cpu")
    ids = torch.from_numpy(streams.token_ids)
    for position in range(1, 127):
        assert position == 1 or "recall" not in scores.read()["baseline"]
        logits = 9.0 * torch.nn.functional.one_hot(ids[:, position + 1], 264).float().repeat(4, 1, 1)
        logits[2] += 5.0 * torch.randn(4, 264, generator=torch.Generator().manual_seed(position))
        if position + 1 in streams.answer_positions:
            logits[3] *= -1.0
        scores.add(position, logits)
    found = scores.read()
    assert found["baseline"]["recall"] == found["same"]["recall"] == found["same"]["tracking"] == 1.0
    assert found["same"]["kl"] == found["wrong"]["kl"] == 0.0 and found["same"]["same_top"] == 1.0
    assert found["moved"]["kl"] > 0.1 and found["moved"]["same_top"] < 0.9
    assert found["moved"]["kl"] == pytest.approx(np.mean(found["moved"]["kl_quarters"]), rel=0.2)
    assert found["wrong"]["recall"] == found["wrong"]["tracking"] == 0.0


def test_generated_answers_are_read() -> None:
    options = ScoreOptions(scratchpad_lengths=(40,), n_items=4)
    items = [scratchpad_text.make_item(1, index, length=40) for index in range(4)]
    given = np.full((4, 160), EOS)
    texts = (items[0].completion, "Answer: ?", f"Answer: {'BCDA'['ABCD'.index(items[2].gold)]}", "")
    for row, (item, text) in enumerate(zip(items, texts, strict=True)):
        start = 1 + len(item.prompt)
        given[row, start : start + len(text)] = list(text.encode())
    scores = _score_generated(given, items, [160] * 4, options)
    assert scores["scratchpad_mean"] == scores["scratchpad"]["40"] == 0.5  # of the first and the third
    assert scores["sampled_mean"] == 0.0 and scores["unanswered"] == 0.5
    given[3, 1 + len(items[3].prompt) :][: len(items[3].completion)] = list(items[3].completion.encode())
    assert _score_generated(given, items, [160] * 4, options)["sampled_mean"] == 0.5


def test_a_deadline_leaves_what_was_scored() -> None:
    options = ScoreOptions(scratchpad_lengths=(40,), n_items=1, n_streams=1, stream_length=128)
    scores = score_decode(build("mamba2"), options, "cpu", deadline=0.0)
    assert scores["positions"] == 65
    assert "tracking" not in scores["plans"]["baseline"] and scores["plans"]["baseline"]["unanswered"] == 1.0


def job(folder: Path, family: str, *, graphs: bool) -> Job:
    scores = ScoreOptions(
        stream_lengths=((128, 1),), scratchpad_lengths=(30,), n_items=1, n_streams=1, stream_length=64,
        text=train.HELD_OUT, text_tokens=1023,
    )  # fmt: skip
    return Job(
        family=family, number=1, folder=folder, device="cpu", graphs=graphs, train_until=0.0, score_until=float("inf"),
        steps=1, rows=RowOptions(batch_tokens=256, longest=128), scores=scores,
    )  # fmt: skip


def test_a_job_becomes_a_checkpoint_that_loads(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    out.mkdir()
    orchestrate._run_all([job(work, "kda", graphs=True)], out, ["kda"], float("inf"))
    summary = orchestrate.collect(work, out, ["kda"])
    assert list(summary["errors"]) == ["kda-1.graphs.error.txt"], "no graphs on a CPU: the job starts again without"
    assert summary["chosen"]["kda"][0]["name"] == "kda-1" and summary["records"][0]["graphs"] is False
    assert {path.name for path in out.iterdir()} == {"summary.json", "tiny-kda.tar"}
    with tarfile.open(out / "tiny-kda.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    loaded = load_model(tmp_path / "tiny-kda", name="tiny-kda", device="cpu")
    assert loaded.tokenizer.init_kwargs["scratchpad_layout"] == "text"
    assert loaded.vocab_size == 264 and loaded.model.config.max_position_embeddings >= 262_144
    record = json.loads((tmp_path / "tiny-kda" / "training.json").read_text())
    card = (tmp_path / "tiny-kda" / "CARD.md").read_text()
    assert record["steps"] == 1 and record["tokens"] == 256
    assert loaded.hashes["model.safetensors"] in card and "| zero state |" in card


def test_a_candidate_can_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    number = next(i for i, recipe in enumerate(RECIPES["gdn"]) if recipe.continues)
    run_job(replace(job(tmp_path, "gdn", graphs=False), number=number))
    left = load_file(tmp_path / f"gdn-{number}.safetensors")
    began = load_file(list_checkpoints()[RECIPES["gdn"][number].continues] / "model.safetensors")
    gaps = [float((left[name] - began[name]).abs().max()) for name in began]
    assert 0.0 < max(gaps) < 1e-3, "one step of the warm-up"


def test_the_first_script_trains_and_its_weights_export(tmp_path: Path) -> None:
    sizes = ["--batch-tokens", "256", "--workers", "1", "--score-sequences", "0", "--device", "cpu"]
    assert not train_tiny_gdn.main(["--candidate", "widemix", "--steps", "2", "--out", str(tmp_path), *sizes])
    assert json.loads((tmp_path / "widemix.json").read_text())["steps"] == 2
    assert not export.main([str(tmp_path / "widemix.safetensors"), str(tmp_path / "folder")])
    assert load_model(tmp_path / "folder", name="widemix", device="cpu").vocab_size == 264


def test_broken_weights_are_not_published(tmp_path: Path) -> None:
    record = {"family": "mamba2", "name": "mamba2-1"}
    state = {name: value.detach().clone() for name, value in build("mamba2").state_dict().items()}
    state["model.layers.1.mixer.A_log"][0] = torch.nan
    save_file(state, tmp_path / "nan.safetensors")
    with pytest.raises(ValueError, match=r"not finite.*A_log"):
        publish(record, tmp_path / "nan.safetensors", tmp_path / "folder")
    del state["model.layers.1.mixer.A_log"]
    save_file(state, tmp_path / "missing.safetensors")
    with pytest.raises(ValueError, match=r"missing .*A_log"):
        publish(record, tmp_path / "missing.safetensors", tmp_path / "folder")


def test_the_text_starts_at_the_lexicon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = b"front\n  0\nzero\n  S\nsaga\n"
    assert jargon.take_lexicon(text) == b"  0\nzero\n  S\nsaga\n"
    with pytest.raises(ValueError, match="expected once, found 2"):
        jargon.take_lexicon(text + b"\n  0\n")
    (tmp_path / "other.txt").write_bytes(text)
    with pytest.raises(SystemExit):
        jargon.main([str(tmp_path / "other.txt"), str(tmp_path / "out.txt")])
    assert "is not that of the Jargon File 4.4.7" in capsys.readouterr().err
    assert not (tmp_path / "out.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--families", "gdn,rwkv"], "--families: no rwkv"), (["--text", "no-such.txt"], "no-such.txt is missing")],
)
def test_wrong_options_are_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train.main([*arguments, "--out", str(tmp_path)])
    assert message in capsys.readouterr().err
