"""Times of the compiled decode kernels on a GPU, per step of a flush cycle, beside what a device copy reaches.

Notable: window offsets are measured one by one, the cursors of all rows set beforehand, so that a step between flushes
and the flush each have their own time and the mean over a cycle counts the flush exactly once. A pass launches the step
on one layer after the other, enough of them to overflow the L2 cache, and is queued behind a waiting kernel, so that
the host's work for a launch is never measured. Inputs are the same for every layer: a model's come from the cache too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

import torch

from driftgate.kernels.contract import Backend, HeadShape, Recurrence, ReplayOptions
from driftgate.kernels.device_time import LEAST_REPEATS, Timing, time_device
from driftgate.kernels.launch import Launch, choose_launch
from driftgate.kernels.pool import StatePool
from driftgate.kernels.traffic import entry_bytes, step_bytes
from driftgate.quant.formats import get_format

__all__ = ["SHAPES", "Subject", "choose_layers", "choose_offsets", "integrate_cycle", "prepare", "time_configuration"]

SHAPES = {
    Recurrence.GDN: HeadShape(key_heads=16, value_heads=32, d_k=128, d_v=128),
    Recurrence.KDA: HeadShape(key_heads=32, value_heads=32, d_k=128, d_v=128),
    Recurrence.MAMBA2: HeadShape(key_heads=8, value_heads=128, d_k=128, d_v=64),
}
"""Layers that are timed: of Qwen3.5-4B, of Kimi Linear, of a Nemotron-3 of 120 B parameters."""

GRAPH_BELOW = 128
"""Batches below it are timed in a CUDA Graph, as engines decode them."""

ROTATION = 4
"""Times the L2 cache that the states of a pass take, where ``MAX_LAYERS`` allows it."""

MAX_LAYERS = 512
LAUNCHES = 16
"""Fewest launches of a pass: what a pass costs beside its launches is spread over them."""

_MICRO = 1e6


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A filled pool and one step's inputs.

    Attributes:
        pool: random states; buffers hold finite values at every place.
        slots: [B] int32, row i has slot i.
        take: takes the step of one layer and returns its output [B, HV, d_v].
    """

    pool: StatePool
    slots: torch.Tensor
    take: Callable[[int], torch.Tensor]

    def preset(self, offset: int) -> None:
        """Make every row's next step the one that finds ``offset`` buffered entries, a flush at L - 1."""
        options = self.pool.options
        self.pool.cursor.fill_(0 if options.step_by_step else offset)
        self.pool.flush.fill_(int(offset >= options.length - 1))

    def run_pass(self) -> torch.Tensor:
        """Take the step in one layer after the other, ``launches`` in all; the last output."""
        for i in range(self.launches):
            out = self.take(i % self.pool.n_layers)
        return out

    @property
    def launches(self) -> int:
        """Launches of a pass: every layer equally often."""
        return self.pool.n_layers * math.ceil(LAUNCHES / self.pool.n_layers)


def time_configuration(
    recurrence: Recurrence,
    shape: HeadShape,
    options: ReplayOptions,
    batch: int,
    launch: Launch | None = None,
    offsets: Iterable[int] | None = None,
    *,
    method: Literal["graph", "events"] | None = None,
    repeats: int = LEAST_REPEATS,
    copy_bandwidth: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Time one plan's step at window offsets, with BF16 activations.

    Args:
        recurrence: whose kernel.
        shape: heads of the layer.
        options: the plan; baseline where it is step by step.
        batch: rows.
        launch: tile and warps; None for the table's.
        offsets: buffered entries that a timed step finds, 0 to L - 1 (the flush); None for 0, L // 2, L - 2 and L - 1.
        method: passes replayed in a CUDA Graph, or launched one by one; None: graph below a batch of 128.
        repeats: timed passes, at least 20.
        copy_bandwidth: bytes a second of ``measure_copy``, for floors; None leaves them out.
        seed: of states and inputs.

    Returns:
        What JSON holds: ``steps`` (for each offset ``us`` (median), ``min_us``, ``spread_us``, ``bytes``, ``floor_us``
        and ``copy_fraction``), ``cycle`` (the same means over a flush cycle; None if ``offsets`` do not span it),
        ``sampled`` (offsets between were interpolated) and what was run.

    Raises:
        ValueError: a batch, offset or number of repeats that cannot be timed; a plan without a natural cycle.
        RuntimeError: no GPU, or outputs or states that are not finite.
    """
    if batch < 1 or repeats < LEAST_REPEATS:
        raise ValueError(f"batch and repeats: expected at least 1 and {LEAST_REPEATS}, got {batch} and {repeats}")
    if options.track or options.window:
        raise ValueError("options: natural cycles of single tokens are timed, expected neither track nor window")
    chosen = sorted(set(choose_offsets(options.length) if offsets is None else offsets))
    amounts = [_count_bytes(recurrence, shape, options, batch, offset) for offset in chosen]  # checks the offsets
    implementation = import_module(f"driftgate.kernels.{recurrence.value}").implementation(Backend.TRITON)
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    rows = batch * shape.value_heads * shape.d_v
    n_layers = choose_layers(rows * get_format(options.read).bytes_per_row(shape.d_k), cache)
    torch.cuda.empty_cache()  # pools of other plans have other sizes
    subject = prepare(
        recurrence, shape, options, batch,
        implementation=implementation, n_layers=n_layers, launch=launch, seed=seed, device="cuda",
    )  # fmt: skip
    method = method or ("graph" if batch < GRAPH_BELOW else "events")
    timings = _time_offsets(subject, chosen, method, repeats)
    steps = [
        {"offset": offset, "flush": offset >= options.length - 1}
        | asdict(timing)
        | _relate(timing.us, amount, copy_bandwidth)
        for offset, timing, amount in zip(chosen, timings, amounts, strict=True)
    ]
    record = {
        "recurrence": recurrence.value, "shape": asdict(shape), "batch": batch, "length": options.length,
        "activation": "bf16", "launch": asdict(launch or choose_launch(shape, interpreted=False)), "method": method,
        "repeats": repeats, "n_layers": n_layers, "launches": subject.launches, "steps": steps,
        "sampled": len(chosen) < max(options.length, 1), "cycle": None,
    }  # fmt: skip
    if _spans_cycle(chosen, options.length):
        us = integrate_cycle(options.length, {step["offset"]: step["us"] for step in steps})
        every = range(max(options.length, 1))
        amount = statistics.fmean(_count_bytes(recurrence, shape, options, batch, offset) for offset in every)
        record["cycle"] = {"us": us} | _relate(us, amount, copy_bandwidth)
    return record


def choose_offsets(length: int, *, every: bool = False) -> list[int]:
    """Window offsets to time: 0, L // 2 and L - 2 between flushes, and the flush at L - 1; or every one of them."""
    last = max(length - 1, 0)
    if every or last == 0:
        return list(range(last + 1))
    return sorted({0, min(length // 2, last - 1), last - 1, last})


def integrate_cycle(length: int, times: Mapping[int, float]) -> float:
    """Mean of a step's time over a flush cycle of ``length`` steps, linear between the measured offsets.

    Args:
        length: L; 0 for the step-by-step baseline, whose one step is at offset 0.
        times: by window offset; the flush at L - 1 counts once and is never interpolated.

    Raises:
        ValueError: the flush or an end of the steps between flushes was not measured.
    """
    flush = max(length - 1, 0)
    if flush not in times:
        raise ValueError(f"times: expected the flush (offset {flush}) among them, got {sorted(times)}; time it too")
    if not _spans_cycle(times, length):
        raise ValueError(f"times: expected the offsets 0 and {flush - 1} among them, got {sorted(times)}")
    total = times[flush]
    known = sorted(offset for offset in times if offset < flush)
    for offset in range(flush):
        below = max(k for k in known if k <= offset)
        above = min(k for k in known if k >= offset)
        share = (offset - below) / (above - below) if above > below else 0.0
        total += times[below] + share * (times[above] - times[below])
    return total / (flush + 1)


def choose_layers(read_bytes: float, cache_bytes: int) -> int:
    """Layers to rotate through, so that what a step reads (``read_bytes`` a layer) has left the L2 cache."""
    return max(1, min(MAX_LAYERS, math.ceil(ROTATION * cache_bytes / read_bytes)))


def prepare(
    recurrence: Recurrence,
    shape: HeadShape,
    options: ReplayOptions,
    batch: int,
    *,
    implementation: ModuleType,
    n_layers: int,
    launch: Launch | None = None,
    activation: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: torch.device | str = "cuda",
) -> Subject:
    """A pool with random states and buffers, and random inputs of one step.

    Args:
        recurrence, shape, options, batch: as ``time_configuration`` has them.
        implementation: its ``decode_step`` and ``replay_step`` take the step.
        n_layers: of the pool, each with the same states.
        launch: for Triton implementations; None for the table's.
        activation: type of q, k and v (C, B and x).
        seed: of everything drawn.
        device: where it lies.
    """
    pool = StatePool(
        shape, options, recurrence=recurrence, n_slots=batch, n_layers=n_layers, activation_dtype=activation,
        device=device,
    )  # fmt: skip
    random = torch.Generator(device=pool.device).manual_seed(seed)

    def normal(*dims: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(dims, generator=random, device=pool.device)

    slots = torch.arange(batch, dtype=torch.int32, device=pool.device)
    states = normal(batch, shape.value_heads, shape.d_v, shape.d_k, scale=0.1)
    for layer in range(n_layers):
        pool.write(layer, slots.long(), states)
    del states
    for name, buffer in pool.buffers().items():
        if name == "log_decay":
            buffer.uniform_(-0.1, 0.0, generator=random)
        elif name == "beta":
            buffer.uniform_(0.001, 0.1 if recurrence is Recurrence.MAMBA2 else 1.0, generator=random)
        else:
            buffer.normal_(0.0, 1.0 if name == "keys" else 0.1, generator=random)
    inputs = _draw_step(recurrence, shape, batch, normal, activation)
    step = implementation.decode_step if options.step_by_step else implementation.replay_step
    chosen = {} if launch is None else {"launch": launch}

    def take(layer: int) -> torch.Tensor:
        out: torch.Tensor = step(**inputs, pool=pool, layer=layer, slots=slots, **chosen)
        return out

    return Subject(pool=pool, slots=slots, take=take)


def _time_offsets(subject: Subject, offsets: Sequence[int], method: str, repeats: int) -> list[Timing]:
    """Time a pass at each offset; one graph serves all, since cursors are device tensors."""
    subject.preset(offsets[0])
    subject.run_pass()  # compiles; every layer, whose tensors may be aligned unlike the first's
    torch.cuda.synchronize()
    run: Callable[[], object] = subject.run_pass
    if method == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            subject.run_pass()
        run = graph.replay
    timings = []
    for offset in offsets:
        subject.preset(offset)
        timings.append(time_device(run, launches=subject.launches, repeats=repeats))
        if not bool(subject.take(0).isfinite().all()) or bool(subject.pool.error.any()):
            raise RuntimeError(f"offset {offset}: outputs or states are not finite, the times would mean nothing")
    return timings


def _draw_step(
    recurrence: Recurrence, shape: HeadShape, batch: int, normal: Callable[..., torch.Tensor], activation: torch.dtype
) -> dict[str, torch.Tensor]:
    """Inputs of one step by argument name; gates as small as a trained model's. Mamba-2 has D and no z."""
    keys, heads = (batch, shape.key_heads, shape.d_k), (batch, shape.value_heads)
    values = (*heads, shape.d_v)
    if not recurrence.delta_rule:
        inputs = {"x": normal(*values), "B": normal(*keys), "C": normal(*keys)}
        rates = {"A": -1 - normal(shape.value_heads).abs(), "D": normal(shape.value_heads)}
        inputs = {name: x.to(activation) for name, x in inputs.items()}
        return inputs | {"dt": normal(*heads).abs() * 0.05 + 0.001} | rates
    gates = (*heads, shape.d_k) if recurrence.channel_decay else heads
    inputs = {"q": normal(*keys), "k": normal(*keys), "v": normal(*values)}
    inputs = {name: x.to(activation) for name, x in inputs.items()}
    return inputs | {"g": normal(*gates).abs() * -0.05, "beta": normal(*heads).sigmoid()}


def _count_bytes(recurrence: Recurrence, shape: HeadShape, options: ReplayOptions, batch: int, offset: int) -> float:
    """Bytes of a launch by formula: states and buffers of all rows, BF16 activations, inputs and outputs excluded."""
    entry = entry_bytes(recurrence, shape, options, activation_bytes=2)
    return float(batch * step_bytes(shape, options, entry, offset=offset))


def _relate(us: float, n_bytes: float, bandwidth: float | None) -> dict[str, float | None]:
    """Bytes, the time a copy would take for them, and the fraction of the copy's bandwidth."""
    floor = None if bandwidth is None else n_bytes / bandwidth * _MICRO
    return {"bytes": n_bytes, "floor_us": floor, "copy_fraction": None if floor is None else floor / us}


def _spans_cycle(offsets: Iterable[int], length: int) -> bool:
    """Whether a cycle's mean follows without extrapolation."""
    flush = max(length - 1, 0)
    return {flush, 0, max(flush - 1, 0)} <= set(offsets)
