"""Two checkpoints on the same tokens, both with an FP32 state: what their weights alone do to the next token.

Notable: this puts the error of a state's precision beside that of the weights' (say BF16 against FP8). Both models are
teacher-forced in one loop, so nothing is kept but a figure a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from driftgate.accuracy.adapters.wrapping import wrap
from driftgate.accuracy.metrics.kl import kl_divergence
from driftgate.accuracy.metrics.top import same_top
from driftgate.accuracy.models import LoadedModel
from driftgate.accuracy.records import KlRecord, ProportionRecord, ReferenceRecord
from driftgate.accuracy.statistics import proportion_ci, summarize_kl
from driftgate.kernels.contract import Backend

__all__ = ["ReferenceSteps", "compare_with_reference"]


@dataclass(frozen=True, kw_only=True)
class ReferenceSteps:
    """What a comparison measured.

    Attributes:
        positions: [n_steps] index of the token that was fed.
        kl: [n_sequences, n_steps] float64, KL(reference‖model) in nats.
        same_top: [n_sequences, n_steps] bool.
    """

    positions: np.ndarray
    kl: np.ndarray
    same_top: np.ndarray

    def record(self, model: str, *, stream_end: int) -> ReferenceRecord:
        """Mean and interval over the stream positions, those before ``stream_end``; ``model`` names the reference."""
        keep = self.positions < stream_end
        kl: dict[str, Any] = summarize_kl(self.kl[:, keep]).as_dict()
        return ReferenceRecord(
            model=model,
            kl=KlRecord(**kl),
            same_top_p=ProportionRecord(**proportion_ci(self.same_top[:, keep]).as_dict()),
        )


def compare_with_reference(
    reference: LoadedModel,
    loaded: LoadedModel,
    token_ids: np.ndarray,
    *,
    batch: int,
    backend: Backend,
    prefill: int = 1,
    progress: Callable[[int], None] | None = None,
) -> ReferenceSteps:
    """Decode both models' baselines teacher-forced.

    Args:
        reference: the model that the other is compared with.
        loaded: of the same vocabulary, on the same device.
        token_ids: [n_sequences, length] int64.
        batch: sequences that decode together; a short batch is padded with earlier sequences.
        backend: which code takes the decode steps.
        prefill: tokens that each model prefills itself.
        progress: called with the number of steps just done.

    Raises:
        ValueError: the vocabularies differ.
    """
    if reference.vocab_size != loaded.vocab_size:
        raise ValueError(f"reference: expected {loaded.vocab_size} tokens, got {reference.vocab_size}")
    n, length = token_ids.shape
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for first in range(0, n, batch):
        rows = token_ids[np.arange(first, first + batch) % n]
        kl, same = _compare_batch(reference, loaded, rows, backend=backend, prefill=prefill, progress=progress)
        used = min(batch, n - first)
        found.append((kl[:used], same[:used]))
    return ReferenceSteps(
        positions=np.arange(prefill, length),
        kl=torch.cat([kl for kl, _ in found]).cpu().numpy(),
        same_top=torch.cat([same for _, same in found]).cpu().numpy(),
    )


def _compare_batch(
    reference: LoadedModel,
    loaded: LoadedModel,
    token_ids: np.ndarray,
    *,
    backend: Backend,
    prefill: int,
    progress: Callable[[int], None] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL and agreement of one batch, [batch, n_steps] each, on the device."""
    kl, same = [], []
    with (
        wrap(reference.model, ["baseline"], n_sequences=len(token_ids), backend=backend) as base,
        wrap(loaded.model, ["baseline"], n_sequences=len(token_ids), backend=backend) as other,
    ):
        tokens = torch.from_numpy(token_ids).to(other.device)
        for model in (base, other):
            model.prefill(tokens[:, :prefill])
        for position in range(prefill, token_ids.shape[1]):
            logits = [model.step(tokens[:, position])[0, :, : loaded.vocab_size] for model in (base, other)]
            kl.append(kl_divergence(*logits))
            same.append(same_top(*logits))
            if progress is not None:
                progress(1)
    return torch.stack(kl, dim=1), torch.stack(same, dim=1)
