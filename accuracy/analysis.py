"""From what was measured to records: the steps frame, and every figure of a plan that comes from it.

Notable: figures are computed from the frame, never from what is in memory, so that a stored run gates the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from driftgate.accuracy.drift_law import DriftLaw, by_position, by_window_offset, drift_law
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.records import (
    DeltaP,
    DriftRecord,
    KlRecord,
    LayerState,
    OffsetPoint,
    PerplexityRecord,
    PositionPoint,
    ProportionRecord,
    StateRecord,
)
from driftgate.accuracy.statistics import (
    DeltaPSummary,
    KlSummary,
    PerplexitySummary,
    ProportionSummary,
    perplexity_ratio,
    proportion_ci,
    summarize_delta_p,
    summarize_kl,
)

__all__ = ["PlanStatistics", "build_steps", "state_record", "summarize_plan"]

_RECURRENCE_REFERENCE = "{read}/fp32@{length}"


@dataclass(frozen=True, kw_only=True)
class PlanStatistics:
    """Statistics of one plan over the stream positions, with the one-sided bounds that verdicts need."""

    kl: KlSummary
    same_top: ProportionSummary
    delta_p: DeltaPSummary
    ppl: PerplexitySummary
    law: DriftLaw
    by_window_offset: list[OffsetPoint]
    by_position: list[PositionPoint]

    def records(self) -> dict[str, Any]:
        """The parts of results.json that these are."""
        law = {k: getattr(self.law, k) for k in ("slope", "slope_ci_low", "slope_ci_high", "excess_slope", "law")}
        return {
            "kl": KlRecord(**self.kl.as_dict()),
            "same_top_p": ProportionRecord(**self.same_top.as_dict()),
            "delta_p": DeltaP(**{k: getattr(self.delta_p, k) for k in DeltaP.model_fields}),
            "ppl": PerplexityRecord(**{k: getattr(self.ppl, k) for k in PerplexityRecord.model_fields}),
            "drift": DriftRecord(**law, by_window_offset=self.by_window_offset, by_position=self.by_position),
        }


def build_steps(result: Any, *, stream_end: int) -> pd.DataFrame:
    """The steps frame of a lock-step result.

    Args:
        result: a LockstepResult.
        stream_end: first position that is no stream any more (questions begin there); later steps are left out.

    Returns:
        One row per plan, sequence and step: plan, sequence, position, window_offset, kl, same_top, delta_p,
        nll_plan, nll_baseline.
    """
    keep = result.positions < stream_end
    positions = result.positions[keep].astype(np.int32)
    frames = []
    for plan, kl in result.kl.items():
        n = len(kl)
        frames.append(
            pd.DataFrame(
                {
                    "sequence": np.repeat(np.arange(n, dtype=np.int32), len(positions)),
                    "position": np.tile(positions, n),
                    "window_offset": result.window_offset[plan][:, keep].astype(np.int16).ravel(),
                    "kl": kl[:, keep].ravel(),
                    "same_top": result.same_top[plan][:, keep].ravel(),
                    "delta_p": result.delta_p[plan][:, keep].ravel(),
                    "nll_plan": result.nll[plan][:, keep].ravel(),
                    "nll_baseline": result.nll["baseline"][:, keep].ravel(),
                }
            ).assign(plan=plan)
        )
    frame = pd.concat(frames, ignore_index=True)
    frame["plan"] = frame["plan"].astype("category")
    return frame[["plan", *[c for c in frame.columns if c != "plan"]]]


def summarize_plan(steps: pd.DataFrame, name: str, plan: PrecisionPlan) -> PlanStatistics:
    """Statistics of one plan.

    Args:
        steps: the frame of a whole run; the excess slope needs the plan READ/fp32@L in it.
        name: key of the plan.
        plan: the plan.
    """
    own = steps[steps["plan"] == name]
    kl = _matrix(own, "kl")
    positions = np.sort(own["position"].unique())
    reference = None
    if plan.options.recurrence != "fp32" and not plan.layers:  # a mixed plan has no such reference in a run
        wanted = _RECURRENCE_REFERENCE.format(read=plan.options.read, length=plan.options.length)
        other = steps[steps["plan"] == str(PrecisionPlan.parse(wanted))]
        reference = _matrix(other, "kl") if len(other) else None
    cycle = max(1, plan.options.length)
    law = drift_law(kl, positions - positions[0], cycle=cycle, reference=reference)
    scored = ~np.isnan(_matrix(own, "nll_baseline")).all(axis=0)  # the last step of a stream has no next token
    return PlanStatistics(
        kl=summarize_kl(kl),
        same_top=proportion_ci(_matrix(own, "same_top").astype(bool)),
        delta_p=summarize_delta_p(_matrix(own, "delta_p")[:, scored]),
        ppl=perplexity_ratio(_matrix(own, "nll_plan")[:, scored], _matrix(own, "nll_baseline")[:, scored]),
        law=law,
        by_window_offset=[OffsetPoint(**p) for p in by_window_offset(kl, _matrix(own, "window_offset").astype(int))],
        by_position=[PositionPoint(**p) for p in by_position(kl, positions=positions)],
    )


def state_record(sums: Sequence[Any], layer_indices: Sequence[int]) -> StateRecord:
    """State errors of one plan; ``sums`` has one StateSums per recurrent layer."""
    layers = []
    for index, layer in zip(layer_indices, sums, strict=True):
        greatest: Mapping[str, float | None] = {f"{k}_max": v for k, v in layer.greatest.items()}
        layers.append(LayerState(layer=index, **layer.mean, **greatest))
    return StateRecord(layers=layers)


def counter_fields(counters: Any) -> dict[str, int]:
    """A Counters object as fields of a CounterRecord."""
    return asdict(counters)


def _matrix(frame: pd.DataFrame, column: str) -> np.ndarray:
    """A column as [n_sequences, n_steps]; the frame is sorted by sequence and position as it was built."""
    n = frame["sequence"].nunique()
    return frame[column].to_numpy().reshape(n, -1)
