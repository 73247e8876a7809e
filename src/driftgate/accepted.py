"""The last accepted run, as a small file that CI keeps: figures with their intervals, and what they were measured on.

Notable: a figure is worse when it lies beyond the far end of the accepted one's 95 % interval; a figure without an
interval is compared only where it was exactly 0. A plan that cannot be told from the baseline is not worse, whatever
the last bits of another machine give. Controls are neither stored nor compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from driftgate.accuracy.drift_checks import SENSITIVITY
from driftgate.accuracy.records import PlanRecord, RunData, Verdict, VerdictRecord, write_text
from driftgate.accuracy.statistics import quantile_interval
from driftgate.accuracy.verdicts import record_verdict
from driftgate.errors import InputError

__all__ = [
    "Accepted",
    "AcceptedFigure",
    "accept",
    "compare_accepted",
    "describe_identity",
    "differing",
    "load_accepted",
    "save_accepted",
]

PREFIX = "accepted:"
HIGHER_IS_BETTER = ("same_top_p",)
OF_LOGITS = ("kl_mean", "kl_p99_9", "same_top_p", "ppl_ratio", "drift_slope")
"""Figures that say nothing where the KL is that of rounding."""
NOT_IDENTITY = ("name", "title", "model", "plans", "cross_check_cycles")
"""Fields of a suite that do not change what a plan's figures are measured on."""


class AcceptedFigure(BaseModel):
    """A figure of a plan with its two-sided 95 % interval, in the unit of the policy's check of that name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float = Field(allow_inf_nan=False)
    low: float | None = Field(default=None, allow_inf_nan=False)
    high: float | None = Field(default=None, allow_inf_nan=False)


class Accepted(BaseModel):
    """The file.

    Attributes:
        identity: what the figures were measured on; see `describe_identity`.
        created: time of the run.
        plans: plan to check to figure; candidates only.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    identity: dict[str, dict[str, Any]]
    created: str
    plans: dict[str, dict[str, AcceptedFigure]]


def describe_identity(data: RunData) -> dict[str, dict[str, Any]]:
    """Model (hashes of its files, type of activations) and suite (streams, sizes, tasks, seed) of a run."""
    hashes = {name: text for name, text in data.manifest.hashes.items() if name.startswith("model/")}
    suite = {name: value for name, value in data.manifest.suite.items() if name not in NOT_IDENTITY}
    return {"model": {"dtype": data.results.model.get("dtype"), **hashes}, "suite": suite}


def accept(data: RunData) -> Accepted:
    """What is kept of a run."""
    return Accepted(
        identity=describe_identity(data),
        created=data.manifest.created,
        plans={
            name: _figures(data, name, record)
            for name, record in data.results.plans.items()
            if record.role == "candidate"
        },
    )


def _figures(data: RunData, name: str, record: PlanRecord) -> dict[str, AcceptedFigure]:
    """Figures by the name of the check that has a limit for them; unknown ones are left out."""
    kl, top, ppl, drift = record.kl, record.same_top_p, record.ppl, record.drift
    values = data.steps[data.steps["plan"] == name]["kl"].to_numpy()
    tail = (
        quantile_interval(values, 0.999, confidence=0.95) if np.isfinite(values).all() and len(values) else (None, None)
    )
    errors = [layer.checkpoint_error for layer in record.state.layers if layer.checkpoint_error is not None]
    found: dict[str, tuple[float | None, float | None, float | None]] = {
        "kl_mean": (kl.mean, kl.ci_low, kl.ci_high),
        "kl_p99_9": (kl.p99_9, *tail),
        "same_top_p": (top.value, top.ci_low, top.ci_high),
        "ppl_ratio": (ppl.ratio, ppl.ratio_ci_low, ppl.ratio_ci_high),
        "drift_slope": (drift.slope, drift.slope_ci_low, drift.slope_ci_high),
        "checkpoint_error": (max(errors, default=None), None, None),
    }
    for task, answers in record.tasks.items():
        found[f"task_loss:{task}"] = (_points(answers.delta), _points(answers.ci_high), _points(answers.ci_low))
    return {
        check: AcceptedFigure(value=value, low=low, high=high)
        for check, (value, low, high) in found.items()
        if value is not None
    }


def _points(delta: float | None) -> float | None:
    """A difference of accuracies as points lost; 0.0 and not -0.0."""
    return None if delta is None else -100 * delta + 0.0


def compare_accepted(data: RunData, accepted: Accepted) -> list[VerdictRecord]:
    """Verdicts of a run's candidates against the last accepted run, one for each plan and figure.

    Raises:
        InputError: the two were not measured on the same model and suite.
    """
    different = differing(describe_identity(data), accepted.identity)
    if different:
        raise InputError(f"the accepted run has another {', '.join(different)}; accept a run of this model and suite")
    verdicts = []
    for name, figures in accepted.plans.items():
        record = data.results.plans.get(name)
        if record is None:
            reason = "the accepted run has this plan and this run has not; accept a run again to drop it"
            verdicts.append(record_verdict(name, f"{PREFIX}plan", "inconclusive", reason))
        elif record.role == "candidate":
            now, quiet = _figures(data, name, record), _is_quiet(data, record)
            for check, before in figures.items():
                verdicts += _compare(name, check, now.get(check), before, quiet=quiet and check in OF_LOGITS)
    return verdicts


def _is_quiet(data: RunData, record: PlanRecord) -> bool:
    """Whether the mean KL of a plan is that of FP32 under another launch."""
    mean, floor = record.kl.mean, data.results.noise_floor.kl_mean
    return mean is not None and (mean == 0.0 or (floor is not None and mean <= SENSITIVITY * floor))


def _compare(
    name: str, check: str, now: AcceptedFigure | None, before: AcceptedFigure, *, quiet: bool
) -> list[VerdictRecord]:
    upward = check in HIGHER_IS_BETTER
    bound = before.low if upward else before.high
    if bound is None and before.value != 0.0:
        return []
    limit = before.value if bound is None else bound
    if now is None:
        reason = f"accepted {before.value:.4g}, undefined in this run"
        return [record_verdict(name, f"{PREFIX}{check}", "inconclusive", reason, limit=limit)]
    worse = (now.value < limit if upward else now.value > limit) and not quiet
    interval = "exactly" if bound is None else f"interval [{_tell(before.low)}, {_tell(before.high)}],"
    reason = f"accepted {before.value:.4g}, {interval} now {now.value:.4g}"
    reason += f"; its mean KL is not above {SENSITIVITY:g} x the noise floor" if quiet else ""
    verdict: Verdict = "fail" if worse else "pass"
    return [record_verdict(name, f"{PREFIX}{check}", verdict, reason, value=now.value, limit=limit)]


def _tell(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4g}"


def differing(mine: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> list[str]:
    """Dotted names of the parts of two identities that differ."""
    return [
        f"{part}.{name}" if part == "suite" else f"model ({name.removeprefix('model/')})"
        for part in ("model", "suite")
        for name in dict.fromkeys([*mine.get(part, {}), *other.get(part, {})])
        if mine.get(part, {}).get(name) != other.get(part, {}).get(name)
    ]


def save_accepted(data: RunData, path: Path) -> None:
    """Write the file, whole or not at all.

    Raises:
        InputError: it cannot be written.
    """
    write_text(path, json.dumps(accept(data).model_dump(mode="json"), indent=1, allow_nan=False) + "\n")


def load_accepted(path: Path) -> Accepted:
    """Read the file.

    Raises:
        InputError: missing, damaged or of another schema.
    """
    try:
        return Accepted.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        reason = f"accepted run {path} does not exist; write it with driftgate gate RUN --write-baseline {path}"
        raise InputError(reason) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}; write it again with --write-baseline") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise InputError(f"{path}: {where}: {first['msg']}; write it again with --write-baseline") from error
