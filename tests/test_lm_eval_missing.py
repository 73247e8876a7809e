"""Where lm-eval is not installed."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
sys.modules["lm_eval"] = None
import driftgate.evals.lm_eval as module
from driftgate.evals.tasks import load_task
for call in (lambda: module.DriftgateLM("tiny-gdn"), lambda: load_task("lm_eval:arc_easy")):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error.exit_code, error)
"""


def test_without_lm_eval_one_line_names_the_extra():
    done = subprocess.run([sys.executable, "-P", "-c", CODE], capture_output=True, text=True, timeout=120)
    line = "InputError 4 lm-eval is not installed; pip install 'driftgate[lm-eval]'"
    assert (done.stdout.splitlines(), done.stderr) == ([line, line], "")
