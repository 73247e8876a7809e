"""Models that a run names: an embedded checkpoint, a folder or a hub id; the reference model; positions they have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from driftgate.errors import InputError, unknown_name

if TYPE_CHECKING:
    from driftgate.evals.suite import Suite
    from driftgate.evals.tasks.item_task import ModelText

__all__ = ["check_positions", "check_reference", "find_model"]


def find_model(model: str | Path) -> Path:
    """The folder of an embedded checkpoint, the folder that was named, or that of a hub id in the local cache.

    Args:
        model: a name; a ``Path`` is never a hub id.

    Raises:
        UsageError: neither an embedded checkpoint nor something that looks like a path or a hub id.
        InputError: a path that is no folder, or a hub id that cannot be had.
    """
    from driftgate.evals.checkpoints import find_checkpoint, list_checkpoints

    name = str(model)
    embedded = find_checkpoint(name)
    if embedded is not None:
        return embedded
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if "/" not in name and not name.startswith("."):
        raise unknown_name("model", name, list_checkpoints())
    from driftgate.accuracy.hub import fetch_checkpoint, is_hub_id

    if isinstance(model, str) and is_hub_id(name):
        return fetch_checkpoint(name)
    if path.is_file():
        raise InputError(f"model {name} is a file; give the folder that it lies in")
    raise InputError(f"model folder {name} does not exist; give a checkpoint folder or one of `driftgate ls models`")


def check_positions(suite: Suite, text: ModelText) -> None:
    """Refuse streams of the user's text that are longer than the positions of a model.

    Raises:
        InputError: says how many steps there may be.
    """
    length = suite.steps + suite.prefill
    if text.context is not None and length > text.context:
        raise InputError(
            f"model {text.name} has {text.context} positions, streams of {length} tokens do not fit; give --steps "
            f"{max(1, text.context - suite.prefill)} or fewer"
        )


def check_reference(name: str, text: ModelText, *, device: str, dtype: str | None) -> tuple[Path, int]:
    """The folder of a reference model whose tokens are those of the main model, and the bytes of its weights.

    Args:
        name: as the user named it.
        text: of the main model.
        device, dtype: as ``load_model`` takes them.

    Raises:
        DriftgateError: as ``find_model`` and ``check_model``, or another vocabulary.
    """
    from driftgate.accuracy.models import check_model, text_config, weights_memory
    from driftgate.evals.model_text import read_text

    folder = find_model(name)
    parsed = check_model(folder, device=device, dtype=dtype)
    other = read_text(folder, text_config(parsed), name=name)
    if other.vocab_size != text.vocab_size:
        raise InputError(
            f"reference model {name} has {other.vocab_size} tokens, {text.name} has {text.vocab_size}; give two "
            "checkpoints of one tokenizer"
        )
    if other.tokenizer is not None and text.tokenizer is not None:
        ours, theirs = text.tokenizer.get_vocab(), other.tokenizer.get_vocab()
        if ours != theirs:
            token = min(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
            raise InputError(
                f"reference model {name} has another id for the token {token!r} than {text.name}; give two checkpoints "
                "of one tokenizer"
            )
    return folder, weights_memory(folder, parsed, dtype)
