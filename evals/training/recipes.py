"""The candidates of each family: where each starts and how fast it learns."""

from __future__ import annotations

from dataclasses import dataclass

from driftgate.evals.training.families import Start

__all__ = ["RECIPES", "Recipe", "noise_at", "rate_at"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One candidate.

    Attributes:
        start: initial values.
        learning_rate, weight_decay: of AdamW.
        read_noise: share by which every entry of the states is off, when read, at the end of the training; it keeps
            heads from reading a small difference of large sums, which an 8 or 4 bit copy would drown.
        streams_alone: progress up to which there are streams alone.
        continues: embedded checkpoint of the same architecture whose weights it starts from, instead of ``start``.
    """

    start: Start
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    read_noise: float = 0.0
    streams_alone: float = 0.0
    continues: str | None = None


RECIPES: dict[str, tuple[Recipe, ...]] = {
    "gdn": (
        Recipe(start=Start(seed=3)),
        Recipe(start=Start(seed=1, conv_deviation=0.3), learning_rate=3e-3),
        Recipe(start=Start(seed=0, beta=(0.02, 0.5), decay=(1e-4, 5e-2))),
        Recipe(start=Start(seed=2, conv_deviation=0.3, decay=(1e-5, 1e-2))),
        Recipe(start=Start(seed=3), read_noise=0.3, continues="tiny-gdn", learning_rate=1e-3),
        Recipe(start=Start(seed=4), read_noise=0.15, continues="tiny-gdn"),
        Recipe(start=Start(seed=3), read_noise=0.3, streams_alone=0.35),
        Recipe(start=Start(seed=3, decay=(1e-6, 1e-2), step=0.3), read_noise=0.3, streams_alone=0.3),
        Recipe(start=Start(seed=5), read_noise=0.3, continues="tiny-gdn", learning_rate=1.5e-3),
        Recipe(start=Start(seed=2, decay=(1e-6, 1e-3), step=0.3), read_noise=0.15, streams_alone=0.3),
    ),
    "mamba2": (
        Recipe(start=Start(seed=3, conv_deviation=0.3, decay=(1e-5, 2e-1))),
        Recipe(start=Start(seed=1, conv_deviation=0.3, decay=(1e-4, 5e-1)), learning_rate=3e-3),
        Recipe(start=Start(seed=0, conv_deviation=0.5, decay=(1e-5, 5e-2))),
        Recipe(start=Start(seed=2, conv_deviation=0.3, decay=(1e-6, 2e-1)), learning_rate=3e-3),
    ),
    "kda": (
        Recipe(start=Start(seed=3)),
        Recipe(start=Start(seed=1, conv_deviation=0.3), learning_rate=3e-3),
        Recipe(start=Start(seed=0, beta=(0.02, 0.5), by_channel=True)),
        Recipe(start=Start(seed=2, conv_deviation=0.3, decay=(1e-5, 1e-2))),
    ),
}
"""More candidates than there are recipes take them again with other seeds."""


def rate_at(progress: float, *, flat_until: float = 0.55) -> float:
    """Share of the top learning rate: warm-up over 3 %, flat until this progress, then linear down to 2 %."""
    if progress < 0.03:
        return max(progress, 1e-3) / 0.03
    return 1.0 if progress < flat_until else max(0.02, 1.0 - 0.98 * (progress - flat_until) / (1.0 - flat_until))


def noise_at(progress: float) -> float:
    """Share of the read noise: none for 10 %, while the model learns to read, then linear up to the whole at 30 %."""
    return min(max(progress - 0.1, 0.0) / 0.2, 1.0)
