"""Cases of the kernels against their FP64 twins: under Triton's interpreter (test_kernels.py) and on a GPU.

The twin takes every step on a copy of what the kernel finds, so an error is the error of one step: n, the steps since
the checkpoint, is h + 1, and M is at most |S_c| + n·max|v||k|. The bounds are those of ``step_bounds.py``, which
derives them.
"""

from __future__ import annotations

import copy
import importlib
from types import ModuleType
from typing import Any

import torch
from mutants import load_mutant
from step_bounds import bound_dot, bound_output, bound_state

from driftgate.accuracy.running_bounds import ROUNDOFF
from driftgate.accuracy.step_data import StepData, draw_inputs
from driftgate.kernels.contract import Dot, Fold, HeadShape, Readout, Recurrence, ReplayOptions
from driftgate.kernels.pool import PAD_SLOT, StatePool

HALF_STEP = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24, "fp8": 2.0**-4}
"""Greatest relative rounding error of an element, normal ones."""


def make_options(**fields: Any) -> ReplayOptions:
    if "readout" in fields:
        fields["readout"] = Readout(fields["readout"])
    if "fold" in fields:
        fields["fold"] = Fold(fields["fold"])
    if "dot" in fields:
        fields["dot"] = Dot(fields["dot"])
    return ReplayOptions(**fields)


def make_shape(shape: list[int]) -> HeadShape:
    key_heads, value_heads, d_k, d_v = shape
    return HeadShape(key_heads=key_heads, value_heads=value_heads, d_k=d_k, d_v=d_v)


def find_kernels(recurrence: str, mutant: str | None = None) -> ModuleType:
    """The Triton functions of a recurrence, or those of a package that ``mutants.write_mutant`` made."""
    if mutant is None:
        return importlib.import_module(f"driftgate.kernels.{recurrence}.decode")
    return load_mutant(mutant, recurrence)


def find_twin(recurrence: str) -> ModuleType:
    return importlib.import_module(f"driftgate.kernels.{recurrence}.reference")


def make_pool(data: StepData, options: ReplayOptions, *, poison: float = torch.nan) -> StatePool:
    device = data.slots.device
    pool = StatePool(
        data.shape,
        options,
        recurrence=data.recurrence,
        n_slots=data.n_slots,
        activation_dtype=data.activation,
        seed=7,
        device=device,
    )
    slots = torch.arange(data.n_slots, device=device)
    pool.start(slots, tokens=0, sequences=slots)
    pool.write(0, slots, data.states)
    for buffer in pool.buffers().values():
        buffer.fill_(poison)
    return pool


def quantum(fmt: str, x: torch.Tensor) -> torch.Tensor:
    """Greatest distance of neighbouring numbers of a format around x [..., d_k]."""
    amax = x.abs().amax(-1, keepdim=True)
    if fmt == "nvfp4":
        return amax / 3 + 0 * x  # E2M1 from 4 to 6, of a block as large as the row
    if fmt == "int8":
        return 1.1 * amax / 127 + 0 * x
    subnormal = amax * 2.0**-17 if fmt == "fp8" else 2.0**-24
    return 2.1 * HALF_STEP[fmt] * x.abs() + subnormal


class Comparison:
    """Worst error as a multiple of its bound, by what was compared, and low-precision elements on another code."""

    def __init__(self) -> None:
        self.worst: dict[str, float] = {}
        self.other_codes, self.n_codes, self.n_compared = 0, 0, 0

    def add(self, what: str, expected: torch.Tensor, got: torch.Tensor, bound: torch.Tensor | float) -> None:
        self.n_compared += expected.numel()
        if not expected.numel():
            return
        ratio = (expected.double() - got.double()).abs() / bound
        ratio = torch.where(ratio.isnan(), torch.inf, ratio)  # NaN is never near enough
        self.worst[what] = max(self.worst.get(what, 0.0), float(ratio.max()))

    def add_state(self, fmt: str, expected: torch.Tensor, got: torch.Tensor, bound: float) -> None:
        near = (expected - got).abs() <= bound + 4 * ROUNDOFF * expected.abs()
        if fmt == "fp32":
            self.add("state", expected, got, bound + 4 * ROUNDOFF * expected.abs())
            return
        self.n_codes += near.numel()
        self.other_codes += int((~near).sum())
        self.add("state", expected, got, bound + quantum(fmt, expected))

    def result(self) -> dict[str, Any]:
        return {
            "worst": self.worst,
            "other_codes": self.other_codes / max(self.n_codes, 1),
            "n_compared": self.n_compared,
        }


def compare_with_twin(
    *,
    shape: list[int],
    options: dict[str, Any],
    recurrence: str = "gdn",
    activation: str = "bfloat16",
    n_steps: int = 6,
    n_rows: int = 2,
    l2norm: bool = True,
    scale: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    kernels: str | None = None,
) -> dict[str, Any]:
    """Take steps with the kernel, and each of them with the FP64 twin from the same stored bytes.

    ``kernels`` is the path of a mutant, None for the real ones.
    """
    module, reference = find_kernels(recurrence, kernels), find_twin(recurrence)
    plan = make_options(**options)
    dtype = getattr(torch, activation)
    data = draw_inputs(
        make_shape(shape), dtype, n_rows=n_rows, n_steps=n_steps, seed=seed, device=device,
        recurrence=Recurrence(recurrence),
    )  # fmt: skip
    extra: dict[str, Any] = {"qk_l2norm": l2norm, "scale": scale} if data.recurrence.delta_rule else {}
    if not l2norm:
        for name in ("q", "k"):
            x = data.streams[name].float()
            data.streams[name].copy_(0.99 * x / x.norm(dim=-1, keepdim=True))
    pool = make_pool(data, plan)
    live = data.live_rows
    slots = data.slots[live].long()
    found = Comparison()
    for t in range(n_steps):
        if t == 1 and not plan.step_by_step:
            pool.force_flush(slots[-1:])
        twin = copy.deepcopy(pool)
        flushing, cursor = pool.flush[slots] != 0, pool.cursor[slots].clone()
        step = {"layer": 0, "slots": data.slots, **extra}
        name = "decode_step" if plan.step_by_step else "replay_step"
        got = getattr(module, name)(**data.inputs(t), pool=pool, **step)
        expected = getattr(reference, name)(**data.inputs(t), pool=twin, compute_dtype=torch.float64, **step)
        n = 1 + (0 if plan.step_by_step else int(cursor.max()))
        compare_step(found, data, pool, twin, got, expected, flushing, n, t, scale)
        pool.advance(data.slots)
    return found.result()


def compare_step(
    found: Comparison,
    data: StepData,
    pool: StatePool,
    twin: StatePool,
    got: torch.Tensor,
    expected: torch.Tensor,
    flushing: torch.Tensor,
    n: int,
    t: int,
    scale: float | None,
) -> None:
    plan, live = pool.options, data.live_rows
    slots = data.slots[live].long()
    greatest = float(twin.read_states.read(0, slots).norm(dim=-1).max())
    greatest = max(greatest, float(twin.checkpoint.read(0, slots).norm(dim=-1).max()))
    keys, queries, gates = lengths(data, t, scale)
    added = float(data.values[: t + 1, live].abs().max())
    greatest += n * added * keys
    state_bound = bound_state(n, data.shape.d_k, greatest)
    bound = bound_output(
        expected[live],
        activation=got.dtype,
        read=queries * (2 * state_bound + dot_bound(plan, greatest, n)),
        skip=added * float(data.constants["D"].abs().max()) if data.constants else 0.0,
        gates=gates if "z" in data.streams else None,
        roundings=2,
    )
    found.add("output", expected[live], got[live], bound)
    found.add("padding", torch.zeros_like(got[data.padded_rows]), got[data.padded_rows], 1e-300)
    after, wanted = pool.checkpoint.read(0, slots), twin.checkpoint.read(0, slots)
    found.add_state(plan.recurrence, wanted[flushing], after[flushing], state_bound)
    assert torch.equal(wanted[~flushing], after[~flushing]), "a step between flushes moved the checkpoint"
    for name, buffer in pool.buffers().items():
        place = pool.cursor[slots[~flushing]].long()
        new, old = (b[0, slots[~flushing], :, place] for b in (buffer, twin.buffers()[name]))
        if name == "corrections":
            part = 2.0**-8 if buffer.dtype == torch.bfloat16 else ROUNDOFF
            limit = state_bound * 2 + dot_bound(plan, greatest, n)
            found.add("correction", old, new, limit + 2 * part * old.double().abs() + 1e-30)
        else:
            assert torch.equal(new, old), f"{name}: the buffer does not hold what was delivered"
    unused = data.unused_slots
    for a, b in zip(pool.checkpoint.tensors(), twin.checkpoint.tensors(), strict=True):
        assert torch.equal(a[0, unused], b[0, unused]), "a slot of no row was written"
    assert int(pool.error.abs().sum()) == 0


def lengths(data: StepData, t: int, scale: float | None) -> tuple[float, float, float]:
    """Greatest norms of a key and a query as steps up to t use them, and greatest |z|, over the live rows."""
    if data.recurrence.delta_rule:
        return 1.0, data.shape.d_k**-0.5 if scale is None else scale, 1.0
    part = {name: x[: t + 1, data.live_rows].float() for name, x in data.streams.items()}
    group = data.shape.group
    keys = part["B"].norm(dim=-1).repeat_interleave(group, dim=2) * part["dt"]
    return float(keys.max()), float(part["C"].norm(dim=-1).max()), float(part["z"].abs().max())


def dot_bound(plan: ReplayOptions, greatest: float, n: int) -> float:
    """Error of the rebuilt tile of ``state_output``: both operands of its product are rounded, to TF32 or BF16."""
    return bound_dot(plan.dot, greatest, n)


def compare_flush_now(
    *,
    shape: list[int],
    options: dict[str, Any],
    recurrence: str = "gdn",
    device: str = "cpu",
    kernels: str | None = None,
) -> dict[str, Any]:
    """flush_now of rows at different cursors, one of them 0, against the FP64 twin."""
    plan = make_options(**options)
    decode, reference = find_kernels(recurrence, kernels), find_twin(recurrence)
    data = draw_inputs(
        make_shape(shape), torch.bfloat16, n_rows=3, n_steps=3, seed=1, device=device, recurrence=Recurrence(recurrence)
    )
    pool = make_pool(data, plan)
    slots = data.slots[data.live_rows].long()
    for t in range(3):
        if t == 1:
            pool.force_flush(slots[1:2])
        if t == 2:
            pool.force_flush(slots[:1])
        decode.replay_step(**data.inputs(t), pool=pool, layer=0, slots=data.slots)
        pool.advance(data.slots)
    assert pool.cursor[slots].tolist() == [0, 1, 3]
    twin, before = copy.deepcopy(pool), pool.checkpoint.codes.clone()
    decode.flush_now(pool, data.slots[data.live_rows], **data.fold_constants())
    reference.flush_now(twin, data.slots[data.live_rows], compute_dtype=torch.float64, **data.fold_constants())
    found = Comparison()
    added = float(data.values[:, data.live_rows].abs().max()) * lengths(data, 2, None)[0]
    greatest = float(data.states.norm(dim=-1).max()) + 3 * added
    bound = bound_state(3, data.shape.d_k, greatest)
    wanted, got = twin.checkpoint.read(0, slots), pool.checkpoint.read(0, slots)
    found.add_state(plan.recurrence, wanted, got, bound)
    assert torch.equal(pool.checkpoint.codes[0, slots[0]], before[0, slots[0]]), "a slot at cursor 0 was requantised"
    assert not torch.equal(pool.checkpoint.codes[0, slots[2]], before[0, slots[2]])
    assert pool.cursor[slots].tolist() == [0, 0, 0]
    assert torch.equal(pool.flush, twin.flush)
    return found.result()


def run_edge(*, name: str, **arguments: Any) -> Any:
    """A function of slot_cases.py or value_cases.py, by its name."""
    for room in ("slot_cases", "value_cases"):
        function = getattr(importlib.import_module(room), name, None)
        if function is not None:
            return function(**arguments)
    raise ValueError(f"{name}: no such case")


def fails(*, name: str, **arguments: Any) -> str:
    """What a case says of kernels that it finds wrong; for mutants."""
    try:
        found = run_edge(name=name, **arguments)
    except AssertionError as error:
        return str(error) or "wrong"
    worst = max(found["worst"].values()) if found else 0.0
    assert worst > 1, f"{name}: the fault was not seen"
    return f"{worst:.2g} times the bound"


def draw_steps(
    recurrence: str,
    *,
    shape: tuple[int, int, int, int] = (1, 2, 16, 16),
    n_rows: int = 2,
    n_steps: int = 4,
    activation: str = "float32",
    device: str = "cpu",
) -> StepData:
    """A small batch; shape H, HV, d_k, d_v."""
    return draw_inputs(
        make_shape(list(shape)), getattr(torch, activation), n_rows=n_rows, n_steps=n_steps, seed=2, device=device,
        recurrence=Recurrence(recurrence),
    )  # fmt: skip


def choose_rows(data: StepData, t: int, rows: Any) -> dict[str, torch.Tensor]:
    """Keyword arguments of step t for some of the rows, in their order."""
    return {name: stream[t, rows] for name, stream in data.streams.items()} | dict(data.constants)


def take_steps(
    data: StepData,
    pool: StatePool,
    slots: torch.Tensor | None = None,
    *,
    pad_slot: int = PAD_SLOT,
    kernels: str | None = None,
) -> torch.Tensor:
    """All steps of a batch with the kernel; outputs [steps, B, HV, d_v]."""
    module = find_kernels(data.recurrence.value, kernels)
    take = module.decode_step if pool.options.step_by_step else module.replay_step
    slots = data.slots if slots is None else slots
    outs = []
    for t in range(data.n_steps):
        outs.append(take(**data.inputs(t), pool=pool, layer=0, slots=slots, pad_slot=pad_slot))
        pool.advance(slots, pad_slot=pad_slot)
    return torch.stack(outs)
