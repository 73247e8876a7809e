"""Ablation: which recurrent layers or heads a plan's error comes from, each of them alone in its precision.

Notable: for a candidate below FP32 every recurrent layer, or value head of one, is measured by a mixed plan of its own,
FP32 replay with the same length everywhere else, on the streams of the run. What it saves are bytes of a step's
traffic against FP32 replay, so that KL per byte saved says where low precision is cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from driftgate.accuracy.lockstep import LockstepResult
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.records import AblationRecord, BitwiseRecord, BytesRecord
from driftgate.accuracy.statistics import summarize_kl
from driftgate.kernels.contract import Recurrence, ReplayOptions

__all__ = ["Alone", "group_parts", "list_ablation", "measure_ablation", "replay_in_fp32"]

_LEAST_WIDTH = 4
"""Plans of one lock step at the least: three blocks beside them do not measure a plan."""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """One measurement.

    Attributes:
        name: key of the plan that is taken apart.
        layer: decoder-layer index that keeps the plan's precision.
        head: value head of the layer that alone keeps it, None for the whole layer.
        plan: the mixed plan.
    """

    name: str
    layer: int
    head: int | None
    plan: PrecisionPlan

    @property
    def key(self) -> str:
        """Of its block in the lock step."""
        head = "" if self.head is None else f" head {self.head}"
        return f"{self.name} in layer {self.layer}{head} alone"


def replay_in_fp32(options: ReplayOptions) -> ReplayOptions:
    """The same replay with an FP32 state."""
    return replace(options, read="fp32", recurrence="fp32", stochastic=False)


def list_ablation(
    candidates: Mapping[str, PrecisionPlan], layer_indices: Sequence[int], *, n_heads: int | None = None
) -> list[Alone]:
    """Every recurrent layer of every candidate whose state is below FP32 there.

    Args:
        candidates: by key.
        layer_indices: decoder-layer index of each recurrent layer.
        n_heads: value heads of a layer, to take each alone; None for whole layers.
    """
    return [
        Alone(
            name=name,
            layer=index,
            head=head,
            plan=PrecisionPlan(options=replay_in_fp32(plan.at(index)), layers=((index, plan.at(index)),), head=head),
        )
        for name, plan in candidates.items()
        for index in layer_indices
        if PrecisionPlan(options=plan.at(index)).low_precision
        for head in ([None] if n_heads is None else range(n_heads))
    ]


def group_parts(parts: Sequence[Alone], *, n_plans: int) -> list[Sequence[Alone]]:
    """What is measured in one lock step each: about as wide as that of the run, so that memory that held it does."""
    width = max(n_plans, _LEAST_WIDTH)
    return [parts[first : first + width] for first in range(0, len(parts), width)]


def measure_ablation(
    groups: Sequence[Sequence[Alone]],
    *,
    lockstep: Callable[[Mapping[str, PrecisionPlan]], LockstepResult],
    find_bytes: Callable[[PrecisionPlan], BytesRecord],
    n_heads: int,
    recurrence: Recurrence,
    stream_end: int,
) -> tuple[list[AblationRecord], list[BitwiseRecord]]:
    """Measure layers or heads alone.

    Args:
        groups: what to measure, lock step by lock step.
        lockstep: runs plans beside the baseline on the streams of the run.
        find_bytes: bytes and traffic of a plan on the model, of whole layers.
        n_heads: value heads of a layer; what one of them saves is its share, since formats act on each alike.
        recurrence: of the model.
        stream_end: first position that is no stream any more; later steps are left out.

    Returns:
        One record for each measurement, by plan and there the cheapest in KL per byte first; and the baseline against
        itself in every lock step.
    """
    records, bitwise = [], []
    for group in groups:
        result = lockstep({part.key: part.plan for part in group})
        records += [_record(part, result, find_bytes, n_heads, stream_end) for part in group]
        bitwise.append(_again(result, group, recurrence))
    order = list(dict.fromkeys(part.name for group in groups for part in group))
    records.sort(key=lambda r: (order.index(r.plan), r.kl_per_byte is None, r.kl_per_byte or 0.0, r.layer, r.head or 0))
    return records, bitwise


def _record(
    part: Alone,
    result: LockstepResult,
    find_bytes: Callable[[PrecisionPlan], BytesRecord],
    n_heads: int,
    stream_end: int,
) -> AblationRecord:
    kl = summarize_kl(result.kl[part.key][:, result.positions < stream_end])
    own, plain = find_bytes(part.plan), find_bytes(PrecisionPlan(options=part.plan.options))
    share = 1 if part.head is None else n_heads
    saved = (plain.traffic_per_step - own.traffic_per_step) / share
    counters = result.counters[part.key]
    errors = result.state[part.key][result.layer_indices.index(part.layer)].mean
    invalid = None
    if counters.low_precision_reads == 0:
        invalid = "copy_not_read: no step read a low-precision state; run more steps than L"
    elif counters.requantizations == 0:
        invalid = "not_requantized: no flush wrote a low-precision state; run more steps than L"
    elif counters.nonfinite_states or kl.n_nonfinite:
        invalid = "not_finite: NaN or infinity was met"
    usable = invalid is None and kl.mean is not None and saved > 0
    return AblationRecord(
        plan=part.name,
        layer=part.layer,
        head=part.head,
        kl_mean=kl.mean,
        kl_ci_low=kl.ci_low,
        kl_ci_high=kl.ci_high,
        **{name: errors[name] for name in ("read_error", "checkpoint_error", "output_error")},
        bytes_saved=saved,
        state_ratio_saved=(plain.state_ratio - own.state_ratio) / share,
        kl_per_byte=kl.mean / saved if usable and kl.mean is not None else None,
        invalid=invalid,
    )


def _again(result: LockstepResult, group: Sequence[Alone], recurrence: Recurrence) -> BitwiseRecord:
    different = result.again
    return BitwiseRecord(
        invariant="A/A",
        recurrence=recurrence.value,
        case={"where": f"logits and layer outputs of the ablation from {group[0].key}", "compared": result.n_logits},
        equal=different is None,
        n_different=0 if different is None else 1,
        max_ulp=0,
        first_different=None if different is None else {"step": different.step, "layer": different.layer},
    )
