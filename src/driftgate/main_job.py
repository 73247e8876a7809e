"""The main job: resolve what the user named, measure, decide, write the run folder and its report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftgate.errors import UsageError, unknown_name
from driftgate.evals.find_models import check_positions, check_reference, find_model
from driftgate.memory import check_memory, held_memory
from driftgate.run_folder import RunFolder, check_out, claim, reclaim
from driftgate.run_request import REQUEST, parse_request, read_request, refuse_changed, write_request

if TYPE_CHECKING:
    from driftgate.accuracy.policy import Policy
    from driftgate.accuracy.records import RunData
    from driftgate.evals.answer_store import AnswerStore
    from driftgate.evals.answering import BuiltTask
    from driftgate.evals.experiment import Experiment
    from driftgate.evals.suite import Suite
    from driftgate.kernels.contract import Backend

__all__ = [
    "Checked", "Prepared", "check", "check_parts", "find_model", "make_experiment", "prepare", "resume", "run",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a run would be: every part was looked at and fits; nothing is loaded, claimed or written.

    Attributes:
        suite: with what the user chose in it.
        policy: limits and reasons.
        folder: of the checkpoint.
        config: of its language model.
        device, backend, dtype: resolved; ``dtype`` None for the checkpoint's own.
        memory: bytes that grow with the steps.
        weights: bytes of the model, and of the reference model where there is one.
        reference: folder of the reference model.
        built: tasks with prompts of their own.
        given: token ids of the streams that the user gave, empty where there are none.
    """

    suite: Suite
    policy: Policy
    folder: Path
    config: Any
    device: str
    backend: Backend
    dtype: str | None
    memory: int
    weights: int = 0
    reference: Path | None = None
    built: tuple[BuiltTask, ...] = ()
    given: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that was checked, whose model is loaded and whose folder is claimed."""

    experiment: Experiment
    folder: RunFolder

    @property
    def out(self) -> Path:
        """The run folder."""
        return self.folder.path

    def execute(self, progress: Callable[[int], None] | None = None) -> RunData:
        """Measure, decide, write the folder and its report; however it ends, the folder is free again."""
        from driftgate.accuracy.records import save_run
        from driftgate.reports import render_all

        try:
            data = self.experiment.run(progress)
            save_run(self.out, data)
            (self.out / REQUEST).unlink()  # the manifest says it all
            render_all(self.out)
        finally:
            self.folder.release()
        return data


def run(suite: str = "quick", *, out: str | Path, **choices: object) -> RunData:
    """Run a suite and write its folder; the Python form of ``driftgate run``.

    Args:
        suite: bundled name or YAML file.
        out: run folder; must not exist or be empty.
        **choices: keyword arguments of ``check``.

    Returns:
        The run, as ``load_run(out)`` would read it.

    Raises:
        DriftgateError: what the user gave does not fit; one line.
    """
    return prepare(suite, out=Path(out), **choices).execute()  # type: ignore[arg-type]


def prepare(
    suite: str = "quick", *, out: Path, command: Sequence[str] | None = None, jobs: int = 1, **choices: Any
) -> Prepared:
    """Check everything, claim the folder, load the model.

    Args:
        suite: bundled name or YAML file.
        out: run folder.
        command: for the manifest; None for ``sys.argv``.
        jobs: processes that answer items.
        **choices: keyword arguments of ``check``.
    """
    checked = check(suite, out=out, **choices)
    folder = claim(out)
    try:
        return _load(checked, folder, command, jobs)
    except BaseException:
        folder.release()
        raise


def resume(out: Path, *, command: Sequence[str] | None = None, jobs: int = 1) -> Prepared:
    """Take up a run that was interrupted: what it asked for is in its folder.

    Args:
        out: its folder.
        command: for the manifest; None for ``sys.argv``.
        jobs: processes that answer items; need not be as many as before.

    Raises:
        InputError: nothing to resume there, or model, versions or device are not as they were.
    """
    request = read_request(out)
    suite, policy = parse_request(request, out)
    checked = check_parts(suite, policy, device=request["device"], backend=request["backend"], dtype=request["dtype"])
    folder = reclaim(out)
    try:
        return _load(checked, folder, command, jobs, request)
    except BaseException:
        folder.release()
        raise


def _load(
    checked: Checked, folder: RunFolder, command: Sequence[str] | None, jobs: int, request: dict[str, Any] | None = None
) -> Prepared:
    from driftgate.evals.answer_store import AnswerStore

    store = AnswerStore(folder=folder.path / "answers")
    experiment = make_experiment(checked, command or sys.argv, jobs, store=store)
    if request is None:
        write_request(folder.path, checked, experiment.loaded)
    else:
        refuse_changed(folder.path, request, checked, experiment.loaded)
    return Prepared(experiment=experiment, folder=folder)


def make_experiment(
    checked: Checked,
    command: Sequence[str],
    jobs: int,
    *,
    store: AnswerStore | None = None,
    least_plans: int = 0,
) -> Experiment:
    """Load the model of a run that was checked.

    Args:
        checked: the run.
        command: for the manifest.
        jobs: processes that answer items.
        store: where answers are kept.
        least_plans: as in ``Experiment``.
    """
    from driftgate.accuracy.models import load_model
    from driftgate.evals.experiment import Experiment
    from driftgate.kernels.contract import Backend

    if checked.device == "cpu":
        import torch

        torch.set_num_threads(1)  # bits depend on the number, and threads fight with the cross-check for the cores
    reference = None
    if checked.reference is not None:
        name = str(checked.suite.reference_model)
        reference = load_model(checked.reference, name=name, device=checked.device, dtype=checked.dtype)
    return Experiment(
        suite=checked.suite,
        loaded=load_model(checked.folder, name=checked.suite.model, device=checked.device, dtype=checked.dtype),
        backend=checked.backend,
        cross_check=checked.backend is Backend.TORCH,
        policy=checked.policy,
        dtype=checked.dtype,
        command=list(command),
        built=checked.built,
        given=checked.given,
        jobs=jobs,
        reference=reference,
        store=store,
        least_plans=least_plans,
    )


def check(
    suite: str = "quick",
    *,
    out: Path,
    model: str | None = None,
    plans: Sequence[str] = (),
    controls: Sequence[str] = (),
    tasks: Sequence[str] | None = None,
    steps: int | None = None,
    sequences: int | None = None,
    batch: int | None = None,
    seed: int | None = None,
    device: str = "auto",
    backend: str = "auto",
    dtype: str | None = None,
    policy: str | Path | None = None,
    data: str | None = None,
    mode: str | None = None,
    prompt: str | None = None,
    repeats: int | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    answer_prefill: str | int | None = None,
    limit: int | None = None,
    generate: bool | None = None,
    ablate: str | None = None,
    reference_model: str | None = None,
) -> Checked:
    """Check everything that can be checked before the long part: usage first, then files, then the model.

    Args:
        suite: bundled name or YAML file; the other arguments override it.
        out: run folder; nothing is written to it.
        model: embedded checkpoint, folder or hub id.
        plans, controls: plan texts; given, they replace the suite's.
        tasks: task names; an empty sequence for none.
        steps, sequences, batch, seed: sizes.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``cuda+cpu``.
        backend: ``auto``, ``triton``, ``triton-interpret`` or ``torch``.
        dtype: ``fp32``, ``bf16``, ``fp16``, or None for the checkpoint's own.
        policy: YAML file or bundled name, None for the suite's or the default.
        data, mode, prompt, repeats, temperature, max_new_tokens, answer_prefill, limit, generate: of items and
            the user's text; see ``Suite``.
        ablate: ``layers``, ``heads`` or None; see ``Suite``.
        reference_model: checkpoint whose weights the model's are compared with, named as ``model`` is.

    Raises:
        DriftgateError: what does not fit; one line.
    """
    chosen = choose_suite(
        suite,
        {
            "model": model, "plans": plans, "controls": controls, "tasks": tasks, "steps": steps,
            "sequences": sequences, "batch": batch, "seed": seed, "data": data, "mode": mode, "prompt": prompt,
            "repeats": repeats, "temperature": temperature, "max_new_tokens": max_new_tokens,
            "answer_prefill": answer_prefill, "limit": limit, "generate": generate,
            "ablate": ablate,
            "reference_model": reference_model,
        },
    )  # fmt: skip
    if dtype not in (None, "fp32", "bf16", "fp16"):
        raise unknown_name("dtype", str(dtype), ("fp32", "bf16", "fp16"))

    from driftgate.accuracy.backends import check_backend
    from driftgate.accuracy.policy import load_policy

    check_backend(backend)
    rules = load_policy(policy if policy is not None else chosen.policy)
    check_out(out)
    return check_parts(chosen, rules, device=device, backend=backend, dtype=dtype)


def check_parts(chosen: Suite, rules: Policy, *, device: str, backend: str, dtype: str | None) -> Checked:
    """Model, device, prompts and memory of a suite that was chosen."""
    from driftgate.accuracy.backends import resolve_backend
    from driftgate.accuracy.config_shapes import read_shapes
    from driftgate.accuracy.mixed import check_layers
    from driftgate.accuracy.models import check_model, resolve_device, text_config, weights_memory
    from driftgate.evals.answering import build_tasks
    from driftgate.evals.model_text import read_text
    from driftgate.evals.stream_data import read_streams
    from driftgate.evals.tasks import load_task
    from driftgate.kernels.contract import Backend

    folder = find_model(chosen.model)
    device = resolve_device(device)
    way = resolve_backend(backend, device)
    parsed = check_model(folder, device=device, dtype=dtype)
    config, weights = text_config(parsed), weights_memory(folder, parsed, dtype)
    shapes = read_shapes(config.to_dict(), source=f"{folder}/config.json")
    check_layers(chosen.named_plans(), shapes.recurrent_layers)
    copies = 2 if way is Backend.TORCH and device == "cpu" else 1  # the cross-check decodes in a process of its own
    built: tuple[BuiltTask, ...] = ()
    given: tuple[tuple[int, ...], ...] = ()
    text = read_text(folder, config, name=chosen.model)
    reference, more = None, 0
    if chosen.reference_model is not None:
        reference, more = check_reference(chosen.reference_model, text, device=device, dtype=dtype)
    held = held_memory(chosen, config, weights=copies * weights + more)
    if chosen.stream != "tasks":  # the embedded checkpoints have no limit, and tasks are their own
        check_positions(chosen, text)
    if chosen.stream == "data":
        length = chosen.steps + chosen.prefill
        given = tuple(
            read_streams(Path(str(chosen.data)), text, n=chosen.sequences, length=length, generate=chosen.generate)
        )
    if chosen.item_tasks:
        tasks = [load_task(name) for name in chosen.item_tasks]
        options = {name: chosen.task_options() for name in chosen.item_tasks}
        built = build_tasks(tasks, options, text, limit=chosen.limit)  # type: ignore[arg-type]
    return Checked(
        suite=chosen, policy=rules, folder=folder, config=config, device=device, backend=way, dtype=dtype,
        memory=check_memory(chosen, config, device=device, dtype=dtype, held=held), weights=weights + more,
        reference=reference, built=built, given=given,
    )  # fmt: skip


def choose_suite(suite: str, choices: Mapping[str, Any]) -> Suite:
    """A suite with what the user chose in place of its own fields.

    Args:
        suite: bundled name or YAML file.
        choices: as ``check`` takes them; those that are no field of a suite are left alone.

    Raises:
        DriftgateError: a name, plan or size that does not fit.
    """
    from driftgate.evals.suite import Suite, load_suite, merge_plans
    from driftgate.evals.tasks import load_task
    from driftgate.evals.tasks.build import make_layout

    loaded = load_suite(suite)
    fields = {name: choices.get(name) for name in Suite.model_fields if name not in ("plans", "tasks", "policy")}
    tasks = choices.get("tasks")
    chosen = loaded.changed(
        **fields,
        plans=merge_plans(loaded, choices.get("plans") or (), choices.get("controls") or ()),
        tasks=None if tasks is None else tuple(tasks),
    )
    _check_ablation(chosen)
    for name in chosen.tasks:
        load_task(name)
    _refuse_idle(chosen, choices)
    chosen = _choose_stream(chosen, asked=bool(tasks and chosen.stream_tasks))
    if chosen.stream == "tasks":
        make_layout(chosen.steps + chosen.prefill, chosen.difficulty)
    return chosen


def _check_ablation(suite: Suite) -> None:
    """Refuse to take plans apart where there is none to take."""
    from driftgate.accuracy.plans import Role

    roles = suite.roles()
    low = [name for name, plan in suite.named_plans().items() if plan.low_precision]
    if suite.ablate is not None and not any(roles[name] is Role.CANDIDATE for name in low):
        raise UsageError("--ablate takes candidates below FP32 apart and there is none; add one with --plan")


def _refuse_idle(chosen: Suite, choices: Mapping[str, Any]) -> None:
    """An option that no task of the run would look at is a mistake, not a detail."""
    for name in ("mode", "prompt", "repeats", "temperature", "max_new_tokens", "answer_prefill", "limit"):
        if choices.get(name) is not None and not chosen.item_tasks:
            flag = "--" + name.removeprefix("answer_").replace("_", "-")
            raise UsageError(f"{flag} is for tasks with items of their own; name one with --task, e.g. --task gpqa")


def _choose_stream(suite: Suite, *, asked: bool) -> Suite:
    """Task streams for embedded checkpoints and where their tasks are asked for, else the baseline's own generation."""
    from driftgate.evals.checkpoints import find_checkpoint

    if suite.stream != "auto":
        return suite
    if suite.data is not None and not any(_takes_data(name) for name in suite.item_tasks):
        if asked:
            raise UsageError(f"--data and task {suite.stream_tasks[0]}: its questions stand in streams of their own")
        return suite.changed(stream="data", tasks=suite.item_tasks)
    if suite.generate:
        raise UsageError("--generate goes on from the lines of a JSONL file; give --data FILE")
    if asked or find_checkpoint(suite.model) is not None:
        return suite.changed(stream="tasks")
    return suite.changed(stream="generation", tasks=suite.item_tasks)


def _takes_data(task: str) -> bool:
    from driftgate.evals.tasks import load_task

    return bool(getattr(load_task(task), "takes_data", False))
