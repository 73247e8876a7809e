"""``driftgate run --extend RUN --plan TEXT``: more plans on the streams and items of a finished run.

Notable: the new plans decode beside a baseline in batches of the same shape as before, and the result is refused if
that baseline's logits are not those of the run, bit for bit. The run itself is left as it is. An extension that was
interrupted is taken up by the same command: answers that were stored are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from driftgate.errors import InputError, UsageError
from driftgate.main_job import Prepared, check_parts, make_experiment
from driftgate.run_folder import check_out, claim, reclaim
from driftgate.run_request import REQUEST, is_extension, write_extension

if TYPE_CHECKING:
    from driftgate.accuracy.policy import Policy
    from driftgate.accuracy.records import RunData

__all__ = ["Extension", "extend"]


@dataclass(frozen=True, kw_only=True)
class Extension(Prepared):
    """A run that adds plans to another.

    Attributes:
        base: the finished run.
        policy: limits for all plans.
    """

    base: RunData
    policy: Policy

    def execute(self, progress: Callable[[int], None] | None = None) -> RunData:
        """Measure the new plans, join the runs, decide anew, write the folder and its report."""
        from driftgate.accuracy.merge import merge_runs
        from driftgate.accuracy.policy import decide
        from driftgate.accuracy.records import save_run
        from driftgate.reports import render_all

        try:
            data = merge_runs(self.base, self.experiment.run(progress))
            decide(data, self.policy)
            save_run(self.out, data)
            (self.out / REQUEST).unlink()
            render_all(self.out)
        finally:
            self.folder.release()
        return data


def extend(
    run: Path,
    *,
    out: Path,
    plans: Sequence[str] = (),
    controls: Sequence[str] = (),
    policy: str | Path | None = None,
    device: str = "auto",
    jobs: int = 1,
    command: Sequence[str] | None = None,
) -> Extension:
    """Check everything, claim a folder, load the model.

    Args:
        run: folder of the finished run.
        out: folder of the joined run.
        plans, controls: plan texts that the run has not; at least one, and no more than it has.
        policy: as for a run; None for the run's own.
        device: as for the run.
        jobs: processes that answer items.
        command: for the manifest; None for ``sys.argv``.

    Raises:
        UsageError: no new plan, more than the run has, or one that it has.
        InputError: the folder is no run, or model, versions or device are not as they were.
    """
    from driftgate.accuracy.merge import refuse_changed_setting
    from driftgate.accuracy.models import hash_file
    from driftgate.accuracy.plans import PrecisionPlan
    from driftgate.accuracy.policy import Policy, load_policy
    from driftgate.accuracy.records import load_run
    from driftgate.evals.answer_store import AnswerStore
    from driftgate.evals.run_records import describe_device, read_versions
    from driftgate.evals.suite import PlanEntry, Suite

    entries = [PlanEntry(plan=str(PrecisionPlan.parse(text))) for text in plans]
    entries += [PlanEntry(plan=str(PrecisionPlan.parse(text)), role="control") for text in controls]
    base = load_run(run)
    known = len(base.results.plans)
    if not entries:
        raise UsageError("--extend adds plans to a run; name them with --plan or --control")
    for entry in entries:
        if entry.plan in base.results.plans:
            raise UsageError(f"plan {entry.plan} is in {run} already; leave it out")
    if len(entries) > known:
        raise UsageError(f"--extend adds at most as many plans as the run has, {known}; add {len(entries)} in steps")
    rules = Policy.model_validate(base.manifest.policy) if policy is None else load_policy(policy)
    try:
        fields = {"plans": [entry.model_dump() for entry in entries], "reference_model": None}
        suite = Suite.model_validate({**base.manifest.suite, **fields})
    except ValueError as error:
        raise InputError(f"{run} is of another version; run it again") from error
    asked = {
        "extends": str(run.absolute()),
        "results": hash_file(run / "results.json"),
        "plans": fields["plans"],
        "policy": rules.model_dump(mode="json"),
    }
    again = is_extension(out, asked)
    if not again:
        check_out(out)
    way = base.results.backend.drift
    checked = check_parts(suite, rules, device=device, backend=way, dtype=base.manifest.backend.get("dtype"))
    folder = reclaim(out) if again else claim(out)
    try:
        store = AnswerStore(folder=folder.path / "answers")
        experiment = make_experiment(checked, command or sys.argv, jobs, store=store, least_plans=known)
        loaded = experiment.loaded
        refuse_changed_setting(
            base.manifest, versions=read_versions(), device=describe_device(loaded.model), model=loaded.hashes
        )
        write_extension(folder.path, asked)
    except BaseException:
        folder.release()
        raise
    return Extension(experiment=experiment, folder=folder, base=base, policy=rules)
