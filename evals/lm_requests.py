"""Requests of lm-eval as prompts, and what was decoded as lm-eval's responses: one way for model and task.

Tokens are those of lm-eval's HFLM, but for two things. Nothing is ever cut off: what does not fit is an error. And BOS
stands once: HFLM puts it before a rolling text whose tokenizer has put one there already.

Notable: decoding stops at token ids. A text of ``until`` that is one token stops it; a longer one is found afterwards,
the text is cut there, and the tokens past it do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from driftgate.accuracy.prompts import Decoded, Prompt
from driftgate.errors import InputError

if TYPE_CHECKING:
    from driftgate.evals.tasks.item_task import ModelText, TaskOptions

__all__ = [
    "Asked",
    "Response",
    "apply_chat_template",
    "encode",
    "encode_pair",
    "make_prompts",
    "read_responses",
    "require_lm_eval",
]

MAX_NEW_TOKENS = 256
"""Where a task does not say; as HFLM."""

_NO_EFFECT = {"top_p": 1, "top_k": 0, "min_p": 0, "num_beams": 1, "repetition_penalty": 1, "use_cache": True}
"""Arguments of a generation that driftgate does not have, with the value that changes nothing."""

_OF_SAMPLING = ("top_p", "top_k", "min_p", "typical_p")
"""Of no effect where the most likely token is taken."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Which request a prompt belongs to; its ``Prompt.detail``.

    Attributes:
        number: of the request in the list; the windows of a rolling request share it.
        instance: of lm-eval.
        until: texts that end a generation.
    """

    number: int
    instance: Any
    until: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Response:
    """What came back on one request.

    Attributes:
        value: as lm-eval expects it: (log-likelihood, is greedy), a log-likelihood, or a text.
        n_tokens: scored or generated, those after an ``until`` text not counted.
        capped: the generation ended without a stop.
        finite: all logits that were looked at are finite.
        low_precision_reads: of a low-precision state while this was decoded.
    """

    value: Any
    n_tokens: int = 0
    capped: bool = False
    finite: bool = True
    low_precision_reads: int = 0


def require_lm_eval() -> None:
    """Raise InputError, naming the extra, where lm-eval is not installed."""
    if find_spec("lm_eval") is None:
        raise InputError("lm-eval is not installed; pip install 'driftgate[lm-eval]'")


def apply_chat_template(tokenizer: Any, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """A chat as text, as HFLM writes it: the last message is continued where it is the answer's beginning."""
    return str(
        tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
    )


def make_prompts(instances: Sequence[Any], *, options: TaskOptions, text: ModelText) -> list[Prompt]:
    """Prompts of lm-eval's requests, in their order.

    Args:
        instances: of lm-eval; one that stands there several times is answered several times.
        options: prefill; ``max_new_tokens`` and ``temperature`` take the place of the task's own.
        text: of the model.

    Returns:
        One prompt per request, more of a rolling one whose text exceeds the context. All prompts of a document share
        an item id, ``task/document``, and are told apart by ``repeat``; ``detail`` is ``Asked``.

    Raises:
        InputError: no tokenizer, nothing to score, or a generation argument that driftgate does not have.
    """
    if text.tokenizer is None:
        raise InputError(f"model {text.name} has no tokenizer, lm-eval's tasks are text; give a folder that has one")
    make = {"loglikelihood": _score_pair, "loglikelihood_rolling": _score_text, "generate_until": _generate}
    seen: Counter[str] = Counter()
    prompts = []
    for number, instance in enumerate(instances):
        item_id = f"{instance.task_name}/{instance.doc_id}"
        for fields in make[instance.request_type](instance, item_id, options, text):
            asked = Asked(number=number, instance=instance, until=fields.pop("until", ()))
            prompts.append(Prompt(item_id=item_id, repeat=seen[item_id], detail=asked, **fields))
            seen[item_id] += 1
    return prompts


def _score_pair(instance: Any, item_id: str, options: TaskOptions, text: ModelText) -> list[dict[str, Any]]:
    context, continuation = encode_pair(text, *instance.args)
    if not continuation:
        raise InputError(f"{item_id}: the continuation {instance.args[1]!r} has no tokens to score; correct the task")
    return [_scored(context, continuation, options)]


def _score_text(instance: Any, item_id: str, options: TaskOptions, text: ModelText) -> list[dict[str, Any]]:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    (string,) = instance.args
    first = prefix_token(text)
    tokens = encode(text, string, special=False)
    tokens = tokens[1:] if tokens[:1] == [first] else tokens
    longest = len(tokens) if text.context is None else text.context - 1  # a prompt counts what it feeds and its target
    windows = get_rolling_token_windows(tokens, first, max_seq_len=max(1, longest), context_len=1)
    return [_scored(*make_disjoint_window(window), options) for window in windows]


def _scored(context: list[int], continuation: list[int], options: TaskOptions) -> dict[str, Any]:
    return {
        "token_ids": tuple(context),
        "continuation": tuple(continuation),
        "prefill": options.prefilled(len(context), mode="loglikelihood"),
    }


def _generate(instance: Any, item_id: str, options: TaskOptions, text: ModelText) -> list[dict[str, Any]]:
    from lm_eval.models.utils import normalize_gen_kwargs

    context, arguments = instance.args
    wanted: dict[str, Any] = dict(normalize_gen_kwargs(arguments, MAX_NEW_TOKENS))
    until = tuple(stop for stop in wanted.pop("until") if stop)
    own = wanted.pop("temperature", 1.0)
    temperature = own if wanted.pop("do_sample") else 0.0
    if options.temperature is not None:
        temperature = options.temperature
    max_gen_toks = wanted.pop("max_gen_toks")
    for name, value in wanted.items():
        greedy = temperature == 0 and name in _OF_SAMPLING
        if not greedy and value not in (None, _NO_EFFECT.get(name)):
            raise InputError(
                f"{item_id}: generation_kwargs {name}: {value} is not available, driftgate samples by temperature "
                "alone; take it out of the task" + (", or ask for temperature 0" if name in _OF_SAMPLING else "")
            )
    token_ids = tuple(encode(text, context)) or (prefix_token(text),)
    return [
        {
            "token_ids": token_ids,
            "prefill": options.prefilled(len(token_ids), mode="generate"),
            "max_new_tokens": options.max_new_tokens or max_gen_toks,
            "temperature": float(temperature),
            "stop_ids": _stop_ids(text, until),
            "until": until,
        }
    ]


def _stop_ids(text: ModelText, until: Sequence[str]) -> tuple[int, ...]:
    """EOS and the texts that are one token."""
    found = list(text.eos_ids)
    for string in until:
        tokens = encode(text, string, special=False)
        if len(tokens) == 1 and text.tokenizer.decode(tokens) == string:
            found += tokens
    return tuple(dict.fromkeys(found))


def prefix_token(text: ModelText) -> int:
    """What stands before a text that has nothing before it: BOS, else EOS."""
    for token in (text.bos_id, *text.eos_ids):
        if token is not None:
            return token
    raise InputError(f"model {text.name} names neither BOS nor EOS; name one in its config.json")


def encode(text: ModelText, string: str, *, special: bool | None = None) -> list[int]:
    """Tokens of a string.

    Args:
        text: of the model.
        string: a prompt, or a part of one.
        special: add the tokenizer's special tokens; None for what the tokenizer does by itself, but no second BOS
            where the string (a chat template's) begins with one.
    """
    if special is None and text.bos_id is not None and string.startswith(text.tokenizer.decode([text.bos_id])):
        special = False
    extra = {} if special is None else {"add_special_tokens": special}
    return [int(token) for token in text.tokenizer.encode(string, **extra)]


def encode_pair(text: ModelText, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Tokens of a context, at least one, and of what is scored after it, as lm-eval splits them.

    Spaces at the end of the context go to the continuation, where tokenizers put them; both are tokenised as one
    string. An empty context is BOS, else EOS.
    """
    stripped = context.rstrip()
    if not stripped:
        first = prefix_token(text)
        tokens = encode(text, context + continuation, special=False)
        return [first], tokens[1:] if tokens[:1] == [first] else tokens
    start = encode(text, stripped)
    return start, encode(text, context + continuation)[len(start) :]


def read_responses(prompts: Sequence[Prompt], decoded: Sequence[Decoded], text: ModelText) -> dict[int, Response]:
    """Responses of one plan by ``Asked.number``, in the order of the prompts.

    Args:
        prompts: of ``make_prompts``, all of a request or none.
        decoded: of one plan, in the order of the prompts.
        text: decodes tokens.
    """
    parts: dict[int, list[tuple[Prompt, Decoded]]] = {}
    for prompt, answer in zip(prompts, decoded, strict=True):
        parts.setdefault(prompt.detail.number, []).append((prompt, answer))
    return {number: _respond(own, text) for number, own in parts.items()}


def _respond(parts: Sequence[tuple[Prompt, Decoded]], text: ModelText) -> Response:
    request_type = parts[0][0].detail.instance.request_type
    answers = [answer for _, answer in parts]
    if request_type == "generate_until":
        ((prompt, answer),) = parts
        return _read_text(prompt, answer, text)
    total = float(sum(sum(answer.logprobs) for answer in answers))
    greedy = all(answer.greedy for answer in answers)
    return Response(
        value=(total, greedy) if request_type == "loglikelihood" else total,
        n_tokens=sum(len(answer.logprobs) for answer in answers),
        finite=all(answer.finite for answer in answers),
        low_precision_reads=sum(answer.low_precision_reads for answer in answers),
    )


def _read_text(prompt: Prompt, answer: Decoded, text: ModelText) -> Response:
    """The text of a generation up to its first stop."""
    tokens = list(answer.token_ids)
    stopped = bool(tokens) and tokens[-1] in prompt.stop_ids
    body = tokens[:-1] if stopped else tokens
    whole = _detokenize(body, text)
    value = _cut(whole, prompt.detail.until)
    n_tokens = len(tokens)
    if value != whole:
        n_tokens = _tokens_until(body, prompt.detail.until, text)
    return Response(
        value=value,
        n_tokens=n_tokens,
        capped=answer.capped and value == whole,
        finite=answer.finite,
        low_precision_reads=answer.low_precision_reads,
    )


def _detokenize(tokens: Sequence[int], text: ModelText) -> str:
    return str(text.tokenizer.decode(list(tokens), skip_special_tokens=True))


def _cut(string: str, until: Sequence[str]) -> str:
    for stop in until:
        string = string.split(stop)[0]
    return string


def _tokens_until(tokens: Sequence[int], until: Sequence[str], text: ModelText) -> int:
    """Tokens up to the one that completes a stop, found by halving: more tokens never undo a stop."""
    low, high = 0, len(tokens)
    while low < high:
        middle = (low + high) // 2
        string = _detokenize(tokens[:middle], text)
        low, high = (low, middle) if _cut(string, until) != string else (middle + 1, high)
    return low
