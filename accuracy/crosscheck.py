"""The same token streams through the real Triton kernels under the interpreter, in a second process.

Notable: Triton decides at import whether it interprets, so this needs a process of its own; it runs beside the long
part. The child also certifies the invariants on the checkpoint's own shapes and inputs. Started as
``python -P -m driftgate.accuracy.crosscheck JOB_FOLDER``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from driftgate.accuracy.mixed import describe_plan, read_plan
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.records import BitwiseRecord, ToleranceRecord
from driftgate.kernels.contract import Backend
from driftgate.quant.formats import FORMATS

if TYPE_CHECKING:
    from driftgate.accuracy.observers import RecordedInputs

__all__ = ["CrossCheckJob", "CrossCheckOutcome", "certified", "steps_needed"]


def steps_needed(plans: Mapping[str, PrecisionPlan], *, cycles: int = 2) -> int:
    """Steps that hold at least ``cycles`` full flush cycles of every plan."""
    return cycles * max((p.options.length for p in plans.values()), default=1)


@dataclass(frozen=True, kw_only=True)
class CrossCheckOutcome:
    """What the child found.

    Attributes:
        steps: decoded steps of each plan.
        logits: by plan and for the baseline, [steps, vocab] of the first sequence.
        bitwise: invariants under the interpreter, on the checkpoint's own shapes.
        tolerance: errors against FP64 of the same kernels, on small heads.
        again_equal: whether the baseline equalled itself there.
        seconds: wall time of the child.
    """

    steps: int
    logits: dict[str, np.ndarray]
    bitwise: list[BitwiseRecord]
    tolerance: list[ToleranceRecord]
    again_equal: bool
    seconds: float


class CrossCheckJob:
    """A running child.

    Args:
        folder: checkpoint folder.
        dtype: as ``load_model`` takes it.
        plans: by name.
        token_ids: [length] int64, the first stream, cut to the steps wanted.
        prefill: tokens that the model prefills itself.
        vocab_size: real columns of the logits.
        seed: of plans with stochastic rounding.
    """

    def __init__(
        self,
        *,
        folder: Path,
        dtype: str | None,
        plans: Mapping[str, PrecisionPlan],
        token_ids: np.ndarray,
        prefill: int,
        vocab_size: int,
        seed: int = 0,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="driftgate-")
        self.path = Path(self._folder.name)
        job = {
            "folder": str(folder.resolve()),
            "dtype": dtype,
            "plans": {name: describe_plan(plan) for name, plan in plans.items()},
            "token_ids": token_ids.tolist(),
            "prefill": prefill,
            "vocab_size": vocab_size,
            "seed": seed,
        }
        (self.path / "job.json").write_text(json.dumps(job))
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with (self.path / "log.txt").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "driftgate.accuracy.crosscheck", str(self.path)],
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.PIPE,  # nothing is written: it closes when this process ends, however it ends
            )

    def result(self) -> CrossCheckOutcome:
        """Wait for the child.

        Raises:
            RuntimeError: it failed; with the last lines that it printed, the very last one first.
        """
        code = self._process.wait()
        try:
            if code != 0:
                tail = (self.path / "log.txt").read_text(errors="replace").strip().splitlines()[-12:]
                last = tail[-1] if tail else "it printed nothing"
                raise RuntimeError("\n".join([f"the interpreted cross-check ended with {code}: {last}", *tail]))
            report = json.loads((self.path / "report.json").read_text())
            with np.load(self.path / "logits.npz") as stored:
                logits = {name: stored[f"plan{i}"] for i, name in enumerate(report["names"])}
        finally:
            self._release()
        return CrossCheckOutcome(
            steps=report["steps"],
            logits=logits,
            bitwise=[BitwiseRecord(**record) for record in report["bitwise"]],
            tolerance=[ToleranceRecord(**record) for record in report["tolerance"]],
            again_equal=report["again_equal"],
            seconds=report["seconds"],
        )

    def cancel(self) -> None:
        """Stop the child, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._release()

    def _release(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._folder.cleanup()


def certified(plans: Mapping[str, PrecisionPlan]) -> dict[str, Sequence[Any]]:
    """What a run certifies on the checkpoint's own shapes and inputs: L = 1 and the plans' lengths, the plans' formats.

    ``driftgate certify`` takes every length and format.
    """
    options = [options for plan in plans.values() for options in plan.every]
    lengths = sorted({1} | {o.length for o in options})
    formats = [f for f in FORMATS if f == "fp32" or any(f in (o.read, o.recurrence) for o in options)]
    return {"lengths": lengths, "formats": formats}


def shorten(recorded: RecordedInputs) -> RecordedInputs:
    """One layer of what was recorded: an interpreted step costs tens of milliseconds a head."""
    return replace(recorded, inputs=recorded.inputs[:1], initial=recorded.initial[:1])


def _follow_parent(path: Path) -> None:
    """End this process and remove its folder as soon as the parent is gone, which a signal may have ended."""

    def wait() -> None:
        os.read(0, 1)
        shutil.rmtree(path, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _main(path: Path) -> None:
    """The child: lock step of one sequence under the interpreter, then the certificate on what it recorded."""
    import time

    import torch

    from driftgate.accuracy.certify import certify
    from driftgate.accuracy.lockstep import LockstepRunner
    from driftgate.accuracy.models import load_model
    from driftgate.accuracy.run_tolerance import measure_run_tolerance

    started = time.monotonic()
    torch.set_num_threads(1)
    job = json.loads((path / "job.json").read_text())
    loaded = load_model(Path(job["folder"]), name="model", device="cpu", dtype=job["dtype"])
    plans = {name: read_plan(name, described) for name, described in job["plans"].items()}
    runner = LockstepRunner(
        loaded.model,
        plans,
        batch=1,
        backend=Backend.TRITON_INTERPRET,
        prefill=job["prefill"],
        vocab_size=job["vocab_size"],
        seed=job["seed"],
    )
    tokens = np.asarray([job["token_ids"]], dtype=np.int64)
    steps = tokens.shape[1] - job["prefill"]
    result = runner.run(tokens, record_steps=steps, keep_logits=steps)
    assert result.recorded is not None
    bitwise = certify(backend=Backend.TRITON_INTERPRET, recorded=shorten(result.recorded), **certified(plans))
    tolerance = measure_run_tolerance(
        plans, recurrence=result.recorded.recurrence, backend=Backend.TRITON_INTERPRET, seed=job["seed"]
    )
    names = list(result.first_logits)
    np.savez(path / "logits.npz", **{f"plan{i}": result.first_logits[n] for i, n in enumerate(names)})
    report = {
        "names": names,
        "steps": steps,
        "bitwise": [record.model_dump() for record in bitwise],
        "tolerance": [record.model_dump() for record in tolerance],
        "again_equal": result.again is None,
        "seconds": time.monotonic() - started,
    }
    (path / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    _follow_parent(Path(sys.argv[1]))
    _main(Path(sys.argv[1]))
