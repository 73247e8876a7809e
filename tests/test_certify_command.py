"""``driftgate certify``: its groups in processes, what it prints and writes, exit codes, kernels of users."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from driftgate import cli
from driftgate.accuracy.records import BitwiseRecord, ToleranceRecord
from driftgate.reports.certificate import (
    bits_table,
    failure_blocks,
    find_failures,
    summary_line,
    tolerance_table,
)
from driftgate.reports.junit import render_certificate

EXAMPLES = Path(__file__).parents[1] / "examples" / "kernels"
PROGRAM = Path(sys.executable).parent / "driftgate"
TINY = ("--backend", "torch", "--length", 1, "--format", "bf16", "--recurrence", "mamba2")
HEAD = "def step(inputs, state, slots, *, scale, qk_l2norm, pad_slot):\n"


@pytest.fixture
def call(capfd, monkeypatch, tmp_path):
    """``call(*arguments)`` runs ``certify`` in this process, in an empty folder: exit code, output, errors."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["driftgate", "certify", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capfd.readouterr()
        return caught.value.code, out, err

    yield run
    for name in [
        name for name, module in sys.modules.items() if str(folder) in (getattr(module, "__file__", "") or "")
    ]:
        del sys.modules[name]


def is_one_line(err: str) -> bool:
    return err.startswith("driftgate: ") and err.endswith("\n") and err.count("\n") == 1


def test_processes_change_nothing_but_the_time(call, tmp_path):
    """The same document from one process and from two, in the same order; a test for every case in the JUnit file."""
    documents = []
    for jobs in (1, 2):
        code, out, err = call(*TINY, "--json", "--jobs", jobs, "--junit", tmp_path / "junit.xml")
        assert (code, err) == (0, "")
        documents.append(json.loads(out))
    assert documents[0] == documents[1]
    assert set(documents[0]) == {"schema_version", "bitwise", "tolerance"}
    bitwise, tolerance = (documents[0][key] for key in ("bitwise", "tolerance"))
    assert {r["recurrence"] for r in [*bitwise, *tolerance]} == {"mamba2"}
    assert {"I1", "I4", "I5"} <= {r["invariant"] for r in bitwise} and len(tolerance) > 0
    assert all(r["equal"] for r in bitwise) and all(r["within"] for r in tolerance)
    assert {r["case"]["length"] for r in bitwise} == {0, 1} and {r["case"]["length"] for r in tolerance} <= {0, 1}
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert int(suite.get("tests")) == len(bitwise) + len(tolerance) == len(suite.findall(".//testcase"))
    assert suite.get("failures") == "0"


USAGE = {
    "recurrence": (("--recurrence", "gnd"), 2, "did you mean gdn"),
    "format": (("--format", "fp9"), 2, "fp9"),
    "length": (("--length", 0), 2, "--length"),
    "jobs": (("--jobs", 0), 2, "--jobs"),
    "seed": (("--seed", -1), 2, "--seed -1"),
    "device": (("--device", "warp"), 2, "warp"),
    "backend": (("--backend", "trition"), 2, "did you mean triton"),
    "backend of another device": (("--backend", "triton", "--device", "cpu"), 2, "--device cuda"),
    "bits": (("--bits", "maybe"), 2, "--bits"),
    "bits without a kernel": (("--backend", "torch", "--bits", "report"), 2, "--kernel"),
    "folder of the JUnit file": (("--backend", "torch", "--junit", "no/such/junit.xml"), 4, "no folder"),
    "kernel of two recurrences": (("--kernel", "a:b", "--recurrence", "gdn", "--recurrence", "kda"), 2, "once"),
    "kernel without a module": (("--backend", "torch", "--kernel", "nothing_here:step"), 4, "no module nothing_here"),
    "kernel without a name": (("--backend", "torch", "--kernel", "nothing_here"), 2, "package.module:function"),
    "format of the kernel": (("--backend", "torch", "--kernel", "mine:step", "--format", "bf16"), 2, "formats"),
    "length of the kernel": (("--backend", "torch", "--kernel", "mine:step", "--length", 2), 2, "L is 1"),
    "recurrence of the kernel": (("--backend", "torch", "--kernel", "mine:kda", "--recurrence", "gdn"), 2, "says that"),
    "no tolerance": (("--backend", "torch", "--kernel", "mine:kda", "--bits", "report"), 2, "stores no fp32 state"),
}  # fmt: skip


@pytest.mark.parametrize("kind", USAGE)
def test_a_wrong_choice_is_one_line(call, kind):
    arguments, expected, says = USAGE[kind]
    text = HEAD + "    return inputs['v']\n"
    settings = "kda.recurrence = 'kda'\nkda.formats = ('bf16',)\n"
    Path("mine.py").write_text(text + text.replace("step", "kda") + settings)
    code, out, err = call(*arguments)
    assert (code, out) == (expected, "")
    assert is_one_line(err) and says in err


def test_a_kernel_in_plain_torch_keeps_its_tolerance_and_is_told_its_bits(call, tmp_path):
    shutil.copy(EXAMPLES / "plain_torch.py", "plain_torch.py")
    arguments = ("--backend", "torch", "--kernel", "plain_torch:step", "--format", "bf16")
    code, out, err = call(*arguments)
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert lines[-1].startswith("fail: plain_torch:step on torch; bits: ") and "I1 compares bits" in out
    code, out, _ = call(*arguments, "--bits", "report", "--junit", tmp_path / "junit.xml")
    assert code == 0 and out.splitlines()[-1].startswith("pass: plain_torch:step on torch; bits: ")
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert suite.get("failures") == "0" and int(suite.get("skipped")) > 0
    skipped = suite.find(".//skipped")
    assert skipped is not None and "your baseline against driftgate's" in skipped.get("message")
    document = json.loads(call(*arguments, "--json")[1])
    assert {r["invariant"] for r in document["bitwise"] if not r["equal"]} == {"I1"}
    assert {r["case"]["kernel"] for r in [*document["bitwise"], *document["tolerance"]]} == {"plain_torch:step"}
    assert all(r["within"] for r in document["tolerance"]) and document["tolerance"]


TWIN = (
    "import torch\nfrom driftgate.kernels.gdn.reference import step as twin, normalise\n"
    + HEAD
    + "    live = (slots != pad_slot).nonzero()[:, 0]\n"
    "    x = {name: value[live].float() for name, value in inputs.items()}\n"
    "    group = inputs['v'].shape[1] // inputs['q'].shape[1]\n"
    "    q = (normalise(x['q']) * scale).repeat_interleave(group, dim=1)\n"
    "    k = normalise(x['k']).repeat_interleave(group, dim=1)\n"
    "    at = slots[live].long()\n"
    "    S, _ = twin(state[at].float(), k, x['v'], x['g'], x['beta'])\n"
    "    state[at] = S.to(state.dtype)\n"
    "    out = torch.zeros_like(inputs['v'])\n"
    "    out[live] = (S * q[..., None, :]).sum(-1).to(out.dtype)\n"
    "    return out\n"
)
FAULTY = {
    "none": ("", "", set(), True),
    "padded rows are not written": (
        "torch.zeros_like(inputs['v'])", "torch.full_like(inputs['v'], 42)", {"I1", "I4"}, True,
    ),
    "the state of a slot of no row is written": (
        "    return out\n", "    state[(slots.max() + 1) % len(state)] += 1\n    return out\n",
        {"I1", "I4", "I7"}, None,
    ),
    "FP32 state stored through BF16": ("S.to(state.dtype)", "S.bfloat16().to(state.dtype)", {"I1", "I7"}, False),
    "q is not scaled": ("* scale", "* 1", {"I1"}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTY)
def test_faults_of_a_function_are_found_where_they_belong(call, name):
    old, new, invariants, within = FAULTY[name]
    assert old in TWIN
    Path("mine.py").write_text(TWIN.replace(old, new))
    code, out, err = call("--backend", "torch", "--kernel", "mine:step", "--json")
    assert (code, err) == (1 if invariants else 0, "")
    document = json.loads(out)
    assert {r["invariant"] for r in document["bitwise"] if not r["equal"]} == invariants
    if within is not None:
        assert all(r["within"] for r in document["tolerance"]) is within
    report = call("--backend", "torch", "--kernel", "mine:step", "--bits", "report", "--quiet")
    assert report == (0 if invariants <= {"I1"} and within else 1, "", "")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("    raise RuntimeError('no kernel for BF16')\n", "mine:step raised RuntimeError: no kernel for BF16"),
        ("    return inputs['v'][0]\n", "returned (2, 16)"),
    ],
)
def test_a_function_that_fails_is_one_line_that_names_the_group(call, body, says):
    Path("mine.py").write_text(HEAD + body)
    code, out, err = call("--backend", "torch", "--kernel", "mine:step")
    assert (code, out) == (4, "")
    assert is_one_line(err) and says in err and "gdn 1/2 heads 16x16" in err


def test_a_function_that_does_not_store_the_state_is_told_so(call):
    Path("mine.py").write_text(TWIN.replace("    state[at] = S.to(state.dtype)\n", ""))
    code, _, err = call("--backend", "torch", "--kernel", "mine:step")
    assert code == 4 and is_one_line(err) and "update state in place" in err


def test_an_object_with_replay_runs_the_whole_certificate(call):
    arguments = ("--backend", "torch", "--length", 2, "--format", "fp8", "--kernel", "driftgate.kernels.gdn:reference")
    code, out, err = call(*arguments, "--json")
    assert (code, err) == (0, "")
    assert {"I3", "I4", "I5"} <= {r["invariant"] for r in json.loads(out)["bitwise"]}


def test_an_object_that_raises_is_one_line(call):
    functions = "".join(
        f"    def {name}(self, *args, **kwargs):\n        raise KeyError('q')\n"
        for name in ("decode_step", "replay_step", "flush_now")
    )
    Path("mine.py").write_text("class Mine:\n" + functions)
    code, _, err = call("--backend", "torch", "--length", 1, "--kernel", "mine:Mine")
    assert code == 4 and is_one_line(err) and "--kernel mine:Mine: KeyError: 'q'" in err


def test_a_module_of_the_folder_is_found_by_the_program_under_the_interpreter(tmp_path):
    """The program begins again for the interpreter, with safe paths, and its workers are processes of their own."""
    (tmp_path / "mine.py").write_text(HEAD + "    import os\n    raise RuntimeError(os.environ['TRITON_INTERPRET'])\n")
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [PROGRAM, "certify", "--device", "cpu", "--jobs", "2", "--kernel", "mine:step"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (4, "")
    assert is_one_line(done.stderr) and "mine:step raised RuntimeError: 1 " in done.stderr


def test_ctrl_c_is_one_line(tmp_path):
    (tmp_path / "mine.py").write_text(
        HEAD + "    import pathlib, time\n    pathlib.Path('reached').touch()\n    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [PROGRAM, "certify", "--backend", "torch", "--device", "cpu", "--jobs", "2", "--kernel", "mine:step"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as program:  # fmt: skip
        until = time.monotonic() + 60
        while not (tmp_path / "reached").exists() and program.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to all of them
        out, err = program.communicate(timeout=30)
    assert (program.returncode, out) == (130, "")
    assert is_one_line(err) and "interrupted" in err


def make_bitwise(invariant: str = "I1", *, equal: bool = True, **case: object) -> BitwiseRecord:
    first = {
        "step": 2, "row": 0, "head": 1, "element": [3, 15], "expected": 0.1, "got": "nan", "what": "checkpoint",
        "looks_like": "a read past the cursor", "ulp_histogram": {"3-4": 2, "1025-2048": 1, "1": 1234},
    }  # fmt: skip
    described = {
        "check": "equals the baseline", "plan": "fp8/fp32@16", "activation": "bfloat16", "key_heads": 16,
        "value_heads": 32, "d_k": 128, "d_v": 128, "n_compared": {"output": 4000, "checkpoint": 64000},
        "backend": "triton", "seed": 0,
    }  # fmt: skip
    return BitwiseRecord(
        invariant=invariant, recurrence="gdn", case=described | case, equal=equal,
        n_different=0 if equal else 1237, max_ulp=0 if equal else 2000, first_different=None if equal else first,
    )  # fmt: skip


def make_tolerance(
    error: float | None = 1e-6, *, within: bool = True, scale: float = 4.0, **case: object
) -> ToleranceRecord:
    described = {
        "plan": "fp32@16", "readout": "output_only", "length": 16, "dot": "ieee", "flushes": "forced",
        "activation": "bfloat16", "key_heads": 1, "value_heads": 2, "d_k": 16, "d_v": 16, "backend": "triton",
    }  # fmt: skip
    return ToleranceRecord(
        recurrence="mamba2", case=described | case, what="output", error=error, bound=2e-6, scale=scale,
        greatest_error=None if error is None else 2 * error, within=within,
    )  # fmt: skip


def render(*parts) -> str:
    from rich.console import Console

    console = Console(width=80, no_color=True)
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str), highlight=False, markup=False)
    return captured.get()


def test_tables_fit_a_terminal_and_count_by_recurrence_and_invariant():
    bitwise = [make_bitwise(), make_bitwise(equal=False), make_bitwise("I2")]
    tolerance = [make_tolerance(), make_tolerance(5e-6, within=False), make_tolerance(length=4)]
    tolerance.append(make_tolerance(None, within=False, readout="state_output", dot="bf16"))
    shown = render(bits_table(bitwise), tolerance_table(tolerance))
    assert max(map(len, shown.splitlines())) <= 80
    rows = [line.split() for line in shown.splitlines()]
    assert ["gdn", "I1", "2", "136,000", "1"] in rows and ["gdn", "I2", "1", "68,000", "0"] in rows
    head = ["mamba2", "output_only", "16", "bfloat16", "output"]
    assert [*head, "2.5e-06", "1.3e-06", "5.0e-07", "1/2", "no"] in rows
    assert [*head[:2], "4", *head[3:], "5.0e-07", "2.5e-07", "5.0e-07", "yes"] in rows
    assert ["mamba2", "state_output", "bf16", "16", *head[3:], "inf/nan", "inf/nan", "5.0e-07", "1/1", "no"] in rows
    nothing = render(tolerance_table([make_tolerance(0.0, scale=0.0)]))
    assert nothing.split()[-4:] == ["-", "-", "-", "yes"]
    assert "1 (reported)" in render(bits_table(bitwise, reported=("I1",)))


def test_failures_say_where_and_what_it_looks_like():
    records = [make_bitwise(equal=False), make_tolerance(5e-6, within=False)]
    block, other = failure_blocks(records)
    assert max(map(len, f"{block}\n{other}".splitlines())) <= 80
    for text in (
        "I1 gdn: equals the baseline, fp8/fp32@16, heads 16/32, 128x128, bfloat16",
        "checkpoint at step 2, row 0, head 1, element [3, 15]",
        "expected 0.1, got nan",
        "1,237 of 68,000 elements differ, at most 2,000 ulp",
        "1: 1,234, 3-4: 2, 1025-2048: 1",
        "looks like: a read past the cursor",
        "backend triton, seed 0",
    ):
        assert text in block
    assert "tolerance mamba2: output, fp32@16, forced flushes, heads 1/2, 16x16, bfloat16" in other
    assert "error 5.00e-06 against FP64, bound 2.00e-06 (2.5 times)" in other
    assert "relative to the greatest result 4: error 1.3e-06, bound 5.0e-07" in other


def test_more_than_ten_failures_are_counted():
    blocks = failure_blocks([make_bitwise(equal=False)] * 13)
    assert len(blocks) == 11 and blocks[-1].startswith("and 3 more")


def test_what_is_reported_alone_fails_nothing(tmp_path):
    bitwise, tolerance = [make_bitwise(equal=False), make_bitwise("I4")], [make_tolerance()]
    assert len(find_failures(bitwise, tolerance)) == 1
    assert find_failures(bitwise, tolerance, reported=("I1",)) == []
    summary = summary_line(bitwise, tolerance, subject="m:step on triton", reported=("I1",))
    assert summary == "pass: m:step on triton; bits: 1 of 2 cases equal (I1 reported only); tolerance: 1 of 1 within"
    render_certificate(bitwise, tolerance, tmp_path / "junit.xml", summary=summary, reported=("I1",))
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert [suite.get(key) for key in ("tests", "failures", "errors", "skipped")] == ["3", "0", "0", "1"]


def test_junit_tells_each_failure(tmp_path):
    bitwise, tolerance = [make_bitwise(equal=False)], [make_tolerance(5e-6, within=False), make_tolerance()]
    render_certificate(bitwise, tolerance, tmp_path / "junit.xml", summary="fail")
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert [suite.get(key) for key in ("tests", "failures", "errors", "skipped")] == ["3", "2", "0", "0"]
    cases = suite.findall(".//testcase")
    assert [c.get("classname") for c in cases] == [
        "driftgate.certify.gdn.I1", *["driftgate.certify.mamba2.tolerance"] * 2,
    ]  # fmt: skip
    told = cases[0].find("failure")
    assert told is not None and told.text == failure_blocks(bitwise)[0]
    assert told.get("message") == "I1 gdn: equals the baseline, fp8/fp32@16, heads 16/32, 128x128, bfloat16"
