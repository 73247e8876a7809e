"""What a run would do and what its tasks can show, before anything is spent: ``driftgate run --dry-run``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftgate.memory import count_rows, format_bytes
from driftgate.run_folder import default_out

if TYPE_CHECKING:
    from driftgate.evals.answering import BuiltTask
    from driftgate.main_job import Checked

__all__ = ["describe"]

FLIP_RATES = (0.0, 0.02, 0.05)
"""Fractions of answers that flip when nothing is lost, for which the power is given."""
ITEM_FLIP_RATES = (0.05, 0.1, 0.3)
"""The same of tasks whose answers are sampled or long: with temperature a third of them may."""


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
        **({"ablate": f"{chosen.ablate}, each alone in every candidate below FP32"} if chosen.ablate else {}),
        "stream": chosen.stream,
        "streams": f"{_count(chosen.sequences, 'stream')} of {_count(chosen.steps, 'decoded step')}, "
        f"{_count(chosen.prefill, 'token')} prefilled",
        "rows of a forward": count_rows(chosen, checked.config),
        "memory of the weights": f"about {format_bytes(checked.weights)}",
        "memory that grows with the steps": f"about {format_bytes(checked.memory)}",
        "policy": checked.policy.name,
        "out": str(out) if out is not None else f"a new folder in {folder.parent}/",
        "tasks": _find_power(checked),
    }


def _find_power(checked: Checked) -> dict[str, Any]:
    """Questions or items of each task, and the chance to pass by margin and flip rate."""
    margins = [c.margin for c in checked.policy.checks if c.check == "task_loss" and c.margin is not None]
    items = {built.task.name: _item_power(built, checked, margins) for built in checked.built}
    return _stream_power(checked, margins) | items


def _stream_power(checked: Checked, margins: list[float]) -> dict[str, Any]:
    from driftgate.accuracy.power import power_noninferiority
    from driftgate.evals.run_streams import check_tokens
    from driftgate.evals.tasks import make_streams

    chosen = checked.suite
    if not chosen.stream_tasks:
        return {}
    length = chosen.steps + chosen.prefill
    streams = make_streams(
        tasks=chosen.stream_tasks, n_sequences=chosen.sequences, length=length, seed=chosen.seed,
        difficulty=chosen.difficulty,
    )  # fmt: skip
    check_tokens(streams.token_ids, vocab_size=checked.config.vocab_size, model=chosen.model)
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


def _item_power(built: BuiltTask, checked: Checked, margins: list[float]) -> dict[str, Any]:
    """Items are independent; their repeats are not: the power says what more of them would buy."""
    from driftgate.accuracy.power import power_items, power_noninferiority

    units, each, repeats = built.task.count([built.prompts[i] for i in built.wanted()])
    found, more = {}, {}
    for margin in margins:
        for rate in ITEM_FLIP_RATES:
            case = f"margin {margin:g}, {rate:.0%} flips"
            if each > 1:
                power = power_noninferiority(units, each, rate, margin, repeats=repeats, replicates=300)
                found[case] = round(power, 2)
                continue
            items = power_items(units, repeats, rate, margin, replicates=300)
            found[case] = round(items.power, 2)
            more[case] = {"80 %": items.repeats_80, "90 %": items.repeats_90}
    longest = max(p.n_tokens for p in built.prompts)
    return {
        "items": units * each,
        "repeats": repeats,
        "tokens of the longest": longest,
        "decode steps at the most": built.n_steps(checked.suite.batch),
        "power": found,
        "repeats for a power of": more,
    }


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
