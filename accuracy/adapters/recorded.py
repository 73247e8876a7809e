"""Device work recorded once as a CUDA graph and then launched whole: a decode step of many plans is bound by launches.

Notable: a graph launches the same kernels on the same addresses, so bits are those of the calls that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["GraphRecorder", "Recorded"]

CALLS_BEFORE = 2
"""Calls that run as they are: kernels compile and load there, which recording does not allow."""

DeviceWork = Callable[..., "torch.Tensor | None"]


class GraphRecorder:
    """Makes functions into recorded ones that share their memory.

    Args:
        enabled: whether to record; else functions are handed back as they came.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._memory: dict[torch.device, object] = {}

    def record(self, function: DeviceWork, device: torch.device) -> DeviceWork:
        """A function of tensors of one device that runs as it is at first, and as one launch later.

        Args:
            function: device work alone: it waits for nothing, keeps nothing that it allocates, decides nothing on the
                host that may differ from call to call. Positional tensors in, a tensor or None out.
            device: of its tensors.
        """
        if not self.enabled or device.type != "cuda":
            return function
        if device not in self._memory:
            self._memory[device] = torch.cuda.graph_pool_handle()
        return Recorded(function, device, memory=self._memory[device])


class Recorded:
    """See ``GraphRecorder.record``; what a call returns is overwritten by the next."""

    def __init__(self, function: DeviceWork, device: torch.device, *, memory: object) -> None:
        self._function, self._device, self._memory = function, device, memory
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[torch.Tensor] = []
        self._out: torch.Tensor | None = None

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor | None:
        """Run it; ValueError for tensors of other shapes or types than those of the first call that was recorded."""
        with torch.cuda.device(self._device):
            if self._calls < CALLS_BEFORE:
                self._calls += 1
                return self._function(*tensors)
            if self._graph is None:
                self._record(tensors)
            assert self._graph is not None
            for place, given in zip(self._inputs, tensors, strict=True):
                if place.shape != given.shape or place.dtype != given.dtype:
                    raise ValueError(
                        f"recorded step: expected {tuple(place.shape)} {place.dtype} as at first, got "
                        f"{tuple(given.shape)} {given.dtype}"
                    )
                place.copy_(given)
            self._graph.replay()
            return self._out

    def _record(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Record the function on places of its own, without running it."""
        self._inputs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
        graph = torch.cuda.CUDAGraph()
        own = torch.cuda.Stream()
        own.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(own):
            graph.capture_begin(pool=self._memory)
            try:
                self._out = self._function(*self._inputs)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(own)
        self._graph = graph
