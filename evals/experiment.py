"""A run: streams through all plans in lock step, answers scored, figures computed, everything as one RunData.

Notable: where there is no GPU the long part runs on the torch twins while a second process takes the same streams
through the interpreted Triton kernels; their greatest difference is reported. With a GPU the compiled kernels do all.
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch

from driftgate.accuracy.analysis import build_steps, counter_fields, state_record, summarize_plan
from driftgate.accuracy.certify import certify
from driftgate.accuracy.crosscheck import CrossCheckJob, CrossCheckOutcome, certified, steps_needed
from driftgate.accuracy.generation import generate_streams
from driftgate.accuracy.lockstep import LockstepResult, LockstepRunner, Probe
from driftgate.accuracy.models import LoadedModel
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.policy import Policy, decide
from driftgate.accuracy.records import (
    Backends,
    BitwiseRecord,
    BytesRecord,
    CounterRecord,
    CrossCheck,
    Manifest,
    NoiseFloor,
    PlanRecord,
    Results,
    RunData,
)
from driftgate.errors import InputError
from driftgate.evals.scoring import score_items
from driftgate.evals.suite import Suite
from driftgate.evals.tasks import Streams, make_streams
from driftgate.kernels.contract import Backend, HeadShape
from driftgate.kernels.launch import ENABLE_FP_FUSION
from driftgate.kernels.traffic import compute_traffic, gdn_entry

__all__ = ["Experiment", "check_tokens", "choose_backend"]

_PACKAGES = ("driftgate", "torch", "triton", "transformers", "numpy", "scipy", "safetensors", "tokenizers")


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
    """

    suite: Suite
    loaded: LoadedModel
    backend: Backend
    cross_check: bool
    policy: Policy
    dtype: str | None
    command: list[str]

    def run(self, progress: Callable[[int], None] | None = None) -> RunData:
        """Measure everything.

        Args:
            progress: called with the number of lock-step steps just done; ``n_steps`` is their total.
        """
        started = time.monotonic()
        suite, plans = self.suite, self.suite.named_plans()
        streams = self._streams()
        cycles = suite.cross_check_cycles
        short = min(suite.steps, steps_needed(plans, cycles=cycles))
        job = self._start_cross_check(streams, plans, short) if self.cross_check else None
        try:
            result = self._lockstep(streams, plans, short, progress)
            decoded = time.monotonic()
            outcome = job.result() if job is not None else None
        finally:
            if job is not None:
                job.cancel()
        bitwise = outcome.bitwise if outcome is not None else self._certify(result)
        data = self._assemble(streams, result, outcome, bitwise)
        data.manifest.timing.update(
            lock_step_s=round(decoded - started, 3),
            total_s=round(time.monotonic() - started, 3),
            **({"cross_check_s": round(outcome.seconds, 3)} if outcome is not None else {}),
        )
        return data

    @property
    def n_steps(self) -> int:
        """Lock-step steps of the whole run."""
        return self.suite.steps * -(-self.suite.sequences // self.suite.batch)

    def _streams(self) -> Streams:
        suite, length = self.suite, self.suite.steps + self.suite.prefill
        if suite.stream != "generation":
            streams = make_streams(tasks=suite.tasks, n_sequences=suite.sequences, length=length, seed=suite.seed)
            check_tokens(streams.token_ids, vocab_size=self.loaded.vocab_size, model=self.loaded.name)
            return streams
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
        suite = self.suite
        runner = LockstepRunner(
            self.loaded.model,
            plans,
            batch=min(suite.batch, suite.sequences),
            backend=self.backend,
            prefill=suite.prefill,
            vocab_size=self.loaded.vocab_size,
            seed=suite.seed,
        )
        probes = [Probe(sequence=q.sequence, position=q.position, token_ids=q.choices) for q in streams.questions]
        return runner.run(streams.token_ids, probes=probes, record_steps=short, keep_logits=short, progress=progress)

    def _certify(self, result: LockstepResult) -> list[BitwiseRecord]:
        assert result.recorded is not None
        plans = self.suite.named_plans()
        return certify(
            backend=self.backend,
            recorded=result.recorded,
            device=str(self.loaded.model.device),
            **certified(plans),
        )

    def _assemble(
        self,
        streams: Streams,
        result: LockstepResult,
        outcome: CrossCheckOutcome | None,
        bitwise: list[BitwiseRecord],
    ) -> RunData:
        plans, roles = self.suite.named_plans(), self.suite.roles()
        steps = build_steps(result, stream_end=streams.stream_positions)
        items, tasks = score_items(streams, result, list(plans))
        shape, n_layers = self._shape(), len(result.layer_indices)
        bitwise = _lockstep_bitwise(result, plans) + _interpreted_again(outcome) + bitwise
        records: dict[str, PlanRecord] = {}
        for name, plan in plans.items():
            records[name] = PlanRecord(
                role=roles[name].value,
                **summarize_plan(steps, name, plan).records(),
                state=state_record(result.state[name], result.layer_indices),
                counters=CounterRecord(**counter_fields(result.counters[name])),
                bytes=_bytes_record(plan, shape, n_layers, self.loaded.model.dtype.itemsize),
                tasks=tasks[name],
            )
        results = Results(
            verdict="inconclusive",
            model=self._model_record(),
            backend=Backends(drift=self.backend.value, tasks=self.backend.value, cross_check=_compare(result, outcome)),
            plans=records,
            bitwise=bitwise,
            noise_floor=NoiseFloor(kl_mean=float(result.noise_kl.mean()), kl_max=float(result.noise_kl.max())),
            verdicts=[],
        )
        data = RunData(results, self._manifest(streams), steps, items)
        decide(data, self.policy)
        return data

    def _shape(self) -> HeadShape:
        from driftgate.accuracy.adapters import FAMILIES

        family = FAMILIES[self.loaded.family]
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
            versions=_versions(),
            device=_device(device),
            backend={
                "drift": self.backend.value,
                "enable_fp_fusion": ENABLE_FP_FUSION,
                "cross_check": "triton-interpret" if self.cross_check else None,
                "transformers_fast_path": "none: recurrent decode is replaced by driftgate, attention is eager",
            },
            hashes={
                **{f"model/{k}": v for k, v in self.loaded.hashes.items()},
                "streams": _hash(streams.token_ids),
            },
            seeds={"streams": suite.seed},
            plans={str(p): {"role": e.role} for e in suite.plans for p in (e.parsed(),)},
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
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )


def _lockstep_bitwise(result: LockstepResult, plans: dict[str, PrecisionPlan]) -> list[BitwiseRecord]:
    """Bits of logits over the whole lock step: the baseline against itself, and plans that must equal it."""
    records = [
        BitwiseRecord(
            invariant="A/A",
            recurrence="gdn",
            case={"where": "logits and layer outputs of every lock-step step", "compared": result.n_logits},
            equal=result.again is None,
            n_different=0 if result.again is None else 1,
            max_ulp=0,
            first_different=None if result.again is None else {"step": result.again.step, "layer": result.again.layer},
        )
    ]
    for name, plan in plans.items():
        invariant = _promise(plan)
        if invariant is not None:
            different = result.different_logits[name]
            records.append(
                BitwiseRecord(
                    invariant=invariant,
                    recurrence="gdn",
                    case={"plan": name, "where": "logits of every lock-step step", "compared": result.n_logits},
                    equal=different == 0,
                    n_different=different,
                    max_ulp=0,
                    first_different=None,
                )
            )
    return records


def _interpreted_again(outcome: CrossCheckOutcome | None) -> list[BitwiseRecord]:
    """The baseline against itself in the interpreted kernels."""
    if outcome is None:
        return []
    return [
        BitwiseRecord(
            invariant="A/A",
            recurrence="gdn",
            case={"where": "logits and layer outputs of the interpreted cross-check", "steps": outcome.steps},
            equal=outcome.again_equal,
            n_different=0 if outcome.again_equal else 1,
            max_ulp=0,
            first_different=None,
        )
    ]


def _promise(plan: PrecisionPlan) -> str | None:
    """The invariant by which a plan's outputs equal the baseline's bit for bit, None where there is none."""
    options = plan.options
    if options.recurrence != "fp32":
        return None
    if options.length == 1:
        return "I1"
    return (
        "I2"
        if options.readout.value == "exact_readout" and options.fold.value == "exact" and not options.split
        else None
    )


def _compare(result: LockstepResult, outcome: CrossCheckOutcome | None) -> CrossCheck | None:
    """Greatest difference of logits between the long part and the interpreted kernels, on the same tokens."""
    if outcome is None:
        return None
    by_plan = {
        name: float(np.abs(result.first_logits[name][: outcome.steps].astype(np.float64) - logits).max())
        for name, logits in outcome.logits.items()
    }
    greatest = float(np.max(list(by_plan.values())))  # NaN stays NaN and is reported as null
    return CrossCheck(steps=outcome.steps, max_abs_difference=greatest, by_plan=by_plan)


def _bytes_record(plan: PrecisionPlan, shape: HeadShape, n_layers: int, activation_bytes: int) -> BytesRecord:
    from driftgate.kernels.pool import StatePool

    pool = StatePool(
        shape,
        plan.options,
        n_slots=1,
        n_layers=n_layers,
        activation_dtype={2: torch.bfloat16, 4: torch.float32}[activation_bytes],
    )
    traffic = compute_traffic(shape, plan.options, gdn_entry(shape, plan.options, activation_bytes=activation_bytes))
    return BytesRecord(
        **pool.bytes_per_sequence(),
        traffic_per_step=traffic.per_step * n_layers,
        traffic_ratio=traffic.ratio,
        state_ratio=traffic.state_ratio,
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _device(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return {"type": "cuda", "name": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return {"type": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}


def _hash(array: np.ndarray) -> str:
    import hashlib

    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
