"""The decode loop of one batch of prompts: scripts, then samples; everything stays on the device until the end.

Row i of every block feeds its prompt from token ``prefill`` on, then its continuation, then what its block sampled.
``a`` is the index of the token that the logits at hand predict: ``a = prefill + t`` after t decode steps, so rows of
unequal prompts are at different places of their scripts at the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from driftgate.accuracy.adapters.wrapping import WrappedModel
from driftgate.accuracy.digest import LogitDigest
from driftgate.accuracy.metrics.probability import negative_log_likelihood
from driftgate.accuracy.metrics.top import top_token
from driftgate.accuracy.prompts import Decoded, Prompt
from driftgate.accuracy.sampling import gumbel_rows, item_key, sample
from driftgate.quant.formats import get_format

__all__ = ["AnswerLoop", "planned_steps"]

FREE = -1
"""Entry of a script where a block's own sample is fed."""
LOOK_EVERY = 32
"""Steps between two looks at whether all rows are done: each is a synchronisation of a GPU."""


class AnswerLoop:
    """Decodes one batch; see the module.

    Args:
        model: inside its context; one row per prompt in every block, block 0 the baseline, block 1 the same again.
        prompts: as many as the model has sequences.
        vocab_size: columns of the logits that are real; None for all.
        seed: of sampling noise.
    """

    def __init__(self, model: WrappedModel, prompts: Sequence[Prompt], *, vocab_size: int | None, seed: int) -> None:
        self.model, self.prompts, self.vocab_size, self.seed = model, prompts, vocab_size, seed
        device, n, blocks = model.device, len(prompts), len(model.blocks)
        self.keys = torch.tensor([item_key(p.item_id, p.repeat) for p in prompts], device=device)
        self.prefill = _column([p.prefill for p in prompts], device)
        self.n_prompt = _column([len(p.token_ids) for p in prompts], device)
        self.n_forced = self.n_prompt + _column([len(p.continuation) for p in prompts], device)
        self.max_new = _column([p.max_new_tokens for p in prompts], device)
        self.temperature = torch.tensor([p.temperature for p in prompts], dtype=torch.float64, device=device)
        self.script = _script(prompts).to(device)
        self.stop = _padded([p.stop_ids for p in prompts], device)
        self.choices = _padded([p.choices for p in prompts], device)
        width = max(len(p.continuation) for p in prompts)
        self.logprobs = torch.full((blocks, n, width), torch.nan, dtype=torch.float64, device=device)
        self.greedy = torch.ones(blocks, n, dtype=torch.bool, device=device)
        shape = (blocks, *self.choices.shape)
        self.choice_logprobs = torch.full(shape, torch.nan, dtype=torch.float64, device=device)
        self.generated = torch.full((blocks, n, int(self.max_new.max())), FREE, device=device)
        self.done = torch.zeros(blocks, n, dtype=torch.bool, device=device)
        self.diverged = torch.full((blocks, n), FREE, device=device)
        self.margin = torch.full((blocks, n), torch.nan, dtype=torch.float64, device=device)
        self.reads = torch.zeros(blocks, n, dtype=torch.int64, device=device)
        self.finite = torch.ones(blocks, n, dtype=torch.bool, device=device)
        self.differs = torch.zeros((), dtype=torch.bool, device=device)
        self._digest = LogitDigest(device)
        self.n_steps = 0
        self._low = _low_precision(model)

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        """Prefill, then step until every row has what its prompt asks for; ``progress`` is called with each step."""
        logits = self._prefill()
        stages = _Stages(self.prompts)
        for t in range(stages.n_steps + 1):
            a = self.prefill + t
            self._look(logits, a)
            self._score(logits, a, stages.scored(t))
            self._choose(logits, stages.chosen(t))
            feed = self._follow(logits, a, generate=stages.generates(t))
            if t == stages.n_steps or (t % LOOK_EVERY == 0 and self._all_done(a)):
                break
            self._count_reads(a)
            logits = self.model.step(feed)[..., : self.vocab_size]
            self.n_steps += 1
            if progress is not None:
                progress(1)

    def _prefill(self) -> torch.Tensor:
        lengths = [p.prefill for p in self.prompts]
        tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        for row, (prompt, length) in enumerate(zip(self.prompts, lengths, strict=True)):
            tokens[row, max(lengths) - length :] = torch.tensor(prompt.token_ids[:length])
        logits = self.model.prefill(tokens.to(self.model.device), lengths=self.prefill, sequences=self.keys)
        logits = logits[..., : self.vocab_size]
        return logits.expand(len(self.model.blocks), *logits.shape)

    def _look(self, logits: torch.Tensor, a: torch.Tensor) -> None:
        """Bits of the baseline against itself, their digest, and whether what will be used is finite."""
        bits = logits.contiguous().view(torch.int16 if logits.element_size() == 2 else torch.int32)
        self.differs |= (bits[0] != bits[1]).any()
        self._digest.add(logits[0])
        self.finite &= logits.isfinite().all(-1) | ~self._wanted(a)

    def _wanted(self, a: torch.Tensor) -> torch.Tensor:
        """Whether anybody asks for what the logits that predict token ``a`` say, [blocks, n]."""
        choosing = (a == self.n_forced) & (self.choices[:, 0] != FREE)
        asked = (a >= self.n_prompt) & ((a < self.n_forced + self.max_new) | choosing)
        return asked & ~self.done

    def _score(self, logits: torch.Tensor, a: torch.Tensor, scored: list[int]) -> None:
        """Log-probabilities of the continuation token that each of these rows feeds next."""
        if not scored:
            return
        rows = torch.tensor(scored, device=logits.device)
        part, targets = logits[:, rows], self.script[rows, a[rows]].expand(len(logits), -1)
        self.logprobs[:, rows, a[rows] - self.n_prompt[rows]] = -negative_log_likelihood(part, targets)
        self.greedy[:, rows] &= top_token(part) == targets

    def _choose(self, logits: torch.Tensor, chosen_by: list[int]) -> None:
        """Log-probabilities of the choices of these rows."""
        if not chosen_by:
            return
        rows = torch.tensor(chosen_by, device=logits.device)
        part = logits[:, rows].double()
        chosen = part.gather(-1, self.choices[rows].clamp(min=0).expand(len(part), -1, -1))
        self.choice_logprobs[:, rows] = chosen - part.logsumexp(-1, keepdim=True)

    def _follow(self, logits: torch.Tensor, a: torch.Tensor, *, generate: bool) -> torch.Tensor:
        """The tokens to feed next, [blocks, n]: of the script, or sampled; records what is generated."""
        within = a.clamp(max=self.script.shape[1] - 1)
        scripted = self.script.gather(1, within[:, None])[:, 0]
        scripted = torch.where(a < self.script.shape[1], scripted, 0)
        if not generate:
            return scripted.clamp(min=0).expand(len(logits), -1)
        index = a - self.n_forced
        noise = gumbel_rows(self.seed, self.keys, index.clamp(min=0), logits.shape[-1])
        tokens, margin = sample(logits, noise, self.temperature)
        tokens = torch.where(scripted != FREE, scripted, tokens)
        active = (index >= 0) & (index < self.max_new) & ~self.done
        place = index.clamp(min=0, max=self.generated.shape[2] - 1).expand(len(logits), -1)[..., None]
        kept = torch.where(active, tokens, self.generated.gather(2, place)[..., 0])
        self.generated.scatter_(2, place, kept[..., None])
        apart = active & active[:1] & (tokens != tokens[:1]) & (self.diverged == FREE)
        self.diverged = torch.where(apart, index, self.diverged)
        self.margin = torch.where(apart, margin[:1], self.margin)
        stopped = (tokens[..., None] == self.stop).any(-1) & (scripted == FREE)
        self.done |= active & stopped
        return torch.where(self.done, 0, tokens)

    def _count_reads(self, a: torch.Tensor) -> None:
        """Reads of a low-precision state by the step that feeds token ``a`` and predicts ``a + 1``."""
        flush = torch.stack([block.pool.flush[: len(self.prompts)] != 0 for block in self.model.blocks])
        flush = flush.to(self.model.device)
        low_read, low_recurrence = self._low[:, :1], self._low[:, 1:]
        self.reads += torch.where(flush, low_recurrence, low_read) * self._wanted(a + 1)

    def _all_done(self, a: torch.Tensor) -> bool:
        finished = (a >= self.n_forced) & (self.done | (a >= self.n_forced + self.max_new))
        return bool(finished.all())

    def again_equal(self) -> bool:
        """Whether blocks 0 and 1 had the same bits at every step."""
        return not bool(self.differs)

    def digest(self) -> int:
        """Of the baseline's logits at every step."""
        return self._digest.value()

    def decoded(self, block: int) -> list[Decoded]:
        """What one block made of each prompt."""
        logprobs, choices, generated, diverged, margin, reads = (
            x[block].cpu().tolist()
            for x in (self.logprobs, self.choice_logprobs, self.generated, self.diverged, self.margin, self.reads)
        )
        greedy, finite, done = (x[block].cpu().tolist() for x in (self.greedy, self.finite, self.done))
        found = []
        for i, prompt in enumerate(self.prompts):
            tokens = tuple(token for token in generated[i] if token != FREE)
            apart = diverged[i] != FREE
            found.append(
                Decoded(
                    item_id=prompt.item_id,
                    repeat=prompt.repeat,
                    logprobs=tuple(logprobs[i][: len(prompt.continuation)]),
                    greedy=greedy[i] and bool(prompt.continuation),
                    choice_logprobs=tuple(choices[i][: len(prompt.choices)]),
                    token_ids=tokens,
                    capped=bool(prompt.max_new_tokens) and not done[i],
                    first_divergence=diverged[i] if apart else None,
                    tie_margin=margin[i] if apart else None,
                    low_precision_reads=reads[i],
                    finite=finite[i],
                )
            )
        return found


def planned_steps(prompts: Sequence[Prompt]) -> int:
    """Decode steps of a batch if no generation stops early."""
    return _Stages(prompts).n_steps


class _Stages:
    """Which rows have anything to be done at a step, known before the first, so that no step asks the device."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        forced = [len(p.token_ids) + len(p.continuation) - p.prefill for p in prompts]
        starts = [len(p.token_ids) - p.prefill for p in prompts]
        self._score = [range(s, f) for s, f in zip(starts, forced, strict=True)]
        self._choose = [f if p.choices else FREE for f, p in zip(forced, prompts, strict=True)]
        self._generate = [
            range(f, f + p.max_new_tokens) for f, p in zip(forced, prompts, strict=True) if p.max_new_tokens
        ]
        last = [r[-1] for r in (*self._score, *self._generate) if len(r)]
        self.n_steps = max([*last, *self._choose])
        """Decode steps until the last logits that are wanted."""

    def scored(self, t: int) -> list[int]:
        return [row for row, steps in enumerate(self._score) if t in steps]

    def chosen(self, t: int) -> list[int]:
        return [row for row, step in enumerate(self._choose) if t == step]

    def generates(self, t: int) -> bool:
        return any(t in r for r in self._generate)


def _column(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """[n, longest, at least 1] int64, filled up with FREE."""
    width = max(1, *(len(row) for row in rows))
    return torch.tensor([[*row, *[FREE] * (width - len(row))] for row in rows], device=device)


def _script(prompts: Sequence[Prompt]) -> torch.Tensor:
    """What each row feeds at each index, [n, longest] int64; FREE where its own sample goes."""
    script = torch.full((len(prompts), max(p.n_tokens for p in prompts)), FREE)
    for row, prompt in enumerate(prompts):
        fixed = torch.tensor([*prompt.token_ids, *prompt.continuation])
        script[row, : len(fixed)] = fixed
        for index, token in prompt.forced:
            script[row, len(fixed) + index] = token
    return script


def _low_precision(model: WrappedModel) -> torch.Tensor:
    """[blocks, 2] int64: reads of a step that does not flush, over all layers, and of one that does."""
    low = []
    for plan in (block.plan for block in model.blocks):
        by_layer = [plan.at(index) for index in model.layer_indices]
        formats = ([o.read for o in by_layer], [o.recurrence for o in by_layer])
        low.append([sum(get_format(name).low_precision for name in names) for names in formats])
    return torch.tensor(low, dtype=torch.int64, device=model.device)
