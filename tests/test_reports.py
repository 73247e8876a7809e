"""Reports of a stored run folder: they hold its data and need nothing outside."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from report_cases import (
    EXACT,
    LEVELS,
    SPLIT,
    WEIRD,
    store_run,
)

from driftgate.accuracy import records as rec
from driftgate.errors import InputError
from driftgate.reports import figures, markdown, render_all, tables


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def run(folder: Path) -> rec.RunData:
    return rec.load_run(folder)


def test_render_all_writes_every_file_and_leaves_no_temporary(folder: Path) -> None:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    pictures = [f"figures/{entry.name}.png" for entry in figures.FIGURES]
    data = ["items.parquet", "manifest.json", "results.json", "steps.parquet"]
    assert names == sorted([*pictures, *data, "report.html", "report.md", "junit.xml"])


def test_render_all_names_what_it_wrote(folder: Path) -> None:
    written = render_all(folder)
    assert sorted(written) == sorted(path for path in folder.rglob("*.*") if path.suffix not in (".parquet", ".json"))


def test_render_all_refuses_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"results\.json"):
        render_all(tmp_path)


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_text_reports_have_no_undefined_word(folder: Path, name: str) -> None:
    text = (folder / name).read_text(encoding="utf-8")
    text = re.sub(r"<(script|style|svg)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert "n/a" in text
    assert not re.search(r"\b(nan|NaN|None|null|inf)\b", text)


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_text_reports_show_every_section(folder: Path, name: str) -> None:
    text = (folder / name).read_text(encoding="utf-8")
    words = [
        "Checks",
        "Bit-exact cases",
        "Backends and cross-check",
        "Noise floor",
        "Counters and bytes",
        "Manifest",
        "1.9e-06",
        "3.10e-10",
        "up to 3 ulp",
        "half of FP8 weights",
        "2,097,152",
        "61 effective steps",
        "4 answers cut off",
    ]
    assert [word for word in words if word not in text] == []


def test_markdown_prints_the_table_in_the_words_of_llama_cpp(folder: Path, run: rec.RunData) -> None:
    text = (folder / "report.md").read_text(encoding="utf-8")
    block = text[text.index(f"### {SPLIT} (") :].split("```")[1]
    kl = run.results.plans[SPLIT].kl
    assert re.search(rf"^Mean    KLD: +{kl.mean:.6f} \[{kl.ci_low:.6f}, {kl.ci_high:.6f}\]$", block, re.MULTILINE)
    for words in (
        "Maximum KLD:",
        "99.9%   KLD:",
        "99.0%   KLD:",
        "Median  KLD:",
        " 0.1%   KLD:",
        "Minimum KLD:",
        "Mean    Δp:",
        "RMS Δp    :",
        "Same top p:",
        "Mean PPL(Q)/PPL(base)",
    ):
        assert block.count(words) == 1, words


def test_markdown_prints_undefined_and_zero_apart(run: rec.RunData) -> None:
    weird = markdown.write_kl_block(run.results.plans[WEIRD])
    assert re.search(r"^99.9%   KLD: +n/a$", weird, re.MULTILINE) and re.search(
        r"^Minimum Δp: +n/a$", weird, re.MULTILINE
    )
    assert re.search(r"^Maximum KLD: +0$", markdown.write_kl_block(run.results.plans[EXACT]), re.MULTILINE)


def test_markdown_tables_keep_their_columns_under_any_plan_name(folder: Path) -> None:
    lines = (folder / "report.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("## Plans") + 2
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in lines[start : start + 2 + len(LEVELS)]}
    assert len(widths) == 1


def test_reports_explain_the_drift_law_the_cross_check_and_the_zigzag(folder: Path) -> None:
    from driftgate.accuracy.drift_law import GROWING_SLOPE

    for name in ("report.html", "report.md"):
        text = (folder / name).read_text(encoding="utf-8")
        assert f"lies above {GROWING_SLOPE}, so that the KL doubles when the length grows 16-fold" in text
        assert tables.CROSS_CHECK_NOTE in text
        assert "zigzag with period 2" in text
    assert 16**GROWING_SLOPE == 2


def test_reports_import_no_torch() -> None:
    code = "import sys, driftgate.reports; print(sorted({'torch', 'triton', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
