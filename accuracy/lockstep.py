"""Lock step: all plans decode the same tokens in one forward per step, compared with the FP32 baseline.

Notable: besides one block of rows per plan there are three: the baseline, the baseline a second time (A/A: its logits
must be equal bit for bit) and the baseline under another legal launch (the noise floor). Nothing is read back from the
device inside the loop; figures are collected as tensors and moved once per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from driftgate.accuracy.adapters.wrapping import Block, wrap
from driftgate.accuracy.lockstep_columns import AgainCheck, Columns
from driftgate.accuracy.lockstep_result import Counters, LockstepResult, Mismatch, Probe, join_results
from driftgate.accuracy.observers import InputRecorder, StateObserver
from driftgate.accuracy.plans import BASELINE, PrecisionPlan
from driftgate.errors import EmptyRunError
from driftgate.kernels.contract import Backend
from driftgate.quant.formats import get_format

__all__ = [
    "AGAIN", "BASELINE_NAME", "NOISE", "Counters", "LockstepResult", "LockstepRunner", "Mismatch", "Probe",
]  # fmt: skip

BASELINE_NAME, AGAIN, NOISE = "baseline", "baseline (A/A)", "baseline (other launch)"
_FIXED_BLOCKS = 3


class LockstepRunner:
    """Runs plans beside the baseline on the same tokens.

    Args:
        model: a loaded causal language model of a covered family, in eval mode.
        plans: by name, in the order of the report.
        batch: sequences that decode together; every batch has this shape, a short one is padded.
        backend: which code takes the decode steps.
        prefill: tokens of each sequence that the model prefills itself; at least 1.
        vocab_size: columns of the logits that are real; None for all.
        seed: of plans with stochastic rounding; the draws of a sequence depend on its place in ``token_ids`` alone.
        least_plans: blocks of rows for at least so many plans: a rerun with fewer in the same shape, whose baseline has
            the same bits.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plans: Mapping[str, PrecisionPlan],
        *,
        batch: int,
        backend: Backend,
        prefill: int = 1,
        vocab_size: int | None = None,
        seed: int = 0,
        least_plans: int = 0,
    ) -> None:
        if prefill < 1:
            raise ValueError(f"prefill: expected at least 1 token, got {prefill}")
        self.model, self.plans, self.batch = model, dict(plans), batch
        self.backend, self.prefill, self.vocab_size, self.seed = backend, prefill, vocab_size, seed
        self.least_plans = least_plans

    def run(
        self,
        token_ids: np.ndarray,
        *,
        probes: Sequence[Probe] = (),
        record_steps: int = 0,
        keep_logits: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> LockstepResult:
        """Decode streams teacher-forced.

        Args:
            token_ids: [n_sequences, length] int64, every sequence of the same length.
            probes: places whose logits are wanted.
            record_steps: steps whose layer inputs are kept for the first sequence.
            keep_logits: steps whose logits are kept for the first sequence.
            progress: called with the number of steps just done.

        Raises:
            EmptyRunError: no step would go through the decode kernels.
            ValueError: a probe lies outside the decoded steps.
        """
        n, length = token_ids.shape
        n_steps = length - self.prefill
        if n < 1 or n_steps < 1:
            raise EmptyRunError(
                f"no steps: {n} sequences of {length} tokens with {self.prefill} prefilled; ask for more --steps"
            )
        for probe in probes:
            if not (0 <= probe.sequence < n and self.prefill <= probe.position < length):
                raise ValueError(
                    f"probes: expected sequences 0 to {n - 1} and positions {self.prefill} to {length - 1}, got {probe}"
                )
        parts, order = [], []
        for first in range(0, n, self.batch):
            index = np.arange(first, first + self.batch) % n  # a short batch is padded with earlier sequences
            chosen = [i for i, p in enumerate(probes) if first <= p.sequence < first + self.batch]
            order += chosen
            used = min(self.batch, n - first)
            batch = _Batch(self, token_ids[index], sequences=index, n_used=used)
            lead = first == 0
            parts.append(
                batch.run(
                    probes=[replace(probes[i], sequence=probes[i].sequence - first) for i in chosen],
                    probe_width=max((len(p.token_ids) for p in probes), default=0),
                    record_steps=record_steps * lead,
                    keep_logits=keep_logits * lead,
                    progress=progress,
                )
            )
        return join_results(parts, np.argsort(np.asarray(order, dtype=int)))


class _Batch:
    """One batch of fixed shape, whose first ``n_used`` sequences are measured; the others are padding."""

    def __init__(self, runner: LockstepRunner, token_ids: np.ndarray, *, sequences: np.ndarray, n_used: int) -> None:
        self.runner, self.n_used = runner, n_used
        self.names = [BASELINE_NAME, AGAIN, NOISE, *runner.plans]
        self.names += [f"padding {i}" for i in range(runner.least_plans - len(runner.plans))]
        self.blocks = [Block.of(n, runner.plans.get(n, BASELINE), alternative=n == NOISE) for n in self.names]
        self.wrapped = wrap(
            runner.model, self.blocks, n_sequences=len(token_ids), backend=runner.backend, seed=runner.seed
        )
        self.sequences = torch.from_numpy(sequences)
        self.tokens = torch.from_numpy(token_ids).to(self.wrapped.device)

    def run(
        self,
        *,
        probes: Sequence[Probe],
        probe_width: int,
        record_steps: int,
        keep_logits: int,
        progress: Callable[[int], None] | None,
    ) -> LockstepResult:
        prefill, length = self.runner.prefill, self.tokens.shape[1]
        with self.wrapped as model:
            observer = StateObserver(model, first_plan=_FIXED_BLOCKS)
            recorder = InputRecorder(model, steps=record_steps)
            again = AgainCheck(model)
            model.states.observers += [again.observe, observer.observe_outputs]
            model.observers += [observer.observe_flushes, recorder.observe]
            model.prefill(self.tokens[:, :prefill], sequences=self.sequences)
            recorder.start()
            columns = Columns(
                model, self.tokens, n_used=self.n_used, probes=probes, probe_width=probe_width, keep_logits=keep_logits
            )
            for position in range(prefill, length):
                columns.before_step()
                observer.before_step()
                logits = model.step(self.tokens[:, position])[..., : self.runner.vocab_size]
                again.after_step(logits, position)
                columns.after_step(logits, position)
                if progress is not None:
                    progress(1)
            if model.kernel_calls == 0:
                raise RuntimeError("no decode step went through driftgate's kernels: the model took another path")
            return self._result(columns, observer, recorder, again)

    def _result(
        self, columns: Columns, observer: StateObserver, recorder: InputRecorder, again: AgainCheck
    ) -> LockstepResult:
        stacked = columns.stacked()
        different, probes = columns.different.cpu().tolist(), columns.probes.cpu().numpy()
        kept = torch.stack(columns.kept, dim=1).float().cpu().numpy() if columns.kept else None
        plans = list(enumerate(self.names))[_FIXED_BLOCKS : _FIXED_BLOCKS + len(self.runner.plans)]
        scored = [(0, BASELINE_NAME), *plans]
        layers = self.wrapped.layer_indices
        return LockstepResult(
            positions=np.asarray(columns.positions),
            kl={n: stacked["kl"][i] for i, n in plans},
            same_top={n: stacked["same_top"][i] for i, n in plans},
            delta_p={n: stacked["delta_p"][i] for i, n in plans},
            nll={n: stacked["nll"][i] for i, n in scored},
            window_offset={n: stacked["offset"][i] for i, n in plans},
            noise_kl=stacked["kl"][self.names.index(NOISE)],
            different_logits={n: different[i] for i, n in plans},
            n_logits=columns.n_logits,
            probes={n: probes[i] for i, n in scored},
            counters={
                n: _count(self.blocks[i].plan, stacked["flush"][i], layers, self.blocks[i].errors()[: self.n_used])
                for i, n in plans
            },
            state={n: observer.sums(i) for i, n in plans},
            layer_indices=layers,
            again=again.mismatch(),
            recorded=recorder.recorded(),
            first_logits={} if kept is None else {n: kept[i] for i, n in scored},
            digests=[again.digest.value()],
        )


def _count(plan: PrecisionPlan, flush: np.ndarray, layer_indices: list[int], wrong: torch.Tensor) -> Counters:
    """Counters of a plan from its flush flags [sequences, steps], the same in all layers, and ``wrong`` [sequences]."""
    flushes = int(flush.sum())
    others = int(flush.size) - flushes
    counters = Counters(flushes=flushes * len(layer_indices), nonfinite_states=int(wrong.sum()))
    for options in map(plan.at, layer_indices):
        low_read = get_format(options.read).low_precision
        low_recurrence = get_format(options.recurrence).low_precision
        counters.low_precision_reads += others * low_read + flushes * low_recurrence
        counters.requantizations += flushes * (low_recurrence or (options.split and low_read))
    return counters
