"""From item tasks to items: prompts before a model is loaded, answers batch by batch, scores at the end.

Notable: the batch is the unit of everything. It is decoded whole, stored whole under an identity that names all that
its bits depend on, and taken whole by a worker process; so items are the same for any number of processes, after any
interruption, and with any limit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.prompts import Decoded, Prompt, check_lengths
from driftgate.errors import EmptyRunError
from driftgate.evals.answer_store import AnswerStore
from driftgate.evals.tasks.item_task import ItemTask, ModelText, TaskOptions

if TYPE_CHECKING:
    import pandas as pd

    from driftgate.accuracy.answers import BatchAnswers
    from driftgate.kernels.contract import Backend

__all__ = ["Answers", "BuiltTask", "Decoder", "answer", "build_tasks"]


@dataclass(frozen=True, kw_only=True)
class BuiltTask:
    """A task with its prompts, which fit the model.

    Attributes:
        task: builds and scores.
        options: what the user chose.
        text: what is known of the model.
        prompts: of all items and repeats.
        limit: items to answer, the first of an order that the seed gives; None for all.
    """

    task: ItemTask
    options: TaskOptions
    text: ModelText
    prompts: tuple[Prompt, ...]
    limit: int | None = None

    def batches(self, batch: int) -> list[list[int]]:
        """Indices of the prompts of every batch that is to be decoded."""
        from driftgate.accuracy.answers import order_batches

        return order_batches(self.prompts, batch=batch, seed=self.options.seed, limit=self.limit)

    def n_steps(self, batch: int) -> int:
        """Decode steps at the most."""
        from driftgate.accuracy.answer_batch import planned_steps

        return sum(planned_steps([self.prompts[i] for i in rows]) for rows in self.batches(batch))

    def wanted(self) -> list[int]:
        """Indices of the prompts within the limit, in the order of ``prompts``."""
        from driftgate.accuracy.answers import first_items

        if self.limit is None:
            return list(range(len(self.prompts)))
        items = set(first_items(self.prompts, seed=self.options.seed, limit=self.limit))
        return [i for i, prompt in enumerate(self.prompts) if prompt.item_id in items]

    def describe(self) -> dict[str, Any]:
        """For the manifest: what was asked, without any text of a question."""
        first = self.prompts[0]
        return {
            "version": self.task.version,
            "options": {name: value for name, value in vars(self.options).items() if value is not None},
            "items": len({self.prompts[i].item_id for i in self.wanted()}),
            "decoded": len(self.wanted()),
            "prompts": hash_prompts(self.prompts),
            "first_token_ids": list(first.token_ids[:16]),
            "prefilled_of_first": first.prefill,
            **self.task.describe([self.prompts[i] for i in self.wanted()]),
        }


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """How batches are decoded; everything that a worker process needs to load the model for itself.

    Attributes:
        folder, name, device, dtype: as ``load_model`` takes them.
        backend: of the decode steps.
        plans: by name.
        batch: prompts of a batch.
        seed: of order, noise and stochastic rounding.
        vocab_size: real columns of the logits.
        identity: whatever else the bits depend on: hashes of model and tokenizer, versions, device.
        least_plans: blocks of rows for at least so many plans, so that a run with fewer has the same bits.
    """

    folder: Path
    name: str
    device: str
    dtype: str | None
    backend: Backend
    plans: dict[str, PrecisionPlan]
    batch: int
    seed: int
    vocab_size: int
    identity: dict[str, Any]
    least_plans: int = 0

    def identify(self, task: ItemTask, prompts: Sequence[Prompt]) -> str:
        """Hash of all that the answers to one batch depend on."""
        fields = {
            **self.identity,
            "task": [task.name, task.version],
            "backend": self.backend.value,
            "dtype": self.dtype,
            "plans": {name: str(plan) for name, plan in self.plans.items()},
            "blocks": max(self.least_plans, len(self.plans)),
            "batch": self.batch,
            "seed": self.seed,
            "prompts": hash_prompts(prompts),
        }
        return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()

    def decode(self, prompts: Sequence[Prompt], *, model: Any = None) -> BatchAnswers:
        """Answers to one batch; without a model, of one that is loaded once per process."""
        from driftgate.accuracy.answers import AnswerRunner

        if model is None:
            model = _load_once(self.folder, self.name, self.device, self.dtype)
        runner = AnswerRunner(
            model, self.plans, batch=self.batch, backend=self.backend, vocab_size=self.vocab_size, seed=self.seed,
            least_plans=self.least_plans,
        )  # fmt: skip
        return runner.run_batch(prompts)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What came of one task.

    Attributes:
        items: rows of every plan within the limit.
        again_equal: the baseline had the same bits twice, in every batch.
        n_steps: decode steps.
        answers: by plan and for the baseline, of the prompts within the limit.
        prompts: these prompts.
        digests: of the baseline's logits, by batch.
    """

    items: pd.DataFrame
    again_equal: bool
    n_steps: int
    answers: dict[str, list[Decoded]]
    prompts: list[Prompt]
    digests: list[int]


def build_tasks(
    tasks: Sequence[ItemTask], options: Mapping[str, TaskOptions], text: ModelText, *, limit: int | None = None
) -> tuple[BuiltTask, ...]:
    """Prompts of every task, before the model is loaded.

    Args:
        tasks: in the order of the report.
        options: by name of the task.
        text: of the model.
        limit: items of each task.

    Raises:
        DriftgateError: data, lengths or options that do not fit; one line.
        EmptyRunError: a task has no items.
    """
    built = []
    for task in tasks:
        prompts = tuple(task.build(options[task.name], text))
        if not prompts:
            raise EmptyRunError(f"task {task.name}: zero items to answer; give a file with questions")
        check_lengths(prompts, context=text.context, task=task.name)
        built.append(BuiltTask(task=task, options=options[task.name], text=text, prompts=prompts, limit=limit))
    return tuple(built)


def answer(
    built: BuiltTask,
    decoder: Decoder,
    *,
    store: AnswerStore | None = None,
    jobs: int = 1,
    model: Any = None,
    progress: Callable[[int], None] | None = None,
) -> Answers:
    """Decode what is not stored yet, and score everything.

    Args:
        built: task and prompts.
        decoder: of every batch.
        store: where batches are kept; None to keep nothing.
        jobs: processes; with more than one each loads the model for itself.
        model: already loaded, for one process.
        progress: called with decode steps, at the most as many as ``built.n_steps``.
    """
    from driftgate.accuracy.answer_batch import planned_steps
    from driftgate.accuracy.workers import Task, run_tasks

    batches = built.batches(decoder.batch)
    parts: dict[int, BatchAnswers] = {}
    work = []
    for number, rows in enumerate(batches):
        prompts = [built.prompts[i] for i in rows]
        identity = decoder.identify(built.task, prompts)
        kept = store.read(built.task.name, number, identity) if store is not None else None
        if kept is not None:
            parts[number] = kept
            continue
        call = partial(_take, decoder, prompts, store, built.task.name, number, identity, None if jobs > 1 else model)
        work.append((number, Task(name=f"{built.task.name}, batch {number}", size=planned_steps(prompts), call=call)))
    found = run_tasks([task for _, task in work], jobs=jobs, progress=progress) if work else []
    parts |= dict(zip((number for number, _ in work), found, strict=True))
    ordered = [parts[number] for number in range(len(batches))]
    by_index: dict[str, dict[int, Decoded]] = {name: {} for name in ordered[0].answers}
    for part, rows in zip(ordered, batches, strict=True):
        for name, own in part.answers.items():
            by_index[name] |= dict(zip(rows, own, strict=True))
    wanted = built.wanted()
    prompts = [built.prompts[i] for i in wanted]
    answers = {name: [own[i] for i in wanted] for name, own in by_index.items()}
    return Answers(
        items=_with_reads(built.task.score(prompts, answers, built.text), answers),
        again_equal=all(part.again_equal for part in ordered),
        n_steps=sum(part.n_steps for part in ordered),
        answers=answers,
        prompts=prompts,
        digests=[part.digest for part in ordered],
    )


def _with_reads(items: pd.DataFrame, answers: Mapping[str, Sequence[Decoded]]) -> pd.DataFrame:
    """Items with the column ``low_precision_reads``: of the answer that a row is, where the task has not said it."""
    if "low_precision_reads" in items:
        return items
    reads = {(plan, a.item_id, a.repeat): a.low_precision_reads for plan, own in answers.items() for a in own}
    rows = zip(items["plan"], items["item_id"], items["repeat"], strict=True)
    return items.assign(low_precision_reads=[reads[row] for row in rows])


def _take(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    store: AnswerStore | None,
    task: str,
    number: int,
    identity: str,
    model: Any,
) -> BatchAnswers:
    """Decode one batch and keep it, in whichever process this is."""
    found = decoder.decode(prompts, model=model)
    if store is not None:
        store.write(task, number, identity, found)
    return found


_LOADED: dict[tuple[Path, str, str | None], Any] = {}


def _load_once(folder: Path, name: str, device: str, dtype: str | None) -> Any:
    key = (folder, device, dtype)
    if key not in _LOADED:
        from driftgate.accuracy.models import load_model

        _LOADED[key] = load_model(folder, name=name, device=device, dtype=dtype).model
    return _LOADED[key]


def hash_prompts(prompts: Sequence[Prompt]) -> str:
    """sha256 of everything that is fed or wanted; ``detail`` is scored, not decoded, and does not count."""
    fields = [
        [
            p.item_id, p.repeat, p.token_ids, p.prefill, p.continuation, p.choices, p.max_new_tokens, p.temperature,
            p.stop_ids, p.forced,
        ]
        for p in prompts
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()
