"""What tasks may know of a model before its weights are loaded: tokenizer, vocabulary, positions, special tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from driftgate.evals.checkpoints import find_checkpoint
from driftgate.evals.tasks.item_task import ModelText
from driftgate.evals.tasks.wordings import own_bos

__all__ = ["read_text"]


def read_text(folder: Path, config: Any, *, name: str) -> ModelText:
    """Read what a checkpoint folder says about text.

    Args:
        folder: of the checkpoint.
        config: of its language model.
        name: how messages call it.

    Raises:
        InputError: the tokenizer is damaged.
    """
    from driftgate.accuracy.models import load_tokenizer

    tokenizer = load_tokenizer(folder)
    width = int(config.vocab_size)
    return ModelText(
        name=name,
        tokenizer=tokenizer,
        vocab_size=width if tokenizer is None else min(width, len(tokenizer)),
        context=getattr(config, "max_position_embeddings", None),
        bos_id=_find_bos(tokenizer, config, embedded=find_checkpoint(name) is not None),
        eos_ids=tuple(dict.fromkeys(_ids(tokenizer, config, "eos_token_id"))),
    )


def _find_bos(tokenizer: Any, config: Any, *, embedded: bool) -> int | None:
    """Token that a text begins with: many a config names one that its tokenizer never adds."""
    if embedded:
        return next(iter(_ids(tokenizer, config, "bos_token_id")), None)
    return None if tokenizer is None else own_bos(tokenizer)


def _ids(tokenizer: Any, config: Any, field: str) -> list[int]:
    """Ids that tokenizer and config name; either may say nothing, one, or several."""
    found: list[int] = []
    for owner in (tokenizer, config):
        value = getattr(owner, field, None)
        values: Iterable[Any] = value if isinstance(value, list | tuple) else [value]
        found += [int(v) for v in values if v is not None]
    return found
