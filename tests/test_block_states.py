"""Pools where the layers compute: a model whose layers lie on several devices decodes as it does on one.

A CPU has one device under two names, ``cpu`` and ``cpu:0``, which torch keeps apart: enough for pools of their own.
Real GPUs: tests/gpu/test_steps_gpu.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from family_cases import make_family_model

from driftgate.accuracy.adapters import block_states, wrap, wrapping
from driftgate.accuracy.adapters.block_states import find_device
from driftgate.accuracy.adapters.recorded import GraphRecorder
from driftgate.accuracy.lockstep import LockstepRunner
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.kernels.contract import Backend

PLAN = "nvfp4/fp8@4"
FAMILIES = ("qwen3_5", "kimi_linear", "nemotron_h")


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return make_family_model(request.param)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other recurrent layer lies on another device."""
    names = iter(["cpu", "cpu:0"] * 100)
    monkeypatch.setattr(wrapping, "find_device", lambda _mixer, _otherwise: torch.device(next(names)))


def decode(model: torch.nn.Module) -> list[torch.Tensor]:
    tokens = torch.arange(1, 25).view(2, 12)
    with wrap(model, ["baseline", PLAN], n_sequences=2) as wrapped:
        wrapped.prefill(tokens[:, :2])
        found = [wrapped.step(tokens[:, i]).clone() for i in range(2, 8)]
        found.append(wrapped.extend(tokens[:, 8:11]).clone())
        return [*found, wrapped.step(tokens[:, 11])]


def test_each_device_has_pools_of_its_own(model, apart):
    with wrap(model, ["baseline", PLAN], n_sequences=2) as wrapped:
        for block in wrapped.blocks:
            assert [str(pool.device) for pool in block.pools] == ["cpu", "cpu:0"]
            assert sorted(n for pool in block.pools for n in pool.layer_numbers) == list(range(wrapped.n_layers))
            assert all(block.place(n)[0].layer_numbers[block.place(n)[1]] == n for n in range(wrapped.n_layers))


def test_layers_on_two_devices_decode_as_on_one(model, monkeypatch, request):
    one = decode(model)
    request.getfixturevalue("apart")
    assert all(torch.equal(a, b) for a, b in zip(one, decode(model), strict=True))


def test_layers_on_two_devices_are_measured_as_on_one(model, request):
    tokens = np.random.default_rng(3).integers(1, 60, (2, 14))
    plans = {text: PrecisionPlan.parse(text) for text in (PLAN, "fp8@1")}

    def measure():
        return LockstepRunner(model, plans, batch=2, backend=Backend.TORCH).run(tokens, record_steps=3)

    one = measure()
    request.getfixturevalue("apart")
    other = measure()
    assert (one.digests, one.counters, one.state, one.again) == (other.digests, other.counters, other.state, None)
    assert one.state[PLAN][0].mean["read_error"] > 0
    assert all(torch.equal(a, b) for a, b in zip(one.recorded.initial, other.recorded.initial, strict=True))


def test_a_mixer_is_where_its_weights_are_or_where_accelerate_says(model):
    from accelerate import cpu_offload

    mixer, here = torch.nn.Linear(2, 2), torch.device("meta")
    assert find_device(mixer, here) == torch.device("cpu")
    cpu_offload(mixer, execution_device=torch.device("cpu"))
    assert next(mixer.parameters()).is_meta and find_device(mixer, here) == torch.device("cpu")
    assert find_device(torch.nn.Identity(), here) == here


def test_where_nothing_is_compiled_nothing_is_recorded(model, monkeypatch):
    asked = []

    def make(*, enabled: bool) -> GraphRecorder:
        asked.append(enabled)
        return GraphRecorder(enabled=enabled)

    monkeypatch.setattr(block_states, "GraphRecorder", make)
    decode(model)
    assert asked == [False]
    assert GraphRecorder(enabled=True).record(decode, torch.device("cpu")) is decode
