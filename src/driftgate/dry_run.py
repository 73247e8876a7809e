"""What a run would do and what its tasks can show, before anything is spent: ``driftgate run --dry-run``."""

from __future__ import annotations

from collections import Counter
from typing import Any

__all__ = ["describe"]

FLIP_RATES = (0.0, 0.02, 0.05)
"""Fractions of answers that flip when nothing is lost, for which the power is given."""


def describe(suite: str, choices: dict[str, Any]) -> dict[str, Any]:
    """Sizes of a run, and for every task the chance that a plan which loses nothing passes.

    Args:
        suite: bundled name or YAML file.
        choices: as ``prepare`` takes them.
    """
    from driftgate.accuracy.policy import load_policy
    from driftgate.accuracy.power import power_noninferiority
    from driftgate.evals.tasks import load_task, make_streams
    from driftgate.main_job import choose_suite

    chosen = choose_suite(suite, choices)
    policy = load_policy(choices.get("policy"))
    for name in chosen.tasks:
        load_task(name)
    length = chosen.steps + chosen.prefill
    questions = (
        make_streams(tasks=chosen.tasks, n_sequences=chosen.sequences, length=length, seed=chosen.seed).questions
        if chosen.tasks
        else ()
    )
    margins = [c.margin for c in policy.checks if c.check == "task_loss" and c.margin is not None]
    power = {}
    for task, n in Counter(q.task for q in questions).items():
        each = max(1, n // chosen.sequences)
        power[task] = {
            "questions": n,
            "power": {
                f"margin {margin:g}, {rate:.0%} flips": round(
                    power_noninferiority(chosen.sequences, each, rate, margin, replicates=500), 2
                )
                for margin in margins
                for rate in FLIP_RATES
            },
        }
    rows = min(chosen.batch, chosen.sequences) * (len(chosen.plans) + 3)
    return {
        "suite": chosen.name,
        "model": chosen.model,
        "plans": [f"{name} ({role.value})" for name, role in chosen.roles().items()],
        "stream": chosen.stream,
        "streams": f"{chosen.sequences} of {chosen.steps} decoded steps, {chosen.prefill} tokens prefilled",
        "rows of a forward": rows,
        "policy": policy.name,
        "tasks": power,
    }
