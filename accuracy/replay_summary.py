"""From the errors of every step to records and the steps frame of a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch

from driftgate.accuracy.drift_law import DriftLaw, by_position, by_window_offset, drift_law
from driftgate.accuracy.dump import Dump, LayerDump
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.records import DriftRecord, OffsetPoint, PositionPoint
from driftgate.accuracy.replay_layer import BaselineErrors, PlanErrors
from driftgate.accuracy.replay_records import (
    BaselineHead,
    BaselineLayer,
    BaselineReplay,
    Errors,
    HeadReplay,
    LayerReplay,
    Slope,
)

__all__ = [
    "make_frame", "mean_by_step", "mean_errors", "summarize_drift", "summarize_floor", "summarize_layer",
]  # fmt: skip

_KINDS = ("output_error", "checkpoint_error", "read_error", "leak", "leak_predicted", "leak_unexplained")


def summarize_layer(layer: LayerDump, found: PlanErrors, plan: PrecisionPlan) -> LayerReplay:
    """One plan in one layer, its heads included."""
    heads = [
        HeadReplay(head=head, **_summaries({k: _pick(found, k, head) for k in _KINDS}))
        for head in range(layer.shape.value_heads)
    ]
    law = _law(mean_by_step([found.output_error]), None, plan)
    slope = Slope(**{name: getattr(law, name) for name in Slope.model_fields})
    return LayerReplay(
        layer=layer.layer,
        recurrence=layer.recurrence.value,
        drift=slope,
        heads=heads,
        **mean_errors(heads).model_dump(),
    )


def _pick(found: PlanErrors, kind: str, head: int) -> np.ndarray | None:
    """[sequences, steps or flushes] of one head."""
    errors = getattr(found, kind)
    return None if errors is None else errors[:, head].numpy()


def _summaries(by_kind: Mapping[str, np.ndarray | None]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for kind, values in by_kind.items():
        found[kind] = None if values is None else float(values.mean())
        found[f"{kind}_max"] = None if values is None else float(values.max())
    return found


def mean_errors(records: Sequence[Errors]) -> Errors:
    """Means of means and greatest of greatest; null where one of them is."""
    found: dict[str, float | None] = {}
    for name in Errors.model_fields:
        values = [getattr(record, name) for record in records]
        known = [value for value in values if value is not None]
        greatest = name.endswith("_max")
        found[name] = None if len(known) < len(values) else float(np.max(known) if greatest else np.mean(known))
    return Errors(**found)


def mean_by_step(errors: Sequence[torch.Tensor]) -> np.ndarray:
    """[sequences, steps], mean over the heads of each layer, then over layers."""
    return torch.stack([e.mean(dim=1) for e in errors]).mean(dim=0).numpy()


def _law(output: np.ndarray, reference: np.ndarray | None, plan: PrecisionPlan) -> DriftLaw:
    positions = np.arange(output.shape[1])
    return drift_law(output, positions, cycle=max(1, plan.options.length), reference=reference)


def summarize_drift(
    output: np.ndarray, reference: np.ndarray | None, plan: PrecisionPlan, offsets: list[int]
) -> DriftRecord:
    """How output errors [sequences, steps] grow; ``reference``: those of the plan with an FP32 recurrence."""
    law = _law(output, reference, plan)
    fields = {k: getattr(law, k) for k in ("slope", "slope_ci_low", "slope_ci_high", "excess_slope", "law")}
    return DriftRecord(
        **fields,
        by_window_offset=[OffsetPoint(**p) for p in by_window_offset(output, offsets)],
        by_position=[PositionPoint(**p) for p in by_position(output)],
    )


def summarize_floor(layers: Sequence[LayerDump], found: Sequence[BaselineErrors]) -> BaselineReplay:
    """The baseline against FP64, layer by layer."""
    records = []
    for layer, errors in zip(layers, found, strict=True):
        shape, output = layer.shape, errors.output_error
        by_head = zip(output.mean(dim=(0, 2)).tolist(), errors.state_error.mean(dim=0).tolist(), strict=True)
        records.append(
            BaselineLayer(
                layer=layer.layer, recurrence=layer.recurrence.value, key_heads=shape.key_heads,
                value_heads=shape.value_heads, d_k=shape.d_k, d_v=shape.d_v, output_error=float(output.mean()),
                output_error_max=float(output.max()), state_error=float(errors.state_error.mean()),
                heads=[BaselineHead(head=n, output_error=o, state_error=s) for n, (o, s) in enumerate(by_head)],
            )
        )  # fmt: skip
    means = {
        name: np.mean([getattr(r, name) for r in records], dtype=float) for name in ("output_error", "state_error")
    }
    return BaselineReplay(**{name: float(value) for name, value in means.items()}, layers=records)


def make_frame(dump: Dump, by_plan: Mapping[str, Sequence[PlanErrors]]) -> pd.DataFrame:
    """One row a plan, layer, head, sequence and step."""
    frames = []
    for name, layers in by_plan.items():
        for layer, errors in zip(dump.layers, layers, strict=True):
            sequences, heads, steps = errors.output_error.shape
            grid = np.indices((heads, sequences, steps)).reshape(3, -1)
            frames.append(
                pd.DataFrame(
                    {
                        "plan": name,
                        "layer": np.int32(layer.layer),
                        "head": grid[0].astype(np.int32),
                        "sequence": grid[1].astype(np.int32),
                        "position": (grid[2] + dump.start).astype(np.int32),
                        "window_offset": np.asarray(errors.offsets, dtype=np.int16)[grid[2]],
                        "output_error": errors.output_error.transpose(0, 1).reshape(-1).numpy(),
                    }
                )
            )
    frame = pd.concat(frames, ignore_index=True)
    frame["plan"] = frame["plan"].astype("category")
    return frame
