"""The stage that assembles records: what the others found, as the two JSON documents and two frames of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from driftgate.accuracy.analysis import build_steps, counter_fields, state_record, summarize_plan
from driftgate.accuracy.lockstep import LockstepResult
from driftgate.accuracy.records import (
    Backends,
    BitwiseRecord,
    CounterRecord,
    Manifest,
    NoiseFloor,
    PlanRecord,
    ReferenceRecord,
    Results,
    RunData,
)
from driftgate.evals.answering import Answers, BuiltTask
from driftgate.evals.run_kernels import Certificate
from driftgate.evals.run_lockstep import Ablation
from driftgate.evals.run_records import answers_bitwise, lockstep_bitwise
from driftgate.evals.run_subject import Subject
from driftgate.evals.scoring import join_items, measure_generation, score_answers, score_items
from driftgate.evals.tasks import Streams

__all__ = ["Findings", "assemble"]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the stages of a run found.

    Attributes:
        streams: that were decoded.
        lockstep: all plans on them.
        ablation: layers or heads alone on them.
        answers: to tasks with prompts of their own, by name.
        certificate: of the kernels.
        reference: the model's baseline beside another checkpoint's, None where there is none.
    """

    streams: Streams
    lockstep: LockstepResult
    ablation: Ablation
    answers: dict[str, Answers]
    certificate: Certificate
    reference: ReferenceRecord | None = None


def assemble(subject: Subject, found: Findings, built: Sequence[BuiltTask], manifest: Manifest) -> RunData:
    """A run without its verdicts.

    Args:
        subject: what was measured.
        found: by every stage.
        built: tasks with prompts of their own.
        manifest: of the run.
    """
    lockstep, plans, roles = found.lockstep, subject.plans, subject.suite.roles()
    steps = build_steps(lockstep, stream_end=found.streams.stream_positions)
    items, tasks = score_items(found.streams, lockstep, list(plans))
    generation = measure_generation(built, found.answers)
    records = {
        name: PlanRecord(
            role=roles[name].value,
            **summarize_plan(steps, name, plan).records(),
            state=state_record(lockstep.state[name], lockstep.layer_indices),
            counters=CounterRecord(**counter_fields(lockstep.counters[name])),
            bytes=subject.find_bytes(plan),
            tasks=tasks[name] | score_answers(built, found.answers, name),
            free_running=generation.get(name),
        )
        for name, plan in plans.items()
    }
    backend, noise = subject.backend, lockstep.noise_kl
    results = Results(
        verdict="inconclusive",
        model=subject.describe(),
        backend=Backends(drift=backend.value, tasks=backend.value, cross_check=found.certificate.cross_check),
        plans=records,
        bitwise=_join_bitwise(subject, found),
        tolerance=found.certificate.tolerance,
        noise_floor=NoiseFloor(kl_mean=float(noise.mean()), kl_max=float(noise.max())),
        verdicts=[],
        ablation=found.ablation.records,
        reference=found.reference,
    )
    return RunData(results, manifest, steps, join_items(items, found.answers))


def _join_bitwise(subject: Subject, found: Findings) -> list[BitwiseRecord]:
    """Comparisons of bits of every stage."""
    recurrence = subject.recurrence
    return [
        *lockstep_bitwise(found.lockstep, subject.plans, recurrence),
        *found.certificate.bitwise,
        *found.ablation.bitwise,
        *(
            answers_bitwise(name, equal=own.again_equal, n_steps=own.n_steps, recurrence=recurrence)
            for name, own in found.answers.items()
        ),
    ]
