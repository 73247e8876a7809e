"""Suites: YAML files that say what a run measures; bundled ones lie in suites/."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from driftgate.accuracy.mixed import check_name, mix_layers
from driftgate.accuracy.plans import BASELINE, PrecisionPlan, Role
from driftgate.accuracy.yaml_file import read_yaml
from driftgate.errors import DriftgateError, EmptyRunError, InputError, UsageError, unknown_name
from driftgate.evals.tasks import TASKS
from driftgate.evals.tasks.build import STANDARD, Difficulty
from driftgate.evals.tasks.item_task import TaskOptions

__all__ = ["PlanEntry", "Suite", "bundled_suites", "load_suite"]

FOLDER = Path(__file__).parent / "suites"


class PlanEntry(BaseModel):
    """One plan of a suite, with its role.

    Attributes:
        plan: text; of a mixed plan, that of every layer that ``layers`` does not name.
        role: candidates are gated, controls are expected to drift.
        name: key of a mixed plan in results.json; other plans go by their text.
        layers: decoder-layer indices as in the checkpoint, e.g. ``"0,3"``, to plan texts of the same length.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan: str
    role: Literal["candidate", "control"] = "candidate"
    name: str | None = None
    layers: dict[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_text(cls, entry: object) -> object:
        if isinstance(entry, str):
            raise ValueError(f"write a plan as a mapping, e.g. - plan: {entry}")
        return entry

    @field_validator("layers", mode="before")
    @classmethod
    def _write_indices(cls, layers: object) -> object:
        """YAML reads a lone index as a number."""
        if layers is None:
            return None
        if not isinstance(layers, dict) or not all(isinstance(text, str) for text in layers.values()):
            raise ValueError('expected decoder-layer indices with a plan text each, e.g. {"0,3": fp8/fp32@16}')
        return {str(indices): text for indices, text in layers.items()}

    @model_validator(mode="after")
    def _check_mixed(self) -> PlanEntry:
        if self.layers is not None and self.name is None:
            raise ValueError("a plan with layers needs a name, its key in results.json")
        if self.name is not None and self.layers is None:
            raise ValueError("name is for a plan with layers; others go by their text")
        if self.name is not None:
            check_name(self.name)
        return self

    def parsed(self) -> PrecisionPlan:
        """The plan itself."""
        base = PrecisionPlan.parse(self.plan)
        return base if self.layers is None else mix_layers(base, self.layers, name=str(self.name))

    @property
    def key(self) -> str:
        """Key of the plan in results.json: its name, or its canonical text."""
        return self.name or str(self.parsed())


class Suite(BaseModel):
    """What a run measures.

    Attributes:
        name, title: for lists and reports.
        model: embedded checkpoint, folder or hub id.
        plans: every plan once; the baseline always runs and is not listed.
        stream: ``tasks`` for the streams that the tasks are asked in, ``generation`` for the baseline's own
            generation, ``data`` for the user's text; ``auto`` takes the last where ``data`` is no task's, and else the
            first for embedded checkpoints, which were trained on them.
        difficulty: of recall and tracking.
        generate: the baseline goes on from the end of each line of ``data``.
        tasks: tasks whose questions stand at the end of the streams; empty for none.
        sequences: streams.
        steps: decoded steps of each stream, prefill not counted.
        batch: streams that decode together; part of what decides the bits.
        prefill: tokens of each stream that the model prefills itself.
        seed: of the streams and their questions, of the order of options, of sampling.
        data: file or hub id with the questions or the text of the tasks that take one.
        mode: ``loglikelihood`` or ``generate``; None for what a task does by itself, as for all that follow.
        prompt: name of the wording.
        repeats: answers to each item.
        temperature: of sampling.
        max_new_tokens: tokens that may be generated for an answer.
        answer_prefill: tokens of a prompt that the model prefills itself: ``none``, ``prompt`` or a number.
        limit: items of each task with items of its own: the first of an order that the seed gives.
        ablate: ``layers`` or ``heads`` to measure each of them alone in the precision of each candidate; None for not.
        reference_model: checkpoint whose weights the model's are compared with, at FP32 state.
        policy: bundled policy or YAML file that applies without ``--policy``; None for the default.
        cross_check_cycles: flush cycles of every plan that run through the interpreted kernels where there is no GPU.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str = ""
    model: str = "tiny-gdn"
    plans: Annotated[tuple[PlanEntry, ...], Field(min_length=1)]
    stream: Literal["auto", "tasks", "generation", "data"] = "auto"
    difficulty: Difficulty = STANDARD
    generate: bool = False
    tasks: tuple[str, ...] = ()
    sequences: Annotated[int, Field(ge=1)] = 16
    steps: int = 1024
    batch: Annotated[int, Field(ge=1, le=65_536)] = 16
    prefill: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    data: str | None = None
    mode: Literal["loglikelihood", "generate"] | None = None
    prompt: str | None = None
    repeats: Annotated[int, Field(ge=1, le=1_000)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    answer_prefill: Literal["none", "prompt"] | Annotated[int, Field(ge=1)] | None = None
    limit: Annotated[int, Field(ge=1)] | None = None
    ablate: Literal["layers", "heads"] | None = None
    reference_model: str | None = None
    policy: str | None = None
    cross_check_cycles: Annotated[int, Field(ge=2)] = 2

    @field_validator("difficulty", mode="before")
    @classmethod
    def _check_difficulty(cls, difficulty: object) -> object:
        known = {field.name for field in dataclasses.fields(Difficulty)}
        if isinstance(difficulty, dict) and not difficulty.keys() <= known:
            raise ValueError(f"knows {', '.join(sorted(known))}, not {', '.join(sorted(difficulty.keys() - known))}")
        return difficulty

    @field_validator("steps")
    @classmethod
    def _check_steps(cls, steps: int) -> int:
        if steps < 1:
            raise EmptyRunError(f"steps {steps}: no step would be decoded; give 1 or more")
        return steps

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        for name in tasks:
            if tasks.count(name) > 1:
                raise UsageError(f"task {name} is listed twice; list it once")
        return tasks

    @field_validator("plans")
    @classmethod
    def _check_plans(cls, plans: tuple[PlanEntry, ...]) -> tuple[PlanEntry, ...]:
        names = [entry.key for entry in plans]
        for entry, name in zip(plans, names, strict=True):
            entry.parsed()
            if names.count(name) > 1:
                raise UsageError(f"plan {name} is listed twice; list it once")
            if name == str(BASELINE):
                raise UsageError("plan baseline always runs; leave it out")
            if any(options.window for options in entry.parsed().every):
                raise UsageError(
                    f"plan {name}: a model decodes single tokens in a run; leave +spec to `driftgate certify`"
                )
            if entry.role == "control" and not entry.parsed().low_precision:
                raise UsageError(f"control {name} keeps FP32 and cannot drift; take one below FP32, e.g. nvfp4@16")
        return plans

    def named_plans(self) -> dict[str, PrecisionPlan]:
        """Plans by key, in the order of the report."""
        return {entry.key: entry.parsed() for entry in self.plans}

    def roles(self) -> dict[str, Role]:
        """Roles by key."""
        return {entry.key: Role(entry.role) for entry in self.plans}

    @property
    def stream_tasks(self) -> tuple[str, ...]:
        """Tasks whose questions stand at the end of the streams."""
        return tuple(name for name in self.tasks if name in TASKS)

    @property
    def item_tasks(self) -> tuple[str, ...]:
        """Tasks with prompts of their own."""
        return tuple(name for name in self.tasks if name not in TASKS)

    def task_options(self) -> TaskOptions:
        """What the suite says about items, as tasks take it."""
        return TaskOptions(
            seed=self.seed,
            data=self.data,
            mode=self.mode,
            prompt=self.prompt,
            repeats=self.repeats,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            prefill=self.answer_prefill,
        )

    def changed(self, **overrides: Any) -> Suite:
        """A suite with some fields replaced by flags; None leaves a field as it is.

        Raises:
            UsageError: a value does not fit; names the field.
        """
        fields = self.model_dump() | {k: v for k, v in overrides.items() if v is not None}
        return _validate(fields, f"suite {self.name}", UsageError)


def bundled_suites() -> dict[str, Path]:
    """Bundled suites by name."""
    return {p.stem: p for p in sorted(FOLDER.glob("*.yaml"))}


def load_suite(name: str) -> Suite:
    """A bundled suite by name, or a YAML file by path.

    Raises:
        UsageError: no bundled suite has that name, or a plan in it is unknown or listed twice.
        EmptyRunError: it asks for no steps.
        InputError: the file is missing, no YAML, or not of this schema.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise InputError(f"suite file {path} does not exist; `driftgate ls suites` lists the bundled ones")
    elif name in bundled_suites():
        path = bundled_suites()[name]
    else:
        raise unknown_name("suite", name, bundled_suites())
    fields = read_yaml(path)
    if not isinstance(fields, dict):
        raise InputError(f"{path}: expected a mapping with name, plans, tasks; got {type(fields).__name__}")
    return _validate({"name": path.stem, **fields}, str(path), InputError)


def merge_plans(suite: Suite, plans: Sequence[str], controls: Sequence[str]) -> tuple[PlanEntry, ...] | None:
    """Plans of the command line in place of the suite's of the same role; None where none are given.

    The suite's controls stay unless others are named: without one, a run cannot show that it sees drift.
    """
    if not plans and not controls:
        return None
    chosen = {
        "candidate": tuple(PlanEntry(plan=str(PrecisionPlan.parse(p))) for p in plans),
        "control": tuple(PlanEntry(plan=str(PrecisionPlan.parse(p)), role="control") for p in controls),
    }
    named = {entry.key for entries in chosen.values() for entry in entries}
    kept = {
        role: entries or tuple(e for e in suite.plans if e.role == role and e.key not in named)
        for role, entries in chosen.items()
    }
    return kept["candidate"] + kept["control"]


def _validate(fields: dict[str, Any], where: str, error_kind: type[DriftgateError]) -> Suite:
    try:
        return Suite.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise error_kind(f"{where}: {field}: {first['msg'].removeprefix('Value error, ')}") from error
