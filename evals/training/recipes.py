"""The candidates of each family: where each starts and how fast it learns."""

from __future__ import annotations

from dataclasses import dataclass

from driftgate.evals.training.families import Start

__all__ = ["RECIPES", "Recipe", "rate_at"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One candidate."""

    start: Start
    learning_rate: float = 2e-3
    weight_decay: float = 0.01


RECIPES: dict[str, tuple[Recipe, ...]] = {
    "gdn": (
        Recipe(start=Start(seed=3)),
        Recipe(start=Start(seed=1, conv_deviation=0.3), learning_rate=3e-3),
        Recipe(start=Start(seed=0, beta=(0.02, 0.5), decay=(1e-4, 5e-2))),
        Recipe(start=Start(seed=2, conv_deviation=0.3, decay=(1e-5, 1e-2))),
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


def rate_at(progress: float) -> float:
    """Share of the top learning rate: warm-up over 3 %, flat to 55 %, then linear down to 2 %."""
    if progress < 0.03:
        return max(progress, 1e-3) / 0.03
    return 1.0 if progress < 0.55 else max(0.02, 1.0 - 0.98 * (progress - 0.55) / 0.45)
