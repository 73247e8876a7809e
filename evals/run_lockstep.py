"""The stages that decode the streams: all plans in lock step, layers or heads alone, a reference model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from driftgate.accuracy.lockstep import LockstepResult, Probe
from driftgate.accuracy.models import LoadedModel
from driftgate.accuracy.plans import Role
from driftgate.accuracy.records import AblationRecord, BitwiseRecord, ReferenceRecord
from driftgate.accuracy.reference import compare_with_reference
from driftgate.evals.ablation import Alone, group_parts, list_ablation, measure_ablation
from driftgate.evals.run_subject import Subject
from driftgate.evals.tasks import Streams

__all__ = ["Ablation", "Progress", "count_steps", "decode_alone", "decode_plans", "decode_reference"]

Progress = Callable[[int], None]
"""Called with the number of decode steps just done."""


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What came of layers or heads alone.

    Attributes:
        records: one for each.
        bitwise: the baseline against itself in their lock steps.
    """

    records: list[AblationRecord]
    bitwise: list[BitwiseRecord]


def decode_plans(subject: Subject, streams: Streams, progress: Progress | None = None) -> LockstepResult:
    """All plans of the suite beside the baseline, with the logits of the questions and what certifies the kernels."""
    kept = subject.first_steps
    runner = subject.runner(subject.plans, least_plans=subject.least_plans)
    probes = [Probe(sequence=q.sequence, position=q.position, token_ids=q.choices) for q in streams.questions]
    return runner.run(streams.token_ids, probes=probes, record_steps=kept, keep_logits=kept, progress=progress)


def decode_alone(subject: Subject, streams: Streams, progress: Progress | None = None) -> Ablation:
    """Layers or heads alone in the precision of each candidate; nothing where the suite does not ask for it."""
    records, bitwise = measure_ablation(
        _list_alone(subject),
        lockstep=lambda plans: subject.runner(plans).run(streams.token_ids, progress=progress),
        find_bytes=subject.find_bytes,
        n_heads=subject.shape.value_heads,
        recurrence=subject.recurrence,
        stream_end=streams.stream_positions,
    )
    return Ablation(records=records, bitwise=bitwise)


def decode_reference(
    subject: Subject, reference: LoadedModel | None, streams: Streams, progress: Progress | None = None
) -> ReferenceRecord | None:
    """The model's baseline beside that of a second checkpoint; None where there is none."""
    if reference is None:
        return None
    found = compare_with_reference(
        reference,
        subject.loaded,
        streams.token_ids,
        batch=subject.batch,
        backend=subject.backend,
        prefill=subject.suite.prefill,
        progress=progress,
    )
    return found.record(reference.name, stream_end=streams.stream_positions)


def count_steps(subject: Subject, *, reference: bool) -> int:
    """Steps that the three stages report; ``reference`` where there is a reference model."""
    n_batches = -(-subject.suite.sequences // subject.suite.batch)
    return subject.suite.steps * n_batches * (1 + len(_list_alone(subject)) + reference)


def _list_alone(subject: Subject) -> list[Sequence[Alone]]:
    """Layers or heads that are measured alone, lock step by lock step."""
    suite, roles = subject.suite, subject.suite.roles()
    if suite.ablate is None:
        return []
    candidates = {name: plan for name, plan in subject.plans.items() if roles[name] is Role.CANDIDATE}
    n_heads = subject.shape.value_heads if suite.ablate == "heads" else None
    parts = list_ablation(candidates, subject.layer_indices, n_heads=n_heads)
    return group_parts(parts, n_plans=len(suite.plans))
