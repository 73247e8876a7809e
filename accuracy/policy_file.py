"""What a policy says: named checks with limits and reasons, read from a YAML file and checked whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from driftgate.accuracy.yaml_file import read_yaml
from driftgate.errors import InputError, unknown_name

__all__ = ["TASK_CHECKS", "Check", "CheckName", "Inconclusive", "Policy", "bundled_policies", "load_policy"]

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


class Inconclusive(BaseModel):
    """What an inconclusive run is to whoever acts on it.

    Attributes:
        counts_as: ``fail`` fails the run; ``pass`` leaves it inconclusive and makes the exit code 0, unless one of its
            checks could have seen nothing.
        reason: why.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    counts_as: Literal["pass", "fail"]
    reason: str = Field(min_length=1)


class Policy(BaseModel):
    """Named checks, and what an inconclusive run counts as; None for exit code 3."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    inconclusive: Inconclusive | None = None
    checks: tuple[Check, ...] = Field(min_length=1)

    @field_validator("inconclusive", mode="before")
    @classmethod
    def _with_a_reason(cls, value: Any) -> Any:
        if value is None or isinstance(value, dict | Inconclusive):
            return value
        raise ValueError(f"{value!r}: expected counts_as, pass or fail, and a reason")


def load_policy(path: str | Path | None = None) -> Policy:
    """Read a policy: a YAML file, a bundled one by its name, or the bundled default.

    Raises:
        UsageError: a name without suffix that is neither a file nor bundled.
        InputError: missing, no YAML, or not of this schema; one line.
    """
    path = _find(path)
    try:
        fields = read_yaml(path)
    except InputError as error:
        if not path.exists():
            raise InputError(f"policy {path} does not exist; leave --policy out for the default") from error
        raise InputError(f"policy {error}") from error
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
