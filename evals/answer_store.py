"""Answers on disk: one file per batch, written whole and sealed, read only under the identity of its writing."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from driftgate.accuracy.prompts import Decoded
from driftgate.accuracy.records import write_text
from driftgate.errors import InputError

if TYPE_CHECKING:
    from driftgate.accuracy.answers import BatchAnswers

__all__ = ["AnswerStore"]


@dataclass(frozen=True, kw_only=True)
class AnswerStore:
    """A folder of batches.

    Attributes:
        folder: made when the first batch is written.
    """

    folder: Path

    def path(self, task: str, number: int) -> Path:
        """File of one batch."""
        return self.folder / re.sub(r"[^A-Za-z0-9._-]", "_", task) / f"{number:05d}.txt"

    def read(self, task: str, number: int, identity: str) -> BatchAnswers | None:
        """A stored batch, None where there is none.

        Raises:
            InputError: the file is no batch of this store, or answers another question, model, plan or version.
        """
        from driftgate.accuracy.answers import BatchAnswers

        path = self.path(task, number)
        try:
            seal, content = path.read_text(encoding="utf-8").split("\n", 1)
            if seal != hashlib.sha256(content.encode()).hexdigest():
                raise ValueError
            fields = json.loads(content)
            found = fields.pop("identity")
            answers = {
                name: [Decoded(**{k: _tuple(v) for k, v in row.items()}) for row in rows]
                for name, rows in fields.pop("answers").items()
            }
            batch = BatchAnswers(answers=answers, **fields)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path} is no batch of answers or was edited; delete it to have it decoded anew"
            ) from error
        if found != identity:
            raise InputError(
                f"{path} was answered with another model, plan, version, seed or prompt; resume the run that it "
                "belongs to, or choose another --out"
            )
        return batch

    def write(self, task: str, number: int, identity: str, batch: BatchAnswers) -> None:
        """Keep a batch; a reader sees all of it or nothing."""
        path = self.path(task, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"identity": identity, **asdict(batch)}) + "\n"
        write_text(path, hashlib.sha256(content.encode()).hexdigest() + "\n" + content)


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
