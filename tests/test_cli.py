"""The command line: exit codes, one line of error, one JSON document, nothing where nothing is wanted."""

from __future__ import annotations

import ast
import errno
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file

from driftgate import cli
from driftgate.accuracy.policy import decide, load_policy
from driftgate.accuracy.records import load_run, save_run
from driftgate.errors import InputError
from driftgate.main_job import Prepared
from driftgate.reports import render_all
from driftgate.run_folder import CLAIM, claim, default_out

_spec = importlib.util.spec_from_file_location("run_cases", Path(__file__).parent / "run_cases.py")
cases = sys.modules["run_cases"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)

PROGRAM = Path(sys.executable).parent / "driftgate"
PLAN = "nvfp4/fp32@4"


@pytest.fixture
def call(capfd, monkeypatch, tmp_path):
    """``call(*arguments)`` runs the command line in this process, in an empty folder: exit code, output, errors."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["driftgate", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capfd.readouterr()
        return caught.value.code, out, err

    return run


def is_one_line(err: str) -> bool:
    return err.startswith("driftgate: ") and err.endswith("\n") and err.count("\n") == 1


USAGE = {
    "unknown plan option": (("run", "--plan", "fp32@4+sr2"), "+sr2"),
    "unknown format": (("run", "--plan", "nvfp5@16"), "nvfp5"),
    "no plan at all": (("run", "--plan", ""), "READ"),
    "L of 0": (("run", "--plan", "fp32@0"), "L must be 1"),
    "negative L": (("run", "--plan", "fp32@-1"), "L must be 1"),
    "L without end": (("run", "--plan", "fp32@99999999999999999999"), "fp32@9"),
    "wide read": (("run", "--plan", "fp32/fp8@4"), "wider"),
    "unknown control": (("run", "--control", "fp9@4"), "fp9"),
    "plan twice": (("run", "--plan", "fp8@4", "--plan", "fp8_e4m3@4"), "twice"),
    "the baseline": (("run", "--plan", "baseline"), "baseline"),
    "unknown model": (("run", "--model", "tiny-gnd"), "did you mean tiny-gdn"),
    "unknown suite": (("run", "quikc"), "did you mean quick"),
    "unknown task": (("run", "--task", "recal"), "did you mean recall"),
    "task twice": (("run", "--task", "recall", "--task", "recall"), "twice"),
    "unknown backend": (("run", "--backend", "trition"), "did you mean triton"),
    "backend without GPU": (("run", "--backend", "triton", "--device", "cpu"), "needs a GPU"),
    "interpreter not set": (("run", "--backend", "triton-interpret", "--device", "cpu"), "TRITON_INTERPRET=1"),
    "unknown dtype": (("run", "--dtype", "fp8"), "fp8"),
    "unknown device": (("run", "--device", "warp"), "unknown device"),
    "too short": (("run", "--steps", 20), "64"),
    "steps that are no number": (("run", "--steps", "many"), "valid integer"),
    "no sequences": (("run", "--sequences", 0), "sequences"),
    "no batch": (("run", "--batch", 0), "batch"),
    "negative seed": (("run", "--seed", -1), "seed"),
    "unknown flag": (("run", "--stesp", 3), "--stesp"),
    "two suites": (("run", "quick", "slow"), "slow"),
    "unknown command": (("rnu",), "rnu"),
    "unknown catalogue": (("ls", "modles"), "did you mean models"),
    "no catalogue": (("ls",), "CATALOGUE"),
    "no run": (("gate",), "RUN"),
}


@pytest.mark.parametrize("kind", USAGE)
def test_a_usage_error_is_one_line_and_makes_no_folder(call, kind):
    arguments, says = USAGE[kind]
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert is_one_line(err) and says.lower() in err.lower()
    assert list(Path.cwd().iterdir()) == []


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


def damage(folder: Path, name: str) -> None:
    """Change a copy of the tiny checkpoint."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    if name == "cut short":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif name == "NaN weights":
        tensors = load_file(weights)
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.nan
        save_file(tensors, weights, metadata={"format": "pt"})
    elif name == "no recurrent layer":
        fields = json.loads(config.read_text())
        config.write_text(json.dumps(fields | {"layer_types": ["full_attention"] * 3}))
    elif name == "no weights":
        weights.unlink()
    elif name == "small vocabulary":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": 96}))
    elif name == "no config":
        config.unlink()
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "nothing"}))


DAMAGES = {
    "cut short": "cut short", "NaN weights": "NaN", "no recurrent layer": "no recurrent layer",
    "no weights": "model.safetensors is missing", "no config": "no config.json", "unknown family": "nothing",
    "small vocabulary": "pad_token_id 96 is outside the vocabulary of 96",
}  # fmt: skip


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
        code, out, err = call("run", "--model", folder, *flags)
        assert (code, out) == (4, "")
        assert is_one_line(err) and DAMAGES[name] in err
    assert not out_folder.exists()
    assert list(Path.cwd().iterdir()) == []


INPUT = {
    "model folder": (("run", "--model", "./nothing"), "./nothing"),
    "suite file": (("run", "nothing.yaml"), "nothing.yaml"),
    "policy file": (("run", "--policy", "nothing.yaml"), "nothing.yaml"),
    "policy file of gate": (("gate", ".", "--policy", "nothing.yaml"), "nothing.yaml"),
    "run folder": (("gate", "nothing"), "nothing"),
    "run folder of report": (("report", "nothing"), "nothing"),
    "empty run folder": (("gate", "."), "results.json"),
    "run folder that is a file": (("gate", __file__), "test_cli.py"),
}


@pytest.mark.parametrize("kind", INPUT)
def test_a_file_that_is_not_there_is_exit_code_4(call, kind):
    arguments, says = INPUT[kind]
    code, out, err = call(*arguments)
    assert (code, out) == (4, "")
    assert is_one_line(err) and says in err


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


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """A run of one candidate with a mean KL of 0.01, gated by the default policy, with its reports."""
    folder = tmp_path_factory.mktemp("stored")
    baseline, answers = cases.flipped(1, 0, 192, right=150)
    items = cases.make_items(baseline, {PLAN: answers}, per_stream=12)
    run = cases.make_run({PLAN: cases.Measured(kl=cases.lognormal(0.01))}, items=items)
    decide(run, load_policy())
    save_run(folder, run)
    render_all(folder)
    return folder


def write_policy(folder: Path, limit: float) -> Path:
    path = folder / "policy.yaml"
    path.write_text(f"checks: [{{check: kl_mean, limit: {limit}, reason: because}}]")
    return path


def limits(stored: Path) -> dict[str, float]:
    """Limits on either side of the one-sided bounds of the stored run's mean, and one between them."""
    mean = load_run(stored).results.plans[PLAN].kl.mean
    return {"pass": 2 * mean, "fail": mean / 2, "inconclusive": mean}


@pytest.mark.parametrize(("verdict", "code"), [("pass", 0), ("fail", 1), ("inconclusive", 3)])
def test_gate_decides_again_and_leaves_the_folder_alone(call, stored, tmp_path, verdict, code):
    policy = write_policy(tmp_path, limits(stored)[verdict])
    before = {p: p.read_bytes() for p in stored.rglob("*") if p.is_file()}
    for flags in ((), ("--quiet",), ("--json",)):
        found, out, err = call("gate", stored, "--policy", policy, *flags)
        assert (found, err) == (code, "")
        if flags == ("--json",):
            document = json.loads(out)
            assert (document["schema_version"], document["verdict"]) == (1, verdict)
            assert [v["verdict"] for v in document["verdicts"]] == [verdict]
        else:
            assert ("verdict: " + verdict in out) == (flags == ())
            assert (out == "") == (flags == ("--quiet",))
    assert {p: p.read_bytes() for p in stored.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(("verdict", "code"), [("pass", 0), ("fail", 1), ("inconclusive", 3)])
def test_text_json_junit_and_exit_code_agree(call, stored, tmp_path, verdict, code):
    run = load_run(stored)
    policy = write_policy(tmp_path, limits(stored)[verdict])
    decide(run, load_policy(policy))
    folder = tmp_path / "run"
    folder.mkdir()
    save_run(folder, run)
    assert call("report", folder, "--quiet") == (0, "", "")
    assert call("gate", folder, "--policy", policy, "--quiet")[0] == code
    assert json.loads((folder / "results.json").read_text())["verdict"] == verdict
    assert verdict.upper() in (folder / "report.md").read_text()
    assert re.search(rf"<title>[^<]*{verdict}", (folder / "report.html").read_text(), re.IGNORECASE)
    suite = ElementTree.parse(folder / "junit.xml").getroot()
    expected = {"pass": ("0", "0"), "fail": ("1", "0"), "inconclusive": ("0", "1")}[verdict]
    assert (suite.get("failures"), suite.get("skipped")) == expected


def test_report_renders_again_and_says_what_it_wrote(call, stored, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(stored, folder)
    (folder / "report.md").unlink()
    code, out, err = call("report", folder)
    assert (code, err) == (0, "")
    assert (folder / "report.md").read_bytes() == (stored / "report.md").read_bytes()
    assert all(Path(line).is_file() for line in out.splitlines())


@pytest.mark.parametrize("name", ["results.json", "manifest.json", "steps.parquet", "items.parquet"])
def test_a_stored_run_that_is_cut_short_is_exit_code_4(call, stored, tmp_path, name):
    folder = tmp_path / "run"
    shutil.copytree(stored, folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:50])
    code, out, err = call("gate", folder)
    assert (code, out) == (4, "")
    assert is_one_line(err) and name in err


@pytest.mark.parametrize(
    ("catalogue", "holds"),
    [
        ("models", "tiny-gdn"), ("plans", "nvfp4/fp32@16"), ("tasks", "tracking"), ("formats", "nvfp4"),
        ("suites", "quick"),
    ],
)  # fmt: skip
def test_every_catalogue_is_listed_as_a_table_and_as_json(call, catalogue, holds):
    code, out, err = call("ls", catalogue)
    assert (code, err) == (0, "")
    assert holds in out
    code, out, err = call("ls", catalogue, "--json")
    assert (code, err) == (0, "")
    assert holds in [next(iter(row.values())) for row in json.loads(out)]


def test_doctor_prints_findings_or_one_json_document(call, monkeypatch):
    from driftgate import doctor

    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("ok", "python", "3")])
    assert call("doctor") == (0, "ok    python: 3\n", "")
    code, out, _ = call("doctor", "--json")
    assert (code, json.loads(out)) == (0, [{"status": "ok", "subject": "python", "text": "3"}])
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("bad", "torch", "none")])
    assert call("doctor")[0] == 4


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
        dtype="float32", head_dim=16, num_key_value_heads=1, layer_types=["full_attention", "linear_attention"]
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


@pytest.mark.parametrize("arguments", [(), ("-h",), ("--help",), ("run", "-h"), ("gate", "--help"), ("ls", "-h")])
def test_help_is_printed(call, arguments):
    code, out, err = call(*arguments)
    assert (code, err) == (0, "")
    assert "Usage: driftgate" in out


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("first line\nsecond line"), 70, "internal error: RuntimeError: first line; please report"),
        (ValueError(), 70, "internal error: ValueError"),
        (BrokenPipeError(), 141, ""),
        (OSError(errno.ENOSPC, "No space left on device"), 4, "no space is left"),
        (MemoryError("of 8 TB"), 4, "memory ran out: of 8 TB"),
    ],
)
def test_what_escapes_is_one_line_with_its_exit_code(call, monkeypatch, error, code, says):
    def fail(_folder: object) -> None:
        raise error

    monkeypatch.setattr("driftgate.reports.render_all", fail)
    found, out, err = call("report", ".")
    assert (found, out) == (code, "")
    assert says in err
    assert is_one_line(err) if says else err == ""


def test_debug_shows_the_traceback_before_the_line(call):
    code, out, err = call("--debug", "gate", "nothing")
    assert (code, out) == (4, "")
    assert err.startswith("Traceback") and err.splitlines()[-1].startswith("driftgate: run folder nothing")


@pytest.mark.parametrize(
    ("arguments", "code", "out_lines", "err_lines"),
    [
        (("run", "--plan", "fp32@0"), 2, 0, 1),
        (("gate", "nothing"), 4, 0, 1),
        (("run", "--model", "MODEL", "--out", "out"), 4, 0, 1),
        (("ls", "suites"), 0, None, 0),
    ],
)
def test_the_installed_program_behaves_the_same(tmp_path, tiny_checkpoint, arguments, code, out_lines, err_lines):
    """A process of its own: what libraries print at import and at exit counts too."""
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    damage(tmp_path / "model", "NaN weights")
    command = [str(tmp_path / "model") if a == "MODEL" else a for a in arguments]
    done = subprocess.run([PROGRAM, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == err_lines
    assert all(line.startswith("driftgate: ") for line in done.stderr.splitlines())
    assert out_lines is None or len(done.stdout.splitlines()) == out_lines


@pytest.fixture
def no_reader() -> Iterator[int]:
    """A pipe whose reader has gone."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@pytest.mark.parametrize(("verdict", "code"), [("pass", 0), ("fail", 1)])
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_reader_that_went_away_leaves_the_exit_code_of_the_verdict(stored, tmp_path, no_reader, verdict, code, flags):
    policy = write_policy(tmp_path, limits(stored)[verdict])
    command = [PROGRAM, "gate", stored, "--policy", policy, *flags]
    done = subprocess.run(command, stdout=no_reader, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def test_help_without_a_reader_is_no_failed_gate(no_reader):
    done = subprocess.run([PROGRAM, "gate", "--help"], stdout=no_reader, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("arguments", [("gate", "RUN"), ("gate", "RUN", "--json"), ("ls", "suites"), ("--help",)])
def test_a_full_disk_is_exit_code_4(stored, arguments):
    command = [PROGRAM, *(stored if a == "RUN" else a for a in arguments)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 4
        assert is_one_line(done.stderr) and "No space left on device" in done.stderr
        assert subprocess.run(command, stdout=full, stderr=full, check=False).returncode == 4


@pytest.mark.parametrize("then", [None, "statistics"])
def test_the_bar_says_what_follows_its_last_step(capfd, monkeypatch, then):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal for rich
    with cli._progress("cases", 2, True, then=then) as advance:
        advance(1)
        advance(1)
    shown = capfd.readouterr().err
    assert "cases" in shown
    assert ("statistics" in shown) == (then is not None)
    assert "cross-check" not in shown


OPTION = re.compile(r"(?<!var\()(?<![\w-])--[a-z][a-z-]*")  # var(--blue) is CSS


def named_options(source: str) -> set[str]:
    """Options in the strings of a file; strings that stand alone are docstrings and name other programs' too."""
    tree = ast.parse(source)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in alone]
    return {option for text in texts if isinstance(text, str) for option in OPTION.findall(text)}


def known_options() -> set[str]:
    program = typer.main.get_command(cli.app)
    commands = [program, *program.commands.values()]
    return {"--help"} | {option for command in commands for p in command.params for option in p.opts}


def test_an_option_that_does_not_exist_is_seen():
    source = '"""--doc"""\nraise E(f"{x} is missing (--resume), see --steps {n}; var(--blue), a--b")'
    assert named_options(source) == {"--resume", "--steps"}
    assert known_options() >= {"--steps", "--debug", "--format", "--json"}
    assert "--resume" not in known_options()


def test_messages_name_only_options_that_exist():
    """evals/training is a program of its own, with its own options."""
    root = Path(__file__).resolve().parents[1]
    rooms = ("quant", "kernels", "accuracy", "evals", "reports", "src")
    files = [p for room in rooms for p in (root / room).rglob("*.py") if "training" not in p.parts]
    assert len(files) > 50
    named = {str(p.relative_to(root)): named_options(p.read_text("utf-8")) for p in files}
    assert any(named.values())
    named["kernels/device_time.py"] -= {"--query-gpu"}  # an option of nvidia-smi
    assert {name: wrong for name, options in named.items() if (wrong := options - known_options())} == {}
