"""Decode steps of a model on GPUs: recorded as graphs, and with layers on two devices. ``pytest tests/gpu -m gpu``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from family_cases import make_family_model

from driftgate.accuracy.adapters import block_states, wrap
from driftgate.accuracy.adapters.recorded import Recorded
from driftgate.accuracy.answers import AnswerRunner
from driftgate.accuracy.lockstep import LockstepResult, LockstepRunner
from driftgate.accuracy.models import load_model
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.prompts import Decoded, Prompt
from driftgate.kernels.contract import Backend

pytestmark = pytest.mark.gpu

FAMILIES = ("qwen3_5", "kimi_linear", "nemotron_h")
PLANS = ("fp32@4", "nvfp4@1", "nvfp4/fp32@4", "fp8@3+sr", "nvfp4/fp8@8+cached+buf=bf16")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def measure(model: torch.nn.Module, *, steps: int = 24) -> LockstepResult:
    tokens = np.random.default_rng(7).integers(1, 60, (3, steps + 2))
    plans = {text: PrecisionPlan.parse(text) for text in PLANS}
    runner = LockstepRunner(model, plans, batch=3, backend=Backend.TRITON, prefill=2)
    return runner.run(tokens, keep_logits=steps, record_steps=4)


def same(one: LockstepResult, other: LockstepResult) -> None:
    assert one.again is None and other.again is None
    assert one.digests == other.digests
    assert one.counters == other.counters
    for name in PLANS:
        assert np.array_equal(one.first_logits[name].view(np.int32), other.first_logits[name].view(np.int32)), name
        assert np.array_equal(one.kl[name], other.kl[name], equal_nan=True)
        assert one.state[name] == other.state[name]
    assert any(one.kl[name].max() > 0 for name in PLANS)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_have_the_bits_of_launched_ones(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_family_model(family).cuda()
    replayed = []
    record = Recorded._record
    monkeypatch.setattr(Recorded, "_record", lambda self, tensors: (replayed.append(self), record(self, tensors)))
    recorded = measure(model)
    assert len(replayed) > 2
    monkeypatch.setattr(block_states, "GraphRecorder", lambda enabled: GraphsOff())
    launched = measure(model)
    same(launched, recorded)


class GraphsOff:
    def record(self, function, device):
        return function


def test_a_continuation_between_recorded_steps_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folds, prefills and new states in the pools reach what was recorded before them."""
    model = make_family_model("qwen3_5").cuda()
    tokens = torch.arange(1, 49, device="cuda").view(2, 24)

    def decode() -> list[torch.Tensor]:
        with wrap(model, ["baseline", "nvfp4/fp32@4"], n_sequences=2, backend="triton") as wrapped:
            wrapped.prefill(tokens[:, :3])
            first = [wrapped.step(tokens[:, i]).clone() for i in range(3, 12)]
            middle = [wrapped.extend(tokens[:, 12:16]).clone()]
            return first + middle + [wrapped.step(tokens[:, i]).clone() for i in range(16, 24)]

    recorded = decode()
    monkeypatch.setattr(block_states, "GraphRecorder", lambda enabled: GraphsOff())
    assert all(torch.equal(a, b) for a, b in zip(decode(), recorded, strict=True))


@two_gpus
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_on_two_gpus_have_the_bits_of_one(family: str, tmp_path: Path) -> None:
    make_family_model(family).save_pretrained(tmp_path)
    one = measure(load_model(tmp_path, name="tiny", device="cuda").model)
    model = load_model(tmp_path, name="tiny", device="cuda+cpu").model
    assert {weight.device.index for weight in model.parameters()} == {0, 1}
    same(one, measure(model))


@two_gpus
def test_the_second_gpu_decodes_as_the_first(tmp_path: Path) -> None:
    make_family_model("kimi_linear").save_pretrained(tmp_path)
    first, second = (measure(load_model(tmp_path, name="tiny", device=f"cuda:{i}").model) for i in (0, 1))
    same(first, second)


def test_answers_of_recorded_steps_are_those_of_launched_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_family_model("kimi_linear").cuda()
    prompts = [
        Prompt(item_id=f"item {i}", token_ids=tuple(range(3, 9 + i)), max_new_tokens=20, temperature=1.0)
        for i in range(5)
    ]
    plans = {text: PrecisionPlan.parse(text) for text in PLANS[1:3]}

    def answer() -> dict[str, list[Decoded]]:
        return AnswerRunner(model, plans, batch=3, backend=Backend.TRITON, vocab_size=60, seed=1).run(prompts)

    recorded = answer()
    monkeypatch.setattr(block_states, "GraphRecorder", lambda enabled: GraphsOff())
    assert answer() == recorded
    assert recorded["nvfp4@1"] != recorded["baseline"]
