"""A transformers model whose recurrent layers decode through driftgate's kernels, for all plans in one forward.

Rows of a forward are [block × sequence], padded to a multiple of 16: one block per plan, and every recurrent layer
hands each block's rows to the kernel of its plan. Prefill and convolution states stay the model's own; all blocks
start from the same prefill.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from driftgate.accuracy.adapters.families import Family, StepInputs, find_family
from driftgate.accuracy.adapters.hooks import DecodeHook, quiet_transformers
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.errors import InputError, UsageError
from driftgate.kernels.contract import Backend, Dot, HeadShape, ReplayOptions
from driftgate.kernels.pool import StatePool

__all__ = ["Block", "WrappedModel", "wrap"]

ROW_MULTIPLE = 16
"""Rows are padded to it: on a CPU, equal rows of a linear layer may differ at some other row counts."""

Observer = Callable[[int, StepInputs, torch.Tensor], None]


@dataclass(kw_only=True)
class Block:
    """Rows of one plan.

    Attributes:
        name: key of the block.
        options: what its kernel reads and writes.
        alternative: take another legal launch of the baseline kernel (for the noise floor).
        rows: its rows in a forward.
        pool: its states.
    """

    name: str
    options: ReplayOptions
    alternative: bool = False
    rows: slice = field(default_factory=lambda: slice(0))
    pool: StatePool = field(init=False)


def wrap(
    model: torch.nn.Module,
    plans: Sequence[str | PrecisionPlan | Block],
    *,
    n_sequences: int = 1,
    backend: Backend | str = Backend.TORCH,
    seed: int = 0,
) -> WrappedModel:
    """Swap the decode step of a transformers model's recurrent layers, one block of rows per plan.

    Args:
        model: a loaded causal language model of a covered family.
        plans: plan texts or plans, the baseline first; or blocks, where more than the plan is to be said.
        n_sequences: sequences of one batch, the same for every plan.
        backend: which code takes the decode steps.
        seed: of plans with stochastic rounding.

    Returns:
        A context manager; inside it the model decodes through driftgate, after it the model is as before.

    Raises:
        InputError: the family is not covered, or the model has no recurrent layer.
        UsageError: a plan text that does not parse, or a plan with speculative windows: a model decodes single tokens.
    """
    family = find_family(model.config)  # type: ignore[arg-type]
    blocks = [plan if isinstance(plan, Block) else _block(plan) for plan in plans]
    return WrappedModel(model, family, blocks, n_sequences=n_sequences, backend=Backend(backend), seed=seed)


def _block(plan: str | PrecisionPlan) -> Block:
    parsed = PrecisionPlan.parse(plan) if isinstance(plan, str) else plan
    return Block(name=str(parsed), options=parsed.options)


class WrappedModel:
    """See ``wrap``.

    Attributes:
        blocks: in row order.
        n_layers: recurrent layers.
        layer_indices: their decoder-layer indices as in the checkpoint.
        observers: called after each recurrent layer's step with (layer, inputs, outputs [rows, HV, d_v]).
        kernel_calls: kernel launches so far; zero after a run means that nothing was measured.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        family: Family,
        blocks: list[Block],
        *,
        n_sequences: int,
        backend: Backend,
        seed: int = 0,
    ) -> None:
        windows = [block.name for block in blocks if block.options.window]
        if windows:
            raise UsageError(
                f"plan {windows[0]!r}: a model decodes single tokens here; +spec is for `driftgate certify`"
            )
        products = [block.name for block in blocks if block.options.dot is Dot.TF32]
        if products and backend is not Backend.TRITON:
            raise InputError(
                f"plan {products[0]!r}: TF32 needs tensor cores; run it on a GPU, or take +dot=ieee or bf16"
            )
        mixers = family.find_mixers(model)
        if not mixers:
            raise InputError(f"the model has no recurrent layer of family {family.name}; nothing to measure")
        shapes = {family.head_shape(mixer) for mixer in mixers}
        if len(shapes) > 1:
            raise InputError(f"recurrent layers of different head shapes are not covered: {shapes}")
        self.model, self.family, self.backend, self.seed = model, family, backend, seed
        self.shape: HeadShape = shapes.pop()
        self.blocks, self.n_sequences, self.n_layers = blocks, n_sequences, len(mixers)
        self.layer_indices = [int(m.layer_idx) for m in mixers]
        self.device, self.dtype = model.device, model.dtype  # type: ignore[attr-defined]
        self.observers: list[Observer] = []
        self.kernel_calls = 0
        self._kernels = _kernels(family.recurrence, backend)
        self._hook = DecodeHook(family.module, family.function, mixers, self._decode)
        self._slots = torch.arange(n_sequences, dtype=torch.int32, device=self.device)
        for i, block in enumerate(blocks):
            block.rows = slice(i * n_sequences, (i + 1) * n_sequences)
            block.pool = self.make_pool(block.options, n_slots=n_sequences)
        used = len(blocks) * n_sequences
        self.n_rows = -(-used // ROW_MULTIPLE) * ROW_MULTIPLE
        self._row_sequence = torch.arange(self.n_rows, device=self.device) % n_sequences
        self._cache: Any = None
        self._position = torch.zeros(0)
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def __enter__(self) -> WrappedModel:
        with ExitStack() as stack:
            stack.enter_context(quiet_transformers())
            stack.enter_context(self._hook)
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()
        self._cache = None

    def make_pool(self, options: ReplayOptions, *, n_slots: int) -> StatePool:
        """A pool of this model's shape on its device."""
        pool = StatePool(
            self.shape,
            options,
            n_slots=n_slots,
            n_layers=self.n_layers,
            activation_dtype=self.dtype,
            seed=self.seed,
            device=self.device,
        )
        if self.backend is Backend.TORCH:
            pool.memoise_reads()
        return pool

    @torch.no_grad()
    def prefill(self, token_ids: torch.Tensor, *, sequences: torch.Tensor | None = None) -> torch.Tensor:
        """Run the model's own prefill once and start every block from it.

        Args:
            token_ids: [n_sequences, T] int64, T >= 1, all of the same length.
            sequences: [n_sequences] int64 ids, which name the draws of stochastic rounding; None for 0, 1, …

        Returns:
            Logits after the last token [n_sequences, vocab].
        """
        n, length = token_ids.shape
        if n != self.n_sequences:
            raise ValueError(f"token_ids: expected {self.n_sequences} sequences, got {n}")
        positions = torch.arange(length, device=self.device).expand(n, -1)
        out = self.model(input_ids=token_ids, position_ids=positions, use_cache=True, logits_to_keep=1)
        self._cache = out["cache" if "cache" in out else "past_key_values"]
        ids = self._slots.long() if sequences is None else sequences.to(self.device)
        for block in self.blocks:
            block.pool.start(self._slots, tokens=length, sequences=ids)
        for layer, index in enumerate(self.layer_indices):
            states = self._cache.layers[index].recurrent_states[0].transpose(-1, -2).float()
            for block in self.blocks:
                block.pool.write(layer, self._slots.long(), states)
        self._cache.reorder_cache(self._row_sequence)
        for index in self.layer_indices:
            # the model's own copy is never read again: one element seen with the shape of all rows
            own = self._cache.layers[index].recurrent_states
            own[0] = torch.zeros((), dtype=own[0].dtype, device=self.device).expand(own[0].shape)
        self._position = torch.full((self.n_rows, 1), length, dtype=torch.long, device=self.device)
        return out.logits[:, -1]  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Feed one token per sequence to every block.

        Args:
            token_ids: [n_sequences] int64, or [n_blocks, n_sequences] where blocks run free.

        Returns:
            Logits [n_blocks, n_sequences, vocab], a view.
        """
        if self._cache is None:
            raise RuntimeError("call prefill before step")
        rows = token_ids[self._row_sequence] if token_ids.ndim == 1 else self._spread(token_ids)
        out = self.model(
            input_ids=rows[:, None], position_ids=self._position, use_cache=True, **{self._cache_name: self._cache}
        )
        self._position += 1
        for block in self.blocks:
            block.pool.advance(self._slots)
        used = len(self.blocks) * self.n_sequences
        return out.logits[:used, -1].view(len(self.blocks), self.n_sequences, -1)  # type: ignore[no-any-return]

    def run_kernel(
        self, inputs: StepInputs, pool: StatePool, layer: int, slots: torch.Tensor, *, alternative: bool = False
    ) -> torch.Tensor:
        """One step of rows that all belong to one pool; o [rows, HV, d_v]."""
        take = self._kernels.decode_step if pool.options.step_by_step else self._kernels.replay_step
        extra = {"alternative": True} if alternative else {}
        self.kernel_calls += 1
        return take(  # type: ignore[no-any-return]
            inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, pool=pool, layer=layer, slots=slots, **extra
        )

    def _spread(self, token_ids: torch.Tensor) -> torch.Tensor:
        flat = token_ids.reshape(-1)
        return torch.cat((flat, flat[:1].expand(self.n_rows - len(flat))))

    def _decode(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """What replaces the family's decode function: [rows, 1, HV, d_v] and the untouched state of the cache."""
        inputs = self.family.read_step(*args, shape=self.shape, **kwargs)
        out = torch.zeros_like(inputs.v)
        for block in self.blocks:
            part = take_rows(inputs, block.rows)
            out[block.rows] = self.run_kernel(part, block.pool, layer, self._slots, alternative=block.alternative)
        for observe in self.observers:
            observe(layer, inputs, out)
        return out[:, None], kwargs["initial_state"]


def take_rows(inputs: StepInputs, rows: slice | torch.Tensor) -> StepInputs:
    """Some rows of a step's inputs."""
    return StepInputs(q=inputs.q[rows], k=inputs.k[rows], v=inputs.v[rows], g=inputs.g[rows], beta=inputs.beta[rows])


def _kernels(recurrence: str, backend: Backend) -> Any:
    """The module of a recurrence's step functions on a backend."""
    from importlib import import_module

    return import_module(f"driftgate.kernels.{recurrence}").implementation(backend)
