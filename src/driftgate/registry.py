"""What can be named: one function per catalogue of ``driftgate ls``, each giving rows of plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["CATALOGUES"]

Rows = list[dict[str, Any]]


def list_models() -> Rows:
    """Embedded checkpoints."""
    from driftgate.evals.checkpoints import list_checkpoints

    rows = []
    for name, folder in list_checkpoints().items():
        size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
        rows.append({"model": name, "weights": f"{size / 1e6:.1f} MB", "card": str(folder / "CARD.md")})
    return rows


def list_families() -> Rows:
    """Model families."""
    from driftgate.accuracy.adapters.families import load_families

    return [
        {"family": f.name, "recurrence": f.recurrence.value, "model_type": ", ".join(f.model_types)}
        for f in load_families().values()
    ]


def list_plans() -> Rows:
    """Plans of the bundled suites, with their state traffic on a 128 x 128 head."""
    from driftgate.accuracy.plans import PrecisionPlan
    from driftgate.evals.suite import bundled_suites, load_suite
    from driftgate.kernels.contract import HeadShape
    from driftgate.kernels.traffic import compute_traffic, gdn_entry

    shape = HeadShape(key_heads=16, value_heads=32, d_k=128, d_v=128)
    seen: dict[str, list[str]] = {}
    for suite in bundled_suites():
        for name, plan in load_suite(suite).named_plans().items():
            if not plan.layers:
                seen.setdefault(name, []).append(suite)
    rows: Rows = [{"plan": "baseline", "traffic of a GDN 16/32 x 128 x 128 layer, BF16": "1.000", "suites": "all"}]
    for name, suites in seen.items():
        options = PrecisionPlan.parse(name).options
        traffic = compute_traffic(shape, options, gdn_entry(shape, options, activation_bytes=2))
        rows.append({"plan": name, list(rows[0])[1]: f"{traffic.ratio:.3f}", "suites": ", ".join(suites)})
    return rows


def list_tasks() -> Rows:
    """Tasks."""
    from driftgate.evals.tasks import list_tasks as names
    from driftgate.evals.tasks import load_task

    return [
        {"task": t.name, "version": t.version, "chance": t.chance, "what": t.description}
        for t in map(load_task, names())
    ]


def list_formats() -> Rows:
    """Number formats."""
    from driftgate.quant import FORMATS

    return [
        {"format": f.name, "bits": f.bits, "bytes of a row of 128": f.bytes_per_row(128), "what": f.title}
        for f in FORMATS.values()
    ]


def list_suites() -> Rows:
    """Bundled suites."""
    from driftgate.evals.suite import bundled_suites, load_suite

    rows = []
    for name in bundled_suites():
        suite = load_suite(name)
        rows.append({"suite": name, "plans": len(suite.plans), "steps": suite.steps, "what": suite.title})
    return rows


CATALOGUES: dict[str, Callable[[], Rows]] = {
    "models": list_models,
    "families": list_families,
    "plans": list_plans,
    "tasks": list_tasks,
    "formats": list_formats,
    "suites": list_suites,
}
