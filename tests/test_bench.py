"""The bench without a GPU: cycles, offsets, bytes, table and refusals; device times are made up where needed."""

from __future__ import annotations

import contextlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from driftgate import bench_command, cli
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.bench_command import choose_cases, format_notes, format_table, run_bench
from driftgate.errors import UsageError
from driftgate.kernels import bench, device_time, gdn, kda, mamba2
from driftgate.kernels.bench import choose_layers, choose_offsets, integrate_cycle, prepare, time_configuration
from driftgate.kernels.contract import HeadShape, Recurrence
from driftgate.kernels.device_time import Timing, time_device
from driftgate.kernels.launch import Launch
from driftgate.kernels.traffic import compute_traffic, entry_bytes

TINY = HeadShape(key_heads=1, value_heads=2, d_k=16, d_v=16)
ROOMS = {Recurrence.GDN: gdn, Recurrence.KDA: kda, Recurrence.MAMBA2: mamba2}
PLANS = ["baseline", "fp32@4", "fp32@4+cached+buf=bf16", "fp32@4+exact_readout", "fp8/fp32@4", "nvfp4@4", "fp32@1"]
MACHINE = {"device": "a GPU", "capability": "sm_90", "driver": None, "torch": "2.11", "triton": "3.6", "date": "today"}


def options(text: str):
    return PrecisionPlan.parse(text).options


@pytest.mark.parametrize(
    ("length", "offsets"),
    [(0, [0]), (1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 2, 3]), (16, [0, 8, 14, 15]), (256, [0, 128, 254, 255])],
)
def test_offsets_are_both_ends_the_middle_and_the_flush(length, offsets):
    assert choose_offsets(length) == offsets
    assert choose_offsets(length, every=True) == list(range(max(length, 1)))


def test_a_cycle_counted_by_hand():
    """L = 6: 1, 2, 3, 4 on the first line, 10 at its own offset, the flush 20."""
    assert integrate_cycle(6, {0: 1.0, 3: 4.0, 4: 10.0, 5: 20.0}) == pytest.approx(40 / 6, rel=1e-12)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 33])
def test_samples_give_the_mean_of_times_that_grow_evenly(length):
    times = {offset: 7.0 + 0.5 * offset for offset in range(length - 1)} | {length - 1: 90.0}
    sampled = {offset: times[offset] for offset in choose_offsets(length)}
    mean = sum(times.values()) / length
    assert integrate_cycle(length, sampled) == pytest.approx(mean, rel=1e-12)
    assert integrate_cycle(length, times) == pytest.approx(mean, rel=1e-12)


def test_the_flush_counts_once_and_reaches_no_other_offset():
    assert integrate_cycle(16, {0: 0.0, 8: 0.0, 14: 0.0, 15: 16.0}) == 1.0


def test_a_baseline_is_its_one_step():
    assert integrate_cycle(0, {0: 3.0}) == 3.0


@pytest.mark.parametrize(
    ("times", "missing"),
    [({0: 1.0, 14: 1.0}, "the flush"), ({0: 1.0, 15: 1.0}, "0 and 14"), ({14: 1.0, 15: 1.0}, "0 and")],
)
def test_no_cycle_without_the_flush_or_an_end(times, missing):
    with pytest.raises(ValueError, match=missing):
        integrate_cycle(16, times)


def test_layers_overflow_the_cache():
    assert choose_layers(1e9, 50_000_000) == 1
    assert choose_layers(32e6, 50_000_000) == 7
    assert choose_layers(1.0, 50_000_000) == bench.MAX_LAYERS


@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("recurrence", Recurrence)
def test_a_preset_offset_is_the_step_that_it_says(recurrence, text):
    """A checkpoint moves in a flush alone; any other step writes the entry at its offset and no other."""
    subject = prepare(
        recurrence, TINY, options(text), 2, implementation=ROOMS[recurrence].reference, n_layers=2, device="cpu"
    )
    pool = subject.pool
    flush = max(pool.options.length - 1, 0)
    assert all(buffer.isfinite().all() and buffer.std() > 0 for buffer in pool.buffers().values())
    for offset in choose_offsets(pool.options.length, every=True):
        before = [pool.checkpoint.codes.clone(), *(b.clone() for b in pool.buffers().values())]
        subject.preset(offset)
        out = subject.run_pass()
        assert out.isfinite().all() and out.std() > 0
        assert (before[0] != pool.checkpoint.codes).flatten(2).any(-1).all() == (offset == flush)
        for old, new in zip(before[1:], pool.buffers().values(), strict=True):
            changed = (old != new).transpose(0, 3).flatten(1).any(1).nonzero().flatten().tolist()
            assert changed in ([[]] if offset == flush else [[offset]])


def test_launches_of_a_pass_visit_every_layer_equally_often():
    subject = prepare(
        Recurrence.GDN, TINY, options("fp32@4"), 1, implementation=gdn.reference, n_layers=3, device="cpu"
    )
    taken: list[int] = []
    counting = bench.Subject(pool=subject.pool, slots=subject.slots, take=lambda layer: taken.append(layer))
    counting.run_pass()
    assert taken == [0, 1, 2] * 6 and len(taken) == counting.launches >= bench.LAUNCHES


def test_time_of_a_launch_is_taken_from_events_behind_a_full_queue(monkeypatch):
    """Median, least and spread of passes of 4 launches; the device waits before the first event of each."""
    log: list[str] = []
    elapsed = iter([0.4, 4.0, *[0.8] * 18])  # milliseconds

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, other: Event) -> float:
            return next(elapsed)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("wait"), raising=False)
    monkeypatch.setattr(device_time, "WARM_UP_SECONDS", 0.0)
    timing = time_device(lambda: log.append("run"), launches=4, repeats=20)
    assert (timing.us, timing.min_us) == pytest.approx((200.0, 100.0))
    assert timing.spread_us == pytest.approx(0.0, abs=1e-9)  # one pass in twenty at either end is outside of it
    assert log == ["run", "synchronize", "run", *["wait", "event", "run", "event"] * 20, "synchronize"]


@pytest.fixture
def made_up(monkeypatch):
    """A GPU that is not there: the twins take the steps on the CPU, a step takes 10 + h µs and a flush 100.

    ``timed`` holds cursor and flush word of each timing; ``spoil`` runs after each.
    """
    seen = SimpleNamespace(timed=[], spoil=lambda pool: None)
    pools: list[Any] = []

    def prepare_on_cpu(*args: Any, launch: Launch | None, device: str, **rest: Any) -> bench.Subject:
        assert device == "cuda"
        subject = prepare(*args, device="cpu", **rest)
        pools.append(subject.pool)
        return subject

    def fake_time(run, *, launches: int, repeats: int) -> Timing:
        (cursor,), (flush,) = pools[-1].cursor.unique().tolist(), pools[-1].flush.unique().tolist()
        seen.timed.append((cursor, flush))
        run()
        seen.spoil(pools[-1])
        return Timing(us=100.0 if flush else 10.0 + cursor, min_us=9.0, spread_us=0.5)

    for room in ROOMS.values():
        monkeypatch.setattr(room, "implementation", lambda backend, room=room: room.reference)
    monkeypatch.setattr(bench, "prepare", prepare_on_cpu)
    monkeypatch.setattr(bench, "time_device", fake_time)
    properties = SimpleNamespace(L2_cache_size=2000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    return seen


@pytest.mark.parametrize("recurrence", Recurrence)
def test_a_record_has_each_offset_and_the_cycle(made_up, recurrence):
    plan = options("nvfp4/fp32@8")
    record = time_configuration(recurrence, TINY, plan, 3, copy_bandwidth=1e9)
    assert made_up.timed == [(0, 0), (4, 0), (6, 0), (7, 1)]
    assert [(s["offset"], s["flush"], s["us"]) for s in record["steps"]] == [
        (0, False, 10.0), (4, False, 14.0), (6, False, 16.0), (7, True, 100.0)
    ]  # fmt: skip
    cycle = record["cycle"]
    assert cycle["us"] == pytest.approx((sum(range(10, 17)) + 100) / 8, rel=1e-12)
    traffic = compute_traffic(TINY, plan, entry_bytes(recurrence, TINY, plan, 2))
    assert cycle["bytes"] == pytest.approx(3 * traffic.per_step, rel=1e-12)
    for part in (cycle, *record["steps"]):
        assert part["floor_us"] == pytest.approx(part["bytes"] / 1e3, rel=1e-12)
        assert part["copy_fraction"] == pytest.approx(part["floor_us"] / part["us"], rel=1e-12)
    assert record["sampled"]
    launch = {"block_v": 16, "block_k": 16, "num_warps": 1, "num_stages": 2, "fuse": False}
    assert record["launch"] == launch
    assert record["n_layers"] * 3 * 2 * 16 * 13 >= 4 * 2000  # rows of 8 + 1 + 4 bytes
    assert json.loads(json.dumps(record)) == record


def test_the_method_follows_the_batch_unless_it_is_named(made_up):
    def method(batch: int, **named: str) -> str:
        return time_configuration(Recurrence.GDN, TINY, options("fp32@1"), batch, **named)["method"]

    assert [method(127), method(128), method(128, method="graph")] == ["graph", "events", "graph"]


def test_a_sweep_of_some_offsets_has_no_cycle(made_up):
    launch = Launch(block_v=8, block_k=16, num_warps=2, num_stages=3)
    record = time_configuration(Recurrence.GDN, TINY, options("fp32@8"), 2, launch, [7, 4])
    assert made_up.timed == [(4, 0), (7, 1)]
    assert (record["cycle"], record["sampled"], record["launch"]["num_stages"]) == (None, True, 3)
    assert record["steps"][0]["floor_us"] is None


def test_every_offset_is_no_sample(made_up):
    record = time_configuration(
        Recurrence.GDN, TINY, options("fp32@4"), 2, offsets=choose_offsets(4, every=True), copy_bandwidth=1e9
    )
    assert not record["sampled"] and len(record["steps"]) == 4


@pytest.mark.parametrize("spoil", [lambda p: p.checkpoint.codes.fill_(torch.nan), lambda p: p.error[:1].fill_(1)])
def test_times_of_states_that_are_not_finite_are_refused(made_up, spoil):
    made_up.spoil = spoil
    with pytest.raises(RuntimeError, match="offset 0: outputs or states are not finite"):
        time_configuration(Recurrence.GDN, TINY, options("fp32@4"), 2)


@pytest.mark.parametrize(
    ("text", "batch", "rest", "said"),
    [
        ("fp32@4", 0, {}, "batch and repeats"),
        ("fp32@4", 1, {"repeats": 19}, "batch and repeats"),
        ("fp32@4", 1, {"offsets": [4]}, "offset: expected 0 to 3, got 4"),
        ("fp32@4+track=3", 1, {}, "track"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_anything_runs(made_up, text, batch, rest, said):
    with pytest.raises(ValueError, match=said):
        time_configuration(Recurrence.GDN, TINY, options(text), batch, **rest)
    assert made_up.timed == []


def test_the_baseline_comes_first_at_every_batch():
    cases = choose_cases(plans=["nvfp4@8", "baseline", "nvfp4@8"], recurrences=["kda"], batches=[4, 2, 4])
    found = [(c.recurrence, c.batch, str(c.plan)) for c in cases]
    assert found == [(Recurrence.KDA, n, plan) for n in (4, 2) for plan in ("baseline", "nvfp4@8")]


def test_defaults_are_all_recurrences_and_plans_of_one_length():
    cases = choose_cases(length=8)
    assert len(cases) == 3 * 3 * 7
    assert {c.plan.options.length for c in cases} == {0, 8}
    assert {c.batch for c in cases} == {16, 64, 256}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"plans": ["fp32@8"], "length": 8}, "--length"),
        ({"recurrences": ["gdm"]}, "did you mean gdn"),
        ({"plans": ["fp32@8+track=3"]}, "natural cycles"),
        ({"plans": ["fp99@8"]}, "fp99"),
        ({"length": 257}, "L must be 1 to 256"),
    ],
)
def test_wrong_choices_are_usage_errors(arguments, said):
    with pytest.raises(UsageError, match=said):
        choose_cases(**arguments)


@pytest.fixture
def document(made_up, monkeypatch):
    """``document(**choices)``: a bench on the made-up GPU."""
    monkeypatch.setattr(bench, "SHAPES", dict.fromkeys(Recurrence, TINY))
    monkeypatch.setattr(device_time, "measure_copy", lambda: {"bytes": 2, "us": 1.0, "bandwidth": 1e9})
    monkeypatch.setattr(device_time, "describe_machine", lambda: MACHINE)

    def make(every_offset: bool = False, **choices: Any) -> dict[str, Any]:
        return run_bench(choose_cases(**choices), every_offset=every_offset)

    return make


def test_a_plan_is_compared_with_the_baseline_of_its_batch(document):
    records = document(plans=["fp32@4"], recurrences=["gdn", "mamba2"], batches=[1, 2])["records"]
    assert [r["plan"] for r in records] == ["baseline", "fp32@4"] * 4
    for r in records:
        assert r["baseline_us"] == 100.0  # the made-up GPU takes a baseline step for a flush
        assert r["speedup"] == pytest.approx(100.0 / r["cycle"]["us"], rel=1e-12)
    assert records[1]["cycle"]["us"] == pytest.approx((10 + 11 + 12 + 100) / 4, rel=1e-12)


def test_the_table_shows_the_numbers_in_80_columns(document):
    found = document(
        plans=["fp32@16", "nvfp4/fp32@16+cached+exact_readout+buf=bf16"], batches=[256], recurrences=["gdn"]
    )
    found["records"][1]["steps"][-1]["us"] = 12345.6
    lines = format_table(found)
    assert max(len(line) for line in lines) <= 80
    assert lines[1].split()[:5] == ["rence", "batch", "plan", "h=0", "h=8"]
    floor = found["records"][0]["cycle"]["floor_us"]
    percent = f"{100 * floor / 100.0:.0f}"
    assert lines[2].split() == ["gdn", "256", "baseline", "-", "-", "-", "100.0", f"{floor:.0f}", "1.00", percent]
    assert lines[3].split()[2:7] == ["fp32@16", "10.0", "18.0", "12346", "22.2"]
    assert lines[3].split()[8] == "4.51"
    assert lines[4].split() == ["gdn", "256", "nvfp4/fp32@16+cached+exact_readout+buf=bf16"]
    assert lines[5].split()[:4] == ["10.0", "18.0", "100.0", "22.2"]


def test_a_table_of_all_defaults_fits(document):
    lines = format_table(document())
    assert len(lines) == 2 + 3 * 3 * 7
    assert max(len(line) for line in lines) <= 80


@pytest.mark.parametrize("kept", [slice(0, -1), slice(0, 0)])
def test_no_cycle_is_printed_without_its_flush(document, kept):
    found = document(plans=["fp32@4"], batches=[1], recurrences=["gdn"])
    record = found["records"][1]
    record["steps"] = record["steps"][kept]
    with pytest.raises(ValueError, match="plan fp32@4: the flush"):
        format_table(found)


def test_notes_say_what_was_sampled_and_what_was_noisy(document):
    found = document(plans=["fp32@8"], batches=[16, 256], recurrences=["gdn"])
    notes = "\n".join(format_notes(found))
    assert "sampled: " in notes and "batch 16 in CUDA Graphs; batch 256 launched one by one" in notes
    assert "driver unknown" in notes and "spread" not in notes
    found["records"][1]["steps"][0]["spread_us"] = 1.1
    assert "1 of 10 times have a spread" in format_notes(found)[-1]
    assert "sampled" not in "\n".join(format_notes(document(every_offset=True, plans=["fp32@8"], batches=[16])))


@pytest.fixture
def call(capfd, monkeypatch):
    """``call(*arguments)``: exit code, output and errors of the command line."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["driftgate", "bench", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, *capfd.readouterr()

    return run


def test_without_a_gpu_there_is_one_line(call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = call("--json")
    assert (code, out) == (4, "")
    assert err.startswith("driftgate: bench: no CUDA device") and err.count("\n") == 1


def test_interpreted_kernels_are_not_timed(call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, out, err = call()
    assert (code, out) == (4, "") and "unset it" in err


@pytest.mark.parametrize("arguments", [("--batch", "0"), ("--length", "0"), ("--plan", "fp32"), ("--recurrence", "x")])
def test_a_wrong_command_line_is_told_before_the_device_is_looked_at(call, monkeypatch, arguments):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = call(*arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1


def test_json_and_file_hold_one_document(call, document, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_command, "_require_gpu", lambda: None)
    file = tmp_path / "bench.json"
    choices = ("--plan", "fp32@4", "--batch", "2", "--recurrence", "gdn")
    code, out, err = call(*choices, "--json", "--out", str(file))
    assert (code, err) == (0, "")
    assert (
        json.loads(out) == json.loads(file.read_text()) == document(plans=["fp32@4"], batches=[2], recurrences=["gdn"])
    )
    assert sorted(json.loads(out)) == ["copy", "machine", "records", "schema_version"]
    code, out, _ = call(*choices, "--every-offset")
    assert code == 0 and "baseline" in out and "sampled" not in out
    assert call(*choices, "--quiet") == (0, "", "")


def test_a_file_that_cannot_be_is_told_before_anything_is_timed(call, document, made_up, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_command, "_require_gpu", lambda: None)
    for wrong in (tmp_path, tmp_path / "none" / "bench.json"):
        code, out, err = call("--out", str(wrong))
        assert (code, out) == (4, "") and "--out" in err and err.count("\n") == 1
    assert made_up.timed == []
