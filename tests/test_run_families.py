"""The main job on a model of each recurrence: drift, state errors, bytes, cross-check and certificate are its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from family_cases import make_family_model

from driftgate.accuracy.adapters import find_family
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.records import RunData
from driftgate.kernels.traffic import compute_traffic, entry_bytes
from driftgate.main_job import prepare

PLANS = {"fp32@2": "candidate", "nvfp4/fp32@2": "candidate"}
TWO = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SMALL = {  # an interpreted program takes some 20 ms, and a head of a row is one
    "mamba2": {"num_hidden_layers": 1, "num_heads": 2, "expand": 1, "n_groups": 1},
    "qwen3_5": TWO | {"linear_num_key_heads": 1, "linear_num_value_heads": 2},
    "kimi_linear": TWO | {"linear_num_heads": 2, "mlp_layer_types": ["dense", "sparse"]},
}


@pytest.fixture(scope="module", params=SMALL)
def done(request, tmp_path_factory) -> tuple[object, RunData]:
    """A model and what ``driftgate run --model FOLDER`` measures of it on a CPU."""
    folder: Path = tmp_path_factory.mktemp("run")
    model = make_family_model(request.param, **SMALL[request.param])
    model.save_pretrained(folder / "model")
    suite = {
        "title": "Small", "model": str(folder / "model"), "plans": [{"plan": p, "role": r} for p, r in PLANS.items()],
        "tasks": [], "stream": "generation", "sequences": 2, "steps": 6, "batch": 2, "seed": 1,
    }  # fmt: skip
    (folder / "small.yaml").write_text(yaml.safe_dump(suite))
    prepared = prepare(str(folder / "small.yaml"), out=folder / "out")
    try:
        return model, prepared.experiment.run()
    finally:
        prepared.folder.release()


def test_the_interpreted_kernels_agree_and_keep_their_bits(done):
    model, run = done
    name = find_family(model.config).recurrence.value
    assert run.results.backend.cross_check.steps == 4
    assert run.results.backend.cross_check.by_plan["fp32@2"] < 5e-5
    assert {record.recurrence for record in run.results.bitwise} == {name}
    assert {"A/A", "I1", "I2", "I3", "I7"} <= {record.invariant for record in run.results.bitwise}
    assert all(record.equal for record in run.results.bitwise)


def test_plans_differ_where_they_should_and_nowhere_else(done):
    _, run = done
    exact, split = (run.results.plans[name] for name in PLANS)
    assert exact.kl.mean < 1e-9 < 1e-6 < split.kl.mean
    for plan, read in ((exact, False), (split, True)):
        for layer in plan.state.layers:
            assert layer.checkpoint_error == 0.0
            assert (layer.read_error or 0) > 0.05 if read else layer.read_error is None
            assert (layer.output_error > 0.01) is read


def test_bytes_are_those_of_the_recurrence(done):
    model, run = done
    family = find_family(model.config)
    mixers = family.find_mixers(model)
    shape = family.head_shape(mixers[0])
    for name in PLANS:
        options = PrecisionPlan.parse(name).options
        traffic = compute_traffic(shape, options, entry_bytes(family.recurrence, shape, options, 4))
        assert run.results.plans[name].bytes.traffic_ratio == pytest.approx(traffic.ratio)
        assert run.results.plans[name].bytes.traffic_per_step == pytest.approx(traffic.per_step * len(mixers))
