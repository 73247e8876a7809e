"""A model for lm-eval whose every scored token goes through the decode step of a precision plan.

``simple_evaluate(model=DriftgateLM(...), tasks=[...])`` runs any of lm-eval's tasks on one plan; ``.baseline`` is the
baseline of the same decode, and ``paired_items`` puts the two beside each other for the paired statistics. Without
lm-eval this module imports and ``DriftgateLM`` says in one line which extra is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftgate.errors import InputError, UsageError, unknown_name
from driftgate.evals.lm_requests import (
    Response,
    apply_chat_template,
    encode,
    make_prompts,
    read_responses,
    require_lm_eval,
)
from driftgate.evals.tasks.item_task import TaskOptions

try:
    from lm_eval.api.model import LM, CacheHook
except ModuleNotFoundError as missing:
    if not str(missing.name).startswith("lm_eval"):
        raise
    LM, CacheHook = object, None

if TYPE_CHECKING:
    import pandas as pd

    from driftgate.accuracy.prompts import Decoded, Prompt

__all__ = ["DriftgateLM", "paired_items"]


class DriftgateLM(LM):  # type: ignore[misc]
    """A checkpoint under one precision plan, as lm-eval's ``LM``.

    Each forward serves the baseline and the plan, so ``baseline`` answers the same requests without decoding them
    again. Nothing is truncated: a request that does not fit the model's positions is an ``InputError``.

    Args:
        model: embedded checkpoint, folder or hub id, as ``driftgate run --model`` takes it; a ``Path`` is no hub id.
        plan: e.g. ``nvfp4/fp32@16``.
        batch: prompts that decode together; part of what decides the bits.
        backend: ``auto``, ``triton``, ``triton-interpret`` or ``torch``.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``fp32``, ``bf16``, ``fp16``, or None for the checkpoint's own.
        seed: of sampling and of stochastic rounding.
        prefill: tokens of each prompt that the model prefills itself: ``none``, ``prompt`` or a number. None for
            ``none`` where a continuation is scored and ``prompt`` where text is generated.

    Raises:
        DriftgateError: lm-eval is missing, or a name, folder, plan, device or backend does not fit; one line.
    """

    def __init__(
        self,
        model: str | Path,
        plan: str = "baseline",
        *,
        batch: int = 16,
        backend: str = "auto",
        device: str = "auto",
        dtype: str | None = None,
        seed: int = 0,
        prefill: str | int | None = None,
    ) -> None:
        require_lm_eval()
        super().__init__()
        from driftgate.accuracy.backends import resolve_backend
        from driftgate.accuracy.models import check_model, load_model, resolve_device, text_config
        from driftgate.accuracy.plans import PrecisionPlan
        from driftgate.evals.find_models import find_model
        from driftgate.evals.model_text import read_text

        parsed = PrecisionPlan.parse(plan)
        _check_choices(batch, dtype, prefill)
        self.plan = str(parsed)
        self.batch, self.options = batch, TaskOptions(seed=seed, prefill=prefill)
        self._device = resolve_device(device)
        self.backend = resolve_backend(backend, self._device)
        folder = find_model(model)  # may fetch it, so everything cheap was looked at before
        self.text = read_text(folder, text_config(check_model(folder)), name=str(model))
        self.loaded = load_model(folder, name=str(model), device=self._device, dtype=dtype)
        self._plans = {} if parsed.options.step_by_step else {self.plan: parsed}
        self._decoded: dict[tuple[Prompt, ...], dict[str, list[Decoded]]] = {}
        self.first_token_ids: list[int] = []

    @property
    def baseline(self) -> DriftgateLM:
        """The baseline; requests that the plan has answered are not decoded again, nor the other way round."""
        other = copy(self)
        other.plan, other.cache_hook = "baseline", CacheHook(None)
        return other

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood, whether every token was the most likely one) of each continuation."""
        return self._answer("loglikelihood", requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text, in windows of the context where it is longer."""
        return self._answer("loglikelihood_rolling", requests, disable_tqdm)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Text up to the first stop, for each request."""
        return self._answer("generate_until", requests, disable_tqdm)

    def respond(self, requests: Sequence[Any], *, disable_tqdm: bool = False) -> list[Response]:
        """What the plan answers to each request, with token counts and caps.

        Args:
            requests: lm-eval's instances, of any types.
            disable_tqdm: no progress bar.

        Raises:
            InputError: a prompt with what is asked after it exceeds the model's positions, or logits are not finite.
        """
        from driftgate.accuracy.prompts import check_lengths

        prompts = make_prompts(requests, options=self.options, text=self.text)
        check_lengths(prompts, context=self.text.context, task="of lm-eval")
        if prompts:
            self.first_token_ids = list(prompts[0].token_ids[:16])
        decoded = self._decode(prompts, disable_tqdm)[self.plan] if prompts else []
        for answer in decoded:
            if not answer.finite:
                raise InputError(
                    f"plan {self.plan}, {answer.item_id}: logits with NaN or infinity; nothing can be scored on them"
                )
        found = read_responses(prompts, decoded, self.text)
        empty = Response(value=0.0)  # a rolling text without tokens
        return [found.get(number, empty) for number in range(len(requests))]

    def _answer(self, request_type: str, requests: Sequence[Any], disable_tqdm: bool) -> list[Any]:
        values = [response.value for response in self.respond(requests, disable_tqdm=disable_tqdm)]
        for request, value in zip(requests, values, strict=True):
            self.cache_hook.add_partial(request_type, request.args, value)
        return values

    def _decode(self, prompts: Sequence[Prompt], disable_tqdm: bool) -> dict[str, list[Decoded]]:
        from tqdm import tqdm

        from driftgate.accuracy.answers import AnswerRunner

        key = tuple(replace(prompt, detail=None) for prompt in prompts)
        if key not in self._decoded:
            runner = AnswerRunner(
                self.loaded.model,
                self._plans,
                batch=self.batch,
                backend=self.backend,
                vocab_size=self.loaded.vocab_size,
                seed=self.options.seed,
            )
            with tqdm(total=len(prompts), desc="prompts", disable=disable_tqdm or None) as bar:
                self._decoded[key] = runner.run(prompts, progress=bar.update)
        return self._decoded[key]

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's."""
        return self.text.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """Keys lm-eval's cache of requests that went through a chat template."""
        return self.text.name.replace("/", "__")

    @property
    def eot_token_id(self) -> int | None:
        """EOS, for lm-eval's records."""
        return next(iter(self.text.eos_ids), None)

    @property
    def max_length(self) -> int | None:
        """Positions of the model, for lm-eval's records."""
        return self.text.context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens of a string; tasks that measure their prompts call this."""
        return encode(self.text, string, special=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as the checkpoint's template writes it."""
        return apply_chat_template(self.text.tokenizer, chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template itself, for lm-eval's records."""
        return str(getattr(self.text.tokenizer, "chat_template", None) or "")

    def get_model_info(self) -> dict[str, Any]:
        """What decides the numbers; lm-eval puts it in the results' ``config``."""
        return {
            "model_name": self.text.name,
            "model_hashes": self.loaded.hashes,
            "model_dtype": str(self.loaded.model.dtype),
            "plan": self.plan,
            "backend": self.backend.value,
            "batch": self.batch,
            "seed": self.options.seed,
            "prefill": self.options.prefill,
            "first_token_ids": self.first_token_ids,
        }


def paired_items(
    results: Mapping[str, Mapping[str, Any]], *, task: str, metric: str, filter_name: str | None = None
) -> pd.DataFrame:
    """The samples of several evaluations as one items frame, as ``driftgate.accuracy.items.paired_record`` takes it.

    Args:
        results: what ``simple_evaluate`` returned, by plan; the baseline's under ``baseline``.
        task: whose samples.
        metric: right (1) or wrong (0) for each sample, e.g. ``acc``.
        filter_name: of lm-eval; None for the first.

    Returns:
        Frame with plan, task, item_id, repeat and correct; lm-eval's samples do not tell caps and answers apart, so
        ``answer`` and ``gold`` are None, ``capped`` False and ``parse_reason`` ``ok``.

    Raises:
        InputError: the samples were not logged, lack the metric, or are not right or wrong.
    """
    import pandas as pd

    rows = []
    for plan, result in results.items():
        samples = (result.get("samples") or {}).get(task)
        if not samples:
            raise InputError(f"{plan}: no samples of task {task}; call simple_evaluate with log_samples=True")
        chosen = filter_name if filter_name is not None else samples[0]["filter"]
        for sample in samples:
            if sample["filter"] != chosen:
                continue
            value = sample.get(metric)
            if value not in (0, 1):
                raise InputError(
                    f"{plan}: {metric} of {task}/{sample['doc_id']} is {value!r}, neither right nor wrong; "
                    f"it has {', '.join(sample['metrics'])}"
                )
            rows.append(
                {
                    "plan": plan, "task": task, "item_id": f"{task}/{sample['doc_id']}", "repeat": 0,
                    "answer": None, "gold": None, "correct": bool(value), "capped": False, "parse_reason": "ok",
                }
            )  # fmt: skip
        if not rows or rows[-1]["plan"] != plan:
            raise InputError(f"{plan}: no samples of task {task} went through filter {chosen}; name one of the task's")
    return pd.DataFrame(rows)


def _check_choices(batch: int, dtype: str | None, prefill: str | int | None) -> None:
    """Raise UsageError for a value that no model could take."""
    if batch < 1:
        raise UsageError(f"batch {batch}: no prompt would be decoded; give 1 or more")
    if dtype not in (None, "fp32", "bf16", "fp16"):
        raise unknown_name("dtype", str(dtype), ("fp32", "bf16", "fp16"))
    if prefill not in (None, "none", "prompt") and not (str(prefill).isdecimal() and int(prefill) >= 1):
        raise UsageError(f"prefill {prefill!r}: expected none, prompt, or a number of tokens, 1 or more")
