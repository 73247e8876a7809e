"""Scores of a candidate: quick ones on whole sequences while it trains, then one decode under emulated plans."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from driftgate.evals.tasks import scratchpad_text
from driftgate.evals.tasks.build import make_layout
from driftgate.evals.tasks.streams import BOS, EOS, SIGNS, generate_streams
from driftgate.evals.training.emulation import PLANS, EmulatedPlan, decode_logits
from driftgate.evals.training.families import masks
from driftgate.evals.training.rows import Kind, mark_item
from driftgate.evals.training.stream_scores import StreamScores

__all__ = ["SCORED_PLANS", "ScoreOptions", "score_decode", "score_sequences"]

SCORED_PLANS = tuple(plan for plan in PLANS if plan.name in ("baseline", "nvfp4@16", "nvfp4/fp32@16", "zero state"))
CHUNK = 64
_ANSWER = re.compile(r"Answer: ([A-D])")


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """How much is scored.

    Args:
        seed: of streams and items; training never has it.
        stream_lengths: tokens of streams scored on whole sequences, and how many of each.
        scratchpad_lengths: tokens of the completions.
        n_items: items of each scratchpad length; when decoded, every second one is sampled.
        n_streams: streams that are decoded under plans.
        stream_length: of those.
        text: file with the text that no candidate is trained on, or None.
        text_tokens: bytes of it that are scored, in windows of 1,024.
    """

    seed: int = 777_000_777
    stream_lengths: tuple[tuple[int, int], ...] = ((616, 32), (1560, 16), (4096, 8))
    scratchpad_lengths: tuple[int, ...] = (200, 500, 1000, 2000)
    n_items: int = 32
    n_streams: int = 48
    stream_length: int = 1536
    text: Path | None = None
    text_tokens: int = 32_768


def _logits(model: Any, token_ids: Tensor) -> Tensor:
    """Logits [B, T, vocabulary] float32 of whole sequences, under the training functions; padded to whole chunks."""
    length = token_ids.shape[1]
    padded = F.pad(token_ids, (0, -length % CHUNK))
    return model(padded, attention_mask=masks(), use_cache=False).logits[:, :length].float()  # type: ignore[no-any-return]


def _score_streams(model: Any, length: int, count: int, seed: int, device: str) -> dict[str, float]:
    streams = generate_streams(make_layout(length), seed=seed, indices=range(count))
    places = torch.from_numpy(streams.answer_positions).to(device) - 1
    logits = _logits(model, torch.from_numpy(streams.token_ids).to(device))[:, places]
    right = (SIGNS[logits[..., SIGNS].argmax(-1).cpu().numpy()] == streams.answers).astype(float)
    return {
        "recall": round(float(right[~streams.is_tracking].mean()), 4),
        "tracking": round(float(right[streams.is_tracking].mean()), 4),
    }


def _score_items(model: Any, length: int, count: int, seed: int, device: str) -> dict[str, float]:
    """Shares of items with every token of the completion right, and with the answer right after the true scratchpad."""
    marked = [mark_item(seed, index, length=length) for index in range(count)]
    longest = max(len(ids) for ids, _ in marked)
    token_ids, kinds = np.full((count, longest), EOS), np.zeros((count, longest), dtype=np.int64)
    for row, (ids, kind) in enumerate(marked):
        token_ids[row, : len(ids)] = ids
        kinds[row, : len(kind)] = kind
    ids_on = torch.from_numpy(token_ids).to(device)
    top = torch.cat([_logits(model, part).argmax(-1) for part in torch.split(ids_on, 16)]).cpu().numpy()
    right = (top[:, :-1] == token_ids[:, 1:]) | (kinds[:, 1:] == Kind.UNSCORED)
    answered = [right[row, len(ids) - 4] for row, (ids, _) in enumerate(marked)]
    return {"exact": round(float(right.all(1).mean()), 4), "answer": round(float(np.mean(answered)), 4)}


def _score_text(model: Any, options: ScoreOptions, device: str) -> float | None:
    """Nats per byte of the held-out text, each window by itself."""
    if options.text is None:
        return None
    data = np.frombuffer(options.text.read_bytes(), dtype=np.uint8)[: options.text_tokens]
    windows = data[: len(data) // 1023 * 1023].reshape(-1, 1023).astype(np.int64)
    token_ids = torch.from_numpy(np.concatenate([np.full((len(windows), 1), BOS), windows], axis=1)).to(device)
    losses = [
        F.cross_entropy(_logits(model, part)[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        for part in torch.split(token_ids, 16)
    ]
    return round(float(torch.cat(losses).mean()), 4)


@torch.no_grad()
def score_sequences(model: Any, options: ScoreOptions, device: str) -> dict[str, Any]:
    """FP32 scores on whole sequences, in about a second on a GPU; the model must run the training functions."""
    return {
        "streams": {
            str(length): _score_streams(model, length, count, options.seed, device)
            for length, count in options.stream_lengths
        },
        "scratchpad": {
            str(length): _score_items(model, length, options.n_items, options.seed, device)
            for length in options.scratchpad_lengths
        },
        "text_nats_per_byte": _score_text(model, options, device),
    }


def _prompts(options: ScoreOptions) -> tuple[list[scratchpad_text.ScratchpadItem], list[int]]:
    """Items of all lengths, and how many tokens each may take, the prompt included."""
    items, limits = [], []
    for length in options.scratchpad_lengths:
        for index in range(options.n_items):
            item = scratchpad_text.make_item(options.seed + 1, index, length=length)
            items.append(item)
            limits.append(1 + len(item.prompt) + len(item.completion) * 5 // 4 + 16)
    return items, limits


@torch.no_grad()
def score_decode(
    model: Any,
    options: ScoreOptions,
    device: str,
    plans: tuple[EmulatedPlan, ...] = SCORED_PLANS,
    *,
    deadline: float = math.inf,
) -> dict[str, Any]:
    """Streams and scratchpad items decoded token by token under every plan; ``plans[0]`` is the baseline.

    Items are generated by each plan for itself, every second one sampled at temperature 1. Generation that the
    deadline (of ``time.monotonic``) cuts off counts as unanswered; ``positions`` says how far it came.
    """
    streams = generate_streams(make_layout(options.stream_length), seed=options.seed, indices=range(options.n_streams))
    items, limits = _prompts(options)
    length = max(options.stream_length, max(limits))
    fed = torch.full((options.n_streams + len(items), length), -1)
    fed[: options.n_streams] = EOS
    fed[: options.n_streams, : options.stream_length] = torch.from_numpy(streams.token_ids)
    for row, item in enumerate(items, start=options.n_streams):
        fed[row, : 1 + len(item.prompt)] = torch.tensor([BOS, *item.prompt.encode()])
    tokens = torch.zeros(len(plans), *fed.shape, dtype=torch.long, device=device)
    sampled = torch.zeros(len(fed), dtype=torch.bool, device=device)
    sampled[options.n_streams + 1 :: 2] = True
    on_streams, position = StreamScores(streams, plans, device), 0
    for position, logits in decode_logits(model, fed.to(device), plans, tokens=tokens, sampled=sampled):
        on_streams.add(position, logits[:, : options.n_streams])
        if position % 64 == 0 and time.monotonic() > deadline:
            break
    given = tokens[:, options.n_streams :, : position + 1].cpu().numpy()
    scores = on_streams.read()
    for p, plan in enumerate(plans):
        scores[plan.name] |= _score_generated(given[p], items, limits, options)
    return {"positions": position + 1, "plans": scores}


def _score_generated(
    given: Any, items: list[scratchpad_text.ScratchpadItem], limits: list[int], options: ScoreOptions
) -> dict[str, Any]:
    """Accuracy by length of greedy answers, means of greedy and sampled ones, the share without one in the limit."""
    right, missing = [], 0
    for row, (item, limit) in enumerate(zip(items, limits, strict=True)):
        ids = given[row, 1 + len(item.prompt) : limit]
        ids = ids[: np.flatnonzero(ids == EOS)[0]] if (ids == EOS).any() else ids
        found = _ANSWER.search(bytes(int(i) for i in ids if 0 <= i < 256).decode("latin-1"))
        missing += found is None
        right.append(found is not None and found.group(1) == item.gold)
    by_length = np.array(right, dtype=float).reshape(len(options.scratchpad_lengths), options.n_items)
    greedy, sampled = by_length[:, ::2].mean(1), by_length[:, 1::2]
    return {
        "scratchpad": dict(zip(map(str, options.scratchpad_lengths), greedy.round(4).tolist(), strict=True)),
        "scratchpad_mean": round(float(greedy.mean()), 4),
        "sampled_mean": round(float(sampled.mean()), 4) if sampled.size else None,
        "unanswered": round(missing / len(items), 4),
    }
