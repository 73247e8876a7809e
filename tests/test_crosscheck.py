"""The second process with interpreted kernels: what it is given, what it gives back, and that it never stays behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from driftgate.accuracy.crosscheck import CrossCheckJob, CrossCheckOutcome, certified, steps_needed
from driftgate.accuracy.lockstep import LockstepResult, LockstepRunner
from driftgate.accuracy.models import load_model
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.kernels.contract import Backend

STEPS, PREFILL, VOCAB, LAYERS, WIDTH = 4, 1, 96, 2, 16
TOKENS = np.random.default_rng(0).integers(3, VOCAB, PREFILL + STEPS)


def plans(*texts: str) -> dict[str, PrecisionPlan]:
    return {text: PrecisionPlan.parse(text) for text in texts}


PLANS = plans("fp32@2", "fp8/fp32@2")


def start(folder, tokens: np.ndarray = TOKENS, **changes) -> CrossCheckJob:
    fields = {
        "folder": folder, "dtype": None, "plans": PLANS, "token_ids": tokens, "prefill": PREFILL, "vocab_size": VOCAB
    }  # fmt: skip
    return CrossCheckJob(**fields | changes)


@pytest.mark.parametrize(
    ("texts", "cycles", "steps"),
    [((), 2, 2), (("fp32@1",), 2, 2), (("fp32@16", "nvfp4@4"), 2, 32), (("fp32@3", "nvfp4@5"), 3, 15)],
)
def test_steps_hold_the_cycles_of_the_longest_plan(texts, cycles, steps):
    assert steps_needed(plans(*texts), cycles=cycles) == steps


def test_what_a_run_certifies_are_the_lengths_and_formats_of_its_plans():
    wanted = certified(plans("nvfp4/fp8@16", "fp32@4"))
    assert wanted["lengths"] == [1, 4, 16]
    assert set(wanted["formats"]) == {"fp32", "fp8", "nvfp4"}
    assert certified({}) == {"lengths": [1], "formats": ["fp32"]}


@pytest.fixture(scope="module")
def checkpoint(make_model, tmp_path_factory) -> Path:
    """Two value heads: an interpreted program takes some 20 ms, and a head of a row is one."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_model(linear_num_key_heads=1, linear_num_value_heads=2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def outcome(checkpoint) -> CrossCheckOutcome:
    job = start(checkpoint)
    try:
        found = job.result()
    finally:
        job.cancel()
    assert not job.path.exists()
    return found


@pytest.fixture(scope="module")
def twin(checkpoint) -> LockstepResult:
    """The same tokens and plans on the torch backend in this process."""
    loaded = load_model(checkpoint, name="tiny", device="cpu")
    runner = LockstepRunner(loaded.model, PLANS, batch=1, backend=Backend.TORCH, prefill=PREFILL, vocab_size=VOCAB)
    return runner.run(TOKENS[None], keep_logits=STEPS)


def test_the_child_returns_logits_of_the_baseline_and_of_every_plan(outcome):
    assert outcome.steps == STEPS
    assert {name: a.shape for name, a in outcome.logits.items()} == dict.fromkeys(["baseline", *PLANS], (STEPS, VOCAB))
    assert outcome.seconds > 0


@pytest.mark.parametrize("name", ["baseline", "fp32@2"])
def test_interpreted_logits_equal_those_of_the_torch_twin_up_to_rounding(outcome, twin, name):
    """Both sum WIDTH products in FP32, in another order: WIDTH·2^-24 of the greatest term a sum, two sums a step and
    layer, which STEPS steps carry on in the state; the norms and projections after them are allowed a factor of 8.
    """
    ours, theirs = twin.first_logits[name], outcome.logits[name]
    bound = 8 * 2 * LAYERS * STEPS * WIDTH * 2.0**-24 * np.abs(theirs).max()
    assert np.abs(ours - theirs).max() <= bound
    assert np.abs(theirs[0] - theirs[1]).max() > 100 * bound, "the bound tells logits apart"


def test_the_child_certifies_the_checkpoints_own_shapes(outcome):
    assert outcome.again_equal
    assert {record.invariant for record in outcome.bitwise} >= {"I1", "I2", "I3"}
    for record in outcome.bitwise:
        assert record.equal
        assert (record.case["backend"], record.case["data"]) == ("triton-interpret", "recorded")
        assert (record.case["value_heads"], record.case["d_k"]) == (2, WIDTH)


def test_the_child_measures_its_kernels_against_fp64(outcome):
    assert [(record.case["plan"], record.what) for record in outcome.tolerance] == [
        ("fp32@2", "output"), ("fp32@2", "state"),
    ]  # fmt: skip
    for record in outcome.tolerance:
        assert record.within and record.greatest_error > 0 and record.scale > 0.1
        assert (record.recurrence, record.case["backend"]) == ("gdn", "triton-interpret")


def test_a_child_that_fails_says_why_in_the_first_line_and_leaves_no_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    job = start(tmp_path)
    with pytest.raises(RuntimeError) as caught:
        job.result()
    first, *log = str(caught.value).splitlines()
    assert first.startswith("the interpreted cross-check ended with 1: ") and "names no model_type" in first
    assert 1 < len(log) <= 12 and log[-1] in first
    assert not job.path.exists()
    job.cancel()


def test_a_cancelled_child_is_dead_and_leaves_no_folder(checkpoint):
    job = start(checkpoint, tokens=np.tile(TOKENS, 100))
    process = job._process
    assert process.poll() is None
    job.cancel()
    assert process.returncode is not None and process.returncode < 0
    assert not job.path.exists()
    job.cancel()  # a second time changes nothing


ORPHAN = """
import os, signal, sys
import numpy as np
from pathlib import Path
from driftgate.accuracy.crosscheck import CrossCheckJob
job = CrossCheckJob(
    folder=Path(sys.argv[1]), dtype=None, plans={}, token_ids=np.ones(5000, dtype=int), prefill=1, vocab_size=96
)
print(job._process.pid, job.path, flush=True)
os.kill(os.getpid(), int(sys.argv[2]))
"""


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # empty: it ended and nobody asked yet
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_does_not_outlive_a_parent_that_a_signal_ended(checkpoint, number):
    """What a cancelled CI job or `timeout` sends."""
    command = [sys.executable, "-P", "-c", ORPHAN, str(checkpoint), str(int(number))]
    parent = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert parent.returncode == -number
    pid, path = parent.stdout.split()
    deadline = time.monotonic() + 120  # it notices once it has started, in a second or two
    while (is_running(pid) or Path(path).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(path).exists()
    assert not is_running(pid)
