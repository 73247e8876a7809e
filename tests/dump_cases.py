"""Dumps of random inputs and of a tiny model, for tests of dumps and of their replay."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from driftgate.accuracy.dump import Dump, LayerDump, load_dump
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.replay_dump import Replay, replay_dump
from driftgate.accuracy.step_data import draw_inputs
from driftgate.kernels.contract import Backend, HeadShape, Recurrence

LEAK_ROUNDING = 1e-4
"""A state of 16 x 16 after n <= 8 steps: 2·n·(d_k + 8)·2^-24 of the greatest row's norm an element, 16 of it in all."""


def draw_layer(
    recurrence: str,
    *,
    layer: int = 0,
    heads: tuple[int, int, int, int] = (1, 2, 16, 16),
    activation: torch.dtype = torch.float32,
    n_rows: int = 2,
    n_steps: int = 16,
    seed: int = 0,
) -> LayerDump:
    """heads: H, HV, d_k, d_v."""
    shape = HeadShape(key_heads=heads[0], value_heads=heads[1], d_k=heads[2], d_v=heads[3])
    data = draw_inputs(
        shape, activation, n_rows=n_rows, n_steps=n_steps, seed=seed, recurrence=Recurrence(recurrence)
    )  # fmt: skip
    live = data.live_rows
    return LayerDump(
        layer=layer,
        recurrence=data.recurrence,
        streams={name: x[:, live].transpose(0, 1).contiguous() for name, x in data.streams.items()},
        constants=dict(data.constants),
        initial_state=data.states[data.slots[live].long()],
    )


def draw_dump(recurrence: str, **options: Any) -> Dump:
    return Dump(layers=(draw_layer(recurrence, **options),), model="random", recorder="tests")


def parse(*texts: str) -> dict[str, PrecisionPlan]:
    return {str(plan): plan for plan in map(PrecisionPlan.parse, texts)}


def measure(dump: Dump, *plans: str, **options: Any) -> Replay:
    """A replay of plans by their texts."""
    return replay_dump(dump, parse(*plans), **options)


def change_file(
    path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None], *, key: str = "driftgate_dump"
) -> None:
    """Change tensors and header of a dump in place, as a faulty writer would have written them."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = json.loads(file.metadata()["driftgate_dump"])
    change(tensors, header)
    save_file(tensors, path, {key: json.dumps(header)})


def replay_interpreted(*, path: str, plans: list[str], n_steps: int) -> dict[str, Any]:
    """The document of a replay under Triton's interpreter."""
    measured = replay_dump(load_dump(path), parse(*plans), n_steps=n_steps, backend=Backend.TRITON_INTERPRET)
    return measured.document.model_dump(mode="json")
