"""The baseline's own generation: the stream of a checkpoint that no task was written for.

Gumbel-max sampling at temperature 1 (a small model loops when greedy); the noise is a pure function of seed, sequence
and position, so a stream depends on neither batch nor device beyond the logits themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from driftgate.accuracy.adapters.wrapping import wrap
from driftgate.kernels.contract import Backend

__all__ = ["generate_streams", "gumbel_noise"]


def gumbel_noise(seed: int, sequence: int, position: int, n: int) -> np.ndarray:
    """Standard Gumbel noise [n] float32, keyed by (seed, sequence, position)."""
    bits = np.random.Philox(key=seed, counter=[0, 0, position, sequence])
    uniform = np.random.Generator(bits).random(n)
    return (-np.log(-np.log(np.clip(uniform, 1e-300, 1 - 1e-16)))).astype(np.float32)


def generate_streams(
    model: torch.nn.Module,
    prompt: np.ndarray,
    *,
    n_sequences: int,
    length: int,
    seed: int,
    batch: int,
    backend: Backend,
    vocab_size: int,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Continue one prompt ``n_sequences`` times with the FP32 baseline.

    Args:
        model: a loaded causal language model of a covered family.
        prompt: [n_prompt] int64, at least one token.
        n_sequences: streams wanted; they differ by their noise.
        length: tokens of each stream, the prompt included.
        seed: of the noise, 0 or more.
        batch: sequences that decode together.
        backend: which code takes the decode steps.
        vocab_size: columns of the logits that may be sampled.
        progress: called with the number of steps just done.

    Returns:
        Token ids [n_sequences, length] int64.
    """
    streams = np.empty((n_sequences, length), dtype=np.int64)
    streams[:, : len(prompt)] = prompt[:length]
    for first in range(0, n_sequences, batch):
        rows = [(first + i) % n_sequences for i in range(batch)]  # a short batch is padded with earlier sequences
        with wrap(model, ["baseline"], n_sequences=batch, backend=backend) as wrapped:
            tokens = torch.from_numpy(np.tile(prompt, (batch, 1))).to(wrapped.device)
            logits = wrapped.prefill(tokens)
            for position in range(len(prompt), length):
                noise = np.stack([gumbel_noise(seed, row, position, vocab_size) for row in rows])
                scores = logits[:, :vocab_size].float() + torch.from_numpy(noise).to(wrapped.device)
                chosen = scores.argmax(dim=-1)
                streams[rows, position] = chosen.cpu().numpy()
                if position + 1 < length:
                    logits = wrapped.step(chosen)[0]
                if progress is not None:
                    progress(1)
    return streams
