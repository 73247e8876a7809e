"""``--reference-model``: what the weights of two checkpoints alone do, on the tokens of the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import make_tiny_model

from driftgate.accuracy.adapters import wrap
from driftgate.accuracy.models import LoadedModel
from driftgate.accuracy.records import load_run
from driftgate.accuracy.reference import compare_with_reference
from driftgate.cli import app
from driftgate.errors import DriftgateError, InputError
from driftgate.kernels.contract import Backend
from driftgate.main_job import check, prepare
from driftgate.reports.tables import run_lines

SMALL = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}  # fmt: skip


def loaded(model: object, *, name: str = "tiny", vocab_size: int = 96) -> LoadedModel:
    return LoadedModel(
        name=name, folder=Path(), model=model, tokenizer=None, vocab_size=vocab_size, family="qwen3_5", hashes={}
    )


@pytest.fixture(scope="module")
def models() -> tuple[LoadedModel, LoadedModel]:
    """A model, and the same with its weights rounded to BF16."""
    return loaded(make_tiny_model()), loaded(make_tiny_model().to(torch.bfloat16).float(), name="rounded")


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 96, (3, 8))


def compare(first: LoadedModel, second: LoadedModel, tokens: np.ndarray, *, batch: int = 3, prefill: int = 1):
    return compare_with_reference(first, second, tokens, batch=batch, backend=Backend.TORCH, prefill=prefill)


def decode(model: LoadedModel, tokens: np.ndarray) -> torch.Tensor:
    """log p after every token but the first, [n, steps, vocab] float64."""
    ids = torch.from_numpy(tokens)
    with wrap(model.model, ["baseline"], n_sequences=len(ids), backend="torch") as wrapped:
        wrapped.prefill(ids[:, :1])
        logits = [wrapped.step(ids[:, i])[0] for i in range(1, ids.shape[1])]
    return torch.stack(logits, dim=1).double().log_softmax(-1)


def test_a_model_is_no_distance_from_itself(models, tokens):
    found = compare(loaded(make_tiny_model()), models[0], tokens)
    assert found.kl.shape == found.same_top.shape == (3, 7)
    assert (found.kl == 0).all() and found.same_top.all()
    assert found.positions.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_the_figures_are_those_of_the_reference_against_the_model(models, tokens):
    model, rounded = models
    found = compare(rounded, model, tokens)
    p, q = decode(rounded, tokens), decode(model, tokens)
    wanted = (p.exp() * (p - q)).sum(-1).numpy()
    backward = (q.exp() * (q - p)).sum(-1).numpy()
    np.testing.assert_allclose(found.kl, wanted, rtol=1e-6, atol=1e-12)
    assert np.abs(found.kl - backward).max() > 1e-3 * wanted.max()
    assert wanted.min() > 1e-7
    assert (found.same_top == (p.argmax(-1) == q.argmax(-1)).numpy()).all()


def test_batches_and_their_padding_change_nothing(models, tokens):
    whole = compare(models[1], models[0], tokens)
    halves = compare(models[1], models[0], tokens, batch=2)
    assert halves.kl.shape == whole.kl.shape
    np.testing.assert_allclose(halves.kl, whole.kl, rtol=1e-3, atol=1e-8)


def test_columns_that_pad_the_vocabulary_are_left_out(models, tokens):
    cut = compare(loaded(models[1].model, vocab_size=90), loaded(models[0].model, vocab_size=90), tokens % 90)
    p, q = (decode(m, tokens % 90)[..., :90].log_softmax(-1) for m in (models[1], models[0]))
    np.testing.assert_allclose(cut.kl, (p.exp() * (p - q)).sum(-1).numpy(), rtol=1e-6, atol=1e-12)


def test_the_record_leaves_out_what_lies_behind_the_stream(models, tokens):
    found = compare(models[1], models[0], tokens)
    record = found.record("rounded", stream_end=5)
    assert record.kl.n_steps == 3 * 4
    assert record.kl.mean == pytest.approx(found.kl[:, :4].mean())
    assert record.kl.ci_low < record.kl.mean < record.kl.ci_high
    assert (record.model, record.same_top_p.value) == ("rounded", found.same_top[:, :4].mean())


def test_another_vocabulary_is_an_error(models, tokens):
    with pytest.raises(ValueError, match="expected 96 tokens, got 95"):
        compare(loaded(models[0].model, vocab_size=95), models[0], tokens)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[object, Path]:
    """A run with a reference model, done, and its folder."""
    folder = tmp_path_factory.mktemp("run")
    model = make_tiny_model(**SMALL)
    model.save_pretrained(folder / "model")
    model.to(torch.bfloat16).float().save_pretrained(folder / "rounded")
    suite = {
        "model": str(folder / "model"), "plans": [{"plan": "fp32@2"}], "tasks": [], "stream": "generation",
        "sequences": 2, "steps": 12, "batch": 2,
    }  # fmt: skip
    (folder / "small.yaml").write_text(yaml.safe_dump(suite))
    prepared = prepare(str(folder / "small.yaml"), out=folder / "out", reference_model=str(folder / "rounded"))
    done = []
    prepared.execute(done.append)
    assert sum(done) == prepared.experiment.n_steps == 24
    return prepared, folder


def test_a_run_stores_the_distance_of_the_weights(run):
    prepared, folder = run
    stored = load_run(folder / "out")
    reference = stored.results.reference
    assert reference.model == str(folder / "rounded")
    assert reference.kl.n_steps == 24
    assert 1e-7 < reference.kl.mean < 1
    assert stored.results.plans["fp32@2"].kl.mean < 1e-9
    assert stored.manifest.suite["reference_model"] == str(folder / "rounded")
    hashes = stored.manifest.hashes
    assert hashes["reference/model.safetensors"] not in ("", hashes["model/model.safetensors"])
    assert prepared.experiment.reference.name == reference.model


def test_a_run_says_the_distance_of_the_weights_in_one_line(run):
    stored = load_run(run[1] / "out")
    lines = [line for line in run_lines(stored) if line.startswith("weights: ")]
    assert len(lines) == 1
    assert f"{stored.results.reference.kl.mean:.2e} [" in lines[0]
    stored.results.reference = None
    assert not any(line.startswith("weights: ") for line in run_lines(stored))


def test_a_run_without_a_reference_model_has_none(run):
    text = json.loads((run[1] / "out/results.json").read_text())
    text.pop("reference")
    from driftgate.accuracy.records import Results

    assert Results.model_validate(text).reference is None


def refused(folder: Path, other: object, **options: object) -> str:
    with pytest.raises(DriftgateError) as caught:
        check("quick", out=folder / "new", model=str(folder / "model"), tasks=[], reference_model=str(other), **options)
    message = str(caught.value)
    assert message.splitlines() == [message]
    return message


def test_a_reference_model_that_does_not_fit_is_named_before_anything_is_loaded(run, tmp_path, monkeypatch):
    from driftgate.accuracy import models as loading

    monkeypatch.setattr(loading, "load_model", None)
    _, folder = run
    assert "unknown model 'nowhere'" in refused(folder, "nowhere")
    assert f"model folder {tmp_path}/none does not exist" in refused(folder, tmp_path / "none")
    make_tiny_model(vocab_size=97, **SMALL).save_pretrained(tmp_path / "wide")
    message = refused(folder, tmp_path / "wide")
    assert message.startswith(f"reference model {tmp_path}/wide has 97 tokens, {folder}/model has 96; give two")
    shutil.copytree(tmp_path / "wide", tmp_path / "cut")
    (tmp_path / "cut/model.safetensors").unlink()
    assert "model.safetensors is missing" in refused(folder, tmp_path / "cut")


def test_a_reference_model_with_other_tokens_is_named(tmp_path):
    from driftgate.evals.checkpoints import find_checkpoint

    other = Path(shutil.copytree(find_checkpoint("tiny-gdn"), tmp_path / "other"))
    text = (other / "tokenizer.json").read_text()
    vocab = json.loads(text)
    words = vocab["model"]["vocab"]
    first, second = sorted(words)[:2]
    words[first], words[second] = words[second], words[first]
    (other / "tokenizer.json").write_text(json.dumps(vocab))
    with pytest.raises(InputError, match=r"has another id for the token .* give two checkpoints of one tokenizer"):
        check("quick", out=tmp_path / "out", reference_model=str(other))
    assert check("quick", out=tmp_path / "out", reference_model="tiny-gdn").reference == find_checkpoint("tiny-gdn")


def test_the_memory_of_both_models_is_said(run, tmp_path):
    from typer.testing import CliRunner

    _, folder = run
    arguments = ["run", "--model", str(folder / "model"), "--steps", "4", "--task", "none", "--dry-run", "--json"]
    said = []
    for more in ([], ["--reference-model", str(folder / "rounded")]):
        result = CliRunner().invoke(app, arguments + more)
        assert result.exit_code == 0, result.output
        said.append(json.loads(result.stdout)["memory of the weights"])
    size = sum(weight.nbytes for weight in make_tiny_model(**SMALL).parameters())
    assert said == [f"about {size / 1000:.3g} kB", f"about {2 * size / 1000:.3g} kB"]
