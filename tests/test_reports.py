"""Reports of a synthetic run folder: every file holds the data, agrees with results.json, and needs nothing outside."""

import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from rich.console import Console

from driftgate.accuracy import records as rec
from driftgate.errors import InputError
from driftgate.reports import figures, junit, markdown, page, render_all, tables

LENGTH, STEPS, SEQUENCES, LAYERS = 16, 512, 2, (0, 2, 4)
EXACT, SPLIT, CACHED, SMALL, WEIRD, CONTROL = (
    "fp32@16",
    "nvfp4/fp32@16",
    "nvfp4/fp32@16+cached",
    "fp8/fp16@16",
    "a<b>|$x & 'c'_*",
    "nvfp4@16",
)
LEVELS = {EXACT: 0.0, SPLIT: 3e-4, CACHED: 3.4e-4, SMALL: 2e-5, WEIRD: 8e-6, CONTROL: 2e-3}
RATIOS = {
    EXACT: (0.531, 0.573),
    SPLIT: (0.137, 0.178),
    CACHED: (0.137, 0.191),
    SMALL: (0.176, 0.21),
    WEIRD: (0.3, 0.35),
    CONTROL: (0.1, 0.14),
}
CHECKS = {EXACT: "pass", SPLIT: "pass", CACHED: "inconclusive", SMALL: "fail", WEIRD: "invalid", CONTROL: "fail"}


def make_steps() -> pd.DataFrame:
    """Steps with a saw-tooth in every split plan and a KL of the control that grows with position."""
    random = np.random.default_rng(7)
    frames = []
    nll = random.gamma(2.0, 1.0, (SEQUENCES, STEPS))
    for plan, level in LEVELS.items():
        for sequence in range(SEQUENCES):
            position = np.arange(64, 64 + STEPS)
            offset = np.arange(STEPS) % LENGTH
            shape = (position / 64) ** 0.6 if plan == CONTROL else 0.2 + offset / LENGTH
            kl = level * shape * random.lognormal(0, 0.5, STEPS)
            columns = {
                "plan": plan,
                "sequence": sequence,
                "position": position,
                "window_offset": offset,
                "kl": kl,
                "same_top": kl < 2e-3,
                "delta_p": -kl / 2,
                "nll_plan": nll[sequence] + kl,
                "nll_baseline": nll[sequence],
            }
            frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def make_plan(plan: str, steps: pd.DataFrame) -> rec.PlanRecord:
    """The record of a plan, its figures computed from its steps."""
    kl = steps.loc[steps["plan"] == plan, "kl"]
    mean = float(kl.mean())
    quantile = {name: float(kl.quantile(q)) for name, q in
                (("p99", .99), ("p95", .95), ("p90", .9), ("median", .5), ("p10", .1), ("p5", .05), ("p1", .01))}  # fmt: skip
    offsets = steps[steps["plan"] == plan].groupby("window_offset")["kl"].agg(["mean", "count"])
    state, traffic = RATIOS[plan]
    error = 0.0 if plan == EXACT else float(np.sqrt(LEVELS[plan]))
    exact = plan in (EXACT, SPLIT, CACHED)
    return rec.PlanRecord(
        role="control" if plan == CONTROL else "candidate",
        kl=rec.KlRecord(
            mean=mean, ci_low=mean * 0.8, ci_high=mean * 1.2, geo_mean=mean * 0.9, geo_ci_low=mean * 0.7, geo_ci_high=mean * 1.1,
            max=float(kl.max()), p99_9=None if plan == WEIRD else float(kl.quantile(0.999)), **quantile, p0_1=float(kl.min()), min=float(kl.min()), n_steps=len(kl),
            n_effective=61.0 if plan == SMALL else 512.0, n_nonfinite=0, first_nonfinite_step=None, n_negative=0,
        ),
        same_top_p=rec.ProportionRecord(value=1 - 20 * mean, ci_low=1 - 25 * mean, ci_high=1 - 15 * mean),
        delta_p=rec.DeltaP(mean=-mean / 2, rms=mean, max=mean * 3, min=None if plan == WEIRD else -mean * 4),
        ppl=rec.PerplexityRecord(plan=8.1 * (1 + mean), baseline=8.1, ratio=1 + mean, ratio_ci_low=1 + mean / 2, ratio_ci_high=1 + 2 * mean),
        drift=rec.DriftRecord(
            slope=None if plan == EXACT else 0.6 if plan == CONTROL else 0.02, slope_ci_low=None if plan == EXACT else 0.01, slope_ci_high=None if plan == EXACT else 0.7,
            excess_slope=0.55 if plan == CONTROL else None, law="growing" if plan == CONTROL else "flat",
            by_window_offset=[rec.OffsetPoint(offset=int(h), mean=row["mean"], n=int(row["count"])) for h, row in offsets.iterrows()],
            by_position=[],
        ),
        state=rec.StateRecord(layers=[
            rec.LayerState(layer=layer, read_error=error * (1 + layer), checkpoint_error=0.0 if exact else error / 3, trajectory_error=error / 2, output_error=error / 5,
                           read_error_max=None, checkpoint_error_max=None, trajectory_error_max=None, output_error_max=None)
            for layer in LAYERS]),
        counters=rec.CounterRecord(low_precision_reads=2880, flushes=192, requantizations=192),
        bytes=rec.BytesRecord(checkpoint=2097152, read_copy=0, buffer=135168, traffic_per_step=2.4e6, traffic_ratio=traffic, state_ratio=state),
        tasks={"recall": make_task(plan, lost=3, gained=1), "tracking": make_task(plan, lost=1, gained=2)},
    )  # fmt: skip


def make_task(plan: str, *, lost: int, gained: int) -> rec.TaskRecord:
    """A paired comparison on 200 items; the answers of one plan were cut off now and then."""
    lost, gained = (0, 0) if plan == EXACT else (18, 2) if plan == CONTROL else (lost, gained)
    delta = (gained - lost) / 200
    return rec.TaskRecord(n=200, repeats=2, accuracy=0.74 + delta, baseline_accuracy=0.74, delta=delta, ci_low=delta - 0.018, ci_high=delta + 0.016, lost=lost,
                          gained=gained, p_value=1.0, cap_hits=4 if plan == SMALL else 0, unparsed=0, verdict="fail" if plan == CONTROL else "pass")  # fmt: skip


def make_run() -> rec.RunData:
    """A run with every verdict, a control, an exact plan, nulls, and a plan name that no format takes kindly to."""
    steps = make_steps()
    results = rec.Results(
        verdict="fail",
        model={"name": "embedded-gdn", "parameters": 1_250_000, "layers": list(LAYERS)},
        backend=rec.Backends(drift="torch", tasks="triton-interpret", cross_check=rec.CrossCheck(steps=48, max_abs_difference=1.9e-6, by_plan={SPLIT: 1.9e-6, EXACT: 0.0})),
        plans={plan: make_plan(plan, steps) for plan in LEVELS},
        bitwise=[
            rec.BitwiseRecord(invariant="I1", recurrence="gdn", case={"L": 16, "heads": 2}, equal=True, n_different=0, max_ulp=0, first_different=None),
            rec.BitwiseRecord(invariant="I2", recurrence="gdn", case={"L": 7}, equal=False, n_different=12, max_ulp=3, first_different={"step": 9, "index": [0, 1]}),
        ],
        noise_floor=rec.NoiseFloor(kl_mean=3.1e-10, kl_max=4.4e-9),
        verdicts=[rec.VerdictRecord(plan=plan, check="kl_mean", value=LEVELS[plan], limit=None if verdict == "invalid" else 1e-3, verdict=verdict,
                                    reason=f"bound of {plan} <i>against</i> the limit") for plan, verdict in CHECKS.items()],
    )  # fmt: skip
    manifest = rec.Manifest(
        command=["driftgate", "run", "quick"], suite={"name": "quick", "steps": STEPS}, policy={"checks": {"kl_mean": {"limit": 1e-3, "reason": "half of FP8 weights"}}},
        versions={"torch": "2.13.0", "driftgate": "0.1.0"}, device={"name": "cpu", "threads": 2}, backend={"drift": "torch"}, hashes={"model": "sha256:" + "ab" * 32},
        seeds={"run": 0}, plans={plan: {} for plan in LEVELS}, streams={"sequences": SEQUENCES}, timing={"drift": 12.5}, created="2030-01-02T03:04:05+00:00",
    )  # fmt: skip
    items = pd.DataFrame({"plan": ["baseline"], "task": ["recall"], "item_id": ["r1"], "repeat": [0], "answer": ["A"], "gold": ["A"], "correct": [True],
                          "n_tokens": [1], "capped": [False], "parse_reason": ["ok"]})  # fmt: skip
    return rec.RunData(results=results, manifest=manifest, steps=steps, items=items)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored run with all of its reports."""
    out = tmp_path_factory.mktemp("run")
    rec.save_run(out, make_run())
    render_all(out)
    return out


@pytest.fixture(scope="module")
def run(folder: Path) -> rec.RunData:
    return rec.load_run(folder)
