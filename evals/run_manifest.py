"""The manifest of a run: what is needed to repeat it, and to see in what two runs differ."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from driftgate.accuracy.mixed import describe_plan
from driftgate.accuracy.models import LoadedModel, hash_file
from driftgate.accuracy.policy import Policy
from driftgate.accuracy.records import Manifest
from driftgate.evals.answering import BuiltTask
from driftgate.evals.run_data import Findings
from driftgate.evals.run_records import describe_device, hash_array, read_versions
from driftgate.evals.run_subject import Subject
from driftgate.kernels.launch import ENABLE_FP_FUSION

__all__ = ["describe_run"]


def describe_run(
    subject: Subject,
    found: Findings,
    *,
    command: list[str],
    policy: Policy,
    built: Sequence[BuiltTask],
    cross_check: bool,
    reference: LoadedModel | None,
) -> Manifest:
    """The manifest, times left out.

    Args:
        subject: model, suite and backend.
        found: streams, and digests of logits.
        command: how the run was asked for.
        policy: limits and reasons.
        built: tasks with prompts of their own.
        cross_check: whether interpreted kernels ran beside the long part.
        reference: a second checkpoint, None for none.
    """
    suite, streams = subject.suite, found.streams
    return Manifest(
        command=command,
        suite=suite.model_dump(mode="json"),
        policy=policy.model_dump(mode="json"),
        versions=read_versions(),
        device=describe_device(subject.loaded.model),
        backend={
            "drift": subject.backend.value,
            "dtype": subject.dtype,
            "enable_fp_fusion": ENABLE_FP_FUSION,
            "cross_check": "triton-interpret" if cross_check else None,
            "transformers_fast_path": "none: recurrent decode is replaced by driftgate, attention is eager",
        },
        hashes={
            **{f"model/{k}": v for k, v in subject.loaded.hashes.items()},
            **{f"reference/{k}": v for k, v in (reference.hashes if reference else {}).items()},
            "streams": hash_array(streams.token_ids),
            **({"data": hash_file(Path(suite.data))} if suite.data and Path(suite.data).is_file() else {}),
        },
        seeds={"streams": suite.seed},
        plans={e.key: {"role": e.role, **describe_plan(e.parsed())} for e in suite.plans},
        streams={
            "kind": suite.stream,
            "sequences": len(streams.token_ids),
            "prefill": suite.prefill,
            "decoded_steps": suite.steps,
            "stream_end": streams.stream_positions,
            "questions": len(streams.questions),
            "first_token_ids": streams.token_ids[0, :16].tolist(),
        },
        tasks={each.task.name: each.describe() for each in built},
        digests={"lock step": found.lockstep.digests, **{name: own.digests for name, own in found.answers.items()}},
        timing={},
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
