"""What a run folder holds: the schema of results.json, the manifest, and the frames; read and written here alone.

Notable: no torch, so that a stored run renders on a laptop. Files are written beside their place and renamed, so that
an interrupted run never leaves half a file. Undefined numbers are null, never NaN.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from driftgate.errors import InputError

__all__ = [
    "SCHEMA_VERSION", "AblationRecord", "Backends", "BitwiseRecord", "BytesRecord", "CounterRecord", "CrossCheck",
    "DeltaP", "DriftRecord", "KlRecord", "LayerState", "Manifest", "NoiseFloor", "PerplexityRecord", "PlanRecord",
    "ProportionRecord", "ReferenceRecord", "Results", "RunData", "StateRecord", "TaskRecord", "ToleranceRecord",
    "Verdict", "VerdictRecord", "load_run", "save_run", "write_text",
]  # fmt: skip

SCHEMA_VERSION = 1
STEP_COLUMNS = (
    "plan", "sequence", "position", "window_offset", "kl", "same_top", "delta_p", "nll_plan", "nll_baseline",
)  # fmt: skip
ITEM_COLUMNS = (
    "plan", "task", "item_id", "repeat", "answer", "gold", "correct", "n_tokens", "capped", "parse_reason",
)  # fmt: skip
Verdict = Literal["pass", "fail", "inconclusive", "invalid"]


class Record(BaseModel):
    """Base of all records: unknown keys are refused, non-finite numbers become null."""

    model_config = ConfigDict(extra="forbid")

    def model_post_init(self, _context: Any) -> None:
        for name in type(self).model_fields:
            value = getattr(self, name)
            finite = _null_nonfinite(value)
            if finite is not value:
                setattr(self, name, finite)


def _null_nonfinite(value: Any) -> Any:
    """The value itself, or a copy with None for every non-finite float where there is one."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        items = {k: _null_nonfinite(v) for k, v in value.items()}
        return items if any(items[k] is not value[k] for k in items) else value
    if isinstance(value, list):
        entries = [_null_nonfinite(v) for v in value]
        return entries if any(a is not b for a, b in zip(entries, value, strict=True)) else value
    return value


R = TypeVar("R", bound=Record)


class KlRecord(Record):
    """KL(baseline‖plan) in nats per step; names follow llama.cpp's --kl-divergence."""

    mean: float | None
    ci_low: float | None
    ci_high: float | None
    geo_mean: float | None
    geo_ci_low: float | None
    geo_ci_high: float | None
    max: float | None
    p99_9: float | None
    p99: float | None
    p95: float | None
    p90: float | None
    median: float | None
    p10: float | None
    p5: float | None
    p1: float | None
    p0_1: float | None
    min: float | None
    n_steps: int
    n_effective: float | None
    n_nonfinite: int
    first_nonfinite_step: int | None
    n_negative: int


class ProportionRecord(Record):
    """A fraction with its two-sided 95 % interval."""

    value: float | None
    ci_low: float | None
    ci_high: float | None


class DeltaP(Record):
    """p_plan - p_baseline of the true next token."""

    mean: float | None
    rms: float | None
    max: float | None
    min: float | None


class PerplexityRecord(Record):
    """exp of the mean negative log likelihood of the true next token, and plan / baseline."""

    plan: float | None
    baseline: float | None
    ratio: float | None
    ratio_ci_low: float | None
    ratio_ci_high: float | None


class OffsetPoint(Record):
    """Mean KL of the steps that found ``offset`` buffered entries."""

    offset: int
    mean: float | None
    n: int


class PositionPoint(Record):
    """Mean KL of the positions low … high (inclusive)."""

    low: int
    high: int
    mean: float | None
    n: int


class DriftRecord(Record):
    """How KL grows with position: slopes of ln KL on ln position."""

    slope: float | None
    slope_ci_low: float | None
    slope_ci_high: float | None
    excess_slope: float | None
    law: Literal["flat", "saturating", "growing"] | None
    by_window_offset: list[OffsetPoint]
    by_position: list[PositionPoint]


class LayerState(Record):
    """Relative Frobenius errors of one recurrent layer, means over heads and flushes (output: steps)."""

    layer: int
    read_error: float | None
    checkpoint_error: float | None
    trajectory_error: float | None
    output_error: float | None
    read_error_max: float | None
    checkpoint_error_max: float | None
    trajectory_error_max: float | None
    output_error_max: float | None


class StateRecord(Record):
    """State errors by layer."""

    layers: list[LayerState]


class CounterRecord(Record):
    """Events counted per (row, layer, step); prefill counts as nothing.

    ``nonfinite_states`` counts sequences in which a state with NaN or infinity was stored.
    """

    low_precision_reads: int
    flushes: int
    requantizations: int
    nonfinite_states: int = 0


class BytesRecord(Record):
    """Bytes per sequence over all recurrent layers; traffic per step by formula."""

    checkpoint: int
    read_copy: int
    buffer: int
    traffic_per_step: float
    traffic_ratio: float
    state_ratio: float


class TaskRecord(Record):
    """Paired comparison of one plan with the baseline on one task; accuracies and bounds are fractions.

    Attributes:
        accuracy_completed, baseline_accuracy_completed: over answers that neither hit the cap nor failed to parse.
        baseline_cap_hits, baseline_unparsed: answers of the baseline.
        letters, baseline_letters: how often each answer was given, where there are four.
        chance: fraction that guessing gets right.
        mass: mean probability on the four letters, where choices were scored.
        ppl: of the task's text, for the task ``ppl``.
    """

    n: int
    repeats: int
    accuracy: float | None
    baseline_accuracy: float | None
    delta: float | None
    ci_low: float | None
    ci_high: float | None
    lost: int
    gained: int
    p_value: float | None
    cap_hits: int
    unparsed: int
    verdict: Verdict
    accuracy_completed: float | None = None
    baseline_accuracy_completed: float | None = None
    baseline_cap_hits: int = 0
    baseline_unparsed: int = 0
    letters: dict[str, int] | None = None
    baseline_letters: dict[str, int] | None = None
    chance: float = 0.25
    mass: float | None = None
    ppl: PerplexityRecord | None = None


class PlanRecord(Record):
    """Everything measured of one plan."""

    role: Literal["candidate", "control"]
    kl: KlRecord
    same_top_p: ProportionRecord
    delta_p: DeltaP
    ppl: PerplexityRecord
    drift: DriftRecord
    state: StateRecord
    counters: CounterRecord
    bytes: BytesRecord
    free_running: dict[str, Any] | None = None
    tasks: dict[str, TaskRecord] = Field(default_factory=dict)


class BitwiseRecord(Record):
    """One bit-exact case: equal, or where and by how much it differs."""

    invariant: str
    recurrence: str
    case: dict[str, Any]
    equal: bool
    n_different: int
    max_ulp: int
    first_different: dict[str, Any] | None


class ToleranceRecord(Record):
    """One case of T1 against FP64.

    Attributes:
        error, bound: of the element nearest to its derived bound; error null where it was not finite.
        scale: greatest magnitude of the FP64 results, which makes the others relative.
        greatest_error: of all elements, null where one was not finite.
        within: whether every element keeps its bound.
    """

    recurrence: str
    case: dict[str, Any]
    what: Literal["output", "state"]
    error: float | None
    bound: float
    scale: float
    greatest_error: float | None
    within: bool


class NoiseFloor(Record):
    """KL of FP32 under another legal launch."""

    kl_mean: float | None
    kl_max: float | None


class CrossCheck(Record):
    """Greatest difference of logits between the drift backend and the interpreted Triton kernels, same tokens."""

    steps: int
    max_abs_difference: float | None
    by_plan: dict[str, float | None] = Field(default_factory=dict)


class Backends(Record):
    """Which backend produced which figures."""

    drift: Literal["triton", "triton-interpret", "torch"]
    tasks: Literal["triton", "triton-interpret", "torch"]
    cross_check: CrossCheck | None


class VerdictRecord(Record):
    """One check of a policy on one plan; ``value`` is the one-sided 95 % bound that was compared with ``limit``."""

    plan: str
    check: str
    value: float | None
    limit: float | None
    verdict: Verdict
    reason: str


class AblationRecord(Record):
    """A recurrent layer, or a value head of one, alone in a plan's precision; FP32 replay everywhere else.

    Attributes:
        plan: key of the plan that was taken apart.
        layer: decoder-layer index.
        head: value head, null for the whole layer.
        kl_mean, kl_ci_low, kl_ci_high: nats per step over the stream positions.
        read_error, checkpoint_error, output_error: of this layer or head, as in ``LayerState``.
        bytes_saved: of a step's traffic per sequence, against FP32 replay in every layer.
        state_ratio_saved: of the plan's state ratio, likewise.
        kl_per_byte: mean KL over bytes saved; null where nothing is saved or nothing was measured.
        invalid: why it was not measured, null if it was.
    """

    plan: str
    layer: int
    head: int | None = None
    kl_mean: float | None
    kl_ci_low: float | None
    kl_ci_high: float | None
    read_error: float | None
    checkpoint_error: float | None
    output_error: float | None
    bytes_saved: float
    state_ratio_saved: float
    kl_per_byte: float | None
    invalid: str | None


class ReferenceRecord(Record):
    """KL(reference model‖model), both with an FP32 state, on the tokens of the run."""

    model: str
    kl: KlRecord
    same_top_p: ProportionRecord


class Results(Record):
    """results.json."""

    schema_version: Literal[1] = 1
    verdict: Literal["pass", "fail", "inconclusive"]
    baseline: str = "baseline"
    model: dict[str, Any]
    backend: Backends
    plans: dict[str, PlanRecord]
    bitwise: list[BitwiseRecord]
    tolerance: list[ToleranceRecord] = Field(default_factory=list)
    noise_floor: NoiseFloor
    reference: ReferenceRecord | None = None
    verdicts: list[VerdictRecord]
    ablation: list[AblationRecord] = Field(default_factory=list)


class Manifest(Record):
    """manifest.json: what is needed to repeat a run and to see in what two runs differ."""

    schema_version: Literal[1] = 1
    command: list[str]
    suite: dict[str, Any]
    policy: dict[str, Any]
    versions: dict[str, str]
    device: dict[str, Any]
    backend: dict[str, Any]
    hashes: dict[str, str]
    seeds: dict[str, int]
    plans: dict[str, dict[str, Any]]
    streams: dict[str, Any]
    tasks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    digests: dict[str, list[int]] = Field(default_factory=dict)
    timing: dict[str, float]
    created: str


@dataclass(frozen=True)
class RunData:
    """A stored run.

    Attributes:
        results, manifest: the two JSON documents.
        steps: plan, sequence, position, window_offset, kl, same_top, delta_p, nll_plan, nll_baseline.
        items: plan, task, item_id, repeat, answer, gold, correct, n_tokens, capped, parse_reason.
    """

    results: Results
    manifest: Manifest
    steps: pd.DataFrame
    items: pd.DataFrame


def load_run(folder: str | Path) -> RunData:
    """Read a run folder.

    Raises:
        InputError: a file is missing, cut short or of another schema; names the file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"run folder {folder} does not exist; give the folder that `driftgate run --out` wrote")
    results = _parse(folder / "results.json", Results)
    manifest = _parse(folder / "manifest.json", Manifest)
    steps = _frame(folder / "steps.parquet", STEP_COLUMNS)
    items = _frame(folder / "items.parquet", ITEM_COLUMNS)
    _check_hashes(folder, manifest)
    return RunData(results, manifest, steps, items)


def save_run(folder: str | Path, run: RunData) -> None:
    """Write the four data files of a run, each atomically; results.json last, so that its presence means complete.

    The manifest keeps the sha256 of the other three: figures and frames that do not belong together are refused.
    """
    folder = Path(folder)
    _write(folder / "steps.parquet", lambda path: run.steps.to_parquet(path, index=False))
    _write(folder / "items.parquet", lambda path: run.items.to_parquet(path, index=False))
    results = _json(run.results)
    run.manifest.hashes.update(
        {f"run/{name}": _sha256((folder / name).read_bytes()) for name in ("steps.parquet", "items.parquet")}
        | {"run/results.json": _sha256(results.encode())}
    )
    write_text(folder / "manifest.json", _json(run.manifest))
    write_text(folder / "results.json", results)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _check_hashes(folder: Path, manifest: Manifest) -> None:
    for name in ("results.json", "steps.parquet", "items.parquet"):
        if manifest.hashes.get(f"run/{name}") != _sha256((folder / name).read_bytes()):
            raise InputError(f"{folder / name} is not the file that this run wrote; run it again")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    _write(path, lambda temporary: Path(temporary).write_text(text, encoding="utf-8"))


def _write(path: Path, writer: Callable[[str], Any]) -> None:
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; choose another --out") from error
    try:
        writer(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; choose another --out") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def _json(record: Record) -> str:
    return json.dumps(record.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"


def _parse(path: Path, kind: type[R]) -> R:
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing; the run did not finish, run it again") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is damaged: {error}; run it again") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise InputError(f"{path}: {where}: {first['msg']}; it is not a run of schema {SCHEMA_VERSION}") from error


def _frame(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(path)
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing; the run did not finish, run it again") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no readable parquet file: {error}".splitlines()[0]) from error
    missing = [c for c in columns if c not in frame.columns]
    if missing:
        raise InputError(f"{path} has no column {missing[0]}; it is not a run of schema {SCHEMA_VERSION}")
    return frame
