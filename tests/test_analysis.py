"""From lock step to records: rows of the frame are the steps, and a NaN stays with its plan and sequence."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from driftgate.accuracy.analysis import build_steps, state_record, summarize_plan
from driftgate.accuracy.lockstep import LockstepResult
from driftgate.accuracy.observers import ERRORS, StateSums
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.records import STEP_COLUMNS

SEQUENCES, STEPS = 3, 200
SHARED, REFERENCE = "nvfp4@4", "nvfp4/fp32@4"


def make_result(*, drift: float = 0.5) -> LockstepResult:
    """A measurement of two plans: KL of the shared one grows with position, the reference's does not."""
    random = np.random.default_rng(11)
    positions = np.arange(1, STEPS + 1)
    shape = (SEQUENCES, STEPS)
    kl = {
        SHARED: 1e-3 * positions**drift * random.lognormal(0, 0.1, shape),
        REFERENCE: 1e-4 * random.lognormal(0, 0.1, shape),
    }
    base = random.gamma(2.0, 1.0, shape)
    base[:, -1] = np.nan
    return LockstepResult(
        positions=positions,
        kl=kl,
        same_top={name: random.random(shape) < 0.9 for name in kl},
        delta_p={name: np.where(np.isnan(base), np.nan, random.normal(0, 0.01, shape)) for name in kl},
        nll={"baseline": base} | {name: base + 0.01 for name in kl},
        window_offset={name: np.broadcast_to(np.arange(STEPS) % 4, shape) for name in kl},
        noise_kl=np.zeros(shape),
        different_logits=dict.fromkeys(kl, 1),
        n_logits=1,
        probes={},
        counters={},
        state={},
        layer_indices=[0],
        again=None,
        recorded=None,
        first_logits={},
        digests=[],
    )


def summarize(frame: pd.DataFrame, name: str):
    return summarize_plan(frame, name, PrecisionPlan.parse(name))


def test_a_row_of_the_frame_is_one_step():
    result = make_result()
    frame = build_steps(result, stream_end=STEPS + 1)
    assert tuple(frame.columns) == STEP_COLUMNS
    assert len(frame) == 2 * SEQUENCES * STEPS
    row = frame[(frame["plan"] == SHARED) & (frame["sequence"] == 2) & (frame["position"] == 10)].iloc[0]
    assert row["kl"] == result.kl[SHARED][2, 9]
    assert row["same_top"] == result.same_top[SHARED][2, 9]
    assert row["delta_p"] == result.delta_p[SHARED][2, 9]
    assert row["nll_plan"] == result.nll[SHARED][2, 9]
    assert row["nll_baseline"] == result.nll["baseline"][2, 9]
    assert row["window_offset"] == 1


def test_questions_at_the_end_are_no_stream():
    frame = build_steps(make_result(), stream_end=100)
    assert frame["position"].max() == 99
    assert len(frame) == 2 * SEQUENCES * 99


def test_figures_are_those_of_the_frame():
    result = make_result()
    statistics = summarize(build_steps(result, stream_end=STEPS + 1), SHARED)
    records = statistics.records()
    assert records["kl"].mean == pytest.approx(result.kl[SHARED].mean(), rel=1e-12)
    assert records["kl"].max == result.kl[SHARED].max()
    assert records["kl"].n_steps == SEQUENCES * STEPS
    assert records["same_top_p"].value == pytest.approx(result.same_top[SHARED].mean(), rel=1e-12)
    assert records["delta_p"].mean == pytest.approx(np.nanmean(result.delta_p[SHARED]), rel=1e-9)
    assert records["ppl"].baseline == pytest.approx(np.exp(np.nanmean(result.nll["baseline"])), rel=1e-12)
    assert records["ppl"].ratio == pytest.approx(np.exp(0.01), rel=1e-9)
    assert [p.offset for p in records["drift"].by_window_offset] == [0, 1, 2, 3]
    assert sum(p.n for p in records["drift"].by_window_offset) == SEQUENCES * STEPS


def test_a_stored_frame_gives_the_same_figures(tmp_path):
    frame = build_steps(make_result(), stream_end=STEPS + 1)
    frame.to_parquet(tmp_path / "steps.parquet", index=False)
    stored = pd.read_parquet(tmp_path / "steps.parquet")
    for name in (SHARED, REFERENCE):
        assert summarize(stored, name).records() == summarize(frame, name).records()


def test_the_excess_slope_is_taken_from_the_plan_with_an_fp32_recurrence():
    frame = build_steps(make_result(drift=0.7), stream_end=STEPS + 1)
    assert summarize(frame, SHARED).law.excess_slope == pytest.approx(0.7, abs=0.1)
    assert summarize(frame, REFERENCE).law.excess_slope is None
    alone = frame[frame["plan"] == SHARED]
    assert summarize(alone, SHARED).law.excess_slope is None


@pytest.mark.parametrize("steps", [slice(None), slice(50, None), slice(-1, None), slice(20, 21)])
def test_a_nan_of_one_sequence_is_counted_and_stays_with_its_plan(steps):
    clean = summarize(build_steps(make_result(), stream_end=STEPS + 1), REFERENCE).records()
    result = make_result()
    for figures in (result.kl, result.nll, result.delta_p):
        figures[SHARED][1, steps] = np.nan
    result.same_top[SHARED][1, steps] = False
    frame = build_steps(result, stream_end=STEPS + 1)
    record = summarize(frame, SHARED).records()["kl"]
    assert record.n_nonfinite == np.isnan(result.kl[SHARED]).sum()
    assert record.first_nonfinite_step is not None
    assert summarize(frame, REFERENCE).records() == clean


def test_state_errors_are_named_by_decoder_layer():
    sums = StateSums(
        mean=dict.fromkeys(ERRORS, 0.25) | {"read_error": None},
        greatest=dict.fromkeys(ERRORS, 0.5) | {"read_error": None},
    )
    (first, second) = state_record([sums, sums], [0, 3]).layers
    assert (first.layer, second.layer) == (0, 3)
    assert (first.checkpoint_error, first.checkpoint_error_max) == (0.25, 0.5)
    assert first.read_error is first.read_error_max is None
