"""Time of work on a GPU, by events; the bandwidth of a copy, and the machine that it was measured on."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch

__all__ = ["LEAST_REPEATS", "Timing", "describe_machine", "measure_copy", "time_device"]

LEAST_REPEATS = 20
WARM_UP_SECONDS = 0.03
_CLOCK_HZ = 2e9  # cycles of the waiting kernel a second; a lower clock waits longer, which does no harm
_MICRO = 1e6


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds of one launch over the repeats; spread is from the 10th to the 90th percentile."""

    us: float
    min_us: float
    spread_us: float


def measure_copy(n_bytes: int = 1 << 30, *, repeats: int = LEAST_REPEATS) -> dict[str, float]:
    """Copy within device memory: ``bytes`` read and written, ``us`` (median), ``bandwidth`` in bytes a second."""
    source = torch.randint(1 << 30, (n_bytes // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    timing = time_device(lambda: target.copy_(source), launches=1, repeats=repeats)
    moved = 2 * 4 * source.numel()
    return {"bytes": moved, **asdict(timing), "bandwidth": moved / timing.us * _MICRO}


def time_device(run: Callable[[], object], *, launches: int, repeats: int) -> Timing:
    """Time of one launch on the device, by events around what ``run`` enqueues.

    Args:
        run: enqueues ``launches`` launches on the current stream; compiled and warm after two calls.
        launches: by which its time is divided.
        repeats: how often it is timed.
    """
    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    host = time.perf_counter() - begin
    while time.perf_counter() - begin < WARM_UP_SECONDS:
        run()
        torch.cuda.synchronize()
    wait = int(_CLOCK_HZ * min(2 * host + 1e-4, 0.1))
    pairs = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        # the device waits here until all of ``run`` is in its queue
        torch.cuda._sleep(wait)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    times = sorted(1e3 * start.elapsed_time(end) / launches for start, end in pairs)
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(us=statistics.median(times), min_us=times[0], spread_us=tenths[-1] - tenths[0])


def describe_machine() -> dict[str, Any]:
    """Device, driver, versions and date of a run; the driver is None where nvidia-smi does not answer."""
    from triton import __version__ as triton_version

    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": found.name, "capability": f"sm_{found.major}{found.minor}",
        "multiprocessors": found.multi_processor_count, "memory_bytes": found.total_memory,
        "l2_bytes": found.L2_cache_size, "driver": _ask_driver(), "cuda": torch.version.cuda,
        "torch": torch.__version__, "triton": triton_version, "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def _ask_driver() -> str | None:
    """Version of the NVIDIA driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return answer[0] if answer else None
