"""What ``driftgate replay`` writes: replay.json as records. No torch here, so that a laptop can read it."""

from __future__ import annotations

from typing import Literal

from driftgate.accuracy.records import BitwiseRecord, CounterRecord, DriftRecord, Record

__all__ = [
    "BaselineHead", "BaselineLayer", "BaselineReplay", "DumpRecord", "Errors", "HeadReplay", "LayerReplay",
    "PlanReplay", "ReplayDocument", "Slope",
]  # fmt: skip


class DumpRecord(Record):
    """Which dump was measured on.

    ``sha256`` is that over the names and hashes of all tensors; ``steps`` of ``steps_recorded`` were taken, after
    ``start`` tokens.
    """

    file: str
    schema_version: int
    sha256: str
    model: str
    recorder: str
    activation_dtype: str
    layers: list[int]
    sequences: int
    steps: int
    steps_recorded: int
    start: int


class Errors(Record):
    """Relative Frobenius norms, means and greatest; null where nothing is defined.

    ``output_error`` at every step against the FP32 baseline; at flushes ``checkpoint_error`` against its state,
    ``read_error`` of the copy against the checkpoint, ``leak`` of the checkpoint against that of the exact fold,
    ``leak_predicted`` by the law, and what the law leaves (of a low-precision checkpoint that is its rounding).
    """

    output_error: float | None
    output_error_max: float | None
    checkpoint_error: float | None
    checkpoint_error_max: float | None
    read_error: float | None
    read_error_max: float | None
    leak: float | None
    leak_max: float | None
    leak_predicted: float | None
    leak_predicted_max: float | None
    leak_unexplained: float | None
    leak_unexplained_max: float | None


class Slope(Record):
    """How a layer's output error grows with position: slope of its logarithm on ln position."""

    slope: float | None
    slope_ci_low: float | None
    slope_ci_high: float | None
    law: Literal["flat", "saturating", "growing"] | None


class HeadReplay(Errors):
    """One value head."""

    head: int


class LayerReplay(Errors):
    """One recurrent layer, by decoder-layer index."""

    layer: int
    recurrence: str
    drift: Slope
    heads: list[HeadReplay]


class PlanReplay(Record):
    """One plan.

    ``status``: ``measured``; ``bits`` a promise of bits was broken; ``invalid`` nothing of the lower precision was
    measured, or an output is not finite; ``no_sensitivity`` a control that cannot be told from the baseline. ``mean``
    is over layers; ``worst_layer`` has the greatest mean output error. ``n_nonfinite`` counts output errors.
    """

    role: Literal["candidate", "control"]
    status: Literal["measured", "bits", "invalid", "no_sensitivity"]
    reason: str
    mean: Errors
    worst_layer: int
    drift: DriftRecord
    counters: CounterRecord
    n_nonfinite: int
    layers: list[LayerReplay]


class BaselineHead(Record):
    """The FP32 baseline against the recurrence in FP64: outputs at every step, the state after the last."""

    head: int
    output_error: float | None
    state_error: float | None


class BaselineLayer(Record):
    """The same of one layer, means over heads."""

    layer: int
    recurrence: str
    key_heads: int
    value_heads: int
    d_k: int
    d_v: int
    output_error: float | None
    output_error_max: float | None
    state_error: float | None
    heads: list[BaselineHead]


class BaselineReplay(Record):
    """The same, means over layers: the floor below which errors say nothing."""

    output_error: float | None
    state_error: float | None
    layers: list[BaselineLayer]


class ReplayDocument(Record):
    """replay.json. No limit is applied: ``pass`` says that all bits are equal that must be and every plan was measured.

    ``fail``: bits differ. ``inconclusive``: a plan is ``invalid`` or ``no_sensitivity``.
    """

    schema_version: Literal[1] = 1
    verdict: Literal["pass", "fail", "inconclusive"]
    dump: DumpRecord
    backend: Literal["triton", "triton-interpret", "torch"]
    device: str
    seed: int
    baseline: BaselineReplay
    plans: dict[str, PlanReplay]
    bitwise: list[BitwiseRecord]
