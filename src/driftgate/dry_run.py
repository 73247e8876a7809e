"""What a run would do and what its tasks can show, before anything is spent: ``driftgate run --dry-run``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftgate.memory import format_bytes
from driftgate.run_folder import default_out

if TYPE_CHECKING:
    from driftgate.main_job import Checked

__all__ = ["describe"]

FLIP_RATES = (0.0, 0.02, 0.05)
"""Fractions of answers that flip when nothing is lost, for which the power is given."""


def describe(suite: str, choices: dict[str, Any], *, out: Path | None) -> dict[str, Any]:
    """Everything that ``check`` found, and for every task the chance that a plan which loses nothing passes.

    Args:
        suite: bundled name or YAML file.
        choices: as ``check`` takes them.
        out: run folder, None for a new one; nothing is written.

    Raises:
        DriftgateError: the run would be refused; the same line.
    """
    from driftgate.main_job import check

    folder = out or default_out(suite)
    checked = check(suite, out=folder, **choices)
    chosen = checked.suite
    return {
        "suite": chosen.name,
        "model": chosen.model,
        "device": checked.device,
        "backend": checked.backend.value,
        "dtype": checked.dtype or "as stored",
        "plans": [f"{name} ({role.value})" for name, role in chosen.roles().items()],
        "stream": chosen.stream,
        "streams": f"{_count(chosen.sequences, 'stream')} of {_count(chosen.steps, 'decoded step')}, "
        f"{_count(chosen.prefill, 'token')} prefilled",
        "rows of a forward": min(chosen.batch, chosen.sequences) * (len(chosen.plans) + 3),
        "memory that grows with the steps": f"about {format_bytes(checked.memory)}",
        "policy": checked.policy.name,
        "out": str(out) if out is not None else f"a new folder in {folder.parent}/",
        "tasks": _find_power(checked),
    }


def _find_power(checked: Checked) -> dict[str, Any]:
    """Questions of each task, and the chance to pass by margin and flip rate."""
    from driftgate.accuracy.power import power_noninferiority
    from driftgate.evals.experiment import check_tokens
    from driftgate.evals.tasks import make_streams

    chosen = checked.suite
    if not chosen.tasks:
        return {}
    length = chosen.steps + chosen.prefill
    streams = make_streams(tasks=chosen.tasks, n_sequences=chosen.sequences, length=length, seed=chosen.seed)
    check_tokens(streams.token_ids, vocab_size=checked.config.vocab_size, model=chosen.model)
    margins = [c.margin for c in checked.policy.checks if c.check == "task_loss" and c.margin is not None]
    power = {}
    for task, n in Counter(q.task for q in streams.questions).items():
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
    return power


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
