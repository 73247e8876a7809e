"""An interrupted run ends as an uninterrupted one; what does not belong to it is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from driftgate import run_request
from driftgate.errors import InputError
from driftgate.main_job import prepare, resume
from driftgate.run_folder import CLAIM
from driftgate.run_request import REQUEST

SMALL = {
    "plans": ["nvfp4/fp32@4"], "controls": ["nvfp4@4"], "tasks": ["gpqa"], "mode": "loglikelihood", "repeats": 1,
    "limit": 3, "batch": 2, "steps": 63, "sequences": 2,
}  # fmt: skip
COMMAND = ["driftgate", "run"]
LOCKSTEP = 63


class Interrupted(Exception):
    pass


def stop_after(n: int):
    """A progress callback that interrupts once so many decode steps are done."""
    seen = [0]

    def advance(done: int) -> None:
        seen[0] += done
        if seen[0] > n:
            raise Interrupted

    return advance


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Folder of an uninterrupted run."""
    out = tmp_path_factory.mktemp("resume") / "whole"
    prepare("quick", out=out, command=COMMAND, **SMALL).execute()
    return out


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Path:
    """Folder of a run that was interrupted after its first batch of answers."""
    out = tmp_path_factory.mktemp("resume") / "interrupted"
    with pytest.raises(Interrupted):
        prepare("quick", out=out, command=COMMAND, **SMALL).execute(stop_after(LOCKSTEP + 1))
    return out


def take(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_resumed_run_has_the_results_of_an_uninterrupted_one(whole, interrupted, tmp_path):
    """Row 22 of the public faults."""
    folder = take(interrupted, tmp_path)
    assert {p.name for p in folder.iterdir()} == {REQUEST, "answers"}
    kept = {p.name: p.stat().st_mtime_ns for p in (folder / "answers" / "gpqa").iterdir()}
    assert len(kept) == 1
    resume(folder, command=COMMAND).execute()
    for name in ("results.json", "items.parquet", "steps.parquet"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
    assert [(folder / "answers" / "gpqa" / name).stat().st_mtime_ns for name in kept] == list(kept.values())
    assert {p.name for p in folder.iterdir()} == {p.name for p in whole.iterdir()}
    with pytest.raises(InputError, match="holds a finished run; `driftgate report"):
        resume(folder)


def test_a_new_run_does_not_take_the_folder_of_an_interrupted_one(interrupted):
    with pytest.raises(InputError, match=r"holds an interrupted run; give --resume"):
        prepare("quick", out=interrupted, **SMALL)


def test_a_torn_batch_is_named_and_nothing_else_is_lost(interrupted, tmp_path):
    folder = take(interrupted, tmp_path)
    batch = next((folder / "answers" / "gpqa").iterdir())
    batch.write_text(batch.read_text()[:100])
    with pytest.raises(InputError, match="is no batch of answers or was edited"):
        resume(folder).execute()
    assert (folder / REQUEST).exists()


def seal(folder: Path, request: dict) -> None:
    """Write a request as a run on another machine would have written it."""
    del request["sha256"]
    (folder / REQUEST).write_text(json.dumps({**request, "sha256": run_request.hash_request(request)}))


def test_a_request_that_was_edited_is_refused(interrupted, tmp_path):
    """A limit that is loosened on the way must not turn a verdict."""
    folder = take(interrupted, tmp_path)
    request = json.loads((folder / REQUEST).read_text())
    request["policy"]["checks"][-1]["margin"] = 50
    (folder / REQUEST).write_text(json.dumps(request))
    with pytest.raises(InputError, match="was edited; start the run anew"):
        resume(folder)


def test_of_two_that_take_a_folder_over_one_gets_it(tmp_path):
    """The claim of a dead process; both look at it at the same moment, many times."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom driftgate.errors import InputError\n"
        "from driftgate.run_folder import reclaim\n"
        "wins = 0\nsys.stdin.readline()\n"
        "for i in range(60):\n    try:\n        reclaim(Path(sys.argv[1]) / str(i))\n        wins += 1\n"
        "    except InputError:\n        pass\n"
        "print(wins, flush=True)\nsys.stdin.readline()\n"
    )
    for i in range(60):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / CLAIM).write_text(f"999999999 {os.uname().nodename}\n")
    both = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", script, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for one in both:
        one.stdin.write("go\n")
        one.stdin.flush()
    wins = [int(one.stdout.readline()) for one in both]
    for one in both:  # a process that is alive keeps what it took
        one.communicate("end\n")
    assert sum(wins) == 60


@pytest.mark.parametrize("content", ["", "12", "a b"])
def test_a_damaged_claim_is_one_line(interrupted, tmp_path, content):
    folder = take(interrupted, tmp_path)
    (folder / CLAIM).write_text(content)
    with pytest.raises(InputError, match=r"is damaged; delete it if no run is going on"):
        resume(folder)


@pytest.mark.parametrize(
    ("part", "field"), [("versions", "torch"), ("model", "model.safetensors"), ("machine", "type"), ("tasks", "gpqa")]
)
def test_a_run_is_not_resumed_on_another_machine_or_model(interrupted, tmp_path, part, field):
    folder = take(interrupted, tmp_path)
    request = json.loads((folder / REQUEST).read_text())
    request[part][field] = "another"
    seal(folder, request)
    with pytest.raises(InputError, match=f"{part} {field} is not what the run began with"):
        resume(folder)
    assert not (folder / CLAIM).exists()


WRONG = '{"suite": 1, "policy": 2, "device": 3, "backend": 4, "dtype": 5}'


@pytest.mark.parametrize("content", ["", "[]", "{}", WRONG])
def test_a_damaged_request_is_one_line(tmp_path, content):
    (tmp_path / REQUEST).write_text(content)
    with pytest.raises(InputError, match=REQUEST) as caught:
        resume(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_run_is_one_line(tmp_path):
    with pytest.raises(InputError, match="holds no interrupted run"):
        resume(tmp_path)


def test_a_run_that_still_goes_on_is_left_alone(interrupted, tmp_path):
    folder = take(interrupted, tmp_path)
    (folder / CLAIM).write_text(f"{os.getpid()} {os.uname().nodename}\n")
    with pytest.raises(InputError, match=f"belongs to process {os.getpid()} on .*, which is still going on"):
        resume(folder)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_run_that_is_killed_again_and_again_ends_the_same(whole, tmp_path):
    """SIGKILL at other moments each time: the claim of a dead process is taken over, half a file is never left."""
    script = Path(sys.executable).with_name("driftgate")
    out = tmp_path / "killed"
    flags = [
        "quick", "--plan", "nvfp4/fp32@4", "--control", "nvfp4@4", "--task", "gpqa", "--mode", "loglikelihood",
        "--repeats", "1", "--limit", "3", "--batch", "2", "--steps", "63", "--sequences", "2", "--quiet",
    ]  # fmt: skip
    for wait in (4, 6, 9, 12):
        again = ["--resume", str(out), "--quiet"] if (out / REQUEST).exists() else [*flags, "--out", str(out)]
        shutil.rmtree(out, ignore_errors=True) if again[0] == "quick" else None
        with subprocess.Popen([script, "run", *again], cwd=tmp_path) as process:
            time.sleep(wait)
            process.send_signal(signal.SIGKILL)
        if (out / "results.json").exists():
            break
    if not (out / "results.json").exists():
        again = ["--resume", str(out), "--quiet"] if (out / REQUEST).exists() else [*flags, "--out", str(out)]
        assert subprocess.run([script, "run", *again], cwd=tmp_path, check=False).returncode in (0, 1, 3)
    for name in ("results.json", "items.parquet", "steps.parquet"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
