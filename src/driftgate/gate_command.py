"""``driftgate gate``: decide a stored run again, under a policy and against the last accepted run.

Notable: everything is decided on one ``RunData`` before anything is printed, so that text, JSON, JUnit, annotations
and exit code cannot disagree. The run folder is left as it is.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftgate.console import EXIT_OF_VERDICT, AsJson, PolicyFile, Quiet, emit, end_run, show, warn, write
from driftgate.errors import InputError, UsageError

if TYPE_CHECKING:
    from driftgate.accuracy.records import RunData

__all__ = ["decide_again", "gate"]

Run = Annotated[Path | None, typer.Argument(metavar="RUN", help="Folder that `driftgate run --out` wrote.")]
Junit = Annotated[Path | None, typer.Option(help="Write a JUnit file, a test for each plan and check.")]
Explain = Annotated[bool, typer.Option("--explain", help="Say how each figure is computed, and why its limit.")]
Baseline = Annotated[Path | None, typer.Option(metavar="FILE", help="Fail what is worse than the last accepted run.")]
WriteBaseline = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Keep this run as the accepted one, unless it fails or is invalid.")
]
Samples = Annotated[
    tuple[Path, Path] | None, typer.Option(metavar="BASE CAND", help="Gate answers of any engine instead of a run.")
]
Margin = Annotated[float | None, typer.Option(help="With --samples: points that may be lost.")]
Metric = Annotated[str | None, typer.Option(help="With --samples: which metric of a sample.")]
Filter = Annotated[str | None, typer.Option("--filter", help="With --samples: which filter of lm-eval's samples.")]


def gate(
    run_folder: Run = None,
    policy: PolicyFile = None,
    junit: Junit = None,
    explain: Explain = False,
    baseline: Baseline = None,
    write_baseline: WriteBaseline = None,
    samples: Samples = None,
    margin: Margin = None,
    metric: Metric = None,
    sample_filter: Filter = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Decide a stored run again under a policy; the folder is left as it is.

    In a job on GitHub the checks that did not pass are annotations, and the step summary holds the plan table.
    """
    if samples is not None:
        _refuse(run_folder=run_folder, junit=junit, baseline=baseline, write_baseline=write_baseline, explain=explain)
        from driftgate.samples_command import gate_samples

        chosen: dict[str, Any] = {"margin": margin, "policy": policy, "metric": metric, "filter": sample_filter}
        raise typer.Exit(_count_samples(gate_samples(*samples, **chosen, as_json=as_json, quiet=quiet), policy))
    if run_folder is None:
        raise UsageError("give the folder of a RUN, or --samples BASE CAND")
    for name, value in (("--margin", margin), ("--metric", metric), ("--filter", sample_filter)):
        if value is not None:
            raise UsageError(f"{name} belongs to --samples; limits of a run stand in its --policy")
    data = decide_again(run_folder, policy=policy, baseline=baseline)
    _write_files(data, junit=junit, write_baseline=write_baseline)
    _print(data, explain=explain, as_json=as_json, quiet=quiet)
    raise end_run(data)


def _refuse(**given: object) -> None:
    """A flag that says nothing about samples is an error, not ignored."""
    for name, value in given.items():
        if value:
            told = "RUN" if name == "run_folder" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{told} does not go with --samples; leave one of them out")


def _count_samples(code: int, policy: Path | None) -> int:
    """The exit code of answers under a policy's rule for what is inconclusive; a line says so where it has one.

    A pass is for runs alone: a file of answers does not say whether any low-precision state was read.
    """
    from driftgate.accuracy.policy_file import load_policy

    rule = load_policy(policy).inconclusive if policy is not None and code == EXIT_OF_VERDICT["inconclusive"] else None
    if rule is None:
        return code
    if rule.counts_as == "pass":
        warn("exit code 3: the policy lets inconclusive runs pass, not answers, which do not say what they read")
        return code
    warn(f"exit code 1 for an INCONCLUSIVE comparison, which this policy counts as a fail: {rule.reason}")
    return EXIT_OF_VERDICT["fail"]


def decide_again(run_folder: Path, *, policy: Path | None = None, baseline: Path | None = None) -> RunData:
    """A stored run with the verdicts of a policy and of a comparison with the last accepted run.

    Args:
        run_folder: of the run.
        policy: YAML file; None for the bundled default.
        baseline: what ``--write-baseline`` wrote; None for no comparison.

    Raises:
        InputError: a file is missing or damaged, or the accepted run was measured on something else.
    """
    from driftgate.accepted import compare_accepted, load_accepted
    from driftgate.accuracy.policy import count_inconclusive, decide, load_policy
    from driftgate.accuracy.records import load_run
    from driftgate.accuracy.verdicts import summarize_verdicts

    rules = load_policy(policy)
    accepted = None if baseline is None else load_accepted(baseline)
    data = load_run(run_folder)
    decide(data, rules)
    data.manifest.policy = rules.model_dump(mode="json")
    if accepted is not None:
        verdicts = data.results.verdicts + compare_accepted(data, accepted)
        data.results.verdicts = count_inconclusive(verdicts, rules.inconclusive)
        data.results.verdict = summarize_verdicts(v.verdict for v in data.results.verdicts)
    return data


def _write_files(data: RunData, *, junit: Path | None, write_baseline: Path | None) -> None:
    from driftgate.reports.github import append_summary
    from driftgate.reports.junit import write as write_junit

    for name, path in (("--junit", junit), ("--write-baseline", write_baseline)):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"{name} {path}: there is no folder {path.absolute().parent}; make it first")
    append_summary(data, os.environ)
    if junit is not None:
        write_junit(data, junit)
    if write_baseline is not None:
        _accept(data, write_baseline)


def _accept(data: RunData, path: Path) -> None:
    """Keep a run as the accepted one, unless it fails or was not measured as its plans say; a line where it is open."""
    from driftgate.accepted import save_accepted
    from driftgate.accuracy.policy import COUNTS_AS

    made = [v for v in data.results.verdicts if v.check != COUNTS_AS]
    for grave in ("fail", "invalid"):
        first = next((v for v in data.results.verdicts if v.verdict == grave), None)
        if first is not None:
            kept = "; the file there is left as it is" if path.exists() else ""
            warn(f"{path} is not written: {grave}: {first.plan} {first.check}: {first.reason}{kept}")
            return
    save_accepted(data, path)
    if data.results.verdict == "inconclusive":
        made = [v for v in data.results.verdicts if v.check != COUNTS_AS]
        told = f"open checks: {sum(v.verdict != 'pass' for v in made)} of {len(made)}"
        warn(f"{path} holds an INCONCLUSIVE run ({told}): later runs are held to figures that no check has passed")


def _print(data: RunData, *, explain: bool, as_json: bool, quiet: bool) -> None:
    from driftgate.reports.checks import explain_checks
    from driftgate.reports.github import list_annotations
    from driftgate.reports.tables import checks_table, headline, open_lines

    for line in list_annotations(data, os.environ):
        emit(f"{line}\n", sys.stderr)  # GitHub reads both streams, and standard output may be one JSON document
    if as_json:
        document: dict[str, Any] = {
            "schema_version": 1,
            "verdict": data.results.verdict,
            "verdicts": [v.model_dump() for v in data.results.verdicts],
        }
        if explain:
            document["explanations"] = explain_checks(data)
        write(json.dumps(document, indent=1) + "\n")
    elif not quiet:
        reasons = open_lines(data)
        parts: list[Any] = [checks_table(data), "", *reasons, *([""] if reasons else [])]
        if explain:
            parts += [part for block in explain_checks(data) for part in (block, "")]
        counts = headline(data).partition(" ")[2]
        show(*parts, f"policy: {data.manifest.policy.get('name')}", f"verdict: {data.results.verdict} {counts}")
