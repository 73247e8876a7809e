"""The house rules that nothing else would notice: who imports whom, and what a wheel holds."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("quant", "kernels", "accuracy", "evals", "reports")
MAY_IMPORT = {
    "quant": {"quant"},
    "kernels": {"kernels", "quant"},
    "accuracy": {"accuracy", "kernels", "quant"},
    "evals": {"evals", "accuracy", "kernels", "quant"},
    "reports": {"reports", "accuracy.records"},
}
EVERYWHERE = {"errors"}
MODULE_NAME = re.compile(r"driftgate((?:\.\w+)+)\.?")
NOT_PACKED = ("__pycache__", ".git", ".venv", "build", "dist", "runs", "shared", ".hypothesis")


def imported_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name below ``driftgate`` of every import in a file, lazy ones and functions' own included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if MODULE_NAME.fullmatch(node.value) else []
        else:
            continue
        for name in names:
            if name == "driftgate" or name.startswith("driftgate."):
                yield node.lineno, name.removeprefix("driftgate").strip(".")


def breaches(source: str, room: str) -> list[tuple[int, str]]:
    """Imports of a room's file that the layout does not allow."""
    allowed = MAY_IMPORT[room] | EVERYWHERE
    return [
        (line, name)
        for line, name in imported_names(source)
        if not any(name == path or name.startswith(f"{path}.") for path in allowed)
    ]


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("quant", "from driftgate.kernels.contract import Fold"),
        ("kernels", "def f():\n    import driftgate.accuracy.plans"),
        ("accuracy", "if TYPE_CHECKING:\n    from driftgate.evals.suite import Suite"),
        ("accuracy", "HOMES = {'run': 'driftgate.main_job'}"),
        ("accuracy", "import_module(f'driftgate.evals.{name}')"),
        ("reports", "from driftgate.accuracy.plans import PrecisionPlan"),
        ("reports", "from driftgate.accuracy import records, lockstep"),
        ("evals", "from driftgate import run"),
        ("quant", "import driftgate"),
    ],
)
def test_a_forbidden_import_is_seen(room, source):
    assert breaches(source, room)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_they_may(room):
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    found = {str(path.relative_to(ROOT)): wrong for path in files if (wrong := breaches(path.read_text("utf-8"), room))}
    assert found == {}


def test_importing_a_room_imports_neither_triton_nor_transformers():
    code = "import importlib, sys\n" + "\n".join(
        f"importlib.import_module('driftgate.{room}')\n"
        f"print('{room}', sorted({{'triton', 'transformers'}} & set(sys.modules)))"
        for room in ROOMS
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout.splitlines(), done.stderr) == ([f"{room} []" for room in ROOMS], "")


@pytest.mark.parametrize("module", ["driftgate", "driftgate.cli", "driftgate.reports", "driftgate.accuracy.records"])
def test_what_reads_stored_runs_imports_no_torch(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'triton', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def packages() -> dict[str, Path]:
    """Every package that lies in the tree, by its installed name."""
    found = {"driftgate": ROOT / "src" / "driftgate"}
    for room in ROOMS:
        for init in (ROOT / room).rglob("__init__.py"):
            found["driftgate." + ".".join(init.parent.relative_to(ROOT).parts)] = init.parent
    return found


def test_pyproject_lists_every_package():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    assert setuptools["packages"] == sorted(packages())
    assert set(setuptools["package-dir"]) == {"driftgate", *(f"driftgate.{room}" for room in ROOMS)}


def test_every_python_file_of_a_room_lies_in_a_package():
    homes = set(packages().values())
    strays = [p for room in ROOMS for p in (ROOT / room).rglob("*.py") if p.parent not in homes]
    assert strays == []


def test_a_side_stream_waits_for_what_it_reads():
    """A kernel on another stream may run before its arguments are filled, slot numbers among them."""
    waits = re.compile(r"(\w+) = torch\.cuda\.Stream\(\)[^\n]*\n\s+\1\.wait_stream\(torch\.cuda\.current_stream\(\)\)")
    found = 0
    for folder in (*ROOMS, "tests", "src"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != Path(__file__).resolve():
                source = path.read_text("utf-8")
                assert source.count("torch.cuda.Stream()") == len(waits.findall(source)), path
                found += source.count("torch.cuda.Stream()")
    assert found >= 3


def test_rooms_have_no_version_of_their_own():
    wrong = [p for p in (ROOT / room / "__init__.py" for room in ROOMS) if "__version__" in p.read_text("utf-8")]
    assert wrong == []


def repository_files() -> list[Path]:
    """Files that are tracked or would be, where git knows."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git repository here")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_is_above_8_mb():
    assert [p for p in repository_files() if p.stat().st_size > 8 * 2**20] == []


def test_no_file_names_a_folder_of_one_machine():
    marks = [f"/{name}/".encode() for name in ("work", "opt/dg")]
    wrong = [p for p in repository_files() if any(mark in p.read_bytes() for mark in marks)]
    assert wrong == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, without network."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_PACKED, "*.egg-info", ".*_cache"))
    command = [
        sys.executable, "-P", "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "--no-index",
        "--disable-pip-version-check", "--verbose", "--wheel-dir", str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "build.log").write_text(done.stdout + done.stderr)
    (built,) = folder.glob("*.whl")
    return built


def data_files() -> set[str]:
    """Everything that code opens by its place beside the code, as named in a wheel."""
    patterns = (
        "accuracy/policies/*.yaml", "evals/suites/*.yaml", "evals/checkpoints/*/*", "evals/data/*",
        "reports/templates/*",
    )  # fmt: skip
    files = {f"driftgate/{p.relative_to(ROOT).as_posix()}" for g in patterns for p in ROOT.glob(g) if p.is_file()}
    return {f for f in files if "__pycache__" not in f} | {"driftgate/py.typed"}


@pytest.mark.timeout(300)
def test_the_wheel_holds_every_module_and_data_file(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        f"{name.replace('.', '/')}/{path.name}" for name, folder in packages().items() for path in folder.glob("*.py")
    }
    assert sorted((modules | data_files()) - held) == []
    assert sorted(n for n in held if not n.startswith(("driftgate/", "driftgate-"))) == []


@pytest.mark.timeout(300)
def test_setuptools_builds_the_wheel_without_a_warning(wheel):
    log = (wheel.parent / "build.log").read_text("utf-8")
    assert "running build_py" in log
    assert [line for line in log.splitlines() if "Warning" in line or "absent from" in line] == []


@pytest.mark.timeout(300)
def test_everything_imports_from_the_wheel_at_the_repository_root(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import importlib, pkgutil, driftgate\n"
        "names = [m.name for m in pkgutil.walk_packages(driftgate.__path__, 'driftgate.')]\n"
        "files = {importlib.import_module(n).__file__ for n in names}\n"
        "print(len(names)); print(*sorted(files), sep='\\n')"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    count, *files = done.stdout.splitlines()
    assert int(count) == len(files) > 40
    assert [f for f in files if not f.startswith(str(tmp_path))] == []
