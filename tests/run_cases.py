"""Runs made of numbers that a test chooses, with every figure computed from them as a real run computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from driftgate.accuracy import records as rec
from driftgate.accuracy.analysis import summarize_plan
from driftgate.accuracy.items import paired_record
from driftgate.accuracy.plans import PrecisionPlan

SEQUENCES, STEPS = 16, 256


def lognormal(
    mean: float, *, sd: float = 0.3, seed: int = 0, shape: tuple[int, int] = (SEQUENCES, STEPS)
) -> np.ndarray:
    """KL of independent steps with this mean, [n_sequences, n_steps]."""
    noise = np.random.default_rng(seed).normal(0.0, sd, shape)
    return mean * np.exp(noise - sd**2 / 2)


@dataclass(kw_only=True)
class Measured:
    """What a test says of one plan.

    Attributes:
        kl: [n_sequences, n_steps] nats.
        differ: every so many steps one has another top token.
        nll: nll of the plan - nll of the baseline, per step.
    """

    kl: np.ndarray
    role: str = "candidate"
    differ: int = 20
    nll: float = 0.0
    reads: int = 1000
    requantizations: int = 100
    nonfinite_states: int = 0
    checkpoint_error: float | None = 0.05


def make_items(baseline: str, plans: Mapping[str, str], *, task: str = "recall", per_stream: int = 1) -> pd.DataFrame:
    """Answers as letters, ``A`` is right; ``per_stream`` items share a stream (1: each is independent)."""
    frames = []
    for plan, answers in {"baseline": baseline, **plans}.items():
        n = len(answers)
        frame = pd.DataFrame(
            {
                "plan": plan, "task": task, "item_id": [f"{task}-{i}" for i in range(n)], "repeat": 0,
                "answer": list(answers), "gold": "A", "correct": [a == "A" for a in answers], "n_tokens": 1,
                "capped": False, "parse_reason": "ok",
            }
        )  # fmt: skip
        if per_stream > 1:
            frame["stream"] = np.arange(n) // per_stream
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def flipped(lost: int, gained: int, n: int, *, right: int) -> tuple[str, str]:
    """Answers of a baseline with ``right`` of n right, and of a plan that loses and gains so many of them."""
    baseline = "A" * right + "B" * (n - right)
    plan = "B" * lost + "A" * (right - lost) + "A" * gained + "B" * (n - right - gained)
    return baseline, plan


def make_run(
    plans: Mapping[str, Measured],
    *,
    items: pd.DataFrame | None = None,
    floor: float | None = 1e-9,
    bitwise: Mapping[str, bool] | None = None,
) -> rec.RunData:
    """A run of these plans; ``bitwise`` names invariants and whether they hold."""
    random = np.random.default_rng(99)
    frames = []
    for name, measured in plans.items():
        n, width = measured.kl.shape
        base = random.gamma(2.0, 1.0, (n, width))
        frames.append(
            pd.DataFrame(
                {
                    "plan": name,
                    "sequence": np.repeat(np.arange(n), width),
                    "position": np.tile(np.arange(1, width + 1), n),
                    "window_offset": np.tile(np.arange(width) % 4, n),
                    "kl": measured.kl.ravel(),
                    "same_top": np.arange(n * width) % measured.differ != 0,
                    "delta_p": -0.001,
                    "nll_plan": (base + measured.nll + random.normal(0.0, 0.02, (n, width))).ravel(),
                    "nll_baseline": base.ravel(),
                }
            )
        )
    steps = pd.concat(frames, ignore_index=True)
    items = make_items("", {name: "" for name in plans}) if items is None else items
    results = rec.Results(
        verdict="inconclusive",
        model={"name": "numbers"},
        backend=rec.Backends(drift="triton", tasks="triton", cross_check=None),
        plans={name: _record(name, measured, steps, items) for name, measured in plans.items()},
        bitwise=[
            rec.BitwiseRecord(
                invariant=invariant, recurrence="gdn", case={}, equal=equal, n_different=0 if equal else 3, max_ulp=0,
                first_different=None if equal else {"step": 7, "layer": 2},
            )
            for invariant, equal in ({"A/A": True, "I1": True} if bitwise is None else bitwise).items()
        ],
        noise_floor=rec.NoiseFloor(kl_mean=floor, kl_max=floor),
        verdicts=[],
    )  # fmt: skip
    manifest = rec.Manifest(
        command=["driftgate", "run"], suite={}, policy={"name": "test"}, versions={}, device={}, backend={}, hashes={},
        seeds={}, plans={}, streams={}, timing={}, created="2030-01-02T03:04:05+00:00",
    )  # fmt: skip
    return rec.RunData(results, manifest, steps, items)


def _record(name: str, measured: Measured, steps: pd.DataFrame, items: pd.DataFrame) -> rec.PlanRecord:
    tasks = items[items["plan"] == name]["task"].unique()
    errors = dict.fromkeys(rec.LayerState.model_fields) | {"checkpoint_error": measured.checkpoint_error}
    return rec.PlanRecord(
        role=measured.role,
        **summarize_plan(steps, name, PrecisionPlan.parse(name)).records(),
        state=rec.StateRecord(layers=[rec.LayerState(**(errors | {"layer": layer})) for layer in (0, 2)]),
        counters=rec.CounterRecord(
            low_precision_reads=measured.reads, flushes=100, requantizations=measured.requantizations,
            nonfinite_states=measured.nonfinite_states,
        ),
        bytes=rec.BytesRecord(
            checkpoint=1, read_copy=1, buffer=1, traffic_per_step=1.0, traffic_ratio=0.5, state_ratio=0.5
        ),
        tasks={task: paired_record(items, name, task) for task in tasks},
    )  # fmt: skip
