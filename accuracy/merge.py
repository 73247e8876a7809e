"""A run with more plans, from a finished one and one of the added plans on the same streams; no torch.

Notable: figures of two runs stand side by side only where the baseline was the same, bit for bit, in both: its logits
at every step, the streams, the prompts, the model, the versions and the device.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pandas as pd

from driftgate.accuracy.analysis import summarize_plan
from driftgate.accuracy.items import BASELINE
from driftgate.accuracy.mixed import read_plan
from driftgate.accuracy.records import CrossCheck, Manifest, RunData
from driftgate.errors import InputError

__all__ = ["merge_runs", "refuse_changed_setting", "refuse_unlike"]


def refuse_unlike(base: Manifest, added: Manifest) -> None:
    """Refuse two runs whose baselines were not the same.

    Raises:
        InputError: names the first thing that differs.
    """
    parts: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
        "versions": (base.versions, added.versions),
        "device": (base.device, added.device),
        "backend": (base.backend, added.backend),
        "hashes": (_measured(base.hashes), _measured(added.hashes)),
        "streams": (base.streams, added.streams),
        "tasks": (base.tasks, added.tasks),
        "logits of the baseline in": (base.digests, added.digests),
    }
    if not base.digests:
        raise InputError("the run to extend keeps no digest of its baseline; it is of an older version, run it again")
    for part, (before, now) in parts.items():
        _refuse_other(part, before, now)


def refuse_changed_setting(
    base: Manifest, *, versions: Mapping[str, str], device: Mapping[str, Any], model: Mapping[str, str]
) -> None:
    """The part of ``refuse_unlike`` that is known once the model is loaded: nothing is decoded in vain.

    Args:
        base: of the run to extend.
        versions, device: of this process.
        model: sha256 of each file of the checkpoint.

    Raises:
        InputError: names the first thing that differs.
    """
    before = {name: value for name, value in base.hashes.items() if name.startswith("model/")}
    now = {f"model/{name}": value for name, value in model.items()}
    _refuse_other("versions", base.versions, versions)
    _refuse_other("device", base.device, device)
    _refuse_other("hashes", before, now)


def _refuse_other(part: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise InputError(f"the run cannot be extended: {part} {name} differ; start a run with all plans")


def _measured(hashes: Mapping[str, str]) -> dict[str, str]:
    """What the added plans stand on: neither files of the run nor the reference model, which is compared once."""
    return {name: value for name, value in hashes.items() if not name.startswith(("run/", "reference/"))}


def merge_runs(base: RunData, added: RunData) -> RunData:
    """All plans of both runs; verdicts are those of neither, and to be decided again.

    Args:
        base: finished run.
        added: the same baseline with other plans.

    Raises:
        InputError: the baselines differ, or a plan is in both.
    """
    refuse_unlike(base.manifest, added.manifest)
    both = base.results.plans.keys() & added.results.plans.keys()
    if both:
        raise InputError(f"plan {min(both)} is in the run already; leave it out")
    results, manifest = copy.deepcopy(base.results), copy.deepcopy(base.manifest)
    results.plans |= added.results.plans
    results.ablation += added.results.ablation
    results.bitwise += [record for record in added.results.bitwise if record not in results.bitwise]
    results.tolerance += [record for record in added.results.tolerance if record not in results.tolerance]
    results.backend.cross_check = _merge_checks(base.results.backend.cross_check, added.results.backend.cross_check)
    manifest.plans |= added.manifest.plans
    manifest.suite = {**manifest.suite, "plans": [*base.manifest.suite["plans"], *added.manifest.suite["plans"]]}
    manifest.command = added.manifest.command
    manifest.created = added.manifest.created
    later = added.manifest.timing
    manifest.timing = {name: value + later.get(name, 0.0) for name, value in base.manifest.timing.items()}
    manifest.hashes = {name: value for name, value in manifest.hashes.items() if not name.startswith("run/")}
    own = added.items[added.items["plan"] != BASELINE]
    steps = pd.concat([base.steps, added.steps], ignore_index=True)
    steps["plan"] = pd.Categorical(steps["plan"], categories=list(results.plans))
    for name, record in results.plans.items():  # a plan's excess slope stands on another plan's steps
        plan = read_plan(name, manifest.plans.get(name, {}))
        for field, value in summarize_plan(steps, name, plan).records().items():
            setattr(record, field, value)
    items = pd.concat([base.items, own], ignore_index=True) if len(own) else base.items
    return RunData(results, manifest, steps, items)


def _merge_checks(base: CrossCheck | None, added: CrossCheck | None) -> CrossCheck | None:
    if base is None or added is None:
        return base
    greatest = [base.max_abs_difference, added.max_abs_difference]
    known = [value for value in greatest if value is not None]
    return CrossCheck(
        steps=min(base.steps, added.steps),
        max_abs_difference=max(known) if len(known) == len(greatest) else None,
        by_plan={**added.by_plan, **base.by_plan},
    )
