"""Cases of speculative windows: against the FP64 twin, I6, edges; and, run as a program, compiled without a GPU.

Functions are called under Triton's interpreter (test_verify.py) and on a GPU (tests/gpu). As a program, without
TRITON_INTERPRET: verify_cases.py CASES.json RESULTS.json, cases and results as compile_cases.py has them, with two more
launches, ``window_flush`` and ``window_read``.
Bounds are those of kernel_cases.py, for a state that took h + T steps.
"""

from __future__ import annotations

import copy
from typing import Any

import compile_cases
import torch
from kernel_cases import (
    ROUNDOFF,
    Comparison,
    find_kernels,
    find_twin,
    lengths,
    make_options,
    make_pool,
    make_shape,
)

from driftgate.accuracy.step_data import StepData, draw_inputs
from driftgate.accuracy.windows import check_windows
from driftgate.kernels import verify
from driftgate.kernels.contract import Recurrence
from driftgate.kernels.pool import StatePool
from driftgate.quant.codecs import encode_rows

LENGTHS = ((1, 3, 2, 4), (4, 4, 1, 2), (3, 4, 4, 4))
"""Tokens of each live row, call by call; of these the row keeps (call + row) mod (length + 1)."""


def run_windows(
    *, options: dict[str, Any], recurrence: str, kernels: str | None = None, **where: Any
) -> dict[str, Any]:
    """``check_windows`` on driftgate's kernels, its twins (``kernels="twin"``), or a mutant at a path."""
    shape, activation = where.pop("shape", [1, 1, 16, 16]), getattr(torch, where.pop("activation", "float32"))
    module = find_twin(recurrence) if kernels == "twin" else find_kernels(recurrence, kernels)
    tally, n_compared = check_windows(
        module, recurrence=Recurrence(recurrence), shape=make_shape(shape), activation=activation,
        options=make_options(**options), **where,
    )  # fmt: skip
    return {"different": tally.n_different, "compared": n_compared, "what": tally.n_compared, "first": tally.report()}


def draw(shape: list[int], activation: str, recurrence: str, *, n_steps: int, device: str = "cpu") -> StepData:
    """Steps of three live rows and a padded one."""
    return draw_inputs(
        make_shape(shape),
        getattr(torch, activation),
        n_rows=3,
        n_steps=n_steps,
        seed=3,
        recurrence=Recurrence(recurrence),
        device=device,
    )


def take(data: StepData, start: int, n_tokens: int) -> dict[str, torch.Tensor]:
    """Inputs of a window of steps of the data, [B, T, ...]."""
    parts = {name: x[start : start + n_tokens].transpose(0, 1) for name, x in data.streams.items()}
    return parts | dict(data.constants)


def spread(data: StepData, numbers: list[int]) -> torch.Tensor:
    """[B] int32 from the numbers of live rows; nonsense for padded rows."""
    counts = torch.full(data.slots.shape, 99, dtype=torch.int32)
    counts[data.live_rows] = torch.tensor(numbers, dtype=torch.int32)
    return counts.to(data.slots.device)


def poison_behind(inputs: dict[str, torch.Tensor], counts: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inputs with NaN at and behind each row's length."""
    poisoned = dict(inputs)
    for name, x in inputs.items():
        if x.ndim > 2:
            behind = torch.arange(x.shape[1], device=x.device) >= counts[:, None]
            poisoned[name] = x.masked_fill(behind.reshape(*behind.shape, *[1] * (x.ndim - 2)), torch.nan)
    return poisoned


def compare_with_twin(
    *,
    shape: list[int],
    options: dict[str, Any],
    recurrence: str,
    activation: str = "float32",
    n_calls: int = 4,
    kernels: str | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Each call from the bytes that the kernel finds, also with the FP64 twin."""
    module, twins = find_kernels(recurrence, kernels), find_twin(recurrence)
    data = draw(shape, activation, recurrence, n_steps=4 * n_calls, device=device)
    pool, found = make_pool(data, make_options(**options)), Comparison()
    for call in range(n_calls):
        fed = [LENGTHS[row][call % 4] for row in range(3)]
        counts = spread(data, fed)
        kept = spread(data, [(call + row) % (n + 1) for row, n in enumerate(fed)])
        inputs = poison_behind(take(data, 4 * call, 4), counts)
        where: dict[str, Any] = {"layer": 0, "slots": data.slots, "lengths": counts}
        before, twin = copy.deepcopy(pool), copy.deepcopy(pool)
        got = module.verify_window(**inputs, pool=pool, **where)
        expected = twins.verify_window(**inputs, pool=twin, compute_dtype=torch.float64, **where)
        compare_call(found, data, before, pool, twin, got, expected, fed)
        pool.commit(data.slots, counts, kept)
    return found.result()


def compare_call(
    found: Comparison,
    data: StepData,
    before: StatePool,
    pool: StatePool,
    twin: StatePool,
    got: torch.Tensor,
    expected: torch.Tensor,
    fed: list[int],
) -> None:
    plan, slots = pool.options, data.slots[data.live_rows].long()
    cursor = before.cursor[slots].tolist()
    flushing = torch.tensor([h + n + plan.window > plan.length for h, n in zip(cursor, fed, strict=True)])
    n = max(cursor) + max(fed)
    keys, queries, gates = lengths(data, data.n_steps - 1, None)
    added = float(data.values[:, data.live_rows].abs().max())
    greatest = max(float(s.read(0, slots).norm(dim=-1).max()) for s in (before.checkpoint, before.read_states))
    greatest += n * added * keys
    state_bound = 2 * n * (data.shape.d_k + 8) * ROUNDOFF * greatest
    rest = 2 * ROUNDOFF * added * float(data.constants["D"].abs().max()) if data.constants else 0.0
    part = 2 * (2.0**-8 if got.dtype == torch.bfloat16 else ROUNDOFF) + 2 * ROUNDOFF * (gates + 8)
    bound = max(gates, 1.0) * (queries * state_bound * 2 + rest) + part * expected.double().abs()
    for row, length in zip(data.live_rows, fed, strict=True):
        found.add("output", expected[row, :length], got[row, :length], bound[row, :length])
        found.add("zeros", torch.zeros_like(got[row, length:]), got[row, length:], 1e-300)
    found.add("zeros", torch.zeros_like(got[data.padded_rows]), got[data.padded_rows], 1e-300)
    found.add_state(
        plan.recurrence, twin.checkpoint.read(0, slots[flushing]), pool.checkpoint.read(0, slots[flushing]), state_bound
    )
    still = torch.tensor([slot for slot in range(data.n_slots) if slot not in slots[flushing].tolist()])
    for a, b in zip(pool.checkpoint.tensors(), before.checkpoint.tensors(), strict=True):
        assert torch.equal(a[0, still], b[0, still]), "a row that did not flush was stored, or a slot of no row"
    if pool.copy is not None:
        made = encode_rows(pool.copy.format, pool.checkpoint.read(0, slots), nonfinite="saturate")
        for a, b in zip((t for t in made if t is not None), pool.copy.tensors(), strict=True):
            assert torch.equal(a, b[0, slots]), "the copy is not made from the checkpoint"
    for name, buffer in pool.buffers().items():
        old = twin.buffers()[name]
        if name == "corrections":
            unit = 2.0**-8 if buffer.dtype == torch.bfloat16 else ROUNDOFF
            assert torch.equal(buffer.isnan(), old.isnan()), "corrections: other places were written"
            wanted = old.double().nan_to_num()
            found.add(name, wanted, buffer.nan_to_num(), 2 * state_bound + 2 * unit * wanted.abs() + 1e-30)
        else:
            assert torch.equal(buffer.nan_to_num(9.0), old.nan_to_num(9.0)), f"{name}: not what was delivered"
    assert int(pool.error.abs().sum()) == 0


def run_edge(*, name: str, **arguments: Any) -> None:
    """One of the functions ``edge_*`` below."""
    globals()[f"edge_{name}"](**arguments)


def edge_later_tokens_do_not_matter(
    *, recurrence: str, options: dict[str, Any], kernels: str | None = None, device: str = "cpu"
) -> None:
    """Tokens 0 and 1 of a window have the same bits with T = 2, with NaN behind in a padded tile, and before a draft
    that is NaN itself (row 32); on rows that find entries and rows that do not."""
    module = find_kernels(recurrence, kernels)
    data = draw([1, 2, 16, 24], "float32", recurrence, n_steps=8, device=device)
    pool = make_pool(data, make_options(**options))
    three = spread(data, [3, 3, 3])
    module.verify_window(**take(data, 0, 3), pool=pool, layer=0, slots=data.slots, lengths=three)
    pool.commit(data.slots, three, spread(data, [0, 2, 3]))
    two, wide = spread(data, [2, 2, 2]), take(data, 3, 4)
    outs = []
    for inputs, counts in (
        ({name: x[:, :2] if x.ndim > 2 else x for name, x in wide.items()}, two),
        (poison_behind(wide, two), two),
        (poison_behind(wide, two), spread(data, [4, 4, 4])),
    ):
        trial = copy.deepcopy(pool)
        out = module.verify_window(**inputs, pool=trial, layer=0, slots=data.slots, lengths=counts)
        outs.append(out[data.live_rows][:, :2])
        kept = spread(data, [2, 1, 2])
        trial.commit(data.slots, counts, kept)
        outs[-1] = torch.cat(
            (
                outs[-1],
                module.replay_step(**data.inputs(7), pool=trial, layer=0, slots=data.slots)[data.live_rows][:, None],
            ),
            dim=1,
        )
    assert bool(outs[0].isfinite().all())
    assert bool((outs[0] != 0).any())
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def edge_accepted(*, recurrence: str, kept: int, length: int) -> None:
    """A window of four of which 0 … 4 inputs are kept, and the steps after it, have the bits of single steps (row 30),
    whether it flushed (L = 8) or not (L = 16)."""
    module = find_kernels(recurrence)
    data = draw([1, 1, 16, 16], "float32", recurrence, n_steps=9)
    plan = make_options(length=length, window=4, readout="exact_readout")
    pool, single = make_pool(data, plan), make_pool(data, plan)
    everything = {"layer": 0, "slots": data.slots}
    for t in range(2):
        for p in (pool, single):
            module.replay_step(**data.inputs(t), pool=p, **everything)
            p.advance(data.slots)
    four = spread(data, [4, 4, 4])
    got = module.verify_window(**take(data, 2, 4), pool=pool, lengths=four, **everything)
    pool.commit(data.slots, four, spread(data, [kept] * 3))
    for i in range(kept):
        out = module.replay_step(**data.inputs(2 + i), pool=single, **everything)
        single.advance(data.slots)
        assert torch.equal(out[data.live_rows], got[data.live_rows, i])
    slots = data.slots[data.live_rows].long()
    folded = 2 if length == 8 else 0
    assert pool.cursor[slots].tolist() == [2 + kept - folded] * 3
    assert pool.base[slots].tolist() == [folded] * 3
    assert pool.tokens[slots].tolist() == [2 + kept] * 3
    for t in range(2 + kept, 9):
        outs = []
        for p in (pool, single):
            outs.append(module.replay_step(**data.inputs(t), pool=p, **everything)[data.live_rows])
            p.advance(data.slots)
        assert torch.equal(*outs), f"step {t}"


def edge_padding(*, recurrence: str) -> None:
    """pad_slot 0, a batch of padded rows, batch 0: zeros, nothing written."""
    module = find_kernels(recurrence)
    data, plan = draw([1, 2, 16, 24], "float32", recurrence, n_steps=8), make_options(length=8, window=4)
    slots = torch.tensor([1, 0, 2, 3], dtype=torch.int32)
    pool, other = make_pool(data, plan), make_pool(data, plan)
    counts = spread(data, [4, 2, 1])
    for start in (0, 4):
        inputs = take(data, start, 4)
        got = module.verify_window(**inputs, pool=pool, layer=0, slots=slots, lengths=counts, pad_slot=0)
        pool.commit(slots, counts, counts, pad_slot=0)
        moved = torch.where(slots == 0, -1, slots)
        expected = module.verify_window(**inputs, pool=other, layer=0, slots=moved, lengths=counts)
        other.commit(moved, counts, counts)
        assert torch.equal(got, expected)
        assert bool((got[1] == 0).all())
    assert torch.equal(pool.checkpoint.codes[0, 0], data.states[0])
    assert pool.tokens[:5].tolist() == [0, 8, 4, 2, 0]
    before = copy.deepcopy(pool)
    nobody = torch.full((4,), -1, dtype=torch.int32)
    out = module.verify_window(**take(data, 0, 4), pool=pool, layer=0, slots=nobody, lengths=counts)
    pool.commit(nobody, counts, counts)
    assert bool((out == 0).all())
    nothing = {name: x[:0] if x.ndim > 2 else x for name, x in take(data, 0, 4).items()}
    out = module.verify_window(**nothing, pool=pool, layer=0, slots=slots[:0], lengths=counts[:0])
    assert out.shape == (0, 4, 2, 24)
    assert torch.equal(pool.checkpoint.codes, before.checkpoint.codes)
    for name, buffer in pool.buffers().items():
        assert torch.equal(buffer.nan_to_num(9.0), before.buffers()[name].nan_to_num(9.0)), f"{name} was written"


def edge_rows_do_not_meet(*, recurrence: str, options: dict[str, Any]) -> None:
    """A row alone, in another slot, gives the bits that it gives in a batch (I4)."""
    module, plan = find_kernels(recurrence), make_options(**options)
    data = draw([1, 2, 16, 16], "float32", recurrence, n_steps=12)
    together, outs = make_pool(data, plan), []
    fed, kept = [[4, 1, 3], [2, 4, 4], [3, 2, 4]], [[3, 1, 0], [2, 4, 2], [3, 0, 4]]
    for call in range(3):
        counts = spread(data, fed[call])
        outs.append(
            module.verify_window(**take(data, 4 * call, 4), pool=together, layer=0, slots=data.slots, lengths=counts)
        )
        together.commit(data.slots, counts, spread(data, kept[call]))
    for i, row in enumerate(data.live_rows):
        alone = StatePool(data.shape, plan, recurrence=data.recurrence, n_slots=30, seed=7)
        slot, home = torch.tensor([29]), data.slots[row].long()
        alone.start(slot, tokens=0, sequences=home)
        alone.write(0, slot, data.states[int(home)][None])
        for call in range(3):
            one = {name: x[row : row + 1] if x.ndim > 2 else x for name, x in take(data, 4 * call, 4).items()}
            counts = torch.tensor([fed[call][i]], dtype=torch.int32)
            got = module.verify_window(**one, pool=alone, layer=0, slots=slot, lengths=counts)
            alone.commit(slot, counts, torch.tensor([kept[call][i]], dtype=torch.int32))
            assert torch.equal(got[0], outs[call][row])
        for a, b in zip(alone.checkpoint.tensors(), together.checkpoint.tensors(), strict=True):
            assert torch.equal(a[0, 29], b[0, int(home)])


def capture(case: dict[str, Any]) -> compile_cases.Launched:
    """Kernel and arguments that ``verify_window`` launches for a case: ``window_flush``, or ``window_read``."""
    data = draw(case["shape"], case["activation"], case["kernels"], n_steps=2)
    options = make_options(**case["options"])
    pool = StatePool(
        data.shape, options, recurrence=data.recurrence, n_slots=data.n_slots, activation_dtype=data.activation
    )
    recorder, kernel = compile_cases.Recorder(verify.window_kernel), verify.window_kernel
    verify.window_kernel = recorder
    try:
        find_kernels(case["kernels"]).verify_window(
            **take(data, 0, 2), pool=pool, layer=0, slots=data.slots, lengths=spread(data, [2, 1, 2])
        )
    finally:
        verify.window_kernel = kernel
    (launch,) = [call for call in recorder.calls if call[2]["FLUSH"] == (case["launch"] == "window_flush")]
    return launch


def main() -> None:
    torch.set_num_threads(1)
    capture_steps = compile_cases.capture
    compile_cases.capture = lambda case: (capture if case["launch"].startswith("window") else capture_steps)(case)
    compile_cases.main()


if __name__ == "__main__":
    main()
