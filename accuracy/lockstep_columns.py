"""Figures of each step of a batch in lock step, kept on the device until the end; the baseline's bits against itself.

Notable: what they do in a step is recorded with it where kernels are compiled (``GraphRecorder``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from driftgate.accuracy.adapters.wrapping import WrappedModel
from driftgate.accuracy.digest import LogitDigest
from driftgate.accuracy.lockstep_result import Mismatch, Probe
from driftgate.accuracy.metrics.kl import kl_divergence
from driftgate.accuracy.metrics.probability import delta_p, negative_log_likelihood
from driftgate.accuracy.metrics.top import same_top

__all__ = ["AgainCheck", "Columns"]


class AgainCheck:
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
        """After a layer's step of all rows, on the device alone."""
        self.layers[layer].copy_(bits_differ(out[self.base], out[self.again]).any())

    def after_step(self, logits: torch.Tensor, position: int) -> None:
        """logits: [blocks, sequences, vocab] after the token at ``position``."""
        differ = [*self.layers, bits_differ(logits[0], logits[1]).any()]
        self.digest.add(logits[0])
        self.history.append(torch.stack([x.to(self.device, non_blocking=True) for x in differ]))
        self.positions.append(position)

    def mismatch(self) -> Mismatch | None:
        """The first step, and its first layer, whose bits differed; a synchronisation of a GPU."""
        history = torch.stack(self.history).cpu()
        steps = history.any(dim=1).nonzero()
        if not len(steps):
            return None
        step = int(steps[0])
        layer = int(history[step].nonzero()[0])
        return Mismatch(step=self.positions[step], layer=[*self.layer_indices, None][layer])


class Columns:
    """Per-step figures of one batch.

    Args:
        model: entered; its blocks are the baseline, the fixed ones and the plans.
        tokens: [n_sequences, length] int64 on the model's device.
        n_used: sequences that are measured; those behind them are padding.
        probes: places whose logits are wanted, with sequences counted in this batch.
        probe_width: most tokens of any probe, of other batches too.
        keep_logits: steps whose logits are kept for the first sequence.
    """

    def __init__(
        self,
        model: WrappedModel,
        tokens: torch.Tensor,
        *,
        n_used: int,
        probes: Sequence[Probe],
        probe_width: int,
        keep_logits: int,
    ) -> None:
        self.model, self.tokens, self.n_used, self.keep_logits = model, tokens, n_used, keep_logits
        states, device, n_blocks = model.states, model.device, len(model.blocks)
        self._probes_at: dict[int, list[tuple[int, Probe]]] = {}
        for i, probe in enumerate(probes):
            self._probes_at.setdefault(probe.position, []).append((i, probe))
        self.cursors: list[torch.Tensor] = []
        self.figures: list[torch.Tensor] = []
        self.different = torch.zeros(n_blocks, dtype=torch.int64, device=device)
        self.n_logits = 0
        self.probes = torch.full((n_blocks, len(probes), probe_width), torch.nan, dtype=torch.float64, device=device)
        self.kept: list[torch.Tensor] = []
        self.positions: list[int] = []
        self._read_cursors = states.record(self._stack_cursors, model.blocks[0].pool.device)
        self._measure = states.record(self._compare, device)

    def before_step(self) -> None:
        """Cursors and flush flags that this step finds."""
        self.cursors.append(self._read_cursors().clone())

    def after_step(self, logits: torch.Tensor, position: int) -> None:
        """logits: [blocks, sequences, vocab] after the token at ``position``."""
        logits, tokens = logits[:, : self.n_used], self.tokens[: self.n_used]
        following = tokens[:, min(position + 1, tokens.shape[1] - 1)]  # there is none behind the last: see ``stacked``
        self.figures.append(self._measure(logits, following).clone())
        self.n_logits += logits[0].numel()
        for i, probe in self._probes_at.get(position, ()):
            ids = torch.tensor(probe.token_ids, device=logits.device)
            self.probes[:, i, : len(ids)] = logits[:, probe.sequence, ids].double()
        if len(self.kept) < self.keep_logits:
            self.kept.append(logits[:, 0].clone())
        self.positions.append(position)

    def _stack_cursors(self) -> torch.Tensor:
        """[2, blocks, sequences] int32."""
        pools, used = [block.pool for block in self.model.blocks], self.n_used
        rows = [x[:used] for x in [*(pool.cursor for pool in pools), *(pool.flush for pool in pools)]]
        return torch.stack(rows).view(2, len(pools), used)

    def _compare(self, logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Figures against block 0, [4, blocks, sequences] float64; differing bits are counted beside."""
        base, targets = logits[:1].expand_as(logits), following.expand(logits.shape[:2])
        self.different += bits_differ(logits, base).sum(dim=(1, 2))
        kl, same = kl_divergence(base, logits), same_top(base, logits).double()
        return torch.stack((kl, same, delta_p(base, logits, targets), negative_log_likelihood(logits, targets)))

    def stacked(self) -> dict[str, np.ndarray]:
        """[blocks, sequences, steps] by figure: kl, same_top, delta_p, nll, offset (cursors), flush."""
        kl, same, change, nll = torch.stack(self.figures, dim=-1).cpu().numpy()
        offset, flush = torch.stack(self.cursors, dim=-1).cpu().numpy()
        if self.positions[-1] + 1 == self.tokens.shape[1]:
            change[..., -1] = nll[..., -1] = np.nan
        names = ("kl", "same_top", "delta_p", "nll", "offset", "flush")
        return dict(zip(names, (kl, same.astype(bool), change, nll, offset, flush), strict=True))


def bits_differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether bits differ, elementwise: NaN equals the same NaN, 0 differs from -0."""
    kinds = {4: torch.int32, 2: torch.int16, 8: torch.int64}
    kind = kinds[a.element_size()]
    return a.view(kind) != b.view(kind)
