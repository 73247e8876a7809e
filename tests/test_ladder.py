"""The ladder of evidence holds what the records say, rung by rung."""

from __future__ import annotations

from report_cases import make_run, with_results

from driftgate.reports.ladder import LADDER_HEADER, list_rungs


def test_rungs_stand_in_order_and_count_their_cases():
    rows = list_rungs(make_run())
    assert all(len(row) == len(LADDER_HEADER) for row in rows)
    rungs = [row[0] for row in rows]
    assert list(dict.fromkeys(rungs)) == ["bits", "tolerance", "tasks"] and rungs == sorted(
        rungs, key=["bits", "tolerance", "tasks"].index
    )
    found = {(row[0], row[1]): row[2:] for row in rows}
    assert found["bits", "I2"] == ["gdn", "1", "0", "3 ulp", "differs"]
    assert found["tolerance", "output_only output"] == ["gdn", "1", "1", "0.2 of the bound", "within"]
    assert found["tolerance", "state_output tf32 state"] == ["gdn", "1", "0", "4 of the bound", "outside"]
    assert found["tolerance", "unstable state"] == ["gdn", "1", "0", "n/a", "outside"]
    assert found["tasks", "recall"] == ["n/a", "5", "5", "-1 points", "5 pass"], "the control is left out"


def test_a_rung_that_was_not_climbed_says_so():
    run = make_run()
    bare = {name: plan.model_copy(update={"tasks": {}}) for name, plan in run.results.plans.items()}
    rows = list_rungs(with_results(run, bitwise=[], tolerance=[], plans=bare))
    assert [row[1].split(";")[0] for row in rows] == ["no case was run", "no case was run", "no task was run"]
