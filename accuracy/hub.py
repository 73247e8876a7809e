"""Checkpoints by hub id: from the local Hugging Face cache, else from the hub, unless the environment says offline.

Notable: the small files come first, so that a model that driftgate does not cover is refused before its weights are
fetched, and of these only the files that the index names: some repositories hold the same weights twice. HF_HOME,
HF_HUB_OFFLINE and the like are honoured, as huggingface_hub reads them.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from driftgate.errors import InputError

__all__ = ["fetch_checkpoint", "is_hub_id"]

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
_SMALL = ("*.json", "*.txt", "*.jinja", "*.model")
_SUBFOLDERS = ("*/*",)


def is_hub_id(name: str) -> bool:
    """Whether a model's name may be one of the hub: ``owner/name`` or ``owner/name@revision``, and no local path."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name.partition("/")[0]).exists()


def fetch_checkpoint(name: str) -> Path:
    """The folder of a checkpoint of the hub, in the local cache.

    Args:
        name: ``owner/name`` or ``owner/name@revision``.

    Raises:
        InputError: not cached and out of reach, no such repository, gated, or not a model that driftgate covers.
    """
    from driftgate.accuracy.models import check_config

    with _quiet_unless_watched():
        folder = _fetch(name, _SMALL)
        check_config(folder)
        return _fetch(name, _SMALL + _weight_files(folder))


def _weight_files(folder: Path) -> tuple[str, ...]:
    """Names of the weight files; all there are where the index is damaged, which whoever reads it next will say."""
    from driftgate.accuracy.weight_files import INDEX, SINGLE

    try:
        places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return tuple(sorted({str(file) for file in places.values()}))
    except FileNotFoundError:
        return (SINGLE,)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ("*.safetensors",)


def _fetch(name: str, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub import errors as hub

    repository, _, revision = name.partition("@")
    offline = constants.HF_HUB_OFFLINE
    try:
        found = snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(patterns),
            ignore_patterns=list(_SUBFOLDERS),
            local_files_only=offline,
        )
    except hub.GatedRepoError as error:
        raise InputError(f"{name} is gated; accept its terms on the hub and log in with `hf auth login`") from error
    except hub.RevisionNotFoundError as error:
        raise InputError(f"{repository} has no revision {revision}; leave @{revision} out or name another") from error
    except hub.RepositoryNotFoundError as error:
        raise InputError(
            f"{name} is neither a folder nor on the Hugging Face hub; correct it, or log in if it is private"
        ) from error
    except hub.LocalEntryNotFoundError as error:
        why = "the environment says offline (HF_HUB_OFFLINE)" if offline else "the hub cannot be reached"
        raise InputError(
            f"{name} is no folder and not in the cache {constants.HF_HUB_CACHE}, and {why}; fetch it first with "
            f"`hf download {repository}`"
        ) from error
    except (hub.HfHubHTTPError, OSError, ValueError) as error:
        raise InputError(
            f"{name} cannot be fetched: {textwrap.shorten(str(error), 400, placeholder=' ...')}"
        ) from error
    return Path(found)


@contextmanager
def _quiet_unless_watched() -> Iterator[None]:
    """Progress bars of the hub only where somebody sees them; as it was afterwards."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        yield
    finally:
        if quiet:
            enable_progress_bars()
