"""Speculative windows: kernels under Triton's interpreter against the FP64 twin and against single steps (I6), what is
refused, and the layouts of compiled sums.

The cases are functions of verify_cases.py; tests/gpu runs the same on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mutants
import pytest
import torch
from test_compile import REAL, SMALL, baseline_of, case, check_layouts, key

from driftgate.accuracy.windows import check_windows
from driftgate.errors import EmptyRunError
from driftgate.kernels.contract import HeadShape, Recurrence, ReplayOptions
from driftgate.kernels.gdn import reference
from driftgate.kernels.pool import StatePool

HERE = Path(__file__).parent
CASES = HERE / "verify_cases.py"
RECURRENCES = ("gdn", "kda", "mamba2")
EXACT = {"length": 8, "window": 4, "readout": "exact_readout"}
SHORT = {"length": 4, "window": 2, "readout": "exact_readout"}

# recurrence; shape H, HV, d_k, d_v; options of the plan; activation.
AGAINST_TWIN: list[tuple[str, list[int], dict[str, Any], str]] = [
    ("gdn", [1, 2, 24, 40], {"length": 8, "window": 4}, "float32"),
    (
        "gdn",
        [1, 1, 16, 16],
        {"length": 12, "window": 4, "read": "nvfp4", "fold": "cached", "buffer": "bf16"},
        "bfloat16",
    ),
    ("gdn", [1, 1, 16, 16], EXACT | {"recurrence": "fp8", "read": "fp8", "stochastic": True}, "float32"),
    ("kda", [1, 1, 16, 16], {"length": 12, "window": 4}, "bfloat16"),
    (
        "kda",
        [1, 2, 40, 24],
        {"length": 8, "window": 4, "recurrence": "fp8", "read": "nvfp4", "stochastic": True},
        "float32",
    ),
    ("kda", [1, 1, 16, 16], EXACT | {"fold": "cached", "read": "bf16"}, "float32"),
    ("mamba2", [1, 1, 16, 16], {"length": 12, "window": 4}, "float32"),
    ("mamba2", [1, 2, 40, 24], EXACT | {"recurrence": "nvfp4", "read": "nvfp4", "stochastic": True}, "bfloat16"),
]

# Faults that only windows have: text of kernels/verify.py, what it becomes, and the plan that shows it.
FAULTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a draft is taken for a committed token": (
        "tl.load(cursor + slot), tl.load(base + slot)\n    if (h + n",
        "tl.load(cursor + slot) + 1, tl.load(base + slot)\n    if (h + n - 1",
        SHORT,
    ),
    "flushes by the natural rule": ("if (h + n + window > length) != FLUSH:", "if (h + n > length) != FLUSH:", SHORT),
    "a flush reads the copy": (
        "            b_S = load_tile(p_codes, p_blocks, p_rows, o_v, DV, DK, BV, BK, FORMAT)\n        else",
        "            b_S = load_tile(p_copy_codes, p_copy_blocks, p_copy_rows, o_v, DV, DK, BV, BK, COPY_FORMAT)\n"
        "        else",
        {"length": 4, "window": 2, "read": "fp8"},
    ),
}
FAULTS_OF_PRODUCTS = {
    "keys do not decay over the window": ("            b_K = b_K * b_a\n", "            b_K = b_K\n"),
    "the state does not decay over the window": ("        b_P = b_P * b_a\n", ""),
    "a token is put in the place of the one before": (
        "b_K = tl.where(o_l == h + i, b_k",
        "b_K = tl.where(o_l == h + i - 1, b_k",
    ),
    "a token does not read itself": (" + b_u * tl.sum(b_k * b_q, axis=0)\n        b_K", "\n        b_K"),
    "the counter of the noise is one token late": (
        "seed, tl.load(tokens + slot), streams + slot, DV",
        "seed, tl.load(tokens + slot) + 1, streams + slot, DV",
    ),
}


def name(found: tuple[str, list[int], dict[str, Any], str]) -> str:
    recurrence, shape, options, activation = found
    return "-".join([recurrence, "x".join(map(str, shape)), *map(str, options.values()), activation])


def write_mutant(folder: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> str:
    if "kernels.verify" not in mutants.MODULES:
        monkeypatch.setattr(mutants, "MODULES", (*mutants.MODULES, "kernels.verify"))
    return str(mutants.write_mutant(folder, old, new))


@pytest.mark.parametrize("found", AGAINST_TWIN, ids=name)
def test_window_agrees_with_the_fp64_twin(interpreted, found: tuple[str, list[int], dict[str, Any], str]) -> None:
    recurrence, shape, options, activation = found
    result = interpreted(
        CASES, "compare_with_twin", recurrence=recurrence, shape=shape, options=options, activation=activation
    )
    assert {"output", "zeros", "state"} <= set(result["worst"])
    assert {what: ratio for what, ratio in result["worst"].items() if ratio > 1} == {}
    assert result["other_codes"] <= 0.03


@pytest.mark.parametrize("fault", FAULTS_OF_PRODUCTS)
def test_twin_tells_faults(interpreted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    kernels = write_mutant(tmp_path, monkeypatch, *FAULTS_OF_PRODUCTS[fault])
    result = interpreted(
        CASES, "compare_with_twin", recurrence="gdn", shape=[1, 1, 16, 16], n_calls=3, kernels=kernels,
        options={"length": 8, "window": 4, "recurrence": "fp8", "read": "fp8", "stochastic": True},
    )  # fmt: skip
    assert result["other_codes"] > 0.1 if "noise" in fault else result["worst"]["output"] > 2


@pytest.mark.parametrize(("recurrence", "length", "window"), [("gdn", 8, 4), ("kda", 6, 3), ("mamba2", 5, 2)])
def test_exact_route_keeps_the_bits_of_single_steps(interpreted, recurrence: str, length: int, window: int) -> None:
    options = EXACT | {"length": length, "window": window}
    found = interpreted(CASES, "run_windows", recurrence=recurrence, options=options)
    assert found["different"] == 0, found["first"]
    assert found["what"]["output"] > 400
    assert found["what"]["checkpoint"] > 400


@pytest.mark.parametrize(
    ("recurrence", "options"),
    [
        ("gdn", {"length": 7, "window": 3}),
        ("kda", {"length": 6, "window": 2, "recurrence": "fp8", "read": "nvfp4", "fold": "cached", "stochastic": True}),
    ],
)
def test_rejected_drafts_leave_no_trace(interpreted, recurrence: str, options: dict[str, Any]) -> None:
    found = interpreted(CASES, "run_windows", recurrence=recurrence, options=options)
    assert found["different"] == 0, found["first"]
    assert found["what"]["output of rejected drafts' other values"] > 400


@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("readout", ["output_only", "exact_readout"])
def test_twins_keep_the_bits_of_single_steps(recurrence: str, readout: str) -> None:
    import verify_cases

    found = verify_cases.run_windows(
        recurrence=recurrence,
        options={"length": 13, "window": 5, "readout": readout},
        kernels="twin",
        shape=[1, 2, 16, 16],
    )  # a torch silu of fewer than 32 elements rounds otherwise
    assert found["different"] == 0, found["first"]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_exact_route_show(
    interpreted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    old, new, options = FAULTS[fault]
    kernels = write_mutant(tmp_path, monkeypatch, old, new)
    found = interpreted(CASES, "run_windows", recurrence="gdn", options=options, kernels=kernels)
    assert found["different"] > 0


@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("options", [{"length": 16, "window": 4}, EXACT], ids=["products", "exact"])
def test_later_tokens_do_not_matter(interpreted, recurrence: str, options: dict[str, Any]) -> None:
    interpreted(CASES, "run_edge", name="later_tokens_do_not_matter", recurrence=recurrence, options=options)


@pytest.mark.parametrize(("length", "kept"), [(8, 0), (8, 1), (8, 3), (8, 4), (16, 0), (16, 2), (16, 4)])
def test_accepted_tokens_and_no_others_are_kept(interpreted, kept: int, length: int) -> None:
    recurrence = RECURRENCES[kept % 3]
    interpreted(CASES, "run_edge", name="accepted", recurrence=recurrence, kept=kept, length=length)


@pytest.mark.parametrize("recurrence", ["kda", "mamba2"])
def test_padding(interpreted, recurrence: str) -> None:
    interpreted(CASES, "run_edge", name="padding", recurrence=recurrence)


@pytest.mark.parametrize("options", [{"length": 8, "window": 4, "read": "fp8"}, EXACT], ids=["products", "exact"])
def test_rows_do_not_meet(interpreted, options: dict[str, Any]) -> None:
    interpreted(CASES, "run_edge", name="rows_do_not_meet", recurrence="gdn", options=options)


@pytest.mark.parametrize(("length", "window"), [(7, 4), (1, 1), (8, 5), (31, 16), (34, 17)])
def test_windows_that_do_not_fit_in_the_buffer_are_refused(length: int, window: int) -> None:
    with pytest.raises(ValueError, match="window: expected"):
        ReplayOptions(length=length, window=window)


def make_window(
    options: ReplayOptions | None = None, *, n_tokens: int = 4
) -> tuple[StatePool, dict[str, Any], torch.Tensor]:
    """A pool of three slots, arguments of a window of two live rows and a padded one, and its lengths."""
    shape = HeadShape(key_heads=1, value_heads=2, d_k=16, d_v=8)
    pool = StatePool(shape, options or ReplayOptions(length=8, window=4), n_slots=3)
    k, v, gate = torch.zeros(3, n_tokens, 1, 16), torch.zeros(3, n_tokens, 2, 8), torch.zeros(3, n_tokens, 2)
    slots = torch.tensor([2, -1, 0], dtype=torch.int32)
    arguments = {"q": k, "k": k, "v": v, "g": gate, "beta": gate, "pool": pool, "layer": 0, "slots": slots}
    return pool, arguments, torch.tensor([3, 99, 4], dtype=torch.int32)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("lengths: expected 1 to T = 4, got \\[0, 4\\]", {"lengths": torch.tensor([0, 1, 4], dtype=torch.int32)}),
        ("lengths: expected 1 to T = 4, got \\[3, 5\\]", {"lengths": torch.tensor([3, 1, 5], dtype=torch.int32)}),
        ("lengths: expected \\(3,\\) int32", {"lengths": torch.tensor([3, 1, 4])}),
        ("lengths: expected \\(3,\\) int32", {"lengths": torch.tensor([3, 1], dtype=torch.int32)}),
        ("lengths: expected contiguous", {"lengths": torch.full((3, 2), 2, dtype=torch.int32)[:, 0]}),
        ("inputs: expected \\[B, T, heads, d\\]", {"q": torch.zeros(3, 1, 16)}),
        ("beta: expected shape \\(3, 4, 2\\)", {"beta": torch.zeros(3, 2)}),
        ("slots: expected each slot once", {"slots": torch.tensor([2, -1, 2], dtype=torch.int32)}),
    ],
)
def test_windows_that_do_not_fit_are_refused(message: str, change: dict[str, Any]) -> None:
    pool, arguments, lengths = make_window()
    for buffer in pool.buffers().values():
        buffer.fill_(7.0)
    with pytest.raises(ValueError, match=message):
        reference.verify_window(**(arguments | {"lengths": lengths} | change))
    assert all(bool((buffer == 7.0).all()) for buffer in pool.buffers().values())


def test_windows_longer_than_the_plan_has_them_are_refused() -> None:
    _, arguments, lengths = make_window(n_tokens=5)
    with pytest.raises(ValueError, match="expected T of 1 to the plan's window = 4, got 5"):
        reference.verify_window(**arguments, lengths=lengths)


@pytest.mark.parametrize("options", [ReplayOptions(), ReplayOptions(length=8)])
def test_plans_without_windows_are_refused(options: ReplayOptions) -> None:
    pool, arguments, lengths = make_window(options)
    with pytest.raises(ValueError, match="expected a plan with a window"):
        reference.verify_window(**arguments, lengths=lengths)
    with pytest.raises(ValueError, match="expected a plan with a window"):
        pool.commit(arguments["slots"], lengths, lengths)
    with pytest.raises(ValueError, match="expected a plan with a window"):
        check_windows(reference, recurrence=Recurrence.GDN, shape=pool.shape, activation=torch.float32, options=options)


@pytest.mark.parametrize(
    ("lengths", "kept", "message"),
    [
        ([3, 99, 4], [4, 0, 4], "n: expected 0 to lengths"),
        ([3, 99, 4], [-1, 0, 4], "n: expected 0 to lengths"),
        ([0, 99, 4], [0, 0, 4], "lengths 1 to 4"),
        ([5, 99, 4], [2, 0, 4], "lengths 1 to 4"),
        ([3, 99], [2, 0, 4], "lengths: expected \\(3,\\) int32"),
        ([3, 99, 4], [2, 0], "n: expected \\(3,\\) int32"),
    ],
)
def test_commits_that_do_not_fit_are_refused(lengths: list[int], kept: list[int], message: str) -> None:
    pool, arguments, _ = make_window()
    counts = [torch.tensor(numbers, dtype=torch.int32) for numbers in (lengths, kept)]
    with pytest.raises(ValueError, match=message):
        pool.commit(arguments["slots"], *counts)
    assert pool.cursor.tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="int32"):
        pool.commit(arguments["slots"], counts[0], torch.zeros(3, dtype=torch.int64))


def test_a_row_that_flushed_and_keeps_nothing_goes_on_from_the_state_it_had() -> None:
    """n = 0: the entries are folded once; windows and steps after it are those of a row that took no window."""
    random = torch.Generator().manual_seed(0)
    pool, arguments, _ = make_window(ReplayOptions(length=8, window=4, readout="exact_readout"))
    other, _, _ = make_window(pool.options)
    for name in ("q", "k", "v"):
        arguments[name] = torch.randn(arguments[name].shape, generator=random)
    arguments["beta"] = torch.rand(arguments["beta"].shape, generator=random)
    slots, four = arguments["slots"], torch.tensor([4, 4, 4], dtype=torch.int32)
    for p in (pool, other):
        reference.verify_window(**(arguments | {"pool": p}), lengths=four)
        p.commit(slots, four, four)
    stored = pool.checkpoint.codes.clone()
    reference.verify_window(
        **(arguments | {"q": -arguments["q"], "k": arguments["v"][..., :1, :].repeat(1, 1, 1, 2)}), lengths=four
    )
    pool.commit(slots, four, torch.zeros_like(four))
    assert (pool.cursor[[2, 0]].tolist(), pool.base[[2, 0]].tolist(), pool.tokens[[2, 0]].tolist()) == (
        [0, 0],
        [4, 4],
        [4, 4],
    )
    assert not torch.equal(pool.checkpoint.codes, stored)
    outs = [reference.verify_window(**(arguments | {"pool": p}), lengths=four) for p in (pool, other)]
    assert torch.equal(*outs)
    before = pool.checkpoint.codes.clone()
    reference.flush_now(pool, torch.tensor([2, 0]))
    assert torch.equal(pool.checkpoint.codes, before), "no entries were left to fold"


def test_a_baseline_that_computes_nothing_is_no_certificate() -> None:
    class Idle:
        replay_step, verify_window, flush_now = reference.replay_step, reference.verify_window, reference.flush_now

        @staticmethod
        def decode_step(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_rest: object, **_named: object
        ) -> torch.Tensor:
            return torch.zeros_like(v)

    with pytest.raises(EmptyRunError, match="computes nothing"):
        check_windows(
            Idle, recurrence=Recurrence.GDN, shape=HeadShape(key_heads=1, value_heads=1, d_k=16, d_v=16),
            activation=torch.float32, options=ReplayOptions(length=8, window=4),
        )  # fmt: skip


def windows(*formats: str, launch: str = "window_flush", **changes: Any) -> dict[str, Any]:
    return case(*formats, launch=launch, window=4, **changes)


EXACT_LAUNCHES = [
    *(windows("fp32", launch=launch, readout="exact_readout") for launch in ("window_flush", "window_read")),
    windows("fp32", "nvfp4", arch=100),
    windows("fp8", "nvfp4", stochastic=True),
    windows("fp32", launch="window_read", readout="exact_readout", kernels="kda", shape=REAL["kda"], arch=100),
    windows("fp32", kernels="mamba2", shape=REAL["mamba2"]),
    windows("fp32", launch="window_read", readout="exact_readout", kernels="mamba2", shape=REAL["mamba2"]),
]
BINARIES = [
    *(windows("fp32", "fp8", launch="window_read", arch=arch) for arch in (90, 100)),
    windows("fp8", "nvfp4", launch="window_read", kernels="kda", arch=100),
    windows("fp32", "nvfp4", launch="window_read", kernels="mamba2"),
    windows("fp8", "nvfp4", kernels="kda"),
    windows("fp8", "fp8", kernels="mamba2", arch=100),
]
BINARIES = [plan | {"shape": SMALL, "full": True} for plan in BINARIES]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("compiled")
    every = list({key(p): p for p in [*EXACT_LAUNCHES, *map(baseline_of, EXACT_LAUNCHES), *BINARIES]}.values())
    (folder / "cases.json").write_text(json.dumps(every))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-P", str(CASES), str(folder / "cases.json"), str(folder / "results.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads((folder / "results.json").read_text())
    return {key(plan): result for plan, result in zip(every, results, strict=True)}


def name_launch(plan: dict[str, Any]) -> str:
    options = plan["options"]
    return f"{plan['kernels']}-{plan['launch']}-{options['read']}-{options['recurrence']}-sm_{plan['arch']}"


@pytest.mark.parametrize("plan", EXACT_LAUNCHES, ids=name_launch)
def test_sums_of_the_exact_route_have_the_layout_of_the_baseline(
    plan: dict[str, Any], compiled: dict[str, dict[str, Any]]
) -> None:
    """A fold's S k, then S k and S q of a token of the window, as in a single step that flushes."""
    check_layouts(plan, compiled)
    assert compiled[key(plan)]["plain_divisions"] == 0
    assert compiled[key(plan)]["products"] == 0


@pytest.mark.parametrize("plan", BINARIES, ids=name_launch)
def test_windows_compile(plan: dict[str, Any], compiled: dict[str, dict[str, Any]]) -> None:
    """To a binary, with exact divisions and roots, and with 64-bit offsets of slots."""
    found = compiled[key(plan)]
    assert found["binary"] > 0
    assert found["approximate"] == []
    assert found["plain_divisions"] == 0
    assert found["slot_uses"] == ["arith.extsi"]
