"""The bench on a GPU: a smoke run of every recurrence with a tiny batch. ``pytest tests/gpu -m gpu``."""

from __future__ import annotations

import json
import time

import pytest
import torch

from driftgate.accuracy.plans import PrecisionPlan
from driftgate.bench_command import choose_cases, format_notes, format_table, run_bench
from driftgate.kernels import bench
from driftgate.kernels.bench import time_configuration
from driftgate.kernels.contract import HeadShape, Recurrence
from driftgate.kernels.device_time import measure_copy, time_device
from driftgate.kernels.launch import Launch

pytestmark = pytest.mark.gpu

SMALL = {
    Recurrence.GDN: HeadShape(key_heads=2, value_heads=4, d_k=64, d_v=64),
    Recurrence.KDA: HeadShape(key_heads=4, value_heads=4, d_k=64, d_v=64),
    Recurrence.MAMBA2: HeadShape(key_heads=2, value_heads=4, d_k=64, d_v=32),
}


def test_every_recurrence_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SHAPES", SMALL)
    monkeypatch.setattr(bench, "MAX_LAYERS", 3)
    found = run_bench(choose_cases(plans=["nvfp4/fp32@4"], batches=[2]))
    assert len(found["records"]) == 6
    for record in found["records"]:
        times = [step["us"] for step in record["steps"]]
        assert all(0 < step["min_us"] <= step["us"] for step in record["steps"])
        assert min(times) <= record["cycle"]["us"] <= max(times)
        assert record["method"] == "graph" and record["launches"] == 18
    assert json.loads(json.dumps(found)) == found
    assert found["machine"]["device"] == torch.cuda.get_device_name()
    assert len(format_table(found)) == 8 and format_notes(found)


def test_graph_and_events_agree_on_a_batch_that_fills_the_device() -> None:
    """No host time is in either; 40 % leaves room for the gap between launches of a stream."""
    shape, options = bench.SHAPES[Recurrence.GDN], PrecisionPlan.parse("fp32@16").options
    launch = Launch(block_v=32, block_k=128, num_warps=1, num_stages=2)
    us = {
        method: time_configuration(Recurrence.GDN, shape, options, 64, launch, [0], method=method)["steps"][0]["us"]
        for method in ("graph", "events")
    }
    assert us["events"] == pytest.approx(us["graph"], rel=0.4)


def test_a_baseline_step_is_not_faster_than_a_copy_of_its_states() -> None:
    """States that came from the cache would be."""
    copy = measure_copy()
    record = time_configuration(
        Recurrence.GDN, bench.SHAPES[Recurrence.GDN], PrecisionPlan.parse("baseline").options, 64,
        copy_bandwidth=copy["bandwidth"],
    )  # fmt: skip
    assert 0 < record["cycle"]["copy_fraction"] < 1.1


def test_host_time_is_not_measured() -> None:
    """A host that takes 2 ms for each launch of a kernel of a few microseconds."""
    x = torch.zeros(1, device="cuda")

    def run() -> None:
        for _ in range(4):
            time.sleep(0.002)
            x.add_(1.0)

    assert time_device(run, launches=4, repeats=20).us < 100
