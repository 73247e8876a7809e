"""A run, stage by stage: streams, lock step, ablation, answers, kernels, reference; then records and verdict.

| stage | file |
| --- | --- |
| what all of them look at: model, plans, backend | run_subject.py |
| streams | run_streams.py |
| lock step, layers or heads alone, reference model | run_lockstep.py |
| answers to tasks with prompts of their own | answering.py |
| the kernels themselves | run_kernels.py |
| records of what was found | run_data.py, run_manifest.py; parts of them in run_records.py and scoring.py |
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from driftgate.accuracy.mixed import check_layers
from driftgate.accuracy.models import LoadedModel
from driftgate.accuracy.policy import Policy, decide
from driftgate.accuracy.records import RunData
from driftgate.evals.answer_store import AnswerStore
from driftgate.evals.answering import Answers, BuiltTask, answer
from driftgate.evals.run_data import Findings, assemble
from driftgate.evals.run_kernels import certify_kernels
from driftgate.evals.run_lockstep import Progress, count_steps, decode_alone, decode_plans, decode_reference
from driftgate.evals.run_manifest import describe_run
from driftgate.evals.run_streams import make_run_streams
from driftgate.evals.run_subject import Subject
from driftgate.evals.suite import Suite
from driftgate.kernels.contract import Backend

__all__ = ["Experiment"]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is to be measured.

    Attributes:
        suite: plans, tasks, sizes and seed.
        loaded: the model.
        backend: of the long part.
        cross_check: run the interpreted kernels beside it; wanted wherever the backend is torch.
        policy: limits and reasons.
        dtype: as the model was loaded, None for the checkpoint's own.
        command: how the run was asked for, for the manifest.
        built: tasks with prompts of their own.
        given: token ids of the streams that the user gave; the baseline goes on where they are short.
        least_plans: blocks of rows for at least so many plans, for a run that adds plans to another.
        jobs: processes that answer items.
        store: where their answers are kept while the run goes on; None to keep nothing.
        reference: a second checkpoint, on the same tokens at FP32 state; None for none.
    """

    suite: Suite
    loaded: LoadedModel
    backend: Backend
    cross_check: bool
    policy: Policy
    dtype: str | None
    command: list[str]
    built: tuple[BuiltTask, ...] = ()
    given: tuple[tuple[int, ...], ...] = ()
    least_plans: int = 0
    jobs: int = 1
    store: AnswerStore | None = None
    reference: LoadedModel | None = None

    def __post_init__(self) -> None:
        """Refuse plans for layers that the model does not have, before anything is spent."""
        check_layers(self.subject.plans, self.subject.layer_indices)

    @property
    def subject(self) -> Subject:
        """What the stages look at."""
        return Subject(
            suite=self.suite,
            loaded=self.loaded,
            backend=self.backend,
            dtype=self.dtype,
            least_plans=self.least_plans,
        )

    @property
    def n_steps(self) -> int:
        """Lock-step steps of the whole run, and the steps of answers at the most."""
        answers = sum(built.n_steps(self.suite.batch) for built in self.built)
        return count_steps(self.subject, reference=self.reference is not None) + answers

    def run(self, progress: Progress | None = None) -> RunData:
        """Measure everything, stage by stage.

        Args:
            progress: called with the number of decode steps just done; ``n_steps`` is their total.
        """
        subject, started = self.subject, time.monotonic()
        streams = make_run_streams(subject, self.given)
        with certify_kernels(subject, streams, interpreted=self.cross_check) as certify:
            lockstep = decode_plans(subject, streams, progress)
            ablation = decode_alone(subject, streams, progress)
            decoded = time.monotonic()
            answers = self._answer(subject, progress)
            answered = time.monotonic()
            certificate = certify(lockstep)
        found = Findings(
            streams=streams,
            lockstep=lockstep,
            ablation=ablation,
            answers=answers,
            certificate=certificate,
            reference=decode_reference(subject, self.reference, streams, progress),
        )
        manifest = describe_run(
            subject, found, command=self.command, policy=self.policy, built=self.built, cross_check=self.cross_check,
            reference=self.reference,
        )  # fmt: skip
        data = assemble(subject, found, self.built, manifest)
        decide(data, self.policy)
        data.manifest.timing.update(
            lock_step_s=round(decoded - started, 3),
            total_s=round(time.monotonic() - started, 3),
            **({"answers_s": round(answered - decoded, 3)} if answers else {}),
            **({"cross_check_s": round(certificate.seconds, 3)} if certificate.seconds is not None else {}),
        )
        return data

    def _answer(self, subject: Subject, progress: Progress | None) -> dict[str, Answers]:
        """Answers to every task with prompts of its own."""
        decoder = subject.decoder()
        return {
            built.task.name: answer(
                built, decoder, store=self.store, jobs=self.jobs, model=self.loaded.model, progress=progress
            )
            for built in self.built
        }
