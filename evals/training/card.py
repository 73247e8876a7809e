"""CARD.md of a candidate: what it is, how it was trained, what was measured, and which conditions it meets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from driftgate.evals.training.choose import CONDITIONS, judge
from driftgate.evals.training.families import FAMILIES

__all__ = ["write_card"]


def write_card(record: Mapping[str, Any], n_parameters: int, sha256: str) -> str:
    """The card as Markdown, from the record that the training left."""
    family = FAMILIES[record["family"]]
    return "\n".join(
        [
            f"# {family.checkpoint}",
            "",
            f"A {family.title} hybrid of {n_parameters / 1e6:.2f} M parameters, FP32, trained for this package so that "
            "every command works with no download",
            "and shows precision effects of a trained recurrence. One attention layer without positions (layer 0), "
            "three recurrent layers; tokens are bytes.",
            "Licence: that of the package. Text: lexicon and appendices of the Jargon File 4.4.7 (public domain), so "
            "nothing of `evals/data/held_out.txt`.",
            "",
            *_training(record, sha256),
            "",
            *_scores(record),
            "",
        ]
    )


def _training(record: Mapping[str, Any], sha256: str) -> list[str]:
    versions, recipe = record["versions"], record["recipe"]
    start = recipe["start"]
    lines = [
        "## Training",
        f"{versions['date']}, {versions['device']}, Python {versions['python']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}; candidate `{record['name']}` of "
        "`python -P -m driftgate.evals.training.train`:",
        f"{record['steps']:,} steps of {record['batch_tokens']:,} tokens ({record['tokens'] / 1e6:.1f} M) in "
        f"{record['seconds']:.0f} s beside the other candidates. AdamW {recipe['learning_rate']:g} (betas 0.9, 0.95, "
        f"weight decay {recipe['weight_decay']:g}, clip 1.0), warm-up 3 %, flat to 55 %, then linear",
        "to 2 %; BF16 autocast; lengths 256 to 4,096. Rows: half streams (`tasks/streams.py`), a third scratchpads "
        "(`tasks/scratchpad_text.py`), the rest text.",
    ]
    if recipe["streams_alone"]:
        lines.append(f"Up to {100 * recipe['streams_alone']:g} % of the training all rows were streams.")
    if recipe["continues"] is not None:
        lines.append(f"Start: the weights of `{recipe['continues']}`; seed {start['seed']} of the rows.")
    else:
        lines.append(
            f"Start: seed {start['seed']}, log decay {start['decay'][0]:g} … {start['decay'][1]:g}, step size "
            f"{start['step']}, write strength {start['beta']}, weights N(0, {start['deviation']:g}²), taps N(0, "
            f"{start['conv_deviation'] or start['deviation']:g}²), by channel: {start['by_channel']}."
        )
    if recipe["read_noise"]:
        lines += [
            "Read noise: states were read through copies, and carried on exactly; every entry of a copy was off by a "
            "normal share of itself, of deviation",
            f"0 up to 10 % of the training and {recipe['read_noise']:g} from 30 % on. No number format was used.",
        ]
    return [
        *lines,
        "The schedule follows the clock, so a rerun gives a model like this one, not these bits. "
        f"sha256 of model.safetensors: {sha256}",
    ]


def _scores(record: Mapping[str, Any]) -> list[str]:
    scores, plans, met = record.get("scores", {}), record.get("decode", {}).get("plans", {}), judge(record)
    lengths = list(next(iter(plans.values()))["scratchpad"]) if plans else []
    columns = ["plan", "KL", "same top", "recall", "tracking", *(f"greedy {n}" for n in lengths), "sampled"]
    streams = "; ".join(
        f"{n} tokens: recall {s['recall']:.3f}, tracking {s['tracking']:.3f}"
        for n, s in scores.get("streams", {}).items()
    )
    text = scores.get("text_nats_per_byte")
    return [
        "## Scores",
        f"Whole sequences, FP32: {streams}. Held-out text: "
        f"{'not measured' if text is None else f'{text:.3f} nats per byte'}.",
        "Decoded token by token under plans emulated in torch (`training/emulation.py`; the kernels' own figures come "
        "from `driftgate run`): KL in nats against FP32 over the",
        "stream, share of its steps with the same top token, accuracy of recall and tracking at 1,536 tokens, accuracy "
        "of generated scratchpads, greedy by length and",
        "sampled at temperature 1 over all lengths, share without an answer.",
        "",
        _row([*columns, "no answer"]),
        "| --- " * (len(columns) + 1) + "|",
        *(_plan_row(name, plan) for name, plan in plans.items()),
        "",
        "Chosen by points, then by the ratio of the two KL up to 20, then by the loss under shared nvfp4: "
        + "; ".join(
            f"{words} ({points}: {'met' if met[name] else 'not met'})" for name, (points, words) in CONDITIONS.items()
        )
        + ".",
    ]


def _plan_row(name: str, plan: Mapping[str, Any]) -> str:
    shares = [plan["same_top"], plan.get("recall"), plan.get("tracking"), *plan["scratchpad"].values()]
    shares += [plan["sampled_mean"], plan["unanswered"]]
    return _row([name, f"{plan['kl']:.1e}", *("not measured" if x is None else f"{x:.3f}" for x in shares)])


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
