"""Parts of a run's records that need no policy: bits of the lock step, backends against each other, bytes, versions."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch

from driftgate.accuracy.crosscheck import CrossCheckOutcome
from driftgate.accuracy.lockstep import LockstepResult
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.records import BitwiseRecord, BytesRecord, CrossCheck
from driftgate.kernels.contract import HeadShape, Recurrence, ReplayOptions
from driftgate.kernels.traffic import compute_traffic, entry_bytes

__all__ = [
    "answers_bitwise", "bytes_record", "compare_backends", "describe_device", "hash_array", "interpreted_again",
    "lockstep_bitwise", "read_versions",
]  # fmt: skip

_PACKAGES = ("driftgate", "torch", "triton", "transformers", "numpy", "scipy", "safetensors", "tokenizers")


def lockstep_bitwise(
    result: LockstepResult, plans: dict[str, PrecisionPlan], recurrence: Recurrence
) -> list[BitwiseRecord]:
    """Bits of logits over the whole lock step: the baseline against itself, and plans that must equal it."""
    records = [
        BitwiseRecord(
            invariant="A/A",
            recurrence=recurrence.value,
            case={"where": "logits and layer outputs of every lock-step step", "compared": result.n_logits},
            equal=result.again is None,
            n_different=0 if result.again is None else 1,
            max_ulp=0,
            first_different=None if result.again is None else {"step": result.again.step, "layer": result.again.layer},
        )
    ]
    for name, plan in plans.items():
        invariant = _promise(plan)
        if invariant is not None:
            different = result.different_logits[name]
            records.append(
                BitwiseRecord(
                    invariant=invariant,
                    recurrence=recurrence.value,
                    case={"plan": name, "where": "logits of every lock-step step", "compared": result.n_logits},
                    equal=different == 0,
                    n_different=different,
                    max_ulp=0,
                    first_different=None,
                )
            )
    return records


def interpreted_again(outcome: CrossCheckOutcome, recurrence: Recurrence) -> BitwiseRecord:
    """The baseline against itself in the interpreted kernels."""
    return BitwiseRecord(
        invariant="A/A",
        recurrence=recurrence.value,
        case={"where": "logits and layer outputs of the interpreted cross-check", "steps": outcome.steps},
        equal=outcome.again_equal,
        n_different=0 if outcome.again_equal else 1,
        max_ulp=0,
        first_different=None,
    )


def answers_bitwise(task: str, *, equal: bool, n_steps: int, recurrence: Recurrence) -> BitwiseRecord:
    """The baseline against itself while the items of a task were answered."""
    return BitwiseRecord(
        invariant="A/A",
        recurrence=recurrence.value,
        case={"where": f"logits of every step of task {task}", "steps": n_steps},
        equal=equal,
        n_different=0 if equal else 1,
        max_ulp=0,
        first_different=None,
    )


def _promise(plan: PrecisionPlan) -> str | None:
    """The invariant by which a plan's outputs equal the baseline's bit for bit, None where a layer has none."""
    promises = [_promise_of(options) for options in plan.every]
    return None if None in promises else promises[0]  # one length and readout, so all are the same


def _promise_of(options: ReplayOptions) -> str | None:
    if options.recurrence != "fp32":
        return None
    if options.length == 1:
        return "I1"
    return (
        "I2"
        if options.readout.value == "exact_readout" and options.fold.value == "exact" and not options.split
        else None
    )


def compare_backends(result: LockstepResult, outcome: CrossCheckOutcome) -> CrossCheck:
    """Greatest difference of logits between the long part and the interpreted kernels, on the same tokens."""
    by_plan = {
        name: float(np.abs(result.first_logits[name][: outcome.steps].astype(np.float64) - logits).max())
        for name, logits in outcome.logits.items()
    }
    greatest = float(np.max(list(by_plan.values())))  # NaN stays NaN and is reported as null
    return CrossCheck(steps=outcome.steps, max_abs_difference=greatest, by_plan=by_plan)


def bytes_record(
    plan: PrecisionPlan,
    recurrence: Recurrence,
    shape: HeadShape,
    layer_indices: Sequence[int],
    activation_bytes: int,
) -> BytesRecord:
    """Bytes and ideal traffic of a plan on a model, its layers added up.

    Args:
        plan: of the states.
        recurrence, shape: of every recurrent layer.
        layer_indices: decoder-layer index of each recurrent layer.
        activation_bytes: of one element of an activation.
    """
    from driftgate.kernels.pool import StatePool

    stored: Counter[str] = Counter({"checkpoint": 0, "read_copy": 0, "buffer": 0})
    traffic = []
    for options, n_layers in Counter(map(plan.at, layer_indices)).items():
        pool = StatePool(
            shape,
            options,
            recurrence=recurrence,
            n_slots=1,
            n_layers=n_layers,
            activation_dtype={2: torch.bfloat16, 4: torch.float32}[activation_bytes],
        )
        stored.update(pool.bytes_per_sequence())
        entry = entry_bytes(recurrence, shape, options, activation_bytes)
        traffic.append((n_layers, compute_traffic(shape, options, entry)))
    return BytesRecord(
        checkpoint=stored["checkpoint"],
        read_copy=stored["read_copy"],
        buffer=stored["buffer"],
        traffic_per_step=sum(n * t.per_step for n, t in traffic),
        traffic_ratio=sum(n * t.ratio for n, t in traffic) / len(layer_indices),
        state_ratio=sum(n * t.state_ratio for n, t in traffic) / len(layer_indices),
    )


def read_versions() -> dict[str, str]:
    """Versions of what a run's figures depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def describe_device(model: Any) -> dict[str, Any]:
    """The device of a loaded model, as far as figures depend on it, and where its layers lie if on several."""
    device = model.device
    if device.type == "cuda":
        places = Counter(str(place) for place in (getattr(model, "hf_device_map", None) or {}).values())
        spread = {"modules_on": dict(sorted(places.items()))} if len(places) > 1 else {}
        return {"type": "cuda", "name": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, **spread}
    return {"type": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}


def hash_array(array: np.ndarray) -> str:
    """sha256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
