"""Cases of the GDN kernels against the FP64 twin: under Triton's interpreter (test_gdn_kernels.py) and on a GPU.

The twin takes every step on a copy of what the kernel finds, so an error is the error of one step. Bounds: with unit
roundoff e = 2^-24 and normalised keys an element of S k is off by at most (d_k + 8)·e·M (a sum of d_k products, the
key's norm, exp, and the products around them), M the greatest norm that a row of the state reaches. A step multiplies
by α(I - βkkᵀ), whose norm is at most 1, so errors only add up: after n steps a state element is off by n·(d_k + 8)·e·M,
and M <= |S_c| + n·max|v|. q is no longer than 1, times ``scale``. The bounds take twice that: u kᵀ has k's error too.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch

from driftgate.accuracy.step_data import StepData, draw_inputs
from driftgate.kernels.contract import Fold, HeadShape, Readout, ReplayOptions
from driftgate.kernels.gdn import decode, reference
from driftgate.kernels.pool import StatePool

ROUNDOFF = 2.0**-24
HALF_STEP = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24, "fp8": 2.0**-4}
"""Greatest relative rounding error of an element, normal ones."""


def make_options(**fields: Any) -> ReplayOptions:
    if "readout" in fields:
        fields["readout"] = Readout(fields["readout"])
    if "fold" in fields:
        fields["fold"] = Fold(fields["fold"])
    return ReplayOptions(**fields)


def make_shape(shape: list[int]) -> HeadShape:
    key_heads, value_heads, d_k, d_v = shape
    return HeadShape(key_heads=key_heads, value_heads=value_heads, d_k=d_k, d_v=d_v)


def load_kernels(path: str) -> ModuleType:
    """A changed copy of kernels/gdn/decode.py, under another name."""
    spec = importlib.util.spec_from_file_location(f"mutant_{abs(hash(path))}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Triton looks the module of a jitted function up
    spec.loader.exec_module(module)
    return module


def buffers(pool: StatePool) -> dict[str, torch.Tensor]:
    names = ("keys", "values", "log_decay", "beta", "corrections")
    return {name: getattr(pool, name) for name in names if getattr(pool, name) is not None}


def make_pool(data: StepData, options: ReplayOptions, *, poison: float = torch.nan) -> StatePool:
    device = data.slots.device
    pool = StatePool(data.shape, options, n_slots=data.n_slots, activation_dtype=data.activation, device=device)
    pool.write(0, torch.arange(data.n_slots, device=device), data.states)
    for buffer in buffers(pool).values():
        buffer.fill_(poison)
    return pool


def quantum(fmt: str, x: torch.Tensor) -> torch.Tensor:
    """Greatest distance of neighbouring numbers of a format around x [..., d_k]."""
    amax = x.abs().amax(-1, keepdim=True)
    if fmt == "nvfp4":
        return amax / 3 + 0 * x  # E2M1 from 4 to 6, of a block as large as the row
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

    ``kernels`` is the path of a changed copy of kernels/gdn/decode.py, None for the real one.
    """
    module = decode if kernels is None else load_kernels(kernels)
    plan = make_options(**options)
    dtype = getattr(torch, activation)
    data = draw_inputs(make_shape(shape), dtype, n_rows=n_rows, n_steps=n_steps, seed=seed, device=device)
    if not l2norm:
        unit = data.k.float() / data.k.float().norm(dim=-1, keepdim=True)
        data.k.copy_(0.99 * unit)
        data.q.copy_(0.99 * data.q.float() / data.q.float().norm(dim=-1, keepdim=True))
    pool = make_pool(data, plan)
    live = data.live_rows
    slots = data.slots[live].long()
    found = Comparison()
    for t in range(n_steps):
        if t == 1 and not plan.step_by_step:
            pool.force_flush(slots[-1:])
        twin = copy.deepcopy(pool)
        flushing, cursor = pool.flush[slots] != 0, pool.cursor[slots].clone()
        step = {"layer": 0, "slots": data.slots, "qk_l2norm": l2norm, "scale": scale}
        name = "decode_step" if plan.step_by_step else "replay_step"
        got = getattr(module, name)(*data.inputs(t), pool=pool, **step)
        expected = getattr(reference, name)(*data.inputs(t), pool=twin, compute_dtype=torch.float64, **step)
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
    greatest += n * float(data.v[: t + 1, live].abs().max())
    state_bound = 2 * n * (data.shape.d_k + 8) * ROUNDOFF * greatest
    scale = data.shape.d_k**-0.5 if scale is None else scale
    rounding = 2 * (2.0**-8 if got.dtype == torch.bfloat16 else ROUNDOFF)  # both outputs are rounded once, u = 2^-8
    bound = scale * state_bound * 2 + rounding * expected[live].double().abs()
    found.add("output", expected[live], got[live], bound)
    found.add("padding", torch.zeros_like(got[data.padded_rows]), got[data.padded_rows], 1e-300)
    after, wanted = pool.checkpoint.read(0, slots), twin.checkpoint.read(0, slots)
    found.add_state(plan.recurrence, wanted[flushing], after[flushing], state_bound)
    assert torch.equal(wanted[~flushing], after[~flushing]), "a step between flushes moved the checkpoint"
    for name, buffer in buffers(pool).items():
        place = pool.cursor[slots[~flushing]].long()
        new, old = (b[0, slots[~flushing], :, place] for b in (buffer, buffers(twin)[name]))
        if name == "corrections":
            part = 2.0**-8 if buffer.dtype == torch.bfloat16 else ROUNDOFF
            found.add("correction", old, new, state_bound * 2 + 2 * part * old.double().abs() + 1e-30)
        else:
            assert torch.equal(new, old), f"{name}: the buffer does not hold what was delivered"
    unused = data.unused_slots
    for a, b in zip(pool.checkpoint.tensors(), twin.checkpoint.tensors(), strict=True):
        assert torch.equal(a[0, unused], b[0, unused]), "a slot of no row was written"
    assert int(pool.error.abs().sum()) == 0


def compare_flush_now(*, shape: list[int], options: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """flush_now of rows at different cursors, one of them 0, against the FP64 twin."""
    plan = make_options(**options)
    data = draw_inputs(make_shape(shape), torch.bfloat16, n_rows=3, n_steps=3, seed=1, device=device)
    pool = make_pool(data, plan)
    slots = data.slots[data.live_rows].long()
    for t in range(3):
        if t == 1:
            pool.force_flush(slots[1:2])
        if t == 2:
            pool.force_flush(slots[:1])
        decode.replay_step(*data.inputs(t), pool=pool, layer=0, slots=data.slots)
        pool.advance(data.slots)
    assert pool.cursor[slots].tolist() == [0, 1, 3]
    twin, before = copy.deepcopy(pool), pool.checkpoint.codes.clone()
    decode.flush_now(pool, data.slots[data.live_rows])
    reference.flush_now(twin, data.slots[data.live_rows], compute_dtype=torch.float64)
    found = Comparison()
    greatest = float(data.states.norm(dim=-1).max()) + 3 * float(data.v[:, data.live_rows].abs().max())
    bound = 6 * (data.shape.d_k + 8) * ROUNDOFF * greatest
    wanted, got = twin.checkpoint.read(0, slots), pool.checkpoint.read(0, slots)
    found.add_state(plan.recurrence, wanted, got, bound)
    assert torch.equal(pool.checkpoint.codes[0, slots[0]], before[0, slots[0]]), "a slot at cursor 0 was requantised"
    assert not torch.equal(pool.checkpoint.codes[0, slots[2]], before[0, slots[2]])
    assert pool.cursor[slots].tolist() == [0, 0, 0]
    assert torch.equal(pool.flush, twin.flush)
    return found.result()


def run_edge(*, name: str, **arguments: Any) -> Any:
    """One of the functions ``edge_*`` below."""
    return globals()[f"edge_{name}"](**arguments)


def _steps(data: StepData, plan: ReplayOptions, pool: StatePool, slots: torch.Tensor, **options: Any) -> torch.Tensor:
    """Outputs [steps, B, HV, d_v]."""
    outs = []
    for t in range(data.n_steps):
        take = decode.decode_step if plan.step_by_step else decode.replay_step
        outs.append(take(*data.inputs(t), pool=pool, layer=0, slots=slots, **options))
        pool.advance(slots, **options)
    return torch.stack(outs)


def _data(n_rows: int = 2, n_steps: int = 4, shape: tuple[int, ...] = (1, 2, 16, 16), **options: Any) -> StepData:
    kind = getattr(torch, options.pop("activation", "float32"))
    return draw_inputs(make_shape(list(shape)), kind, n_rows=n_rows, n_steps=n_steps, seed=2, **options)


def edge_pad_slot_zero(*, length: int) -> None:
    """With pad_slot 0 slot 0 is no slot; with -1 it is one: the same rows, the same bits, slot 0 untouched."""
    data = _data()
    plan = make_options(length=length)
    pool, other = make_pool(data, plan), make_pool(data, plan)
    expected = _steps(data, plan, pool, torch.tensor([1, -1, 2], dtype=torch.int32))
    got = _steps(data, plan, other, torch.tensor([1, 0, 2], dtype=torch.int32), pad_slot=0)
    assert torch.equal(expected, got)
    assert torch.equal(other.checkpoint.codes[0, 0], data.states[0])
    assert int(other.tokens[0]) == 0
    real = make_pool(data, plan)
    inputs = [x.nan_to_num(0.5) for x in data.inputs(0)]
    inputs[3] = -inputs[3].abs()
    take = decode.decode_step if plan.step_by_step else decode.replay_step
    out = take(*inputs, pool=real, layer=0, slots=torch.tensor([1, 0, 2], dtype=torch.int32))
    assert bool(out[1].abs().sum() > 0), "slot 0 is a real slot where pad_slot is -1"


def edge_nothing_to_do(*, length: int) -> None:
    """Batch 0, and a batch of padded rows alone: zeros, nothing written."""
    data = _data()
    plan = make_options(length=length)
    pool = make_pool(data, plan)
    before = copy.deepcopy(pool)
    empty = [x[:0] for x in data.inputs(0)]
    take = decode.decode_step if plan.step_by_step else decode.replay_step
    out = take(*empty, pool=pool, layer=0, slots=torch.zeros(0, dtype=torch.int32))
    assert out.shape == (0, 2, 16)
    padded = torch.full((3,), -1, dtype=torch.int32)
    out = take(*data.inputs(0), pool=pool, layer=0, slots=padded)
    assert bool((out == 0).all())
    decode.flush_now(pool, torch.zeros(0, dtype=torch.int32))
    for a, b in zip(pool.checkpoint.tensors(), before.checkpoint.tensors(), strict=True):
        assert torch.equal(a, b)
    for name, buffer in buffers(pool).items():
        assert bool(buffer.isnan().all()), f"{name} was written"


def edge_slot_reuse(*, options: dict[str, Any]) -> None:
    """A slot after five steps of another request gives the bits of a fresh one (rows 7 and 8)."""
    plan = make_options(**options)
    data, slot = _data(n_rows=1, n_steps=5), torch.tensor([2], dtype=torch.int32)
    one = [row for row in data.live_rows]
    rows = [tuple(x[one] for x in data.inputs(t)) for t in range(5)]
    used, fresh = make_pool(data, plan), make_pool(data, plan, poison=torch.inf)
    outs = []
    for pool, n_before in ((used, 3), (fresh, 0)):
        for t in range(n_before):
            decode.replay_step(*rows[t], pool=pool, layer=0, slots=slot)
            pool.advance(slot)
        pool.reset(slot.long())
        outs.append([])
        for row in rows:
            outs[-1].append(decode.replay_step(*row, pool=pool, layer=0, slots=slot))
            pool.advance(slot)
    for a, b in zip(*outs, strict=True):
        assert torch.equal(a, b)
        assert bool(a.isfinite().all())
    for a, b in zip(used.checkpoint.tensors(), fresh.checkpoint.tensors(), strict=True):
        assert torch.equal(a[0, 2], b[0, 2])


def edge_minus_infinity(*, options: dict[str, Any]) -> None:
    """g = -inf forgets everything before it: no NaN, and the steps after it do not depend on the state (row 25)."""
    plan = make_options(**options)
    data = _data(n_steps=5)
    data.g[1, :] = -torch.inf
    outs = []
    for factor in (1.0, -3.0):
        pool = make_pool(data, plan)
        pool.write(0, torch.arange(data.n_slots), factor * data.states)
        outs.append(_steps(data, plan, pool, data.slots)[:, data.live_rows])
    assert bool(outs[0].isfinite().all())
    assert not torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1:].abs(), outs[1][1:].abs())


def edge_small_keys(*, amplitude: float, kernels: str | None = None) -> dict[str, Any]:
    """k of amplitude 0, 1e-4, 0.1: x / sqrt(sum x² + 1e-6), finite; all zero gives a state that decays (row 23)."""
    module = decode if kernels is None else load_kernels(kernels)
    data = _data(n_steps=2)
    data.k.mul_(amplitude)
    pool = make_pool(data, make_options(length=2))
    twin = copy.deepcopy(pool)
    found = Comparison()
    for t in range(2):
        got = module.replay_step(*data.inputs(t), pool=pool, layer=0, slots=data.slots)
        expected = reference.replay_step(
            *data.inputs(t), pool=twin, layer=0, slots=data.slots, compute_dtype=torch.float64
        )
        for p in (pool, twin):
            p.advance(data.slots)
        found.add("output", expected[data.live_rows], got[data.live_rows], 1e-5)
    slots = data.slots[data.live_rows].long()
    if amplitude == 0:
        decay = (data.g[0, data.live_rows].double() + data.g[1, data.live_rows].double()).exp()
        expected = data.states[slots].double() * decay[..., None, None]
        found.add("state", expected, pool.checkpoint.read(0, slots), 4 * ROUNDOFF * expected.abs() + 1e-30)
    return found.result()


def edge_beta_keeps_its_bits() -> None:
    """β = sigmoid(0.5) = 0.62245935 with BF16 activations: in the step, in the buffer and in the fold (rows 21, 33)."""
    data = _data(n_rows=1, n_steps=2, activation="bfloat16")
    value = torch.tensor(0.5).sigmoid().item()
    assert value != torch.tensor(value).bfloat16().float().item()
    data.beta.fill_(value)
    data.states.zero_()
    pool = make_pool(data, make_options(length=2))
    slot = int(data.slots[data.live_rows[0]])
    decode.replay_step(*data.inputs(0), pool=pool, layer=0, slots=data.slots)
    assert bool((pool.beta[0, slot] == value).all())
    assert torch.equal(pool.values[0, slot, :, 0], data.v[0, data.live_rows[0]])
    assert torch.equal(pool.corrections[0, slot, :, 0], torch.tensor(value) * data.v[0, data.live_rows[0]].float())


def edge_same_bits_whatever_the_strides() -> None:
    """q, k, v, g, β as column slices of one packed tensor, off by 8 bytes: the bits of contiguous ones (row 14)."""
    data, plan = _data(n_rows=2, n_steps=3), make_options(length=2)
    pool, other = make_pool(data, plan), make_pool(data, plan)
    expected = _steps(data, plan, pool, data.slots)
    for t in range(3):
        packed = torch.cat([x.flatten(1) for x in data.inputs(t)], dim=1)
        packed = torch.cat([torch.zeros(3, 2), packed], dim=1)
        shapes = [x.shape for x in data.inputs(t)]
        sizes = [2, *(shape[1:].numel() for shape in shapes)]
        parts = [
            p.view(s) if p.is_contiguous() else p.unflatten(1, s[1:])
            for p, s in zip(packed.split(sizes, 1)[1:], shapes, strict=True)
        ]
        assert not parts[0].is_contiguous()
        got = decode.replay_step(*parts, pool=other, layer=0, slots=data.slots)
        other.advance(data.slots)
        assert torch.equal(got, expected[t])
    assert torch.equal(pool.checkpoint.codes, other.checkpoint.codes)


def edge_rows_do_not_meet() -> None:
    """A row alone gives the bits that it gives in a batch, in another slot, at another place (I4)."""
    data, plan = _data(n_rows=3, n_steps=5, shape=(2, 4, 24, 16)), make_options(length=3, read="fp8")
    together = make_pool(data, plan)
    expected = _steps(data, plan, together, data.slots)
    for row in data.live_rows:
        alone = StatePool(data.shape, plan, n_slots=5000)
        slot = torch.tensor([4999])
        alone.write(0, slot, data.states[int(data.slots[row])][None])
        for t in range(5):
            got = decode.replay_step(*(x[row : row + 1] for x in data.inputs(t)), pool=alone, layer=0, slots=slot)
            alone.advance(slot)
            assert torch.equal(got[0], expected[t, row])
        for a, b in zip(alone.checkpoint.tensors(), together.checkpoint.tensors(), strict=True):
            assert torch.equal(a[0, 4999], b[0, int(data.slots[row])])


def edge_outputs_are_written_everywhere() -> None:
    """Outputs come from memory full of NaN (rows 9, 10): live rows finite, padded rows zero."""
    data = _data(shape=(1, 2, 24, 80))
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        assert bool(torch.empty(4).isnan().all())
        for options in ({"length": 0}, {"length": 2}, {"length": 2, "readout": "exact_readout"}):
            plan = make_options(**options)
            out = _steps(data, plan, make_pool(data, plan), data.slots)
            assert bool(out[:, data.live_rows].isfinite().all())
            assert bool((out[:, data.padded_rows] == 0).all())
    finally:
        torch.use_deterministic_algorithms(False)


def edge_nonfinite_sets_the_error_word(*, recurrence: str) -> None:
    """A value that is not finite sets the word of its slot alone (row 18)."""
    plan = make_options(length=1, recurrence=recurrence, read=recurrence)
    data = _data(n_steps=1)
    bad, good = data.live_rows
    data.v[0, bad, 1, 3] = torch.inf
    pool = make_pool(data, plan)
    _steps(data, plan, pool, data.slots)
    assert int(pool.error[int(data.slots[bad])]) == 1
    assert int(pool.error[int(data.slots[good])]) == 0
    pool.reset(data.slots[[bad]].long())
    assert int(pool.error.sum()) == 0


def edge_runs_are_repeatable(*, device: str = "cpu") -> None:
    """The same steps twice give the same bits (I5)."""
    data, plan = _data(n_steps=4, device=device), make_options(length=3, recurrence="fp8", read="nvfp4")
    outs = [_steps(data, plan, make_pool(data, plan), data.slots) for _ in range(2)]
    assert torch.equal(*outs)
