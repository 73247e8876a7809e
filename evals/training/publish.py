"""Write a trained candidate as a checkpoint folder in Hugging Face format, with a card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from driftgate.accuracy.models import hash_file
from driftgate.evals.training.candidate import find_recipe
from driftgate.evals.training.choose import CONDITIONS, judge
from driftgate.evals.training.families import FAMILIES
from driftgate.evals.training.model import save_tokenizer

__all__ = ["LARGEST", "publish"]

LARGEST = 8_000_000
"""Bytes of a checkpoint's weights at the most."""


def publish(record: Mapping[str, Any], weights: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors, the tokenizer files, CARD.md and training.json.

    Raises:
        ValueError: a weight is missing, unknown or not finite; the file is too large; or the folder, loaded as a
            user would, gives other logits.
    """
    family = FAMILIES[record["family"]]
    number = int(str(record["name"]).rsplit("-", 1)[1])
    model = family.build(find_recipe(record["family"], number).start)
    state = load_file(weights)
    missing, unknown = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if unknown or set(missing) - tied:
        raise ValueError(f"{weights}: missing {missing}, unknown {unknown}")
    broken = [name for name, value in state.items() if not torch.isfinite(value).all()]
    if broken:
        raise ValueError(f"{weights}: not finite: {broken}")
    model.tie_weights()
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    save_tokenizer(folder)
    _name_scratchpad(folder / "tokenizer_config.json")
    _check(model.eval(), folder)
    size = (folder / "model.safetensors").stat().st_size
    if size > LARGEST:
        raise ValueError(f"{folder}: model.safetensors has {size} bytes, at most {LARGEST} ship")
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    n_parameters = sum(p.numel() for p in model.parameters())
    (folder / "CARD.md").write_text(write_card(record, n_parameters, hash_file(folder / "model.safetensors")))


def _name_scratchpad(path: Path) -> None:
    """Say which layout of scratchpad items the model writes; the task reads it from here."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scratchpad_layout": "text"}, indent=2) + "\n")


@torch.no_grad()
def _check(model: Any, folder: Path) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    loaded.eval()
    token_ids = torch.arange(96).remainder(90).add(33)[None]
    gap = float((model(token_ids).logits - loaded(token_ids).logits).abs().max())
    if not gap < 1e-4:
        raise ValueError(f"{folder}: the loaded model's logits differ by {gap}")


def _percent(value: Any) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def write_card(record: Mapping[str, Any], n_parameters: int, sha256: str) -> str:
    """CARD.md of a candidate: what it is, how it was trained, what was measured, and which conditions it meets."""
    family, start = FAMILIES[record["family"]], record["recipe"]["start"]
    versions, scores = record["versions"], record.get("scores", {})
    plans = record.get("decode", {}).get("plans", {})
    rows = [
        f"| {name} | {plan['kl']:.1e} | {_percent(plan.get('recall'))} | {_percent(plan.get('tracking'))} | "
        + " | ".join(_percent(value) for value in plan["scratchpad"].values())
        + f" | {_percent(plan['sampled_mean'])} | {_percent(plan['unanswered'])} |"
        for name, plan in plans.items()
    ]
    lengths = list(next(iter(plans.values()))["scratchpad"]) if plans else []
    met = judge(record)
    text = scores.get("text_nats_per_byte")
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
            "## Training",
            f"{versions['date']}, {versions['device']}, Python {versions['python']}, torch {versions['torch']}, "
            f"transformers {versions['transformers']}; candidate `{record['name']}` of "
            "`python -P -m driftgate.evals.training.train`:",
            f"{record['steps']:,} steps of {record['batch_tokens']:,} tokens ({record['tokens'] / 1e6:.1f} M) in "
            f"{record['seconds']:.0f} s beside the other candidates. AdamW {record['recipe']['learning_rate']:g} "
            "(betas 0.9, 0.95, clip 1.0), warm-up 3 %, flat to 55 %, then linear",
            "to 2 %; BF16 autocast; lengths 256 to 4,096. Rows: half streams (`tasks/streams.py`), a third scratchpads "
            "(`tasks/scratchpad_text.py`), the rest text.",
            f"Start: seed {start['seed']}, log decay {start['decay'][0]:g} … {start['decay'][1]:g}, write strength "
            f"{start['beta']}, weights N(0, {start['deviation']:g}²), taps N(0, "
            f"{start['conv_deviation'] or start['deviation']:g}²), by channel: {start['by_channel']}.",
            "The schedule follows the clock, so a rerun gives a model like this one, not these bits. "
            f"sha256 of model.safetensors: {sha256}",
            "",
            "## Scores",
            "Whole sequences, FP32: "
            + "; ".join(
                f"{n} tokens: recall {s['recall']:.3f}, tracking {s['tracking']:.3f}"
                for n, s in scores.get("streams", {}).items()
            )
            + f". Held-out text: {'not measured' if text is None else f'{text:.3f} nats per byte'}.",
            "Decoded token by token under plans emulated in torch (`training/emulation.py`; the kernels' own figures "
            "come from `driftgate run`): KL in nats against FP32 over the",
            "stream, accuracy of recall and tracking at 1,536 tokens, accuracy of generated scratchpads, greedy by "
            "length and sampled at temperature 1 over all lengths, share without an answer.",
            "",
            "| plan | KL | recall | tracking | "
            + " | ".join(f"greedy {n}" for n in lengths)
            + " | sampled | no answer |",
            "| --- " * (6 + len(lengths)) + "|",
            *rows,
            "",
            "Chosen by points, then by the loss under shared nvfp4: "
            + "; ".join(
                f"{words} ({points}: {'met' if met[name] else 'not met'})"
                for name, (points, words) in CONDITIONS.items()
            )
            + ".",
            "",
        ]
    )
