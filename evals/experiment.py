"""A run: streams through all plans in lock step, answers scored, figures computed, everything as one RunData.

Notable: where there is no GPU the long part runs on the torch twins while a second process takes the same streams
through the interpreted Triton kernels; their greatest difference is reported. With a GPU the compiled kernels do all.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from driftgate.accuracy.adapters import Family, find_family
from driftgate.accuracy.analysis import build_steps, counter_fields, state_record, summarize_plan
from driftgate.accuracy.answers import BASELINE_NAME, AnswerRunner
from driftgate.accuracy.certify import certify
from driftgate.accuracy.crosscheck import CrossCheckJob, CrossCheckOutcome, certified, steps_needed
from driftgate.accuracy.generation import generate_streams
from driftgate.accuracy.lockstep import LockstepResult, LockstepRunner, Probe
from driftgate.accuracy.mixed import check_layers, describe_plan
from driftgate.accuracy.models import LoadedModel, hash_file
from driftgate.accuracy.plans import PrecisionPlan, Role
from driftgate.accuracy.policy import Policy, decide
from driftgate.accuracy.prompts import Prompt
from driftgate.accuracy.records import (
    AblationRecord,
    Backends,
    BitwiseRecord,
    BytesRecord,
    CounterRecord,
    Manifest,
    NoiseFloor,
    PlanRecord,
    ReferenceRecord,
    Results,
    RunData,
    ToleranceRecord,
)
from driftgate.accuracy.reference import compare_with_reference
from driftgate.accuracy.run_tolerance import measure_run_tolerance
from driftgate.errors import InputError
from driftgate.evals.ablation import Alone, group_parts, list_ablation, measure_ablation
from driftgate.evals.answer_store import AnswerStore
from driftgate.evals.answering import Answers, BuiltTask, Decoder, answer
from driftgate.evals.run_records import (
    answers_bitwise,
    bytes_record,
    compare_backends,
    describe_device,
    hash_array,
    interpreted_again,
    lockstep_bitwise,
    read_versions,
)
from driftgate.evals.scoring import join_items, measure_generation, score_answers, score_items
from driftgate.evals.suite import Suite
from driftgate.evals.tasks import Streams, make_streams
from driftgate.kernels.contract import Backend, HeadShape, Recurrence
from driftgate.kernels.launch import ENABLE_FP_FUSION

__all__ = ["Experiment", "check_tokens", "choose_backend"]


def choose_backend(text: str, device: str) -> Backend:
    """The backend of the long part: ``auto`` is ``triton`` on a GPU and ``torch`` without one."""
    if text == "auto":
        return Backend.TRITON if device.startswith("cuda") else Backend.TORCH
    return Backend(text)


def check_tokens(token_ids: np.ndarray, *, vocab_size: int, model: str) -> None:
    """Refuse streams with ids that a model has not; once here, since a check at every step would stop a GPU.

    Args:
        token_ids: [n_sequences, length] integers, 0 or more.
        vocab_size: real columns of the logits.
        model: its name.

    Raises:
        InputError: an id lies outside the vocabulary.
    """
    greatest = int(token_ids.max())
    if greatest >= vocab_size:
        raise InputError(
            f"model {model} has {vocab_size} tokens, the task streams use {greatest + 1}; give --task none to measure "
            "on its own generation"
        )


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
        check_layers(self.suite.named_plans(), self.layer_indices)

    @property
    def layer_indices(self) -> list[int]:
        """Decoder-layer index of each recurrent layer."""
        return [int(mixer.layer_idx) for mixer in self._family().find_mixers(self.loaded.model)]

    def run(self, progress: Callable[[int], None] | None = None) -> RunData:
        """Measure everything.

        Args:
            progress: called with the number of decode steps just done; ``n_steps`` is their total.
        """
        started = time.monotonic()
        suite, plans = self.suite, self.suite.named_plans()
        streams = self._streams()
        cycles = suite.cross_check_cycles
        short = min(suite.steps, steps_needed(plans, cycles=cycles))
        job = self._start_cross_check(streams, plans, short) if self.cross_check else None
        try:
            result = self._lockstep(streams, plans, short, progress)
            ablation = self._ablate(streams, progress)
            decoded = time.monotonic()
            answers = {built.task.name: self._answer(built, progress) for built in self.built}
            answered = time.monotonic()
            outcome = job.result() if job is not None else None
        finally:
            if job is not None:
                job.cancel()
        bitwise = outcome.bitwise if outcome is not None else self._certify(result)
        data = self._assemble(streams, result, outcome, bitwise, answers, ablation)
        data.results.reference = self._compare_reference(streams, progress)
        digests = {name: found.digests for name, found in answers.items()}
        data.manifest.digests = {"lock step": result.digests, **digests}
        data.manifest.timing.update(
            lock_step_s=round(decoded - started, 3),
            total_s=round(time.monotonic() - started, 3),
            **({"answers_s": round(answered - decoded, 3)} if answers else {}),
            **({"cross_check_s": round(outcome.seconds, 3)} if outcome is not None else {}),
        )
        return data

    @property
    def n_steps(self) -> int:
        """Lock-step steps of the whole run, and the steps of answers at the most."""
        lockstep = self.suite.steps * -(-self.suite.sequences // self.suite.batch) * (1 + len(self._ablated()))
        reference = 0 if self.reference is None else self.suite.steps * -(-self.suite.sequences // self.suite.batch)
        return lockstep + reference + sum(built.n_steps(self.suite.batch) for built in self.built)

    def _streams(self) -> Streams:
        suite, length = self.suite, self.suite.steps + self.suite.prefill
        if suite.stream not in ("generation", "data"):
            streams = make_streams(
                tasks=suite.stream_tasks,
                n_sequences=suite.sequences,
                length=length,
                seed=suite.seed,
                difficulty=suite.difficulty,
            )
            check_tokens(streams.token_ids, vocab_size=self.loaded.vocab_size, model=self.loaded.name)
            return streams
        if self.given:
            token_ids = self._continue(length)
            check_tokens(token_ids, vocab_size=self.loaded.vocab_size, model=self.loaded.name)
        else:
            token_ids = generate_streams(
                self.loaded.model,
                np.asarray([self.loaded.first_token]),
                n_sequences=suite.sequences,
                length=length,
                seed=suite.seed,
                batch=min(suite.batch, suite.sequences),
                backend=self.backend,
                vocab_size=self.loaded.vocab_size,
            )
        return Streams(token_ids=token_ids, questions=(), stream_positions=length)

    def _continue(self, length: int) -> np.ndarray:
        """The user's streams, [n, length] int64; short ones go on with the baseline's own samples at temperature 1."""
        prompts = [
            Prompt(item_id=f"stream {i}", token_ids=ids, max_new_tokens=length - len(ids))
            for i, ids in enumerate(self.given)
            if len(ids) < length
        ]
        if not prompts:
            return np.asarray(self.given)
        runner = AnswerRunner(
            self.loaded.model, {}, batch=self.suite.batch, backend=self.backend, vocab_size=self.loaded.vocab_size,
            seed=self.suite.seed,
        )  # fmt: skip
        found = {a.item_id: a.token_ids for a in runner.run(prompts)[BASELINE_NAME]}
        return np.asarray([ids + found.get(f"stream {i}", ()) for i, ids in enumerate(self.given)])

    def _compare_reference(self, streams: Streams, progress: Callable[[int], None] | None) -> ReferenceRecord | None:
        if self.reference is None:
            return None
        found = compare_with_reference(
            self.reference, self.loaded, streams.token_ids, batch=min(self.suite.batch, self.suite.sequences),
            backend=self.backend, prefill=self.suite.prefill, progress=progress,
        )  # fmt: skip
        return found.record(self.reference.name, stream_end=streams.stream_positions)

    def _start_cross_check(self, streams: Streams, plans: dict[str, PrecisionPlan], steps: int) -> CrossCheckJob:
        suite = self.suite
        return CrossCheckJob(
            folder=self.loaded.folder,
            dtype=self.dtype,
            plans=plans,
            token_ids=streams.token_ids[0, : suite.prefill + steps],
            prefill=suite.prefill,
            vocab_size=self.loaded.vocab_size,
            seed=suite.seed,
        )

    def _lockstep(
        self, streams: Streams, plans: dict[str, PrecisionPlan], short: int, progress: Callable[[int], None] | None
    ) -> LockstepResult:
        runner = self._runner(plans, least_plans=self.least_plans)
        probes = [Probe(sequence=q.sequence, position=q.position, token_ids=q.choices) for q in streams.questions]
        return runner.run(streams.token_ids, probes=probes, record_steps=short, keep_logits=short, progress=progress)

    def _runner(self, plans: Mapping[str, PrecisionPlan], *, least_plans: int = 0) -> LockstepRunner:
        suite = self.suite
        return LockstepRunner(
            self.loaded.model,
            plans,
            batch=min(suite.batch, suite.sequences),
            backend=self.backend,
            prefill=suite.prefill,
            vocab_size=self.loaded.vocab_size,
            seed=suite.seed,
            least_plans=least_plans,
        )

    def _ablated(self) -> list[Sequence[Alone]]:
        """Layers or heads that are measured alone, lock step by lock step."""
        suite, roles = self.suite, self.suite.roles()
        if suite.ablate is None:
            return []
        candidates = {n: plan for n, plan in suite.named_plans().items() if roles[n] is Role.CANDIDATE}
        n_heads = self._shape().value_heads if suite.ablate == "heads" else None
        parts = list_ablation(candidates, self.layer_indices, n_heads=n_heads)
        return group_parts(parts, n_plans=len(suite.plans))

    def _ablate(
        self, streams: Streams, progress: Callable[[int], None] | None
    ) -> tuple[list[AblationRecord], list[BitwiseRecord]]:
        return measure_ablation(
            self._ablated(),
            lockstep=lambda plans: self._runner(plans).run(streams.token_ids, progress=progress),
            find_bytes=self._find_bytes,
            n_heads=self._shape().value_heads,
            recurrence=self._family().recurrence,
            stream_end=streams.stream_positions,
        )

    def _find_bytes(self, plan: PrecisionPlan) -> BytesRecord:
        itemsize = self.loaded.model.dtype.itemsize
        return bytes_record(plan, self._family().recurrence, self._shape(), self.layer_indices, itemsize)

    def decoder(self) -> Decoder:
        """How the batches of item tasks are decoded."""
        suite, loaded = self.suite, self.loaded
        return Decoder(
            folder=loaded.folder,
            name=loaded.name,
            device=str(loaded.model.device),
            dtype=self.dtype,
            backend=self.backend,
            plans=suite.named_plans(),
            batch=suite.batch,
            seed=suite.seed,
            vocab_size=loaded.vocab_size,
            identity={
                "model": loaded.hashes,
                "versions": read_versions(),
                "device": describe_device(loaded.model.device),
            },
            least_plans=self.least_plans,
        )

    def _answer(self, built: BuiltTask, progress: Callable[[int], None] | None) -> Answers:
        return answer(
            built,
            self.decoder(),
            store=self.store,
            jobs=self.jobs,
            model=self.loaded.model,
            progress=progress,
        )

    def _certify(self, result: LockstepResult) -> list[BitwiseRecord]:
        assert result.recorded is not None
        plans = self.suite.named_plans()
        return certify(
            backend=self.backend,
            recorded=result.recorded,
            device=str(self.loaded.model.device),
            **certified(plans),
        )

    def _measure_tolerance(self, recurrence: Recurrence) -> list[ToleranceRecord]:
        return measure_run_tolerance(
            self.suite.named_plans(),
            recurrence=recurrence,
            backend=self.backend,
            device=str(self.loaded.model.device),
            seed=self.suite.seed,
        )

    def _assemble(
        self,
        streams: Streams,
        result: LockstepResult,
        outcome: CrossCheckOutcome | None,
        bitwise: list[BitwiseRecord],
        answers: dict[str, Answers],
        ablation: tuple[list[AblationRecord], list[BitwiseRecord]],
    ) -> RunData:
        plans, roles = self.suite.named_plans(), self.suite.roles()
        steps = build_steps(result, stream_end=streams.stream_positions)
        items, tasks = score_items(streams, result, list(plans))
        items = join_items(items, answers)
        recurrence = self._family().recurrence
        bitwise = lockstep_bitwise(result, plans, recurrence) + interpreted_again(outcome, recurrence) + bitwise
        bitwise += ablation[1]
        bitwise += [
            answers_bitwise(name, equal=found.again_equal, n_steps=found.n_steps, recurrence=recurrence)
            for name, found in answers.items()
        ]
        generation = measure_generation(self.built, answers)
        records: dict[str, PlanRecord] = {}
        for name, plan in plans.items():
            records[name] = PlanRecord(
                role=roles[name].value,
                **summarize_plan(steps, name, plan).records(),
                state=state_record(result.state[name], result.layer_indices),
                counters=CounterRecord(**counter_fields(result.counters[name])),
                bytes=self._find_bytes(plan),
                tasks=tasks[name] | score_answers(self.built, answers, name),
                free_running=generation.get(name),
            )
        results = Results(
            verdict="inconclusive",
            model=self._model_record(),
            backend=Backends(
                drift=self.backend.value, tasks=self.backend.value, cross_check=compare_backends(result, outcome)
            ),
            plans=records,
            bitwise=bitwise,
            tolerance=outcome.tolerance if outcome is not None else self._measure_tolerance(recurrence),
            noise_floor=NoiseFloor(kl_mean=float(result.noise_kl.mean()), kl_max=float(result.noise_kl.max())),
            verdicts=[],
            ablation=ablation[0],
        )
        data = RunData(results, self._manifest(streams), steps, items)
        decide(data, self.policy)
        return data

    def _family(self) -> Family:
        return find_family(self.loaded.model.config)

    def _shape(self) -> HeadShape:
        family = self._family()
        return family.head_shape(family.find_mixers(self.loaded.model)[0])

    def _model_record(self) -> dict[str, Any]:
        shape = self._shape()
        return {
            "name": self.loaded.name,
            "family": self.loaded.family,
            "parameters": self.loaded.n_parameters,
            "dtype": str(self.loaded.model.dtype).removeprefix("torch."),
            "vocab_size": self.loaded.vocab_size,
            "key_heads": shape.key_heads,
            "value_heads": shape.value_heads,
            "d_k": shape.d_k,
            "d_v": shape.d_v,
        }

    def _manifest(self, streams: Streams) -> Manifest:
        suite, device = self.suite, self.loaded.model.device
        return Manifest(
            command=self.command,
            suite=suite.model_dump(mode="json"),
            policy=self.policy.model_dump(mode="json"),
            versions=read_versions(),
            device=describe_device(device),
            backend={
                "drift": self.backend.value,
                "dtype": self.dtype,
                "enable_fp_fusion": ENABLE_FP_FUSION,
                "cross_check": "triton-interpret" if self.cross_check else None,
                "transformers_fast_path": "none: recurrent decode is replaced by driftgate, attention is eager",
            },
            hashes={
                **{f"model/{k}": v for k, v in self.loaded.hashes.items()},
                **{f"reference/{k}": v for k, v in (self.reference.hashes if self.reference else {}).items()},
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
            timing={},
            tasks={built.task.name: built.describe() for built in self.built},
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
