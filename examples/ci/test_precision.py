"""A precision plan as a test: `pytest --driftgate-policy policy.yaml test_precision.py`.

The plugin comes with driftgate. The test fails with the checks that did not pass.
"""

import os

SUITE = os.environ.get("SUITE", "quick")


def test_nvfp4_reads_with_an_fp32_recurrence(driftgate_run):
    """Measured here, on the embedded checkpoint."""
    run = driftgate_run(SUITE, plans=["nvfp4/fp32@16"], controls=["nvfp4@16"])
    assert run.results.plans["nvfp4/fp32@16"].bytes.traffic_ratio < 0.5


def test_the_stored_run_of_the_gpu_job(driftgate_run):
    """Measured elsewhere; RUN names its folder."""
    driftgate_run(os.environ.get("RUN", "precision"))
