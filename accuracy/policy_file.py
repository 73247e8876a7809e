"""What a policy says: named checks with limits and reasons, read from a YAML file and checked whole."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from driftgate.errors import InputError, unknown_name

__all__ = ["TASK_CHECKS", "Check", "CheckName", "Policy", "bundled_policies", "load_policy"]

FOLDER = Path(__file__).parent / "policies"
DEFAULT = FOLDER / "default.yaml"

CheckName = Literal[
    "bitwise", "kl_mean", "kl_p99_9", "same_top_p", "ppl_ratio", "drift_slope", "checkpoint_error", "task_loss",
    "cap_hit_excess",
]  # fmt: skip
TASK_CHECKS = ("task_loss", "cap_hit_excess")
"""Checks of answers, one verdict for each plan and task."""


class Check(BaseModel):
    """One rule.

    Attributes:
        check: what is compared.
        limit: greatest value that passes (``same_top_p``: least); unit of the figure. ``cap_hit_excess``: fraction of
            the answers by which a plan may hit the cap oftener than the baseline.
        margin: greatest loss in points, for ``task_loss``.
        reason: why this limit.
        plans: patterns of the plans it applies to.
        tasks: patterns of the tasks, for checks of answers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    check: CheckName
    limit: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    margin: float | None = Field(default=None, gt=0, lt=100)
    reason: str = Field(min_length=1)
    plans: tuple[str, ...] = ("*",)
    tasks: tuple[str, ...] = ("*",)

    @model_validator(mode="after")
    def _one_number(self) -> Check:
        wanted = {"bitwise": None, "task_loss": "margin"}.get(self.check, "limit")
        for name in ("limit", "margin"):
            if (getattr(self, name) is not None) != (name == wanted):
                raise ValueError(f"{self.check} takes {wanted or 'neither limit nor margin'}")
        if self.check == "cap_hit_excess" and self.limit is not None and self.limit > 1.0:
            raise ValueError(f"cap_hit_excess takes a limit of 0 to 1, a fraction of the answers, not {self.limit:g}")
        return self


class Policy(BaseModel):
    """Named checks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    checks: tuple[Check, ...] = Field(min_length=1)


def load_policy(path: str | Path | None = None) -> Policy:
    """Read a policy: a YAML file, a bundled one by its name, or the bundled default.

    Raises:
        UsageError: a name without suffix that is neither a file nor bundled.
        InputError: missing, no YAML, or not of this schema; one line.
    """
    path = _find(path)
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"policy {path} does not exist; leave --policy out for the default") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"policy {path} is no readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(fields, dict):
        raise InputError(f"policy {path}: expected a mapping with name and checks, got {type(fields).__name__}")
    try:
        return Policy.model_validate({"name": path.stem, **fields})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "policy"
        raise InputError(f"policy {path}: {where}: {first['msg']}") from error


def bundled_policies() -> dict[str, Path]:
    """Policies of the package by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def _find(path: str | Path | None) -> Path:
    if path is None:
        return DEFAULT
    if str(path) in bundled_policies():
        return bundled_policies()[str(path)]
    if not Path(path).suffix and not Path(path).exists() and len(Path(path).parts) == 1:
        raise unknown_name("policy", str(path), bundled_policies())
    return Path(path)
