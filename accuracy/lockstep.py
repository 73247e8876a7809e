"""Lock step: all plans decode the same tokens in one forward per step, compared with the FP32 baseline.

Notable: besides one block of rows per plan there are three: the baseline, the baseline a second time (A/A: its logits
must be equal bit for bit) and the baseline under another legal launch (the noise floor). Nothing is read back from the
device inside the loop; figures are collected as tensors and moved once per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from driftgate.accuracy.adapters.wrapping import Block, WrappedModel, wrap
from driftgate.accuracy.digest import LogitDigest
from driftgate.accuracy.metrics.kl import kl_divergence
from driftgate.accuracy.metrics.probability import delta_p, negative_log_likelihood
from driftgate.accuracy.metrics.top import same_top
from driftgate.accuracy.observers import InputRecorder, RecordedInputs, StateObserver, StateSums
from driftgate.accuracy.plans import BASELINE, PrecisionPlan
from driftgate.errors import EmptyRunError
from driftgate.kernels.contract import Backend
from driftgate.quant.formats import get_format

__all__ = ["AGAIN", "BASELINE_NAME", "NOISE", "Counters", "LockstepResult", "LockstepRunner", "Probe"]

BASELINE_NAME, AGAIN, NOISE = "baseline", "baseline (A/A)", "baseline (other launch)"
_FIXED_BLOCKS = 3


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Tokens whose logits are wanted at one place: the choices of a question.

    Attributes:
        sequence, position: the logits after feeding the token at ``position`` of that sequence.
        token_ids: the tokens.
    """

    sequence: int
    position: int
    token_ids: tuple[int, ...]


@dataclass(kw_only=True)
class Counters:
    """Events of one plan, counted per (row, layer, step) where its kernel was called.

    ``nonfinite_states`` counts sequences in which a state with NaN or infinity was stored.
    """

    low_precision_reads: int = 0
    flushes: int = 0
    requantizations: int = 0
    nonfinite_states: int = 0


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """First place where the baseline differed from itself.

    Attributes:
        step: position of the token that was fed.
        layer: decoder-layer index, None where only logits differ.
    """

    step: int
    layer: int | None


@dataclass(frozen=True, kw_only=True)
class LockstepResult:
    """What one run in lock step measured.

    Attributes:
        positions: [n_steps] index of the token that was fed.
        kl, same_top, delta_p, nll: by plan, [n_sequences, n_steps] float64 (same_top bool); ``nll`` has the baseline
            too. The last step has no next token: nll and delta_p are NaN there when the stream ends.
        window_offset: by plan, [n_sequences, n_steps] int.
        noise_kl: [n_sequences, n_steps], KL of the baseline under another launch.
        different_logits: by plan, number of logits whose bits differ from the baseline's.
        n_logits: logits compared for each plan.
        probes: by plan and for the baseline, [n_probes, n_token_ids] float64 logits in the order of the probes.
        counters, state: by plan; state holds one entry per recurrent layer.
        layer_indices: decoder-layer index of each recurrent layer.
        again: where the A/A block differed, None if nowhere.
        recorded: inputs of the recurrent layers for the first sequence, where asked for.
        first_logits: by plan and for the baseline, logits of the first sequence [n_kept, vocab] where asked for.
        digests: of the bits of the baseline's logits, one of each batch; equal where a rerun was bit-equal.
    """

    positions: np.ndarray
    kl: dict[str, np.ndarray]
    same_top: dict[str, np.ndarray]
    delta_p: dict[str, np.ndarray]
    nll: dict[str, np.ndarray]
    window_offset: dict[str, np.ndarray]
    noise_kl: np.ndarray
    different_logits: dict[str, int]
    n_logits: int
    probes: dict[str, np.ndarray]
    counters: dict[str, Counters]
    state: dict[str, list[StateSums]]
    layer_indices: list[int]
    again: Mismatch | None
    recorded: RecordedInputs | None
    first_logits: dict[str, np.ndarray]
    digests: list[int]


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
            lead = first == 0
            batch = _Batch(
                self,
                token_ids[index],
                sequences=index,
                first=first,
                n_used=min(self.batch, n - first),
                probes=[probes[i] for i in chosen],
                probe_width=max((len(p.token_ids) for p in probes), default=0),
                record_steps=record_steps * lead,
                keep_logits=keep_logits * lead,
            )
            parts.append(batch.run(progress))
        return _join(parts, np.argsort(np.asarray(order, dtype=int)))


class _Batch:
    """One batch of fixed shape, whose first ``n_used`` sequences are measured; the others are padding."""

    def __init__(
        self,
        runner: LockstepRunner,
        token_ids: np.ndarray,
        *,
        sequences: np.ndarray,
        first: int,
        n_used: int,
        probes: list[Probe],
        probe_width: int,
        record_steps: int,
        keep_logits: int,
    ) -> None:
        self.runner, self.first, self.n_used = runner, first, n_used
        self.names = [BASELINE_NAME, AGAIN, NOISE, *runner.plans]
        self.names += [f"padding {i}" for i in range(runner.least_plans - len(runner.plans))]
        self.blocks = [Block.of(n, runner.plans.get(n, BASELINE), alternative=n == NOISE) for n in self.names]
        self.wrapped = wrap(
            runner.model, self.blocks, n_sequences=len(token_ids), backend=runner.backend, seed=runner.seed
        )
        self.sequences = torch.from_numpy(sequences)
        self.device = self.wrapped.device
        self.tokens = torch.from_numpy(token_ids).to(self.device)
        self.probes_at: dict[int, list[tuple[int, Probe]]] = {}
        for i, probe in enumerate(probes):
            self.probes_at.setdefault(probe.position, []).append((i, probe))
        self.n_probes, self.probe_width = len(probes), probe_width
        self.record_steps, self.keep_logits = record_steps, keep_logits

    def run(self, progress: Callable[[int], None] | None) -> LockstepResult:
        prefill, length = self.runner.prefill, self.tokens.shape[1]
        with self.wrapped as model:
            observer = StateObserver(model, first_plan=_FIXED_BLOCKS)
            recorder = InputRecorder(model, steps=self.record_steps)
            again = _AgainCheck(model)
            model.states.observers += [again.observe, observer.observe_outputs]
            model.observers += [observer.observe_flushes, recorder.observe]
            model.prefill(self.tokens[:, :prefill], sequences=self.sequences)
            recorder.start()
            columns = _Columns(self)
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
            return columns.result(observer, recorder, again)


class _AgainCheck:
    """Bits of the A/A block against the baseline: outputs of each layer, then logits."""

    def __init__(self, model: WrappedModel) -> None:
        self.base, self.again = (b.rows for b in model.blocks[:2])
        self.layer_indices = model.layer_indices
        self.device = model.device
        self.layers = [torch.zeros((), dtype=torch.bool, device=device) for device in model.states.devices]
        self.history: list[torch.Tensor] = []
        self.positions: list[int] = []
        self.digest = LogitDigest(model.device)

    def observe(self, layer: int, _inputs: object, out: torch.Tensor) -> None:
        self.layers[layer].copy_(_bits_differ(out[self.base], out[self.again]).any())

    def after_step(self, logits: torch.Tensor, position: int) -> None:
        differ = [*self.layers, _bits_differ(logits[0], logits[1]).any()]
        self.digest.add(logits[0])
        self.history.append(torch.stack([x.to(self.device, non_blocking=True) for x in differ]))
        self.positions.append(position)

    def mismatch(self) -> Mismatch | None:
        history = torch.stack(self.history).cpu()
        steps = history.any(dim=1).nonzero()
        if not len(steps):
            return None
        step = int(steps[0])
        layer = int(history[step].nonzero()[0])
        return Mismatch(step=self.positions[step], layer=[*self.layer_indices, None][layer])


class _Columns:
    """Per-step figures of one batch, kept on the device until the end."""

    def __init__(self, batch: _Batch) -> None:
        self.batch = batch
        self.columns: dict[str, list[torch.Tensor]] = {
            k: [] for k in ("kl", "same_top", "delta_p", "nll", "offset", "flush")
        }
        device = batch.device
        self.different = torch.zeros(len(batch.blocks), dtype=torch.int64, device=device)
        self.n_logits = 0
        shape = (len(batch.blocks), batch.n_probes, batch.probe_width)
        self.probes = torch.full(shape, torch.nan, dtype=torch.float64, device=device)
        self.kept: list[torch.Tensor] = []
        self.positions: list[int] = []

    def before_step(self) -> None:
        """Cursors and flush flags that this step finds, [blocks, sequences]."""
        blocks, used = self.batch.blocks, self.batch.n_used
        self.columns["offset"].append(torch.stack([b.pool.cursor[:used] for b in blocks]))
        self.columns["flush"].append(torch.stack([b.pool.flush[:used] for b in blocks]))

    def after_step(self, logits: torch.Tensor, position: int) -> None:
        """logits: [blocks, sequences, vocab] after the token at ``position``."""
        logits, tokens = logits[:, : self.batch.n_used], self.batch.tokens[: self.batch.n_used]
        base = logits[:1]
        add = self.columns
        add["kl"].append(kl_divergence(base.expand_as(logits), logits))
        add["same_top"].append(same_top(base.expand_as(logits), logits))
        if position + 1 < tokens.shape[1]:
            target = tokens[:, position + 1].expand(logits.shape[:2])
            add["nll"].append(negative_log_likelihood(logits, target))
            add["delta_p"].append(delta_p(base.expand_as(logits), logits, target))
        else:
            missing = torch.full(logits.shape[:2], torch.nan, dtype=torch.float64, device=logits.device)
            add["nll"].append(missing)
            add["delta_p"].append(missing)
        self.different += _bits_differ(logits, base).sum(dim=(1, 2))
        self.n_logits += logits[0].numel()
        for i, probe in self.batch.probes_at.get(position, ()):
            ids = torch.tensor(probe.token_ids, device=logits.device)
            self.probes[:, i, : len(ids)] = logits[:, probe.sequence - self.batch.first, ids].double()
        if len(self.kept) < self.batch.keep_logits:
            self.kept.append(logits[:, 0].clone())
        self.positions.append(position)

    def result(self, observer: StateObserver, recorder: InputRecorder, again: _AgainCheck) -> LockstepResult:
        names, blocks = self.batch.names, self.batch.blocks
        stacked = {k: torch.stack(v, dim=-1).cpu().numpy() for k, v in self.columns.items()}  # [blocks, S, steps]
        different, probes = self.different.cpu().tolist(), self.probes.cpu().numpy()
        kept = torch.stack(self.kept, dim=1).float().cpu().numpy() if self.kept else None
        plans = list(enumerate(names))[_FIXED_BLOCKS : _FIXED_BLOCKS + len(self.batch.runner.plans)]
        scored = [(0, BASELINE_NAME), *plans]
        layers = self.batch.wrapped.layer_indices
        return LockstepResult(
            positions=np.asarray(self.positions),
            kl={n: stacked["kl"][i] for i, n in plans},
            same_top={n: stacked["same_top"][i] for i, n in plans},
            delta_p={n: stacked["delta_p"][i] for i, n in plans},
            nll={n: stacked["nll"][i] for i, n in scored},
            window_offset={n: stacked["offset"][i] for i, n in plans},
            noise_kl=stacked["kl"][names.index(NOISE)],
            different_logits={n: different[i] for i, n in plans},
            n_logits=self.n_logits,
            probes={n: probes[i] for i, n in scored},
            counters={
                n: _count(blocks[i].plan, stacked["flush"][i], layers, blocks[i].errors()[: self.batch.n_used])
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


def _bits_differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether bits differ, elementwise: NaN equals the same NaN, 0 differs from -0."""
    kinds = {4: torch.int32, 2: torch.int16, 8: torch.int64}
    kind = kinds[a.element_size()]
    return a.view(kind) != b.view(kind)


def _join(parts: list[LockstepResult], order: np.ndarray) -> LockstepResult:
    """One result of all batches; ``order`` brings the probes of all batches back to the caller's order."""
    first = parts[0]

    def rows(pick: Callable[[LockstepResult], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {n: np.concatenate([pick(r)[n] for r in parts]) for n in pick(first)}

    def sums(name: str) -> Counters:
        total = Counters()
        for r in parts:
            for key, value in vars(r.counters[name]).items():
                setattr(total, key, getattr(total, key) + value)
        return total

    return LockstepResult(
        positions=first.positions,
        kl=rows(lambda r: r.kl),
        same_top=rows(lambda r: r.same_top),
        delta_p=rows(lambda r: r.delta_p),
        nll=rows(lambda r: r.nll),
        window_offset=rows(lambda r: r.window_offset),
        noise_kl=np.concatenate([r.noise_kl for r in parts]),
        different_logits={n: sum(r.different_logits[n] for r in parts) for n in first.different_logits},
        n_logits=sum(r.n_logits for r in parts),
        probes={n: a[order] for n, a in rows(lambda r: r.probes).items()},
        counters={n: sums(n) for n in first.counters},
        state=first.state,
        layer_indices=first.layer_indices,
        again=next((r.again for r in parts if r.again is not None), None),
        recorded=first.recorded,
        first_logits=first.first_logits,
        digests=[digest for r in parts for digest in r.digests],
    )
