"""``driftgate run`` before anything is measured: sizes, checkpoints, devices, memory, and whose the folder is."""

from __future__ import annotations

import json
import os
import shutil
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_cases as cases
import torch
from cli_cases import DAMAGES, INPUT, USAGE, call_program, damage, enter_empty_folder, is_one_line

from driftgate.errors import InputError
from driftgate.main_job import Prepared
from driftgate.run_folder import CLAIM, claim, default_out


@pytest.fixture
def call(capfd, monkeypatch, tmp_path):
    """``call(*arguments)`` runs the command line in this process, in an empty folder: exit code, output, errors."""
    enter_empty_folder(monkeypatch, tmp_path)
    return partial(call_program, capfd, monkeypatch)


@pytest.mark.parametrize("steps", [0, -5])
def test_no_steps_are_exit_code_5(call, steps):
    code, out, err = call("run", "--steps", steps)
    assert (code, out) == (5, "")
    assert is_one_line(err) and str(steps) in err


def test_a_suite_file_without_steps_is_exit_code_5(call, tmp_path):
    suite = tmp_path / "mine.yaml"
    suite.write_text("plans: [{plan: fp32@4}]\nsteps: 0\n")
    code, _, err = call("run", suite)
    assert code == 5 and is_one_line(err)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_checkpoint_that_cannot_be_used_is_exit_code_4_and_leaves_the_folder_free(
    call, tiny_checkpoint, tmp_path, name
):
    folder, out_folder = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_checkpoint, folder)
    damage(folder, name)
    for flags in (("--out", out_folder), ("--out", out_folder / "below"), (), ("--dry-run",)):
        if name == "NaN weights" and flags == ("--dry-run",):
            continue  # only the weights show it, and they are not loaded
        code, out, err = call("run", "--model", folder, "--steps", 64, *flags)
        assert (code, out) == (4, "")
        assert is_one_line(err) and DAMAGES[name] in err
    assert not out_folder.exists()
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_exit_code_4(call):
    code, out, err = call("run", "--device", "cuda")
    assert (code, out) == (4, "")
    assert is_one_line(err) and "cuda is not on this machine" in err


@pytest.fixture
def taken(tmp_path, request) -> Path:
    """An output folder that no run may write to."""
    folder = tmp_path / "taken"
    if request.param == "a file":
        folder.write_text("x")
    elif request.param == "below a file":
        (tmp_path / "file").write_text("x")
        folder = tmp_path / "file" / "below"
    elif request.param == "a long name":
        folder = tmp_path / ("x" * 300)
    else:
        folder.mkdir()
        (folder / {"another run": "results.json", "other files": "thesis.tex"}[request.param]).write_text("{}")
    return folder


@pytest.mark.parametrize(
    "taken", ["a file", "below a file", "a long name", "another run", "other files"], indirect=True
)
def test_an_output_folder_that_cannot_be_used_is_refused_and_left_alone(call, taken, tmp_path):
    before = sorted(p.name for p in tmp_path.rglob("*"))
    code, out, err = call("run", "--out", taken)
    assert (code, out) == (4, "")
    assert is_one_line(err) and "--out" in err
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_a_folder_has_one_run_at_a_time_and_is_free_again_after_it(call, tmp_path):
    out_folder = tmp_path / "above" / "out"
    first = claim(out_folder)
    for flags in ((), ("--dry-run",)):
        code, out, err = call("run", "--out", out_folder, *flags)
        assert (code, out) == (4, "")
        assert is_one_line(err) and "another run that is still going on" in err
    assert [p.name for p in out_folder.iterdir()] == [CLAIM]
    first.release()
    assert not (tmp_path / "above").exists()


def test_of_runs_that_start_at_once_one_gets_the_folder(tmp_path):
    outcomes: list[str] = []
    start = threading.Barrier(8)

    def take() -> None:
        start.wait()
        try:
            claim(tmp_path / "out")
            outcomes.append("claimed")
        except InputError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("claimed") == 1
    assert sum("another run" in outcome for outcome in outcomes) == 7


def test_default_folders_of_the_same_second_differ():
    assert len({default_out("suites/quick.yaml") for _ in range(50)}) == 50
    assert default_out("suites/quick.yaml").name.startswith("quick-")


@pytest.mark.parametrize("there", [False, True])
def test_a_run_that_fails_gives_its_folder_back(tmp_path, there):
    def fail(_progress: object) -> None:
        raise KeyboardInterrupt

    if there:
        (tmp_path / "out").mkdir()
    prepared = Prepared(experiment=SimpleNamespace(run=fail), folder=claim(tmp_path / "out"))
    with pytest.raises(KeyboardInterrupt):
        prepared.execute()
    assert [p.name for p in tmp_path.iterdir()] == (["out"] if there else [])
    assert list(tmp_path.rglob("*")) == ([tmp_path / "out"] if there else [])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("mode", [0o500, 0o000])
def test_a_folder_without_permission_is_refused(call, tmp_path, mode):
    parent = tmp_path / "locked"
    parent.mkdir(mode=mode)
    code, out, err = call("run", "--out", parent / "out")
    assert (code, out) == (4, "")
    assert is_one_line(err) and "Permission denied" in err


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_dry_run_says_sizes_and_power_and_writes_nothing(call, flags):
    code, out, err = call("run", "--dry-run", *flags)
    assert (code, err) == (0, "")
    assert list(Path.cwd().iterdir()) == []
    if flags:
        document = json.loads(out)
        assert document["tasks"]["recall"]["questions"] == 16 * 12
        assert all(0 <= p <= 1 for task in document["tasks"].values() for p in task["power"].values())
    else:
        assert "nvfp4@16 (control)" in out
        assert "16 streams of 1536 decoded steps, 1 token prefilled" in out


WOULD_BE_REFUSED = {
    kind: arguments
    for kind, (arguments, _) in (USAGE | INPUT).items()
    if arguments[0] == "run" and kind not in ("steps that are no number", "unknown flag", "two suites")
}


@pytest.mark.parametrize("kind", WOULD_BE_REFUSED)
def test_a_dry_run_refuses_what_a_run_refuses_with_the_same_line(call, kind):
    arguments = WOULD_BE_REFUSED[kind]
    assert call(*arguments, "--dry-run") == call(*arguments)


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
@pytest.mark.parametrize("steps", [10**9, 10**40])
def test_more_steps_than_the_memory_holds_are_refused_before_anything_fills_it(call, flags, steps):
    code, out, err = call("run", "--steps", steps, *flags)
    assert (code, out) == (4, "")
    assert is_one_line(err) and f"{steps} steps need about" in err and "--steps" in err
    assert list(Path.cwd().iterdir()) == []


def test_the_memory_that_is_refused_grows_with_every_size(monkeypatch):
    from driftgate import memory
    from driftgate.evals.suite import load_suite

    config = SimpleNamespace(
        dtype="float32",
        head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["full_attention", "linear_attention"],
    )
    suite = load_suite("quick")
    needed = memory.needed_memory(suite, config)
    for change in ({"steps": 2 * suite.steps}, {"sequences": 32}, {"sequences": 32, "batch": 32}):
        assert memory.needed_memory(suite.changed(**change), config) > 1.2 * needed
    assert (
        memory.needed_memory(suite, config, device="cuda") < memory.needed_memory(suite, config, dtype="bf16") < needed
    )
    monkeypatch.setattr(memory, "available_memory", lambda: needed)
    assert memory.check_memory(suite, config) == needed
    monkeypatch.setattr(memory, "available_memory", lambda: needed - 1)
    with pytest.raises(InputError, match="1536 steps need about"):
        memory.check_memory(suite, config)


def test_this_machine_says_how_much_memory_is_free():
    from driftgate.memory import available_memory

    free = available_memory()
    assert free is not None and 2**20 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_a_vocabulary_without_the_tokens_of_the_tasks_is_refused(call, tiny_checkpoint, flags):
    code, out, err = call("run", "--model", tiny_checkpoint, "--task", "recall", "--steps", 64, *flags)
    assert (code, out) == (4, "")
    assert is_one_line(err) and "has 96 tokens" in err and "--task none" in err
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(("counts_as", "code"), [(None, 3), ("pass", 0), ("fail", 1)])
def test_a_run_ends_as_its_gate_does(call, monkeypatch, counts_as, code):
    """A policy that says what an inconclusive run counts as holds for the run itself; a pass is said aloud."""
    from driftgate import main_job
    from driftgate.accuracy.policy import Check, Policy, decide

    kl = cases.lognormal(1e-3)
    data = cases.make_run({"nvfp4/fp32@4": cases.Measured(kl=kl)})
    rule = None if counts_as is None else {"counts_as": counts_as, "reason": "the night decides"}
    checks = (Check(check="kl_mean", limit=float(kl.mean()), reason="because"),)
    decide(data, Policy(name="mine", inconclusive=rule, checks=checks))
    prepared = SimpleNamespace(experiment=SimpleNamespace(n_steps=1), out=Path(), execute=lambda _advance: data)
    monkeypatch.setattr(main_job, "prepare", lambda *_, **__: prepared)
    found, out, err = call("run", "--quiet")
    assert (found, out) == (code, "")
    assert (is_one_line(err) and "the night decides" in err) if counts_as == "pass" else err == ""
    assert ("counts as a" in call("run")[1]) == (counts_as is not None)
