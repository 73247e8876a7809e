"""``driftgate gate``: text, JSON, JUnit, annotations and exit code say the same, for every kind of verdict."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import numpy as np
import pytest
import run_cases as cases
import yaml
from cli_cases import PLAN, call_program, enter_empty_folder, is_one_line, limits, store_run, write_policy

from driftgate.accuracy.policy import decide, load_policy
from driftgate.accuracy.policy_file import CheckName
from driftgate.accuracy.records import RunData, load_run, save_run
from driftgate.reports.checks import CHECK_NOTES
from driftgate.reports.github import SUMMARY_LIMIT, append_summary, list_annotations


@pytest.fixture
def call(capfd, monkeypatch, tmp_path):
    """``call(*arguments)`` runs the command line in this process, in an empty folder: exit code, output, errors."""
    enter_empty_folder(monkeypatch, tmp_path)
    return partial(call_program, capfd, monkeypatch)


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    return store_run(tmp_path_factory.mktemp("stored"))


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
def test_the_reports_of_a_folder_agree_with_its_gate(call, stored, tmp_path, verdict, code):
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


@pytest.mark.parametrize("name", ["results.json", "manifest.json", "steps.parquet", "items.parquet"])
def test_a_stored_run_that_is_cut_short_is_exit_code_4(call, stored, tmp_path, name):
    folder = tmp_path / "run"
    shutil.copytree(stored, folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:50])
    code, out, err = call("gate", folder)
    assert (code, out) == (4, "")
    assert is_one_line(err) and name in err


def kl(mean: float) -> np.ndarray:
    return cases.lognormal(mean, shape=(16, 64))


def broken(mean: float) -> np.ndarray:
    values = kl(mean)
    values[3, 5] = np.inf
    return values


CANDIDATE = {PLAN: cases.Measured(kl=kl(1e-3))}
CONTROL = {"nvfp4@4": cases.Measured(kl=kl(1e-1), role="control")}
# kind of run: plans, other arguments of make_run, the limit of kl_mean, exit code
KINDS = {
    "pass": (CANDIDATE, {}, 2e-3, 0),
    "fail": (CANDIDATE, {}, 5e-4, 1),
    "inconclusive": (CANDIDATE, {}, float(kl(1e-3).mean()), 3),
    "invalid": ({PLAN: cases.Measured(kl=kl(1e-3), reads=0)}, {}, 2e-3, 3),
    "not finite": ({PLAN: cases.Measured(kl=broken(1e-3))}, {}, 2e-3, 1),
    "control drifts": (CANDIDATE | CONTROL, {}, 2e-3, 0),
    "blind control": ({PLAN: CANDIDATE[PLAN], "nvfp4@4": cases.Measured(kl=kl(1e-9), role="control")}, {}, 2e-3, 3),
    "controls alone": (CONTROL, {}, 2e-3, 3),
    "bits differ": (CANDIDATE, {"bitwise": {"A/A": True, "I1": False}}, 2e-3, 1),
    "baseline differs from itself": (CANDIDATE, {"bitwise": {"A/A": False}}, 2e-3, 1),
    "no invariant": (CANDIDATE, {"bitwise": {}}, 2e-3, 3),
    "fail and invalid": (CANDIDATE | {"fp8@4": cases.Measured(kl=kl(1e-3), reads=0)}, {}, 5e-4, 1),
}


def store_kind(folder: Path, kind: str) -> tuple[Path, Path, int]:
    """A stored run of a kind, its policy and its exit code."""
    plans, arguments, limit, code = KINDS[kind]
    folder.mkdir(parents=True)
    save_run(folder, cases.make_run(plans, **arguments))
    policy = folder.parent / f"{folder.name}.yaml"
    checks = [{"check": "bitwise", "reason": "bits"}, {"check": "kl_mean", "limit": limit, "reason": "because"}]
    policy.write_text(yaml.safe_dump({"checks": checks}))
    return folder, policy, code


def junit_verdict(path: Path) -> str:
    """The verdict that a CI system draws from a JUnit file; tests that were skipped decide nothing by themselves."""
    suite = ElementTree.parse(path).getroot().find("testsuite")
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    found = {name: len(suite.findall(f"testcase/{tag}")) for name, tag in
             (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))}  # fmt: skip
    assert counts == found | {"tests": len(suite.findall("testcase"))}
    return "fail" if counts["failures"] else "inconclusive" if counts["errors"] or counts["skipped"] else "pass"


@pytest.mark.parametrize("kind", KINDS)
def test_text_json_junit_annotations_and_exit_code_agree(call, monkeypatch, tmp_path, kind):
    folder, policy, code = store_kind(tmp_path / "run", kind)
    verdict = {0: "pass", 1: "fail", 3: "inconclusive"}[code]
    flags = ("gate", folder, "--policy", policy, "--junit", "out.xml")
    assert (result := call(*flags))[0] == code
    assert re.search(rf"^verdict: {verdict} ", result[1], re.MULTILINE) and result[2] == ""
    found, out, err = call(*flags, "--json")
    document = json.loads(out)
    assert (found, err, document["verdict"]) == (code, "", verdict)
    kinds = {v["verdict"] for v in document["verdicts"]}
    assert verdict == ("fail" if "fail" in kinds else "inconclusive" if kinds - {"pass"} or not kinds else "pass")
    assert junit_verdict(Path("out.xml")) == verdict
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    found, out, err = call(*flags, "--quiet")
    assert (found, out) == (code, "")
    shown = re.findall(r"^::(error|warning) title=driftgate (\w+)", err, re.MULTILINE)
    opened = [v for v in document["verdicts"] if v["verdict"] != "pass" and v["plan"] != "nvfp4@4"]
    assert [name for _, name in shown] == sorted(
        (v["verdict"] for v in opened), key=["fail", "invalid", "inconclusive"].index
    )
    assert (tmp_path / "summary.md").read_text().startswith(f"## driftgate: {verdict.upper()} ")


def test_a_control_never_reddens_a_job(call, monkeypatch, tmp_path):
    """However far it drifts, it is no failure, no error and no annotation."""
    folder, policy, code = store_kind(tmp_path / "run", "control drifts")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert call("gate", folder, "--policy", policy, "--junit", "out.xml", "--quiet") == (code, "", "")
    accepted = tmp_path / "accepted.json"
    assert call("gate", folder, "--policy", policy, "--write-baseline", accepted, "--quiet")[0] == 0
    assert list(json.loads(accepted.read_text())["plans"]) == [PLAN]
    run = load_run(folder)
    worse = cases.make_run(CANDIDATE | {"nvfp4@4": cases.Measured(kl=kl(5.0), role="control")})
    worse.manifest.created = run.manifest.created
    save_run(folder, worse)
    assert call("gate", folder, "--policy", policy, "--baseline", accepted, "--quiet") == (0, "", "")


def accepted_file(call, tmp_path: Path, plans: dict[str, cases.Measured]) -> tuple[Path, Path]:
    """A policy that lets everything pass, and the accepted run of these plans."""
    (tmp_path / "good").mkdir()
    items = None
    save_run(tmp_path / "good", cases.make_run(plans, items=items))
    policy = write_policy(tmp_path, 10.0)
    call("gate", tmp_path / "good", "--policy", policy, "--write-baseline", tmp_path / "accepted.json", "--quiet")
    return policy, tmp_path / "accepted.json"


WORSE = {
    "same": (CANDIDATE, 0, ""),
    "worse": ({PLAN: cases.Measured(kl=kl(2e-3))}, 1, "accepted:kl_mean"),
    "better": ({PLAN: cases.Measured(kl=kl(2e-4))}, 0, ""),
    "other top tokens": ({PLAN: cases.Measured(kl=kl(1e-3), differ=3)}, 1, "accepted:same_top_p"),
    "higher perplexity": ({PLAN: cases.Measured(kl=kl(1e-3), nll=0.5)}, 1, "accepted:ppl_ratio"),
    "plan gone": ({"fp8/fp32@4": cases.Measured(kl=kl(1e-3))}, 3, "accepted:plan"),
    "one more plan": (CANDIDATE | {"fp8/fp32@4": cases.Measured(kl=kl(1e-1))}, 0, ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", WORSE)
def test_a_run_is_held_against_the_last_accepted_one(call, tmp_path, kind):
    plans, code, check = WORSE[kind]
    policy, accepted = accepted_file(call, tmp_path, CANDIDATE)
    (tmp_path / "new").mkdir()
    save_run(tmp_path / "new", cases.make_run(plans))
    flags = ("gate", tmp_path / "new", "--policy", policy, "--baseline", accepted)
    found, out, err = call(*flags, "--json", "--junit", "out.xml")
    assert (found, err) == (code, "")
    grave = {v["check"] for v in json.loads(out)["verdicts"] if v["verdict"] != "pass"}
    assert (check in grave) if check else not grave
    assert junit_verdict(Path("out.xml")) == {0: "pass", 1: "fail", 3: "inconclusive"}[code]


def test_an_exact_zero_that_is_no_longer_zero_is_worse(call, tmp_path):
    exact = {PLAN: cases.Measured(kl=kl(1e-3), checkpoint_error=0.0)}
    policy, accepted = accepted_file(call, tmp_path, exact)
    (tmp_path / "new").mkdir()
    save_run(tmp_path / "new", cases.make_run({PLAN: cases.Measured(kl=kl(1e-3), checkpoint_error=1e-6)}))
    code, out, _ = call("gate", tmp_path / "new", "--policy", policy, "--baseline", accepted, "--json")
    assert code == 1
    assert [v["check"] for v in json.loads(out)["verdicts"] if v["verdict"] == "fail"] == ["accepted:checkpoint_error"]


def test_rounding_of_another_machine_is_not_worse(call, tmp_path):
    """An FP32 plan has the KL of FP32; the last bits of another processor may double it."""
    policy, accepted = accepted_file(call, tmp_path, {"fp32@4": cases.Measured(kl=kl(1e-10), differ=1000)})
    (tmp_path / "new").mkdir()
    save_run(tmp_path / "new", cases.make_run({"fp32@4": cases.Measured(kl=kl(1e-9), differ=500)}))
    assert call("gate", tmp_path / "new", "--policy", policy, "--baseline", accepted, "--quiet")[0] == 0


@pytest.mark.parametrize("change", ["model file", "dtype", "steps", "policy", "plans"])
def test_an_accepted_run_of_something_else_is_exit_code_4(call, tmp_path, change):
    def run(*, other: bool) -> RunData:
        data = cases.make_run(CANDIDATE)
        data.manifest.hashes["model/model.safetensors"] = "b" if other and change == "model file" else "a"
        data.results.model["dtype"] = "bfloat16" if other and change == "dtype" else "float32"
        data.manifest.suite |= {"steps": 64 if other and change == "steps" else 128}
        data.manifest.suite |= {"plans": ["x"] if other and change == "plans" else [], "name": str(other)}
        return data

    for name, other in (("good", False), ("new", True)):
        (tmp_path / name).mkdir()
        save_run(tmp_path / name, run(other=other))
    policy = write_policy(tmp_path, 10.0)
    call("gate", tmp_path / "good", "--policy", policy, "--write-baseline", "accepted.json", "--quiet")
    code, out, err = call("gate", tmp_path / "new", "--policy", policy, "--baseline", "accepted.json", "--quiet")
    if change in ("policy", "plans"):
        assert (code, err) == (0, "")
    else:
        assert (code, out) == (4, "")
        told = {"model file": "model (model.safetensors)", "dtype": "model (dtype)", "steps": "suite.steps"}[change]
        assert is_one_line(err) and told in err


ACCEPTED = {
    "pass": "",
    "inconclusive": "holds an INCONCLUSIVE run (open checks: 1 of 1)",
    "fail": "is not written: fail",
}


@pytest.mark.parametrize("verdict", ACCEPTED)
@pytest.mark.parametrize("flags", [(), ("--quiet",), ("--json",)])
def test_a_run_that_fails_is_not_accepted_and_an_open_one_not_without_a_word(call, stored, tmp_path, verdict, flags):
    policy, out = write_policy(tmp_path, limits(stored)[verdict]), tmp_path / "accepted.json"
    code, _, err = call("gate", stored, "--policy", policy, "--write-baseline", out, *flags)
    assert code == {"pass": 0, "inconclusive": 3, "fail": 1}[verdict]
    assert out.exists() == (verdict != "fail")
    assert ACCEPTED[verdict] in err and (is_one_line(err) or (verdict, err) == ("pass", ""))


@pytest.mark.parametrize("kind", ["fail", "invalid", "not finite", "baseline differs from itself"])
def test_a_run_that_is_not_accepted_leaves_the_file_as_it_is(call, tmp_path, kind):
    folder, policy, code = store_kind(tmp_path / "run", kind)
    (tmp_path / "accepted.json").write_text("the last one")
    found, _, err = call("gate", folder, "--policy", policy, "--write-baseline", tmp_path / "accepted.json", "--quiet")
    assert found == code
    assert is_one_line(err) and "is not written" in err and "left as it is" in err
    assert (tmp_path / "accepted.json").read_text() == "the last one"


def write_rule(policy: Path, counts_as: str) -> None:
    """Let a policy say what an inconclusive run counts as."""
    rule = {"counts_as": counts_as, "reason": "the night decides"}
    policy.write_text(yaml.safe_dump({**yaml.safe_load(policy.read_text()), "inconclusive": rule}))


@pytest.mark.parametrize("flags", [(), ("--quiet",), ("--json",)])
def test_a_pass_by_the_policy_is_exit_code_0_and_said_aloud(call, stored, tmp_path, flags):
    policy = write_policy(tmp_path, limits(stored)["inconclusive"])
    write_rule(policy, "pass")
    code, out, err = call("gate", stored, "--policy", policy, "--junit", "out.xml", *flags)
    assert code == 0
    assert is_one_line(err) and "exit code 0 for an INCONCLUSIVE run" in err and "the night decides" in err
    assert junit_verdict(Path("out.xml")) == "inconclusive", "no test of it has passed"
    if flags == ("--json",):
        assert json.loads(out)["verdict"] == "inconclusive"
    else:
        assert ("verdict: inconclusive" in out and "counts as a pass" in out) == (flags == ())


def test_a_pass_by_the_policy_is_a_warning_and_in_the_step_summary(call, monkeypatch, stored, tmp_path):
    policy = write_policy(tmp_path, limits(stored)["inconclusive"])
    write_rule(policy, "pass")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    code, _, err = call("gate", stored, "--policy", policy, "--quiet")
    assert code == 0
    assert err.startswith("::warning title=driftgate inconclusive%3A exit code 0::1 check is inconclusive")
    assert "counts as a pass: the night decides" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize("kind", ["invalid", "blind control", "controls alone", "no invariant"])
def test_a_run_that_could_have_seen_nothing_is_not_let_pass(call, tmp_path, kind):
    folder, policy, code = store_kind(tmp_path / "run", kind)
    write_rule(policy, "pass")
    found, out, err = call("gate", folder, "--policy", policy)
    assert (found, err) == (code, "") == (3, "")
    assert "could have seen nothing" in out and "verdict: inconclusive" in out


@pytest.mark.parametrize("kind", ["inconclusive", "invalid", "blind control", "controls alone"])
def test_an_open_run_fails_by_the_policy_in_every_output(call, tmp_path, kind):
    folder, policy, _ = store_kind(tmp_path / "run", kind)
    write_rule(policy, "fail")
    code, out, err = call("gate", folder, "--policy", policy, "--json", "--junit", "out.xml")
    assert (code, err, json.loads(out)["verdict"]) == (1, "", "fail")
    assert junit_verdict(Path("out.xml")) == "fail"


@pytest.mark.parametrize("kind", ["pass", "fail"])
@pytest.mark.parametrize("counts_as", ["pass", "fail"])
def test_a_decided_run_is_not_touched_by_the_rule(call, tmp_path, kind, counts_as):
    folder, policy, code = store_kind(tmp_path / "run", kind)
    write_rule(policy, counts_as)
    found, out, err = call("gate", folder, "--policy", policy, "--explain")
    assert (found, err) == (code, "")
    assert f"an inconclusive run counts as: {counts_as}: the night decides" in out
    assert "found: the run is not inconclusive" in out


def test_a_plan_that_is_gone_is_not_let_pass_by_the_policy(call, tmp_path):
    """The rule is applied after the comparison with the accepted run, once."""
    policy, accepted = accepted_file(call, tmp_path, CANDIDATE)
    write_rule(policy, "pass")
    (tmp_path / "new").mkdir()
    save_run(tmp_path / "new", cases.make_run({"fp8/fp32@4": cases.Measured(kl=kl(1e-3))}))
    code, out, _ = call("gate", tmp_path / "new", "--policy", policy, "--baseline", accepted, "--json")
    assert code == 3
    (rule,) = [v for v in json.loads(out)["verdicts"] if v["check"] == "counts_as"]
    assert rule["verdict"] == "inconclusive" and "accepted:plan" in rule["reason"]


@pytest.mark.parametrize(("counts_as", "code", "says"), [("fail", 1, "counts as a fail"), ("pass", 3, "not answers")])
def test_open_answers_may_fail_by_a_policy_and_never_pass(call, tmp_path, counts_as, code, says):
    for name, wrong in (("base", 10), ("cand", 14)):
        lines = [json.dumps({"item_id": f"q{i}", "correct": i >= wrong, "engine": name}) for i in range(200)]
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    policy = tmp_path / "answers.yaml"
    policy.write_text("checks: [{check: task_loss, margin: 2, reason: because}]")
    flags = ("gate", "--samples", "base.jsonl", "cand.jsonl", "--policy", policy, "--quiet")
    assert call(*flags) == (3, "", "")
    write_rule(policy, counts_as)
    found, out, err = call(*flags)
    assert (found, out) == (code, "")
    assert is_one_line(err) and says in err


@pytest.mark.parametrize(
    ("content", "says"), [(None, "does not exist"), ("{", "Invalid JSON"), ('{"schema_version": 2}', "schema_version")]
)
def test_an_accepted_run_that_cannot_be_read_is_exit_code_4(call, stored, content, says):
    if content is not None:
        Path("accepted.json").write_text(content)
    code, out, err = call("gate", stored, "--baseline", "accepted.json")
    assert (code, out) == (4, "")
    assert is_one_line(err) and says in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("RUN", "--margin", 2), "--margin"),
        (("RUN", "--metric", "acc"), "--metric"),
        (("RUN", "--filter", "none"), "--filter"),
        (("RUN", "--samples", "a", "b"), "RUN does not go with --samples"),
        (("--samples", "a", "b", "--junit", "x.xml"), "--junit does not go with --samples"),
        (("--samples", "a", "b", "--explain"), "--explain does not go with --samples"),
        (("--samples", "a", "b", "--write-baseline", "x"), "--write-baseline does not go with --samples"),
    ],
)
def test_flags_that_say_nothing_together_are_refused(call, stored, arguments, says):
    code, out, err = call("gate", *(stored if a == "RUN" else a for a in arguments))
    assert (code, out) == (2, "")
    assert is_one_line(err) and says in err


def test_a_junit_file_without_a_folder_is_refused(call, stored):
    code, out, err = call("gate", stored, "--junit", "no/where.xml")
    assert (code, out) == (4, "")
    assert is_one_line(err) and "make it first" in err


def test_every_check_that_can_be_made_is_explained(call, stored, tmp_path):
    assert set(get_args(CheckName)) <= set(CHECK_NOTES)
    code, out, err = call("gate", stored, "--explain")
    assert (code, err) == (0, "")
    assert "Mean of KL(baseline‖plan) over the decoded steps" in out
    assert "limit: at most 0.02 nats per step (all candidates): llama.cpp reports" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    document = json.loads(call("gate", stored, "--explain", "--json")[1])
    assert len(document["explanations"]) == len({v["check"].partition(":")[0] for v in document["verdicts"]})


def test_a_table_of_checks_fits_eighty_columns(call, monkeypatch, stored):
    monkeypatch.setenv("COLUMNS", "80")
    lines = call("gate", stored)[1].splitlines()
    assert max(len(line) for line in lines) <= 80
    assert sum(line.startswith(PLAN) for line in lines) == len(load_run(stored).results.verdicts) - 1


def test_the_step_summary_keeps_its_size_and_its_whole_lines(tmp_path):
    run = cases.make_run(CANDIDATE)
    decide(run, load_policy())
    summary = tmp_path / "summary.md"
    for before in (0, SUMMARY_LIMIT - 300, SUMMARY_LIMIT - 10):
        summary.write_bytes(b"x" * before)
        append_summary(run, {"GITHUB_STEP_SUMMARY": str(summary)})
        added = summary.read_bytes()[before:].decode()
        assert summary.stat().st_size <= SUMMARY_LIMIT
        if before == 0:
            assert PLAN in added and "Cut here" not in added
        else:
            assert added == "" or added.endswith("Cut here: a step summary holds 1 MiB.\n")
    append_summary(run, {})


def test_annotations_are_escaped_and_counted(tmp_path):
    run = cases.make_run(CANDIDATE)
    decide(run, load_policy())
    odd = run.results.verdicts[0].model_copy(
        update={"plan": "a,b:c", "verdict": "fail", "reason": "100 %\nof it: really, all"}
    )
    run.results.verdicts = [odd] * 3
    shown = list_annotations(run, {"GITHUB_ACTIONS": "true"})
    assert shown[0].startswith("::error title=driftgate fail%3A a%2Cb%3Ac")
    assert shown[0].endswith("::100 %25%0Aof it: really, all")
    run.results.verdicts = [odd] * 25
    assert len(list_annotations(run, {"GITHUB_ACTIONS": "true"})) == 10
    assert list_annotations(run, {"GITHUB_ACTIONS": "true"})[-1].endswith("::and 16 more; see the summary")
    assert list_annotations(run, {}) == []


def test_samples_of_any_engine_are_gated_with_every_flag_of_theirs(call, monkeypatch, tmp_path):
    from driftgate import samples_command

    seen = {}

    def gate_samples(*paths: Path, **flags: object) -> int:
        seen.update(flags, paths=paths)
        return 3

    monkeypatch.setattr(samples_command, "gate_samples", gate_samples)
    Path("p.yaml").write_text("checks: [{check: bitwise, reason: because}]")
    flags = ("--margin", 2, "--metric", "acc", "--filter", "strict", "--policy", "p.yaml", "--json", "--quiet")
    assert call("gate", "--samples", "base", "cand", *flags) == (3, "", "")
    assert seen == {
        "paths": (Path("base"), Path("cand")), "margin": 2.0, "metric": "acc", "filter": "strict",
        "policy": Path("p.yaml"), "as_json": True, "quiet": True,
    }  # fmt: skip


@pytest.mark.parametrize(("lost", "code"), [(0, 0), (40, 1)])
def test_two_files_of_answers_have_a_verdict(call, lost, code):
    for name, wrong in (("base", 10), ("cand", 10 + lost)):
        lines = [json.dumps({"item_id": f"q{i}", "correct": i >= wrong, "engine": name}) for i in range(200)]
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    found, _, err = call("gate", "--samples", "base.jsonl", "cand.jsonl", "--margin", 4)
    assert (found, err) == (code, "")
