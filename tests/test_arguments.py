"""Arguments of steps and flushes that do not fit: one line by kernel and twin of every recurrence, nothing written."""

from __future__ import annotations

import copy
import importlib
from itertools import permutations
from types import ModuleType
from typing import Any

import pytest
import torch

from driftgate.accuracy.step_data import StepData, draw_inputs
from driftgate.kernels.arguments import split_mixed_qkv
from driftgate.kernels.contract import HeadShape, Recurrence, ReplayOptions
from driftgate.kernels.gdn import reference as gdn_reference
from driftgate.kernels.pool import StatePool

SHAPE = HeadShape(key_heads=2, value_heads=4, d_k=24, d_v=16)
MODULES = [
    pytest.param(recurrence, kind, id=f"{recurrence.value}-{kind}")
    for recurrence in Recurrence
    for kind in ("decode", "reference")
]
every_module = pytest.mark.parametrize(("recurrence", "kind"), MODULES)


def find_module(recurrence: Recurrence, kind: str) -> ModuleType:
    """Kernels or twin; the kernels refuse before anything is launched."""
    return importlib.import_module(f"driftgate.kernels.{recurrence.value}.{kind}")


def make_data(recurrence: Recurrence) -> StepData:
    return draw_inputs(SHAPE, torch.float32, n_rows=2, n_steps=2, seed=0, recurrence=recurrence)


def make_pool(data: StepData, *, n_layers: int = 1, **options: Any) -> StatePool:
    pool = StatePool(SHAPE, ReplayOptions(**options), recurrence=data.recurrence, n_slots=4, n_layers=n_layers)
    for layer in range(n_layers):
        pool.write(layer, torch.arange(4), data.states)
    return pool


def everything(pool: StatePool) -> list[torch.Tensor]:
    return [*pool.checkpoint.tensors(), *pool.buffers().values(), pool.cursor, pool.flush, pool.tokens, pool.error]


INPUTS = {
    "query heads": ("q", "C", lambda x: x[:, :1], "{name}: expected shape"),
    "key length": ("k", "B", lambda x: x[:, :, :-1], "{name}: expected shape"),
    "key type": ("k", "B", lambda x: x.double(), "{name}: expected torch.float32"),
    "value rows": ("v", "x", lambda x: x[:-1], "{name}: expected shape"),
    "gate type": ("beta", "dt", lambda x: x.bfloat16(), "{name}: expected torch.float32"),
    "gate heads": ("beta", "dt", lambda x: x[:, :1], "{name}: expected shape"),
    "decay type": ("g", "A", lambda x: x.bfloat16(), "{name}: expected torch.float32"),
    "decay shape": ("g", "A", lambda x: x[..., None], "{name}: expected shape"),
    "skip shape": (None, "D", lambda x: x[:-1], "{name}: expected shape"),
    "output gate type": (None, "z", lambda x: x.double(), "{name}: expected torch.float32"),
}


OF_DELTA = [wrong for wrong, (name, *_) in INPUTS.items() if name is not None]


@pytest.mark.parametrize("length", [0, 2])
@pytest.mark.parametrize("kind", ["decode", "reference"])
@pytest.mark.parametrize(
    ("recurrence", "wrong"),
    [pytest.param(r, w, id=f"{r.value}-{w}") for r in Recurrence for w in (OF_DELTA if r.delta_rule else INPUTS)],
)
def test_inputs_that_do_not_fit_are_refused(recurrence: Recurrence, kind: str, wrong: str, length: int) -> None:
    of_delta, of_mamba2, change, message = INPUTS[wrong]
    name = of_delta if recurrence.delta_rule else of_mamba2
    data = make_data(recurrence)
    pool = make_pool(data, length=length)
    before = copy.deepcopy(everything(pool))
    inputs = data.inputs(0)
    inputs[name] = change(inputs[name])
    module = find_module(recurrence, kind)
    take = module.replay_step if length else module.decode_step
    with pytest.raises(ValueError, match=message.format(name=name)):
        take(**inputs, pool=pool, layer=0, slots=data.slots)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(pool), strict=True))


def test_gates_of_the_other_delta_rule_are_refused() -> None:
    """g per head where it is wanted per channel, and the reverse."""
    for recurrence, other in ((Recurrence.GDN, Recurrence.KDA), (Recurrence.KDA, Recurrence.GDN)):
        data = make_data(recurrence)
        inputs = data.inputs(0) | {"g": make_data(other).streams["g"][0]}
        with pytest.raises(ValueError, match="g: expected shape"):
            find_module(recurrence, "reference").replay_step(
                **inputs, pool=make_pool(data, length=2), layer=0, slots=data.slots
            )


SLOTS = {
    "too large": (torch.tensor([0, 4, -1]), {}, "slots: expected 0 to 3 or pad_slot -1"),
    "negative": (torch.tensor([0, -2, -1]), {}, "slots: expected 0 to 3"),
    "twice": (torch.tensor([2, 2, -1]), {}, "slots: expected each slot once"),
    "float": (torch.tensor([0.0, 1.0, 2.0]), {}, "slots: expected .* int32 or int64"),
    "every second": (torch.tensor([0, 9, 1, 9, 2, 9])[::2], {}, "slots: expected contiguous, got stride 2"),
    "a real slot for padding": (torch.tensor([0, 1, 3]), {"pad_slot": 3}, "pad_slot: expected"),
    "layer": (torch.tensor([0, 1, 2]), {"layer": 1}, "layer: expected 0 to 0"),
}


@pytest.mark.parametrize("wrong", SLOTS)
@every_module
def test_slots_that_do_not_fit_are_refused(recurrence: Recurrence, kind: str, wrong: str) -> None:
    slots, options, message = SLOTS[wrong]
    data = make_data(recurrence)
    pool = make_pool(data, length=2)
    before = copy.deepcopy(everything(pool))
    with pytest.raises(ValueError, match=message):
        find_module(recurrence, kind).replay_step(**data.inputs(0), pool=pool, slots=slots, **({"layer": 0} | options))
    assert all(torch.equal(a, b) for a, b in zip(before, everything(pool), strict=True))


@every_module
def test_a_step_of_the_other_kind_is_refused(recurrence: Recurrence, kind: str) -> None:
    module, data = find_module(recurrence, kind), make_data(recurrence)
    with pytest.raises(ValueError, match=r"pool: expected a replay plan .* call decode_step"):
        module.replay_step(**data.inputs(0), pool=make_pool(data), layer=0, slots=data.slots)
    pool = make_pool(data, length=2, read="fp8")
    with pytest.raises(ValueError, match=r"pool: expected the step-by-step baseline .* call replay_step"):
        module.decode_step(**data.inputs(0), pool=pool, layer=0, slots=data.slots)


@pytest.mark.parametrize("kind", ["decode", "reference"])
@pytest.mark.parametrize(
    ("recurrence", "other"),
    [pytest.param(a, b, id=f"{a.value}-on-{b.value}") for a, b in permutations(Recurrence, 2)],
)
def test_a_pool_of_another_recurrence_is_refused(recurrence: Recurrence, kind: str, other: Recurrence) -> None:
    module, data = find_module(recurrence, kind), make_data(recurrence)
    message = f"pool: expected recurrence {recurrence.value}, got {other.value}"
    with pytest.raises(ValueError, match=message):
        module.decode_step(**data.inputs(0), pool=make_pool(make_data(other)), layer=0, slots=data.slots)
    pool = make_pool(make_data(other), length=4)
    with pytest.raises(ValueError, match=message):
        module.replay_step(**data.inputs(0), pool=pool, layer=0, slots=data.slots)
    with pytest.raises(ValueError, match=message):
        module.flush_now(pool, data.slots[data.live_rows], **data.fold_constants())


@pytest.mark.parametrize("slots", [[-1], [1, -1], [4], [2, 2]], ids=str)
@every_module
def test_a_flush_of_what_is_no_slot_is_refused(recurrence: Recurrence, kind: str, slots: list[int]) -> None:
    """Padding has no place in ``flush_now``: -1 would be the last slot in torch."""
    data = make_data(recurrence)
    pool = make_pool(data, length=4)
    pool.advance(torch.tensor([3, -1]))  # the dump place of padded rows counts too
    before = copy.deepcopy(everything(pool))
    with pytest.raises(ValueError, match="slots: expected"):
        find_module(recurrence, kind).flush_now(pool, torch.tensor(slots), **data.fold_constants())
    assert all(torch.equal(a, b) for a, b in zip(before, everything(pool), strict=True))


@pytest.mark.parametrize("kind", ["decode", "reference"])
def test_rates_of_a_flush_that_do_not_fit_are_refused(kind: str) -> None:
    data = make_data(Recurrence.MAMBA2)
    A = data.constants["A"]
    flush_now = find_module(data.recurrence, kind).flush_now
    pool = make_pool(data, length=4, n_layers=2)
    pool.advance(torch.tensor([0]))
    for wrong in (A, A[None], torch.stack((A, A), dim=1)):
        with pytest.raises(ValueError, match=r"A: expected shape \(2, 4\)"):
            flush_now(pool, torch.tensor([0]), A=wrong)
    with pytest.raises(ValueError, match=r"A: expected torch.float32"):
        flush_now(pool, torch.tensor([0]), A=torch.stack((A, A)).double())
    with pytest.raises(ValueError, match="A: expected contiguous"):
        flush_now(pool, torch.tensor([0]), A=torch.stack((A, A), dim=1).T)


def test_packed_inputs_are_split_and_give_the_bits_of_separate_ones() -> None:
    shape, data = SHAPE, make_data(Recurrence.GDN)
    inputs = data.inputs(0)
    mixed = torch.cat([inputs[name].flatten(1) for name in ("q", "k", "v")], dim=1)
    q, k, v = split_mixed_qkv(mixed, shape)
    assert all(torch.equal(a.nan_to_num(7), inputs[n].nan_to_num(7)) for n, a in (("q", q), ("k", k), ("v", v)))
    outs = []
    for step in (inputs, inputs | {"q": q, "k": k, "v": v}):
        pool = StatePool(shape, ReplayOptions(length=2), n_slots=data.n_slots)
        outs.append(gdn_reference.replay_step(**step, pool=pool, layer=0, slots=data.slots))
    assert torch.equal(*outs)
    with pytest.raises(ValueError, match=r"mixed_qkv: expected a last axis of 160, got 159"):
        split_mixed_qkv(mixed[:, 1:], shape)
