"""``driftgate run``: the main job, from the command line to its summary."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from driftgate.console import AsJson, PolicyFile, Quiet, end_run, progress, show, write
from driftgate.errors import EmptyRunError, UsageError

if TYPE_CHECKING:
    from driftgate.accuracy.records import RunData

__all__ = ["run"]


def run(
    suite: Annotated[str, typer.Argument(help="Bundled suite or YAML file.")] = "quick",
    model: Annotated[str | None, typer.Option(help="Embedded checkpoint, folder or hub id.")] = None,
    plan: Annotated[list[str] | None, typer.Option(help="Plan, e.g. nvfp4/fp32@16; repeatable.")] = None,
    control: Annotated[list[str] | None, typer.Option(help="Plan that is expected to drift; repeatable.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Task, or none; repeatable.")] = None,
    steps: Annotated[int | None, typer.Option(help="Decoded steps of each stream.")] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Streams.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Streams that decode together.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of streams and questions.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or cuda+cpu.")] = "auto",
    backend: Annotated[str, typer.Option(help="auto, triton, triton-interpret or torch.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; default as stored.")] = None,
    data: Annotated[str | None, typer.Option(help="Questions of a task, or text to stream: a file.")] = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="The baseline goes on from each line of --data.")
    ] = False,
    mode: Annotated[str | None, typer.Option(help="loglikelihood or generate.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Wording of the prompts.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Answers to each item.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Of sampling; 0 is greedy.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens that an answer may have.")] = None,
    prefill: Annotated[str | None, typer.Option(help="Of each prompt, by the model: none, prompt or a number.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items of each task.")] = None,
    reference_model: Annotated[str | None, typer.Option(help="Checkpoint to compare the model's weights with.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that answer items.")] = 1,
    ablate: Annotated[
        str | None, typer.Option(help="layers or heads: also measure each alone in every candidate's precision.")
    ] = None,
    recommend: Annotated[
        bool, typer.Option("--recommend", help="Name the plan with the least KL that passes and fits --budget.")
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Greatest state ratio for --recommend: bytes of state that a step reads and writes on average, buffer "
            "left out, relative to the FP32 baseline (column State)."
        ),
    ] = None,
    extend: Annotated[Path | None, typer.Option(help="Finished run to add plans to.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of an interrupted run to take up.")] = None,
    policy: PolicyFile = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/SUITE-TIME-RANDOM.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No progress bar.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and the power of its tasks.")] = False,
) -> None:
    """Measure plans beside the FP32 baseline, decide, and write a report."""
    from driftgate.extend import extend as add_plans
    from driftgate.main_job import Prepared, prepare
    from driftgate.main_job import resume as take_up
    from driftgate.recommend import check_budget, recommend_plan
    from driftgate.run_folder import default_out

    check_budget(recommend, budget)
    if steps is not None and steps < 1:
        raise EmptyRunError(f"--steps {steps}: no step would be decoded; give 1 or more")
    tasks = None if task is None else [t for t in task if t != "none"]
    choices = {
        "model": model, "plans": plan or [], "controls": control or [], "tasks": tasks, "steps": steps,
        "sequences": sequences, "batch": batch, "seed": seed, "dtype": dtype, "policy": policy, "data": data,
        "mode": mode, "prompt": prompt, "repeats": repeats, "temperature": temperature,
        "max_new_tokens": max_new_tokens, "answer_prefill": prefill, "limit": limit,
        "generate": generate or None, "reference_model": reference_model, "ablate": ablate,
    }  # fmt: skip
    if extend is not None:
        given = {name for name, value in choices.items() if value not in (None, [])} - {"plans", "controls", "policy"}
        if given or dry_run or resume is not None:
            raise UsageError("--extend takes streams and items of its run; give --plan, --control, --policy and --out")
    elsewhere = (suite, backend) != ("quick", "auto") or (device != "auto" and resume is not None)
    if extend is not None and elsewhere:
        raise UsageError("--extend takes suite and backend of its run; leave them out")
    if resume is not None and (
        dry_run or elsewhere or out is not None or any(v not in (None, []) for v in choices.values())
    ):
        raise UsageError("--resume takes up a run as it was asked for; leave the other options out")
    choices |= {"device": device, "backend": backend}
    if dry_run:
        _print_dry_run(suite, choices, out, as_json=as_json)
        return
    prepared: Prepared
    if resume is not None:
        prepared = take_up(resume, jobs=jobs)
    elif extend is not None:
        prepared = add_plans(
            extend, out=out or default_out("extended"), plans=plan or [], controls=control or [], policy=policy,
            device=device, jobs=jobs,
        )  # fmt: skip
    else:
        prepared = prepare(suite, out=out or default_out(suite), jobs=jobs, **choices)  # type: ignore[arg-type]
    with progress(
        "decode",
        prepared.experiment.n_steps,
        not (quiet or as_json or no_progress),
        then="cross-check and statistics",
    ) as advance:
        data = prepared.execute(advance)
    advice = None if budget is None else recommend_plan(data, budget=budget)
    if as_json:
        told = {} if advice is None else {"recommendation": asdict(advice)}
        write(json.dumps({**data.results.model_dump(mode="json"), **told}, indent=1) + "\n")
    elif not quiet:
        _print_summary(data, prepared.out)
        if advice is not None:
            show(*advice.lines())
    raise end_run(data)


def _print_summary(data: RunData, folder: Path) -> None:
    from driftgate.recommend import ablation_table
    from driftgate.reports.tables import run_lines, summary_table, tasks_tables

    tables: list[Table | str] = [summary_table(data), ""]
    for table in tasks_tables(data):
        tables += [table, ""]
    if data.results.ablation:
        tables += [ablation_table(data), ""]
    show(*tables, *run_lines(data), f"report: {folder / 'report.html'}")


def _print_dry_run(suite: str, choices: dict[str, object], out: Path | None, *, as_json: bool) -> None:
    from driftgate.dry_run import describe

    described = describe(suite, choices, out=out)
    if as_json:
        write(json.dumps(described, indent=1) + "\n")
        return
    lines = [
        f"{key}: {', '.join(value) if isinstance(value, list) else value}"
        for key, value in described.items()
        if key != "tasks"
    ]
    for task, facts in described["tasks"].items():
        asked = ", ".join(f"{value} {name}" for name, value in facts.items() if not isinstance(value, dict))
        lines.append(f"{task}: {asked}")
        for case, power in facts["power"].items():
            needed = facts.get("repeats for a power of", {}).get(case, {})
            more = ", ".join(f"{chance} with {n or 'no number of'} repeats" for chance, n in needed.items())
            lines.append(f"  a plan that loses nothing passes: {power:.0%} at {case}" + (f"; {more}" if more else ""))
    show(*lines)
