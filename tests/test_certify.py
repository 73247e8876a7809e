"""The certificate: it passes driftgate's kernels and twins, says where bits differ, never passes having seen nothing.

Faulty kernels are in test_certify_mutants.py, the part with a tolerance in test_tolerance.py.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from driftgate.accuracy import certify, repeats
from driftgate.accuracy.adapters.decode_functions import StepInputs
from driftgate.accuracy.bits import BitTally, ulp_distance
from driftgate.accuracy.cases import INVARIANTS, Check
from driftgate.accuracy.certify import DEFAULT_SHAPES, count_cases, list_groups, run_group
from driftgate.accuracy.observers import RecordedInputs
from driftgate.accuracy.step_data import draw_inputs
from driftgate.errors import EmptyRunError, UsageError
from driftgate.kernels.contract import Backend, HeadShape, Recurrence
from driftgate.kernels.gdn import reference
from driftgate.kernels.launch import choose_launch

HERE = Path(__file__).parent
CASES = HERE / "certify_cases.py"
SMALL = HeadShape(key_heads=1, value_heads=2, d_k=16, d_v=16)
GDN = (Recurrence.GDN,)
FUNCTIONS = ("decode_step", "replay_step", "flush_now")

# Recurrence; shape H, HV, d_k, d_v; lengths; formats; invariants. The long test takes everything.
REDUCED: list[tuple[str, list[int], list[int], list[str], list[str]]] = [
    ("gdn", [1, 2, 16, 16], [1, 3], ["fp32"], ["I1", "I2", "I7"]),
    ("gdn", [1, 1, 24, 16], [2], ["fp8", "nvfp4"], ["I3", "I5"]),
    ("kda", [1, 1, 64, 40], [2], ["fp32"], ["I2"]),
    ("kda", [1, 1, 16, 16], [2], ["fp16"], ["I4"]),
    ("mamba2", [1, 1, 16, 16], [3], ["fp32", "fp8"], ["I2", "I3"]),
    ("mamba2", [1, 1, 24, 16], [1], ["bf16"], ["I1", "I4"]),
]
EVERY: list[tuple[str, list[int]]] = [
    ("gdn", [2, 4, 40, 24]), ("gdn", [1, 1, 128, 24]), ("kda", [1, 2, 40, 24]), ("mamba2", [2, 2, 64, 40]),
]  # fmt: skip


def check_equal(records: list[dict[str, Any]], recurrence: str, invariants: list[str]) -> None:
    assert [r for r in records if not r["equal"]] == []
    assert {r["invariant"] for r in records} == set(invariants)
    assert {r["recurrence"] for r in records} == {recurrence}
    assert all(sum(r["case"]["n_compared"].values()) > 0 for r in records)


@pytest.mark.parametrize("case", REDUCED, ids=lambda c: f"{c[0]}-{'x'.join(map(str, c[1]))}-{'-'.join(c[3])}")
def test_certifies_the_kernels(interpreted, case: tuple[str, list[int], list[int], list[str], list[str]]) -> None:
    recurrence, shape, lengths, formats, invariants = case
    records = interpreted(
        CASES, "run", recurrence=recurrence, shape=shape, lengths=lengths, formats=formats, invariants=invariants
    )
    check_equal(records, recurrence, invariants)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("case", EVERY, ids=lambda c: f"{c[0]}-{'x'.join(map(str, c[1]))}")
def test_certifies_the_kernels_on_odd_heads(interpreted, case: tuple[str, list[int]]) -> None:
    recurrence, shape = case
    formats = ["fp32", "fp16", "nvfp4"] if recurrence == "gdn" else ["fp32", "fp8"]
    records = interpreted(CASES, "run", recurrence=recurrence, shape=shape, lengths=[1, 3, 5], formats=formats)
    check_equal(records, recurrence, list(INVARIANTS))


@pytest.mark.parametrize("recurrence", Recurrence)
def test_certifies_the_torch_twin(recurrence: Recurrence) -> None:
    seen: list[int] = []
    choices = {"backend": Backend.TORCH, "recurrences": [recurrence], "shapes": DEFAULT_SHAPES[::2]}
    choices |= {"lengths": (1, 4), "formats": ("fp32", "nvfp4")}
    records = certify(**choices, progress=seen.append)
    assert [r for r in records if not r.equal] == []
    assert sum(seen) == len(records) == count_cases(**choices)
    assert {r.invariant for r in records} == set(INVARIANTS)
    assert {r.case["d_v"] for r in records} == {16, 40}


def test_every_format_of_the_torch_twin() -> None:
    formats = ("bf16", "fp8_e5m2", "int8", "int16", "mxfp4", "mxfp8")
    records = certify(backend=Backend.TORCH, recurrences=GDN, shapes=[SMALL], lengths=(1, 2), formats=formats)
    assert [r for r in records if not r.equal] == []
    assert {r.case["recurrence_format"] for r in records} == set(formats)


def test_processes_can_share_the_groups() -> None:
    """A group holds one of everything that is compiled, survives pickling, and gives the records of the whole."""
    choices = {"backend": Backend.TORCH, "shapes": [SMALL], "lengths": (1,), "formats": ("fp32",)}
    groups = pickle.loads(pickle.dumps(list_groups(**choices)))
    assert len({str(group) for group in groups}) == len(groups)
    records = []
    for group in groups:
        found = run_group(group, backend=Backend.TORCH)
        assert len(found) == group.n_records
        assert {r.recurrence for r in found} == {group.recurrence.value}
        assert {r.case["recurrence_format"] for r in found} == {group.format}
        assert {r.case["activation"] for r in found} == {str(group.activation).removeprefix("torch.")}
        records += found
    assert records == certify(**choices)


def test_graphs_are_replayed_on_compiled_kernels_alone() -> None:
    def checks(backend: Backend) -> set[Check]:
        groups = list_groups(backend=backend, shapes=[SMALL], lengths=[1, 8])
        return {case.check for group in groups for case in group.cases}

    assert checks(Backend.TRITON) == set(Check)
    assert checks(Backend.TORCH) == checks(Backend.TRITON_INTERPRET) == set(Check) - {Check.GRAPH}


@pytest.mark.parametrize("stale", ["", "slots", "inputs"])
def test_a_graph_that_replays_old_arguments_is_found(monkeypatch: pytest.MonkeyPatch, stale: str) -> None:
    """The check itself, with a stand-in for the capture: a call that is made again on the same tensors."""

    def capture(step: Any) -> tuple[torch.Tensor, Any]:
        run, inputs, slots = step.args
        out = step()

        def replay() -> None:
            rows = slots.clone() if stale != "slots" else torch.full_like(slots, -1)
            given = {name: x * (0 if stale == "inputs" else 1) for name, x in inputs.items()}
            out.copy_(step.func(run, given, rows))

        return out, replay

    monkeypatch.setattr(repeats, "_capture", capture)
    case = next(
        case
        for group in list_groups(backend=Backend.TRITON, recurrences=GDN, shapes=[SMALL], lengths=[3], formats=["fp8"])
        for case in group.cases
        if case.check is Check.GRAPH
    )
    data = draw_inputs(SMALL, torch.bfloat16, n_rows=3, n_steps=case.n_steps, seed=0)
    found = repeats.check_graph(reference, case, data)
    assert len(found) == len(case.plans) == 3
    for _, tally in found:
        assert set(tally.n_compared) == {"output", "checkpoint", "counters"}
        assert (tally.n_different > 0) is bool(stale)


def test_a_shape_has_more_than_one_tile() -> None:
    tiles = {-(-shape.d_v // choose_launch(shape, interpreted=False).block_v) for shape in DEFAULT_SHAPES}
    assert tiles == {1, 2}


def make_kernels(**changed: Any) -> SimpleNamespace:
    """The GDN twin with other functions in the place of some."""
    return SimpleNamespace(**{name: changed.get(name, getattr(reference, name)) for name in FUNCTIONS})


def test_first_difference_says_where() -> None:
    def replay_step(*args, pool, slots, **kwargs):  # type: ignore[no-untyped-def]
        out = reference.replay_step(*args, pool=pool, slots=slots, **kwargs)
        if int(pool.tokens[slots[2].long()]) == 2:
            out[2, 1, 3] = torch.nextafter(out[2, 1, 3], torch.tensor(torch.inf))
        return out

    records = certify(
        backend=Backend.TORCH, recurrences=GDN, shapes=[SMALL], lengths=[1], formats=["fp32"], invariants=["I1"],
        implementation=make_kernels(replay_step=replay_step),
    )  # fmt: skip
    record = next(r for r in records if r.case["activation"] == "float32")
    where = record.first_different
    assert where is not None
    assert {k: where[k] for k in ("step", "row", "head", "element", "what")} == {
        "step": 2, "row": 2, "head": 1, "element": [3], "what": "output",
    }  # fmt: skip
    assert where["ulp_histogram"] == {"1": 1}
    assert where["looks_like"].startswith("another order of additions in the output alone")
    assert (record.n_different, record.max_ulp) == (1, 1)


def test_a_cause_that_fits_nothing_is_unknown() -> None:
    def replay_step(*args, pool, **kwargs):  # type: ignore[no-untyped-def]
        out = reference.replay_step(*args, pool=pool, **kwargs)
        pool.checkpoint.codes.add_(0.01 * torch.rand(pool.checkpoint.codes.shape))
        return out

    records = certify(
        backend=Backend.TORCH, recurrences=GDN, shapes=[SMALL], lengths=[1], formats=["fp32"],
        invariants=["I1", "I5"], implementation=make_kernels(replay_step=replay_step),
    )  # fmt: skip
    found = {(r.invariant, r.first_different["looks_like"]) for r in records if r.first_different is not None}
    assert found == {("I1", "unknown"), ("I5", "a race, or memory that nothing wrote")}


def test_a_write_for_padded_rows_is_found() -> None:
    def replay_step(*args, pool, slots, **kwargs):  # type: ignore[no-untyped-def]
        out = reference.replay_step(*args, pool=pool, slots=slots, **kwargs)
        if len(slots) and bool((slots < 0).all()):
            pool.beta[0, 0, 0, 0] = 1.0
        return out

    records = certify(
        backend=Backend.TORCH, recurrences=GDN, shapes=[SMALL], lengths=[2], formats=["fp32"], invariants=["I4"],
        implementation=make_kernels(replay_step=replay_step),
    )  # fmt: skip
    failed = [r for r in records if not r.equal]
    assert [(r.case["check"], r.case["plan"]) for r in failed] == [("nothing to do", "fp32@2")]
    assert failed[0].first_different["looks_like"] == "a write for a padded row"


def test_a_kernel_that_does_nothing_is_an_error() -> None:
    idle = SimpleNamespace(
        decode_step=lambda q, k, v, *rest, **options: torch.zeros_like(v),
        replay_step=lambda q, k, v, *rest, **options: torch.zeros_like(v),
        flush_now=lambda *args, **options: None,
    )
    with pytest.raises(EmptyRunError, match="computes nothing"):
        certify(
            backend=Backend.TORCH, recurrences=GDN, shapes=[SMALL], lengths=[1], formats=["fp32"], implementation=idle
        )


def test_kernels_without_windows_are_not_asked_for_them() -> None:
    choices = {"backend": Backend.TORCH, "recurrences": GDN, "shapes": [SMALL], "lengths": [4], "formats": ["fp32"]}
    assert certify(**choices, invariants=["I6"])
    with pytest.raises(EmptyRunError, match="nothing that the invariants ask for"):
        certify(**choices, invariants=["I6"], implementation=make_kernels())


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no length": ({"lengths": []}, EmptyRunError, "no case"),
    "no recurrence": ({"recurrences": []}, EmptyRunError, "no case"),
    "format": ({"formats": ["fp9"]}, UsageError, "fp9"),
    "invariant": ({"invariants": ["I9"]}, UsageError, "I9"),
    "one kernel for all": ({"implementation": reference}, UsageError, "one recurrence"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_choice_that_cannot_be_run_is_an_error(name: str) -> None:
    choices, error, match = WRONG[name]
    with pytest.raises(error, match=match):
        certify(**({"backend": Backend.TORCH, "shapes": [SMALL], "lengths": [1], "formats": ["fp32"]} | choices))


def record_inputs(n_layers: int, n_steps: int) -> RecordedInputs:
    layers = [draw_inputs(SMALL, torch.bfloat16, n_rows=1, n_steps=n_steps, seed=layer) for layer in range(n_layers)]
    inputs = [
        [StepInputs(streams={name: x[:1] for name, x in data.inputs(t).items()}) for t in range(n_steps)]
        for data in layers
    ]
    initial = torch.stack([data.states[data.slots[0]] for data in layers])
    return RecordedInputs(recurrence=Recurrence.GDN, shape=SMALL, inputs=inputs, initial=initial)


@pytest.mark.parametrize("n_layers", [1, 2, 5])
def test_recorded_inputs_take_the_place_of_random_ones(n_layers: int) -> None:
    recorded = record_inputs(n_layers, 9)
    records = certify(backend=Backend.TORCH, lengths=[1, 3], formats=["fp32", "fp8"], recorded=recorded)
    assert all(r.equal and r.case["data"] == "recorded" for r in records)
    assert {r.case["activation"] for r in records} == {"bfloat16"}
    assert {r.case["steps"] for r in records} == {5, 9}
    assert {r.invariant for r in records} == {"I1", "I2", "I3", "I7"}


def test_too_few_recorded_steps_for_a_flush_are_an_error() -> None:
    with pytest.raises(EmptyRunError, match="give more steps"):
        certify(backend=Backend.TORCH, lengths=[5], formats=["fp32"], recorded=record_inputs(2, 1))


def test_rearranged_rows_are_the_same_sequences() -> None:
    data = draw_inputs(SMALL, torch.float32, n_rows=3, n_steps=2, seed=0)
    moved = data.place([None, 3, 0], [6, 2], n_slots=8)
    assert moved.sources == (-1, 3, 0)
    assert moved.slots.tolist() == [-1, 6, 2]
    for new, old in ((1, 3), (2, 0)):
        assert torch.equal(moved.states[moved.slots[new].long()], data.states[data.slots[old].long()])
        assert all(torch.equal(moved.streams[name][:, new], x[:, old]) for name, x in data.streams.items())
    assert all(x[:, 0].isnan().all() for x in moved.streams.values())
    strided = data.stride()
    for name, x in data.streams.items():
        assert not strided.streams[name][0].is_contiguous()
        assert torch.equal(strided.streams[name].nan_to_num(7.0), x.nan_to_num(7.0))
    thin = data.thin()
    for name in ("q", "k"):
        x = thin.streams[name][:, data.live_rows]
        assert bool(((x != 0).sum(-1) == 1).all())
        assert torch.equal(x.sum(-1).abs(), data.streams[name][:, data.live_rows].abs().amax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ulp_distance_counts_numbers_between(dtype: torch.dtype) -> None:
    one, zero = torch.ones(1, dtype=dtype), torch.zeros(1, dtype=dtype)
    up = torch.nextafter(one, 2 * one)
    assert ulp_distance(one, up).item() == 1
    assert ulp_distance(-up, -one).item() == 1
    assert ulp_distance(zero, -zero).item() == 0
    tiny = torch.nextafter(zero, one)
    assert ulp_distance(-tiny, tiny).item() == 2


def test_tally_tells_zeros_apart_and_takes_no_nan_for_equal() -> None:
    tally = BitTally()
    tally.compare("output", torch.zeros(1, 1, 2), torch.tensor([[[0.0, -0.0]]]), step=0, rows=[0])
    assert (tally.n_different, tally.max_ulp, tally.histogram) == (1, 0, {"0": 1})
    nan = torch.full((1, 1, 1), torch.nan)
    tally.compare("output", nan, nan, step=1, rows=[0])
    assert tally.n_different == 2


def test_tally_tells_equal_where_there_must_be_a_difference() -> None:
    tally, x = BitTally(), torch.ones(2, 3)
    tally.require_other("other seed", x, x + 1, step=0, row=1)
    assert (tally.n_different, tally.n_compared) == (0, {"other seed": 6})
    tally.require_other("other seed", x, x.clone(), step=0, row=1)
    assert (tally.n_different, tally.first["row"]) == (6, 1)


def test_tally_compares_bytes_of_nan() -> None:
    tally, nan = BitTally(), torch.full((1, 2), torch.nan)
    tally.compare_bytes("pool", nan, nan.clone(), step=0, rows=[0])
    assert tally.n_different == 0
    tally.compare_bytes("pool", nan, -nan, step=0, rows=[0])
    assert tally.n_different == 2


def test_tally_refuses_other_types() -> None:
    with pytest.raises(ValueError, match="expected"):
        BitTally().compare("state", torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.bfloat16), step=0, rows=[0])


def test_the_room_gives_the_function_whatever_was_imported_first() -> None:
    program = (
        "import sys, driftgate.accuracy as room\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "import driftgate.accuracy.certify\n"
        "from driftgate.accuracy import certify, kl_divergence, PrecisionPlan, LockstepRunner\n"
        "assert certify is sys.modules['driftgate.accuracy.certify'].certify is room.certify\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
