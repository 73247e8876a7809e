"""One optimiser step; on a GPU its forward and backward pass is captured as one graph for each length.

A step of these small models is some thousands of tiny kernels, so that launching them one by one takes longer than
running them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from driftgate.evals.training.families import masks
from driftgate.evals.training.rows import Kind, RowBatch

__all__ = ["Stepper"]

WARM_UP = 2


class Stepper:
    """Trains one model; all its work runs on one stream.

    Args:
        model: on its device, in training mode, under the training functions of its family.
        graphs: capture the steps; needs a GPU.
        weight_decay: of AdamW.
        read_noise: the tensor that the training functions look up; ``step`` sets it, and it is 0 between steps.
    """

    def __init__(
        self, model: Any, *, device: str, graphs: bool, weight_decay: float, read_noise: Tensor | None = None
    ) -> None:
        self.model, self.device, self._read_noise = model, device, read_noise
        self._on_gpu = device != "cpu"
        self._stream: torch.cuda.Stream | None = None
        if self._on_gpu:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())  # the model's copy to the device
            self._stream = stream
        self._graphs: dict[tuple[int, int], tuple[Any, tuple[Tensor, ...]]] | None = {} if graphs else None
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        with self.on_stream():
            self._parameters = list(model.parameters())
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter)
            self._totals = torch.zeros(len(Kind), 3, device=device)
            self._optimizer = torch.optim.AdamW(
                self._parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=weight_decay, fused=self._on_gpu
            )
        self.skipped = 0

    def on_stream(self) -> Any:
        """Context in which everything that touches the model must run."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def step(self, batch: RowBatch, rate: float, noise: float = 0.0) -> None:
        """One step of gradient descent with this learning rate; a gradient that is not finite is skipped.

        Args:
            batch: rows and weights.
            rate: learning rate.
            noise: deviation of the read noise in this step; of no effect without the tensor.
        """
        arrays = (batch.token_ids.astype("int64"), batch.kinds.astype("int64"), batch.weights)
        given = tuple(torch.from_numpy(array) for array in arrays)
        with self.on_stream():
            self._run(given, noise)
            norm = torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
            if not torch.isfinite(norm):
                self.skipped += 1
                return
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()

    def _run(self, given: tuple[Tensor, ...], noise: float) -> None:
        """Gradients of one batch; a graph is captured and compared without noise."""
        graph, inputs = (None, given) if self._graphs is None else self._captured(given)
        if self._read_noise is not None:
            self._read_noise.fill_(noise)
        if graph is None:
            self._forward_backward(*(x.to(self.device) for x in given))
        else:
            for held, x in zip(inputs, given, strict=True):
                held.copy_(x)
            graph.replay()
        if self._read_noise is not None:
            self._read_noise.zero_()

    def read_totals(self) -> dict[str, float]:
        """Mean loss and share of right tokens of each kind since the last call."""
        with self.on_stream():
            totals = self._totals.to("cpu", copy=True)
            self._totals.zero_()
        found = {}
        for kind in Kind:
            loss, right, count = totals[kind].tolist()
            if count and kind is not Kind.UNSCORED:
                found[f"{kind.name.lower()}_loss"] = round(loss / count, 4)
                found[f"{kind.name.lower()}_right"] = round(right / count, 4)
        return found

    def _captured(self, given: tuple[Tensor, ...]) -> tuple[Any, tuple[Tensor, ...]]:
        """The graph for this shape and the tensors that it reads; captured on first use."""
        assert self._graphs is not None
        shape = (given[0].shape[0], given[0].shape[1])
        if shape not in self._graphs:
            inputs = tuple(x.to(self.device) for x in given)
            totals = self._totals.clone()
            for _ in range(WARM_UP):
                self._forward_backward(*inputs)
            expected = [parameter.grad.clone() for parameter in self._parameters]
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                self._forward_backward(*inputs)
            graph.replay()
            self._compare(expected, shape)
            self._totals.copy_(totals)
            self._graphs[shape] = (graph, inputs)
        return self._graphs[shape]

    def _compare(self, expected: list[Tensor], shape: tuple[int, int]) -> None:
        """Refuse a graph whose gradients are not those of the same step without it, up to the order of sums."""
        gaps = [(p.grad - e).square().sum() for p, e in zip(self._parameters, expected, strict=True)]
        gap = float((torch.stack(gaps).sum() / sum(e.square().sum() for e in expected)).sqrt())
        if not gap < 0.02:
            raise RuntimeError(f"graph of shape {shape}: gradients differ by {gap:.3g} of their norm")

    def _forward_backward(self, token_ids: Tensor, kinds: Tensor, weights: Tensor) -> None:
        """Gradients of one batch into ``grad``, which keeps its memory, and its losses into the totals."""
        torch._foreach_zero_([parameter.grad for parameter in self._parameters])
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self._on_gpu, cache_enabled=False):
            logits = self.model(token_ids, attention_mask=masks(), use_cache=False).logits
        logits = logits[:, :-1].float().flatten(0, 1)
        labels = token_ids[:, 1:].flatten()
        losses = F.cross_entropy(logits, labels, reduction="none")
        (losses * weights[:, 1:].flatten()).sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            right = (logits.argmax(-1) == labels).float()
            rows = torch.stack([losses, right, torch.ones_like(right)], dim=1)
            self._totals.index_add_(0, kinds[:, 1:].flatten(), rows)
