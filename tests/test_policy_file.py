"""Policy files: what is read, and a wrong one is one line that names file and place."""

from __future__ import annotations

import pytest

from driftgate.accuracy.policy import load_policy
from driftgate.errors import InputError


def test_the_default_policy_gives_every_limit_a_reason():
    policy = load_policy()
    assert policy.name == "default"
    assert {c.check for c in policy.checks} >= {"bitwise", "kl_mean", "task_loss"}
    assert all(len(c.reason) > 20 for c in policy.checks)


WRONG = {
    "unknown check": ("checks: [{check: kl_maen, limit: 1, reason: x}]", "checks.0.check"),
    "unknown key of a check": ("checks: [{check: kl_mean, limit: 1, reason: x, plan: y}]", "checks.0.plan"),
    "unknown key": ("limits: []\nchecks: [{check: bitwise, reason: x}]", "limits"),
    "limit and margin": ("checks: [{check: task_loss, limit: 1, margin: 2, reason: x}]", "task_loss takes margin"),
    "neither": ("checks: [{check: kl_mean, reason: x}]", "kl_mean takes limit"),
    "limit of bitwise": ("checks: [{check: bitwise, limit: 0, reason: x}]", "bitwise takes neither"),
    "margin of a drift check": ("checks: [{check: kl_mean, margin: 2, reason: x}]", "kl_mean takes limit"),
    "margin of a cap check": ("checks: [{check: cap_hit_excess, margin: 2, reason: x}]", "cap_hit_excess takes limit"),
    "points for a fraction": ("checks: [{check: cap_hit_excess, limit: 5, reason: x}]", "a fraction of the answers"),
    "NaN limit": ("checks: [{check: kl_mean, limit: .nan, reason: x}]", "checks.0.limit"),
    "infinite limit": ("checks: [{check: kl_mean, limit: .inf, reason: x}]", "checks.0.limit"),
    "negative limit": ("checks: [{check: kl_mean, limit: -1, reason: x}]", "checks.0.limit"),
    "margin of 0": ("checks: [{check: task_loss, margin: 0, reason: x}]", "checks.0.margin"),
    "margin of 100": ("checks: [{check: task_loss, margin: 100, reason: x}]", "checks.0.margin"),
    "word for a limit": ("checks: [{check: kl_mean, limit: low, reason: x}]", "checks.0.limit"),
    "no reason": ("checks: [{check: kl_mean, limit: 1}]", "checks.0.reason"),
    "empty reason": ("checks: [{check: kl_mean, limit: 1, reason: ''}]", "checks.0.reason"),
    "no checks": ("name: x", "checks"),
    "empty list of checks": ("checks: []", "checks"),
    "checks that are no list": ("checks: 3", "checks"),
    "plans that are no list": ("checks: [{check: bitwise, reason: x, plans: fp32@4}]", "plans"),
    "empty file": ("", "expected a mapping"),
    "a list": ("- check: bitwise", "expected a mapping"),
    "a number as key": ("1: 2\nchecks: [{check: bitwise, reason: x}]", "1"),
    "a word for inconclusive": (
        "inconclusive: pass\nchecks: [{check: bitwise, reason: x}]",
        "pass or fail, and a reason",
    ),
    "unknown outcome": (
        "inconclusive: {counts_as: skip, reason: x}\nchecks: [{check: bitwise, reason: x}]",
        "inconclusive.counts_as",
    ),
    "no reason of inconclusive": (
        "inconclusive: {counts_as: pass}\nchecks: [{check: bitwise, reason: x}]",
        "inconclusive.reason",
    ),
    "unknown key of inconclusive": (
        "inconclusive: {counts_as: pass, reason: x, plans: [a]}\nchecks: [{check: bitwise, reason: x}]",
        "inconclusive.plans",
    ),
    "no YAML": ("checks: [", "no readable YAML"),
    "a tag of Python": ("checks: !!python/object/apply:os.getcwd []", "no readable YAML"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_policy_file_is_one_line_that_names_file_and_place(tmp_path, kind):
    text, says = WRONG[kind]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_policy(path)
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert str(path) in message and says in message
    assert "\n" not in message


def test_a_policy_says_what_an_inconclusive_run_counts_as(tmp_path):
    path = tmp_path / "mine.yaml"
    checks = "checks: [{check: bitwise, reason: x}]"
    path.write_text(f"inconclusive: {{counts_as: fail, reason: nights are long}}\n{checks}")
    rule = load_policy(path).inconclusive
    assert (rule.counts_as, rule.reason) == ("fail", "nights are long")
    path.write_text(checks)
    assert load_policy(path).inconclusive is None
    assert load_policy().inconclusive is None, "the bundled policies leave it open"


def test_a_policy_file_that_is_missing_or_a_folder_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.yaml does not exist"):
        load_policy(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="no readable YAML"):
        load_policy(tmp_path)


def test_a_policy_file_of_other_bytes_is_named(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00checks")
    with pytest.raises(InputError, match=r"mine\.yaml"):
        load_policy(path)


def test_a_limit_may_be_written_as_1e_3(tmp_path):
    """YAML 1.1 reads 1e-3 as a word; people write it."""
    path = tmp_path / "mine.yaml"
    path.write_text("checks: [{check: kl_mean, limit: 1e-3, reason: x}]")
    policy = load_policy(path)
    assert (policy.name, policy.checks[0].limit) == ("mine", 0.001)
