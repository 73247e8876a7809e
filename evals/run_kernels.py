"""The stage that certifies the kernels: promises of bits, errors against FP64, and twins against kernels.

Notable: where the Triton kernels are compiled they take the long part, and are certified in this process on what it
recorded. Where torch twins take it, a second process takes the first stream through the interpreted kernels meanwhile
and certifies those; the greatest difference of logits says how far twins and kernels are apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from driftgate.accuracy.certify import certify
from driftgate.accuracy.crosscheck import CrossCheckJob, certified
from driftgate.accuracy.lockstep import LockstepResult
from driftgate.accuracy.records import BitwiseRecord, CrossCheck, ToleranceRecord
from driftgate.accuracy.run_tolerance import measure_run_tolerance
from driftgate.evals.run_records import compare_backends, interpreted_again
from driftgate.evals.run_subject import Subject
from driftgate.evals.tasks import Streams

__all__ = ["Certificate", "certify_kernels"]


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was found of the kernels.

    Attributes:
        bitwise: invariants on the model's own shapes and inputs; of interpreted kernels the baseline against itself,
            too.
        tolerance: errors against FP64.
        cross_check: interpreted kernels against the backend of the long part, None where none were interpreted.
        seconds: wall time of the second process, None where there was none.
    """

    bitwise: list[BitwiseRecord]
    tolerance: list[ToleranceRecord]
    cross_check: CrossCheck | None = None
    seconds: float | None = None


@contextmanager
def certify_kernels(
    subject: Subject, streams: Streams, *, interpreted: bool
) -> Iterator[Callable[[LockstepResult], Certificate]]:
    """Certify the kernels while, or after, the streams are decoded.

    Args:
        subject: model, plans and backend.
        streams: of the run.
        interpreted: start a second process with interpreted kernels; it ends with the context, however that ends.

    Yields:
        What gives the certificate, of the result of the lock step; it waits for the second process.
    """
    if not interpreted:
        yield lambda lockstep: _certify_here(subject, lockstep)
        return
    job = _start_interpreted(subject, streams)
    try:
        yield lambda lockstep: _certify_interpreted(subject, job, lockstep)
    finally:
        job.cancel()


def _start_interpreted(subject: Subject, streams: Streams) -> CrossCheckJob:
    suite = subject.suite
    return CrossCheckJob(
        folder=subject.loaded.folder,
        dtype=subject.dtype,
        plans=subject.plans,
        token_ids=streams.token_ids[0, : suite.prefill + subject.first_steps],
        prefill=suite.prefill,
        vocab_size=subject.loaded.vocab_size,
        seed=suite.seed,
    )


def _certify_interpreted(subject: Subject, job: CrossCheckJob, lockstep: LockstepResult) -> Certificate:
    outcome = job.result()
    return Certificate(
        bitwise=[interpreted_again(outcome, subject.recurrence), *outcome.bitwise],
        tolerance=outcome.tolerance,
        cross_check=compare_backends(lockstep, outcome),
        seconds=outcome.seconds,
    )


def _certify_here(subject: Subject, lockstep: LockstepResult) -> Certificate:
    assert lockstep.recorded is not None
    plans, device = subject.plans, str(subject.loaded.model.device)
    return Certificate(
        bitwise=certify(backend=subject.backend, recorded=lockstep.recorded, device=device, **certified(plans)),
        tolerance=measure_run_tolerance(
            plans, recurrence=subject.recurrence, backend=subject.backend, device=device, seed=subject.suite.seed
        ),
    )
