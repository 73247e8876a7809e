"""Documentation holds: links and anchors resolve, code blocks run, command lines parse, nothing is left unmentioned."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import pytest
import run_cases as cases
import typer
from PIL import Image

from driftgate import cli
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.policy import decide, load_policy
from driftgate.accuracy.policy_file import CheckName
from driftgate.accuracy.records import ITEM_COLUMNS, STEP_COLUMNS, save_run
from driftgate.evals.checkpoints import list_checkpoints
from driftgate.evals.suite import bundled_suites
from driftgate.evals.tasks import list_tasks
from driftgate.reports import figures

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
CARDS = sorted(
    path for room in ("kernels", "evals", "examples") for path in (ROOT / room).rglob("*.md")
)  # linked to and from, their code is tested elsewhere
LONG = {"guide-notebooks.md"}
"""Pages with a block that measures: half a minute."""
NOT_RUN = "Not run by tests/test_docs.py:"
FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\[\]]*\]\((?P<target>[^()\s]+)\)")
_HOSTS = ("pypi", "pythonhosted", "anaconda", "npmjs", "crates", "rubygems", "ghcr", "docker", r"download\.pytorch")
REGISTRY = re.compile(rf"\b({'|'.join(_HOSTS)})\.(org|com|io)\b")
SEPARATORS = {"|", "||", "&&", ";", "&"}


def of_page(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


each_page = pytest.mark.parametrize("path", PAGES, ids=of_page)


@dataclass(frozen=True)
class Block:
    """A fenced block; ``reason`` says why it is not run, and is empty where it is."""

    language: str
    text: str
    reason: str


def read_blocks(text: str) -> list[Block]:
    blocks = []
    for found in FENCE.finditer(text):
        before = text[: found.start()].rstrip().rpartition("\n")[2]
        reason = before.partition(NOT_RUN)[2].strip(" *") if NOT_RUN in before else ""
        blocks.append(Block(found["language"], found["text"], reason))
    return blocks


def list_anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    anchors: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text), flags=re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        seen = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in anchors)
        anchors.append(f"{slug}-{seen}" if seen else slug)
    return set(anchors)


def find_broken_links(text: str, folder: Path) -> list[str]:
    """Targets that do not resolve from a page in ``folder``; external ones have only to be well-formed."""
    broken = []
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    for target in (found["target"] for found in LINK.finditer(prose)):
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            if parts.scheme != "https" or "." not in parts.netloc:
                broken.append(target)
            continue
        path = (folder / parts.path).resolve() if parts.path else None
        if path is not None and not path.exists():
            broken.append(target)
        elif parts.fragment:
            linked = text if path is None else path.read_text("utf-8")
            if parts.fragment not in list_anchors(linked):
                broken.append(target)
    return broken


def list_commands(text: str) -> Iterator[list[str]]:
    """Arguments of every call of driftgate in a block of shell."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word not in SEPARATORS:
                words.append(word)
                continue
            while words and re.match(r"[A-Z_]+=", words[0]):
                del words[0]
            if words and words[0] == "driftgate":
                yield words[1:]
            words = []


def commands() -> dict[str, Any]:
    return typer.main.get_command(cli.app).commands


def check_command(arguments: list[str]) -> None:
    """Parse a command line as the program does, and check the names in it; nothing is run.

    Raises:
        Exception: what click or driftgate says of it.
    """
    rest = arguments[1:] if arguments[:1] == ["--debug"] else arguments
    assert rest and rest[0] in commands(), f"no command {rest[:1]}"
    values = commands()[rest[0]].make_context(rest[0], list(rest[1:])).params
    for text in [*(values.get("plan") or ()), *(values.get("control") or ())]:
        PrecisionPlan.parse(text)
    if rest[0] == "run":
        suite = values["suite"]
        assert suite.endswith(".yaml") or suite in bundled_suites(), f"no suite {suite}"
        for task in values["task"] or ():
            assert task in [*list_tasks(), "none"] or task.startswith("lm_eval:"), f"no task {task}"


def list_flags(command: str) -> set[str]:
    """Long names of a command's options."""
    found = {name for p in commands()[command].params for name in p.opts if name.startswith("--")}
    return found | {"--help"}


@each_page
def test_links_and_anchors_resolve(path: Path) -> None:
    assert find_broken_links(path.read_text("utf-8"), path.parent) == []


@pytest.mark.parametrize("path", CARDS, ids=of_page)
def test_links_of_cards_and_of_readmes_of_rooms_resolve(path: Path) -> None:
    assert find_broken_links(path.read_text("utf-8"), path.parent) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading, `code` and more\n\n## Twice\n\n## Twice\n")
    text = (
        "# Here\n[a](other.md#a-heading-code-and-more) [b](other.md#twice-1) [c](#here) [d](https://example.org/x)\n"
        "`[e](not-a-link.md)` [f](gone.md) [g](other.md#gone) [h](http://example.org) [two\nlines](gone-too.md)\n"
        "```bash\n[i](in-code.md)\n```\n"
    )
    assert find_broken_links(text, tmp_path) == ["gone.md", "other.md#gone", "http://example.org", "gone-too.md"]


@each_page
def test_no_host_of_a_package_registry_is_named(path: Path) -> None:
    assert REGISTRY.search(path.read_text("utf-8")) is None


def test_a_registry_would_be_found() -> None:
    assert REGISTRY.search("see https://" + "pypi" + ".org/simple")


@each_page
def test_command_lines_parse(path: Path) -> None:
    blocks = read_blocks(path.read_text("utf-8"))
    stray = [b.text for b in blocks if b.language not in ("bash", "python") and "driftgate " in b.text]
    assert [text for text in stray if re.search(r"^driftgate ", text, flags=re.MULTILINE)] == []
    for arguments in (a for b in blocks if b.language == "bash" for a in list_commands(b.text)):
        check_command(arguments)


@each_page
def test_commands_within_text_exist(path: Path) -> None:
    """Shorter than a command line: only the command and the flags are looked at."""
    for span in re.findall(r"`driftgate ([^`]+)`", FENCE.sub("", path.read_text("utf-8"))):
        words = [word for word in span.split() if word != "--debug"]
        assert words[0] in commands(), span
        assert {word for word in words if re.fullmatch(r"--[a-z-]+", word)} <= list_flags(words[0]), span


@pytest.mark.parametrize(
    "line",
    [
        "driftgate rum", "driftgate run --stepz 4", "driftgate run --plan nvfp5@16", "driftgate run quickest",
        "driftgate run --task rekall", "driftgate cost", "driftgate gate a b", "driftgate run --sequences 0",
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_found(line: str) -> None:
    arguments = list(list_commands(f"X=1 {line}  # why\n"))
    assert len(arguments) == 1
    with pytest.raises(Exception, match=r"\w"):
        check_command(arguments[0])


def test_commands_are_found_in_pipes_and_continued_lines() -> None:
    found = list(
        list_commands("cd x && driftgate doctor | head\ndriftgate ls \\\n  plans || test $? -eq 3\nmake run\n")
    )
    assert found == [["doctor"], ["ls", "plans"]]


def test_every_command_and_every_flag_of_run_and_gate_is_mentioned() -> None:
    text = "\n".join(path.read_text("utf-8") for path in PAGES)
    assert [name for name in commands() if f"driftgate {name}" not in text] == []
    for command in ("run", "gate"):
        missing = [flag for flag in sorted(list_flags(command)) if not re.search(rf"{flag}(?![\w-])", text)]
        assert missing == [], command


def test_what_ships_is_named_where_users_look_for_it() -> None:
    def read(name: str) -> str:
        return (ROOT / name).read_text("utf-8")

    suites, gates, figures_page = (read(f"docs/{n}.md") for n in ("guide-suites", "guide-ci", "figures"))
    checks = get_args(CheckName)
    assert [name for name in [*list_tasks(), *bundled_suites()] if f"`{name}`" not in suites] == []
    assert [name for name in [*STEP_COLUMNS, *ITEM_COLUMNS] if name not in suites] == []
    assert [name for name in checks if f"`{name}`" not in gates or f"`{name}" not in figures_page] == []
    assert [name for name in list_checkpoints() if f"`{name}`" not in read("README.md")] == []
    drawn = [entry.name for entry in figures.FIGURES]
    assert [name for name in drawn if f"`{name}`" not in read("docs/guide-notebooks.md")] == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    linked = {found["target"] for found in LINK.finditer(index)}
    assert {p.name for p in (ROOT / "docs").glob("*.md")} - {"index.md"} <= linked


def test_a_reason_not_to_run_a_block_is_read() -> None:
    text = f"*{NOT_RUN} needs a GPU.*\n\n```python\na\n```\n\nText.\n\n```python\nb\n```\n"
    assert [b.reason for b in read_blocks(text)] == ["needs a GPU.", ""]


def store_run(folder: Path) -> None:
    """What ``driftgate run --out FOLDER`` would have left, made of numbers."""
    baseline, answers = cases.flipped(1, 0, 192, right=190)
    plans = {"nvfp4/fp32@16": answers, "nvfp4@16": cases.flipped(75, 0, 192, right=190)[1]}
    measured = {
        "nvfp4/fp32@16": cases.Measured(kl=cases.lognormal(1.6e-3)),
        "nvfp4@16": cases.Measured(kl=cases.lognormal(5.6e-2), role="control"),
    }
    run = cases.make_run(measured, items=cases.make_items(baseline, plans, per_stream=12))
    decide(run, load_policy())
    folder.mkdir(parents=True)
    save_run(folder, run)


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=pytest.mark.long if p.name in LONG else (), id=of_page(p)) for p in PAGES],
)
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch, driftgate_run) -> None:
    """In one namespace a page, in a folder that holds two stored runs; tests of the plugin are called."""
    blocks = [b for b in read_blocks(path.read_text("utf-8")) if b.language == "python"]
    for block in blocks:
        ast.parse(block.text)
    if not any(not b.reason for b in blocks):
        return
    store_run(tmp_path / "runs" / "mine")
    store_run(tmp_path / "precision")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks):
        if not block.reason:
            exec(compile(block.text, f"{path.name}, block {number}", "exec"), namespace)
    for name, value in list(namespace.items()):
        if name.startswith("test_"):
            value(driftgate_run)


@pytest.mark.parametrize("language", ["yaml", "json"])
def test_data_blocks_are_well_formed(language: str) -> None:
    import json

    import yaml

    texts = [b.text for p in PAGES for b in read_blocks(p.read_text("utf-8")) if b.language == language]
    assert texts
    for text in texts:
        if language == "yaml":
            assert isinstance(yaml.safe_load(text), dict)
        else:
            assert all(isinstance(json.loads(line), dict) for line in text.splitlines())


def test_the_picture_of_the_readme_is_small_and_drawn() -> None:
    path = ROOT / "docs" / "images" / "kl_against_position.png"
    assert path.stat().st_size < 150_000
    with Image.open(path) as picture:
        assert picture.width >= 800
        assert len(picture.convert("RGB").getcolors(maxcolors=1 << 24)) > 100


def test_licence_and_citation_say_the_same() -> None:
    import tomllib

    import yaml

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    licence = (ROOT / "LICENSE").read_text("utf-8")
    assert project["license"] == citation["license"] == "Apache-2.0"
    assert project["version"] == citation["version"]
    assert "Apache License\n" in licence and "Version 2.0, January 2004" in licence and "END OF TERMS" in licence
