"""A synthetic run with every verdict, a control, an exact plan, nulls, and a plan name full of markup."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from driftgate.accuracy import records as rec
from driftgate.reports import render_all

LENGTH, STEPS, SEQUENCES, LAYERS = 16, 512, 2, (0, 2, 4)
# fmt: off
EXACT, SPLIT, CACHED, SMALL, WEIRD, CONTROL = (
    "fp32@16", "nvfp4/fp32@16", "nvfp4/fp32@16+cached", "fp8/fp16@16", "a<b>|$x & 'c'_*", "nvfp4@16")
LEVELS = {EXACT: 0.0, SPLIT: 3e-4, CACHED: 3.4e-4, SMALL: 2e-5, WEIRD: 8e-6, CONTROL: 2e-3}
RATIOS = {EXACT: (.531, .573), SPLIT: (.137, .178), CACHED: (.137, .191), SMALL: (.176, .21),
          WEIRD: (.3, .35), CONTROL: (.1, .14)}  # state, traffic
CHECKS = {EXACT: "pass", SPLIT: "pass", CACHED: "inconclusive", SMALL: "fail", WEIRD: "invalid",
          CONTROL: "fail"}
QUANTILES = {"p99": .99, "p95": .95, "p90": .9, "median": .5, "p10": .1, "p5": .05, "p1": .01}


def make_steps() -> pd.DataFrame:
    """Steps whose KL rises inside each window, and for the control with position."""
    random = np.random.default_rng(7)
    nll = random.gamma(2.0, 1.0, (SEQUENCES, STEPS))
    position, offset = np.arange(64, 64 + STEPS), np.arange(STEPS) % LENGTH
    frames = []
    for plan, sequence in product(LEVELS, range(SEQUENCES)):
        shape = (position / 64) ** 0.6 if plan == CONTROL else 0.2 + offset / LENGTH
        kl = LEVELS[plan] * shape * random.lognormal(0, 0.5, STEPS)
        frames.append(pd.DataFrame({
            "plan": plan, "sequence": sequence, "position": position, "window_offset": offset, "kl": kl,
            "same_top": kl < 2e-3, "delta_p": -kl / 2, "nll_plan": nll[sequence] + kl,
            "nll_baseline": nll[sequence]}))
    return pd.concat(frames, ignore_index=True)


def make_plan(plan: str, steps: pd.DataFrame) -> rec.PlanRecord:
    """The record of a plan, its KL computed from its steps."""
    steps = steps[steps["plan"] == plan]
    kl, zero, control, weird = steps["kl"], plan == EXACT, plan == CONTROL, plan == WEIRD
    mean, low, high = (float(kl.mean()) * factor for factor in (1, 0.8, 1.2))
    error = float(np.sqrt(LEVELS[plan]))
    unknown = dict.fromkeys(
        ("read_error_max", "checkpoint_error_max", "trajectory_error_max", "output_error_max"))
    return rec.PlanRecord(
        role="control" if control else "candidate",
        kl=rec.KlRecord(
            mean=mean, ci_low=low, ci_high=high, geo_mean=mean * 0.9, geo_ci_low=low * 0.9,
            geo_ci_high=high * 0.9, max=float(kl.max()), min=float(kl.min()),
            p99_9=None if weird else float(kl.quantile(.999)), p0_1=float(kl.quantile(.001)),
            **{name: float(kl.quantile(q)) for name, q in QUANTILES.items()},
            n_steps=len(kl), n_effective=61.0 if plan == SMALL else 512.0, n_nonfinite=0,
            first_nonfinite_step=None, n_negative=0),
        same_top_p=rec.ProportionRecord(value=1 - 20 * mean, ci_low=1 - 25 * mean, ci_high=1 - 15 * mean),
        delta_p=rec.DeltaP(mean=-mean / 2, rms=mean, max=mean * 3, min=None if weird else -mean * 4),
        ppl=rec.PerplexityRecord(
            plan=8.1 * (1 + mean), baseline=8.1, ratio=1 + mean, ratio_ci_low=1 + low,
            ratio_ci_high=1 + high),
        drift=rec.DriftRecord(
            slope=None if zero else 0.6 if control else 0.02, slope_ci_low=None if zero else 0.01,
            slope_ci_high=None if zero else 0.7, excess_slope=0.55 if control else None,
            law="growing" if control else "flat", by_position=[],
            by_window_offset=[rec.OffsetPoint(offset=h, mean=group.mean(), n=len(group))
                              for h, group in kl.groupby(steps["window_offset"])]),
        state=rec.StateRecord(layers=[
            rec.LayerState(layer=layer, read_error=error * (1 + layer), output_error=error / 5,
                           checkpoint_error=0.0 if "/fp32" in plan else error / 3, trajectory_error=error / 2,
                           **unknown) for layer in LAYERS]),
        counters=rec.CounterRecord(low_precision_reads=2880, flushes=192, requantizations=192),
        bytes=rec.BytesRecord(checkpoint=2097152, read_copy=0, buffer=135168, traffic_per_step=2.4e6,
                              state_ratio=RATIOS[plan][0], traffic_ratio=RATIOS[plan][1]),
        tasks={"recall": make_task(plan, lost=3, gained=1), "tracking": make_task(plan, lost=1, gained=2)},
    )


def make_task(plan: str, *, lost: int, gained: int) -> rec.TaskRecord:
    """A paired comparison on 200 items; some answers of one plan were cut off."""
    lost, gained = {EXACT: (0, 0), CONTROL: (18, 2)}.get(plan, (lost, gained))
    delta = (gained - lost) / 200
    return rec.TaskRecord(
        n=200, repeats=2, accuracy=0.74 + delta, baseline_accuracy=0.74, delta=delta, ci_low=delta - 0.018,
        ci_high=delta + 0.016, lost=lost, gained=gained, p_value=1.0, cap_hits=4 if plan == SMALL else 0,
        unparsed=0, verdict="fail" if plan == CONTROL else "pass")


def make_tolerance(what: str, readout: str, error: float | None) -> rec.ToleranceRecord:
    """A tolerance case: one route is exact, one outside its bound, one not finite."""
    return rec.ToleranceRecord(
        recurrence="gdn", case={"readout": readout, "dot": "tf32" if readout == "state_output" else "ieee",
                                "backend": "triton-interpret"},
        what=what, error=error, bound=1e-6, scale=3.0, greatest_error=error,
        within=error is not None and error <= 1e-6)


def make_run() -> rec.RunData:
    """A run with every verdict, a control, an exact plan, nulls, and a plan name full of markup."""
    steps = make_steps()
    results = rec.Results(
        verdict="fail",
        model={"name": "embedded-gdn", "parameters": 1_250_000, "layers": list(LAYERS)},
        backend=rec.Backends(
            drift="torch", tasks="triton-interpret",
            cross_check=rec.CrossCheck(
                steps=48, max_abs_difference=1.9e-6, by_plan={SPLIT: 1.9e-6, EXACT: 0.0})),
        plans={plan: make_plan(plan, steps) for plan in LEVELS},
        bitwise=[
            rec.BitwiseRecord(invariant="I1", recurrence="gdn", case={"L": 16, "heads": 2}, equal=True,
                              n_different=0, max_ulp=0, first_different=None),
            rec.BitwiseRecord(invariant="I2", recurrence="gdn", case={"L": 7}, equal=False, n_different=12,
                              max_ulp=3, first_different={"step": 9, "index": [0, 1]})],
        tolerance=[make_tolerance(what, readout, error) for what in ("output", "state") for readout, error in
                   (("output_only", 2e-7), ("exact_readout", 0.0), ("state_output", 4e-6), ("unstable", None))],
        noise_floor=rec.NoiseFloor(kl_mean=3.1e-10, kl_max=4.4e-9),
        verdicts=[
            rec.VerdictRecord(plan=plan, check="kl_mean", value=LEVELS[plan], verdict=verdict,
                              limit=None if verdict == "invalid" else 1e-3,
                              reason=f"bound of {plan} <i>against</i> the limit")
            for plan, verdict in CHECKS.items()],
    )
    manifest = rec.Manifest(
        command=["driftgate", "run", "quick"], suite={"name": "quick", "steps": STEPS},
        policy={"checks": {"kl_mean": {"limit": 1e-3, "reason": "half of FP8 weights"}}},
        versions={"torch": "2.13.0"}, device={"name": "cpu"}, backend={"drift": "torch"},
        hashes={"model": "sha256:" + "ab" * 32}, seeds={"run": 0}, plans={plan: {} for plan in LEVELS},
        streams={"sequences": SEQUENCES}, timing={"drift": 12.5}, created="2030-01-02T03:04:05+00:00")
    items = pd.DataFrame({
        "plan": ["baseline"], "task": ["recall"], "item_id": ["r1"], "repeat": [0], "answer": ["A"],
        "gold": ["A"], "correct": [True], "n_tokens": [1], "capped": [False], "parse_reason": ["ok"]})
    return rec.RunData(results=results, manifest=manifest, steps=steps, items=items)
# fmt: on


FORMATS = {"nvfp4": "control", "fp8": "control", "nvfp4/fp32": "candidate", "fp8/fp32": "candidate"}
"""Formats of a run with many plans, and their role; as the suite ``drift`` has them."""


def make_many() -> rec.RunData:
    """A run of 18 plans: four pairs of formats, L of 4 to 32 and for controls of 1."""
    run = make_run()
    roles = {f"{name}@{length}": role for name, role in FORMATS.items() for length in (1, 4, 8, 16, 32)}
    roles = {name: role for name, role in roles.items() if role == "control" or not name.endswith("@1")}
    source = run.steps[run.steps["plan"] == SPLIT]
    steps = [source.assign(plan=name, kl=source["kl"] * (1 + i / 9)) for i, name in enumerate(roles)]
    plans = {name: run.results.plans[SPLIT].model_copy(update={"role": role}) for name, role in roles.items()}
    return replace(with_results(run, plans=plans, verdicts=[]), steps=pd.concat(steps, ignore_index=True))


def store_run(folder: Path) -> Path:
    """The run with all of its reports in a folder."""
    rec.save_run(folder, make_run())
    render_all(folder)
    return folder


def with_results(run: rec.RunData, **changes: object) -> rec.RunData:
    """The same run with other results."""
    return replace(run, results=run.results.model_copy(update=changes))


def only(run: rec.RunData, *plans: str) -> rec.RunData:
    """The same run with fewer plans."""
    return with_results(run, plans={plan: run.results.plans[plan] for plan in plans})


class Page(HTMLParser):
    """What a browser would ask for, ids, links to them, tags and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.requests: list[str] = []
        self.ids: list[str] = []
        self.anchors: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                value = value or ""
                if not value.startswith("data:image/"):
                    (self.anchors if value.startswith("#") else self.requests).append(value)

    def handle_data(self, data: str) -> None:
        self.text += data
