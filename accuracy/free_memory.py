"""Memory that is still free on this machine and its GPUs, and how sizes are written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["SPREAD", "available_memory", "device_memory", "format_bytes", "spread_limits"]

SPREAD = "cuda+cpu"
"""Device of a model whose layers lie on all GPUs as far as they fit, and in this machine's memory beyond."""
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def available_memory() -> int | None:
    """Bytes that this process may still take: of the machine, or of its control group where that is less."""
    try:
        fields: Mapping[str, str] = dict(
            line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        )
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return None
    try:
        return min(free, int(_CGROUP.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no control group, or "max"
        return free


def device_memory(device: str) -> int | None:
    """Bytes that are free where a model is to lie: of the GPU ``cuda`` or ``cuda:N``, of this machine, or of all."""
    if device == SPREAD:
        return sum(spread_limits().values())
    if not device.startswith("cuda"):
        return available_memory()
    import torch

    place = torch.device(device)
    cached = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)  # torch's own, to be used again
    return int(torch.cuda.mem_get_info(place)[0]) + cached


def spread_limits() -> dict[int | str, int]:
    """Bytes of weights that may lie on each GPU and in this machine's memory, as accelerate takes them.

    A fifth of a GPU is left to states, caches and the layer that is passing through.
    """
    import torch

    places: dict[int | str, int] = {
        i: (device_memory(f"cuda:{i}") or 0) * 4 // 5 for i in range(torch.cuda.device_count())
    }
    return {**places, "cpu": available_memory() or 0}


def format_bytes(size: int) -> str:
    """A size with two significant digits or more, in decimal units."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}" if value < 1000 else f"{value:.3e} {units[0]}"
