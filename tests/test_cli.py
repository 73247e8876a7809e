"""The command line: exit codes, one line of error, one JSON document, nothing where nothing is wanted."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import typer
from cli_cases import (
    INPUT,
    PROGRAM,
    USAGE,
    call_program,
    damage,
    enter_empty_folder,
    is_one_line,
    limits,
    store_run,
    write_policy,
)  # fmt: skip

from driftgate import cli, console


@pytest.fixture
def call(capfd, monkeypatch, tmp_path):
    """``call(*arguments)`` runs the command line in this process, in an empty folder: exit code, output, errors."""
    enter_empty_folder(monkeypatch, tmp_path)
    return partial(call_program, capfd, monkeypatch)


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    return store_run(tmp_path_factory.mktemp("stored"))


@pytest.mark.parametrize("kind", USAGE)
def test_a_usage_error_is_one_line_and_makes_no_folder(call, kind):
    arguments, says = USAGE[kind]
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert is_one_line(err) and says.lower() in err.lower()
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("kind", INPUT)
def test_a_file_that_is_not_there_is_exit_code_4(call, kind):
    arguments, says = INPUT[kind]
    code, out, err = call(*arguments)
    assert (code, out) == (4, "")
    assert is_one_line(err) and says in err


def test_report_renders_again_and_says_what_it_wrote(call, stored, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(stored, folder)
    (folder / "report.md").unlink()
    code, out, err = call("report", folder)
    assert (code, err) == (0, "")
    assert (folder / "report.md").read_bytes() == (stored / "report.md").read_bytes()
    assert all(Path(line).is_file() for line in out.splitlines())


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
    with console.progress("cases", 2, True, then=then) as advance:
        advance(1)
        advance(1)
    shown = capfd.readouterr().err
    assert "cases" in shown
    assert ("statistics" in shown) == (then is not None)
    assert "cross-check" not in shown


def test_no_full_bar_stands_beside_what_follows_it(capfd, monkeypatch):
    """What follows is told by a line of its own with the time that it takes, even where steps were counted short."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with console.progress("decode", 2, True, then="cross-check and statistics") as advance:
        advance(1)
        assert "cross-check" not in capfd.readouterr().err
        advance(1)
        capfd.readouterr()
        advance(1)
    shown = capfd.readouterr().err
    assert "cross-check and statistics" in shown and "0:00:0" in shown
    assert "2/2" not in shown and "decode" not in shown


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
    source = '"""--doc"""\nraise E(f"{x} is missing (--warp), see --steps {n}; var(--blue), a--b")'
    assert named_options(source) == {"--warp", "--steps"}
    assert known_options() >= {"--steps", "--debug", "--format", "--json"}
    assert "--warp" not in known_options()


def test_messages_name_only_options_that_exist():
    """evals/training is a program of its own, with its own options."""
    root = Path(__file__).resolve().parents[1]
    rooms = ("quant", "kernels", "accuracy", "evals", "reports", "src")
    files = [p for room in rooms for p in (root / room).rglob("*.py") if "training" not in p.parts]
    assert len(files) > 50
    named = {str(p.relative_to(root)): named_options(p.read_text("utf-8")) for p in files}
    assert any(named.values())
    of_others = {"--query-gpu", "--log", "--to", "--driftgate-policy", "--driftgate-inconclusive"}
    for name in ("kernels/device_time.py", "accuracy/samples.py", "accuracy/sample_formats.py"):
        named[name] -= of_others  # of nvidia-smi, lm-eval and inspect
    named["src/driftgate/pytest_plugin.py"] -= of_others  # of pytest, by the plugin
    assert {name: wrong for name, options in named.items() if (wrong := options - known_options())} == {}
