"""Any task of lm-evaluation-harness (lm-eval) as a task of items: ``--task lm_eval:NAME``.

lm-eval makes the requests and judges the responses (its filters, its metrics); what is decoded in between is the same
for every plan. A document is an item, right or wrong by the first metric of the task that is 0 or 1 for every document,
or by the one that is named: ``lm_eval:NAME#METRIC`` or ``lm_eval:NAME#METRIC,FILTER``, as lm-eval's results name it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import numpy as np

from driftgate.accuracy.prompts import check_lengths
from driftgate.errors import DriftgateError, InputError, unknown_name
from driftgate.evals.lm_requests import Response, make_prompts, read_responses, require_lm_eval
from driftgate.evals.tasks.harness_source import as_lm_eval, ask, find_task, one_line, open_tasks
from driftgate.evals.tasks.item_task import ItemTask, ModelText, TaskOptions

if TYPE_CHECKING:
    import pandas as pd

    from driftgate.accuracy.prompts import Decoded, Prompt

__all__ = ["HarnessTask"]

INVALID = "[invalid]"
"""What lm-eval's filters put where they find no answer."""

LONGEST = 16
"""Characters of an answer that a row may hold; a longer one is kept as a hash, since it may quote its question."""

_EMPTY_ANSWERS = {"loglikelihood": (-1.0, False), "generate_until": ""}


@dataclass(frozen=True, kw_only=True)
class _Judged:
    """One answer to one document.

    Attributes:
        item_id, repeat: of the row.
        metrics: of lm-eval, by name.
        answer, gold: a letter or a short string.
        parsed: the filters found an answer.
        responses: that it was judged by.
    """

    item_id: str
    repeat: int
    metrics: Mapping[str, Any]
    answer: str | None
    gold: str | None
    parsed: bool
    responses: Sequence[Response]


class HarnessTask(ItemTask):
    """One task, tag or group of lm-eval; in a group every document counts the same.

    ``TaskOptions.data`` and ``mode`` have no say, a task brings both; ``prompt`` may be ``plain`` or ``chat`` (the
    checkpoint's chat template). ``Prompt.repeat`` numbers the requests of a document, ``repeat`` of a row its answers.

    ``metric`` is the one that decided, once something was scored.

    Args:
        name: as lm-eval lists it, or a YAML file; ``#METRIC`` or ``#METRIC,FILTER`` behind it chooses what is right.

    Raises:
        InputError: lm-eval is not installed, or the YAML file does not exist.
        UsageError: lm-eval has no such task; names the nearest.
    """

    name: str  # type: ignore[misc]
    description: str  # type: ignore[misc]

    def __init__(self, name: str) -> None:
        require_lm_eval()
        self.name = f"lm_eval:{name}"
        self._harness_name, _, wanted = name.partition("#")
        self._metric, _, self._filter = wanted.partition(",")
        self.description = f"task {self._harness_name} of lm-evaluation-harness"
        self._manager = find_task(self._harness_name)
        self.metric: str | None = None

    @cached_property
    def version(self) -> float:  # type: ignore[override]
        """lm-eval's own, 0 where it gives none; of a group the sum over its tasks."""
        numbers = [str(task.VERSION) for task in self._tasks.values()]
        return sum(float(number) for number in numbers if number.replace(".", "", 1).isdecimal())

    @cached_property
    def chance(self) -> float:  # type: ignore[override]
        """What guessing among the choices gets right, over all documents; 0 where there are none."""
        with as_lm_eval():
            return float(np.mean([_chance(t, doc) for t in self._tasks.values() for _, doc in t.doc_iterator()]))

    @cached_property
    def _tasks(self) -> dict[str, Any]:
        """lm-eval's tasks by name; loads their data."""
        return open_tasks(self._manager, self._harness_name)

    def build(self, options: TaskOptions, text: ModelText) -> list[Prompt]:
        """Prompts of all requests; those of one document share an item id.

        Raises:
            InputError: the data is not on this machine, or the task cannot be asked or judged here.
            UsageError: the task has no metric, filter or wording of the name that was given.
        """
        instances = [i for task in self._tasks.values() for i in ask(task, options, text)]
        for instance in instances:
            if instance.request_type not in _EMPTY_ANSWERS:
                raise InputError(
                    f"task {self.name} measures perplexity, which is not right or wrong; use --task ppl --data FILE"
                )
        self._try_metrics(instances)
        prompts = make_prompts(instances, options=options, text=text)
        check_lengths(prompts, context=text.context, task=self.name)
        return prompts

    def score(
        self, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Decoded]], text: ModelText
    ) -> pd.DataFrame:
        """Rows of every plan, one per document and repeat; the module says what is correct.

        Args:
            prompts: as ``build`` made them, all of a document or none.
            answers: by plan, in the order of the prompts.
            text: decodes token ids.
        """
        import pandas as pd

        instances = {p.detail.number: p.detail.instance for p in prompts}
        judged: dict[str, list[_Judged]] = {}
        for plan, decoded in answers.items():
            responses = read_responses(prompts, decoded, text)
            judged[plan] = self._judge([(instances[number], r) for number, r in responses.items()])
        self.metric = self._choose_metric([row for own in judged.values() for row in own])
        return pd.DataFrame([_row(self.name, plan, row, self.metric) for plan, own in judged.items() for row in own])

    def count(self, prompts: Sequence[Prompt]) -> tuple[int, int, int]:
        """Documents; ``Prompt.repeat`` numbers the requests of a document, which are no repeats."""
        return super().count(prompts)[0], 1, 1

    def _try_metrics(self, instances: Sequence[Any]) -> None:
        """Judge empty answers to the first document of each task: better refused now than after decoding."""
        firsts = {i.task_name: i.doc_id for i in reversed(instances)}
        pairs = [
            (i, Response(value=_EMPTY_ANSWERS[i.request_type])) for i in instances if firsts[i.task_name] == i.doc_id
        ]
        try:
            judged = self._judge(pairs)
        except DriftgateError:
            raise
        except Exception as error:  # functions of the task, or a metric that would have to be fetched
            raise InputError(f"task {self.name}: answers cannot be judged here: {one_line(error)}") from error
        self._choose_metric(judged)

    def _judge(self, pairs: Sequence[tuple[Any, Response]]) -> list[_Judged]:
        """lm-eval's filters and metrics over requests and the responses of one plan."""
        given: dict[str, dict[int, tuple[Any, list[Response]]]] = {}
        for instance, response in pairs:
            of_task = given.setdefault(instance.task_name, {})
            of_task.setdefault(id(instance), (instance, []))[1].append(response)
        with as_lm_eval():
            return [
                row for name, own in given.items() for row in self._judge_task(self._tasks[name], list(own.values()))
            ]

    def _judge_task(self, task: Any, given: Sequence[tuple[Any, Sequence[Response]]]) -> list[_Judged]:
        """Rows of one task: filters see all its requests at once, as in lm-eval, and once per repeat."""
        rows = []
        n = max(1, given[0][0].repeats or 1)
        for repeat in range(len(given[0][1]) // n):
            part = slice(repeat * n, (repeat + 1) * n)
            task._instances = [replace(i, resps=[r.value for r in own[part]], filtered_resps={}) for i, own in given]
            task.apply_filters()
            documents: dict[int, list[tuple[Any, Sequence[Response]]]] = {}
            for instance, (_, own) in zip(task.instances, given, strict=True):
                documents.setdefault(instance.doc_id, []).append((instance, own[part]))
            for own in documents.values():
                own.sort(key=lambda pair: pair[0].idx)
                rows.append(self._judge_document(task, repeat, own))
        return rows

    def _judge_document(self, task: Any, repeat: int, asked: Sequence[tuple[Any, Sequence[Response]]]) -> _Judged:
        instances = [instance for instance, _ in asked]
        names = list(instances[0].filtered_resps)
        if self._filter and self._filter not in names:
            raise unknown_name("lm-eval filter", self._filter, names)
        filtered = [i.filtered_resps[self._filter or names[0]] for i in instances]
        doc = instances[0].doc
        answer, gold = _short_answers(task, doc, filtered, instances[0].request_type)
        return _Judged(
            item_id=f"{instances[0].task_name}/{instances[0].doc_id}",
            repeat=repeat,
            metrics=task.process_results(doc, filtered),
            answer=answer,
            gold=gold,
            parsed=not isinstance(filtered[0], str) or filtered[0] != INVALID,
            responses=[response for _, own in asked for response in own],
        )

    def _choose_metric(self, judged: Sequence[_Judged]) -> str:
        """The metric that is right or wrong for all of these: the named one, else the first."""
        names = list(judged[0].metrics)
        if self._metric and self._metric not in names:
            raise unknown_name("lm-eval metric", self._metric, names)
        for name in [self._metric] if self._metric else names:
            better = all(task.higher_is_better().get(name) is not False for task in self._tasks.values())
            if better and all(_right_or_wrong(row.metrics.get(name)) for row in judged):
                return name
        raise InputError(
            f"task {self.name}: {self._metric or 'none of ' + ', '.join(names)} is right (1) or wrong (0) for every "
            "document; name another task, or another metric behind #"
        )


def _row(task: str, plan: str, judged: _Judged, metric: str) -> dict[str, Any]:
    """One row of the items frame."""
    finite = all(r.finite for r in judged.responses)
    capped = any(r.capped for r in judged.responses)
    reason = "ok" if judged.parsed else "truncated" if capped else "none"
    return {
        "plan": plan,
        "task": task,
        "item_id": judged.item_id,
        "repeat": judged.repeat,
        "answer": judged.answer if finite else None,
        "gold": judged.gold,
        "correct": finite and bool(judged.metrics[metric]),
        "n_tokens": sum(r.n_tokens for r in judged.responses),
        "capped": capped,
        "parse_reason": reason if finite else "nonfinite",
        "stream": -1,
        "low_precision_reads": sum(r.low_precision_reads for r in judged.responses),
    }


def _right_or_wrong(value: Any) -> bool:
    return isinstance(value, Real | np.bool_) and float(value) in (0.0, 1.0)


def _choices(task: Any, doc: Any) -> list[str]:
    """Choices of a document; empty where there are none to choose from."""
    if task.OUTPUT_TYPE == "multiple_choice":
        return list(task.doc_to_choice(doc))
    return list(doc.get("choices", ())) if task.OUTPUT_TYPE == "loglikelihood" and isinstance(doc, dict) else []


def _gold_choices(task: Any, doc: Any, choices: Sequence[str]) -> list[int]:
    """Indices of the right choices."""
    gold = task.doc_to_text(doc) if getattr(task, "multiple_input", 0) else task.doc_to_target(doc)
    listed = gold if isinstance(gold, list) else [gold]
    indices = [choices.index(g) if isinstance(g, str) and g in choices else g for g in listed]
    return [i for i in indices if isinstance(i, int) and 0 <= i < len(choices)]


def _chance(task: Any, doc: Any) -> float:
    choices = _choices(task, doc)
    return len(_gold_choices(task, doc, choices)) / len(choices) if choices else 0.0


def _short_answers(task: Any, doc: Any, filtered: Sequence[Any], request_type: str) -> tuple[str | None, str | None]:
    """What was answered and what is right: letters of choices, or a text if it is short."""
    if request_type == "generate_until":
        return _brief(filtered[0]), _brief(task.doc_to_target(doc))
    choices = _choices(task, doc)
    if not choices:
        return ("greedy" if filtered[0][1] else "other"), "greedy"
    best = int(np.argmax([likelihood for likelihood, _ in filtered[: len(choices)]]))
    return _letter(best), "/".join(_letter(i) for i in _gold_choices(task, doc, choices)) or None


def _letter(index: int) -> str:
    return ascii_uppercase[index] if index < len(ascii_uppercase) else str(index)


def _brief(value: Any) -> str:
    words = " ".join(str(value).split())
    return words if len(words) <= LONGEST else "sha256:" + hashlib.sha256(words.encode()).hexdigest()[:12]
