"""A transformers model whose recurrent layers decode through driftgate's kernels, for all plans in one forward.

Rows of a forward are [block × sequence], padded to a multiple of 16: one block per plan, and every recurrent layer
hands each block's rows to the kernel of its plan. Prefill and convolution states stay the model's own; all blocks
start from the same prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from driftgate.accuracy.adapters.block_states import BlockStates, Observer, find_device
from driftgate.accuracy.adapters.blocks import Block
from driftgate.accuracy.adapters.decode_functions import StepInputs
from driftgate.accuracy.adapters.families import Family, find_family
from driftgate.accuracy.adapters.hooks import DecodeHook, quiet_transformers
from driftgate.accuracy.adapters.model_rows import ModelRows
from driftgate.accuracy.mixed import check_layers
from driftgate.accuracy.plans import BASELINE, PrecisionPlan
from driftgate.errors import InputError, UsageError
from driftgate.kernels.contract import Backend, Dot, HeadShape

__all__ = ["Block", "WrappedModel", "wrap"]

ROW_MULTIPLE = 16
"""Rows are padded to it: on a CPU, equal rows of a linear layer may differ at some other row counts."""


def wrap(
    model: torch.nn.Module,
    plans: Sequence[str | PrecisionPlan | Block],
    *,
    n_sequences: int = 1,
    backend: Backend | str = Backend.TORCH,
    seed: int = 0,
    mimic: bool = False,
) -> WrappedModel:
    """Swap the decode step of a transformers model's recurrent layers, one block of rows per plan.

    Args:
        model: a loaded causal language model of a covered family.
        plans: plan texts or plans, the baseline first; or blocks, where more than the plan is to be said.
        n_sequences: sequences of one batch, the same for every plan.
        backend: which code takes the decode steps.
        seed: of plans with stochastic rounding.
        mimic: take Mamba-2 steps with transformers' own roundings (dt, dt·B and the state that is read, in the model's
            type) in place of driftgate's kernels: a BF16 model then decodes to the bit as it does unwrapped, which
            proves the wiring. Baseline alone.

    Returns:
        A context manager; inside it the model decodes through driftgate, after it the model is as before.

    Raises:
        InputError: the family is not covered, or the model has no recurrent layer.
        UsageError: a plan text that does not parse, a plan with speculative windows (a model decodes single tokens), or
            ``mimic`` with another plan than the baseline or where transformers' decode step is FP32 inside.
    """
    family = find_family(model.config)
    blocks = [plan if isinstance(plan, Block) else _block(plan) for plan in plans]
    return WrappedModel(
        model, family, blocks, n_sequences=n_sequences, backend=Backend(backend), seed=seed, mimic=mimic
    )


def _block(plan: str | PrecisionPlan) -> Block:
    parsed = PrecisionPlan.parse(plan) if isinstance(plan, str) else plan
    return Block.of(str(parsed), parsed)


class WrappedModel:
    """See ``wrap``.

    Attributes:
        blocks: in row order.
        states: their pools, and the kernels.
        n_layers: recurrent layers.
        layer_indices: their decoder-layer indices as in the checkpoint.
        device: where token ids go in and logits come out.
        observers: called after each recurrent layer's step with (layer, inputs, outputs [rows, HV, d_v]); those of
            ``states`` are called before.
        kernel_calls: steps that kernels took so far; zero after a run means that nothing was measured.
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
        mimic: bool = False,
    ) -> None:
        windows = [block.name for block in blocks if block.options.window]
        if windows:
            raise UsageError(
                f"plan {windows[0]!r}: a model decodes single tokens here; +spec is for `driftgate certify`"
            )
        products = [block.name for block in blocks if any(o.dot is Dot.TF32 for o in block.plan.every)]
        if products and backend is not Backend.TRITON:
            raise InputError(
                f"plan {products[0]!r}: TF32 needs tensor cores; run it on a GPU, or take +dot=ieee or bf16"
            )
        if mimic and (family.decode.mimic is None or any(block.plan != BASELINE for block in blocks)):
            raise UsageError(
                f"mimic: for the baseline of Mamba-2 models alone, got {family.recurrence.value} and plans "
                f"{[block.name for block in blocks]}; leave it out"
            )
        mixers = family.find_mixers(model)
        if not mixers:
            raise InputError(f"the model has no recurrent layer of family {family.name}; nothing to measure")
        shapes = {family.head_shape(mixer) for mixer in mixers}
        if len(shapes) > 1:
            raise InputError(f"recurrent layers of different head shapes are not covered: {shapes}")
        self.model, self.family, self.backend, self.seed, self.mimic = model, family, backend, seed, mimic
        self.shape: HeadShape = shapes.pop()
        self.blocks, self.n_sequences, self.n_layers = blocks, n_sequences, len(mixers)
        self.layer_indices = [int(m.layer_idx) for m in mixers]
        check_layers({block.name: block.plan for block in blocks}, self.layer_indices)
        self.device: torch.device = model.device  # type: ignore[assignment]
        self.dtype: torch.dtype = model.dtype  # type: ignore[assignment]
        self.observers: list[Observer] = []
        self.kernel_calls = 0
        self._layers_done = 0
        self._hook = DecodeHook(family.module, family.decode.name, mixers, self._decode)
        self.states = BlockStates(
            blocks, shape=self.shape, recurrence=family.recurrence, layer_indices=self.layer_indices,
            devices=[find_device(mixer, self.device) for mixer in mixers], n_sequences=n_sequences,
            activation_dtype=self.dtype, seed=seed, backend=backend, record=not mimic,
        )  # fmt: skip
        used = len(blocks) * n_sequences
        self.n_rows = -(-used // ROW_MULTIPLE) * ROW_MULTIPLE
        self._row_sequence = torch.arange(self.n_rows, device=self.device) % n_sequences
        self._rows = ModelRows(model, family, mixers, row_sequence=self._row_sequence)
        self._ids = torch.arange(n_sequences, device=self.device)

    def __enter__(self) -> WrappedModel:
        with ExitStack() as stack:
            stack.enter_context(quiet_transformers())
            stack.enter_context(self._hook)
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()
        self._rows.cache = None

    @torch.no_grad()
    def prefill(
        self, token_ids: torch.Tensor, *, lengths: torch.Tensor | None = None, sequences: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the model's own prefill once and start every block from it.

        Args:
            token_ids: [n_sequences, T] int64, T >= 1. A shorter row lies at the right; in front of it is any token.
            lengths: [n_sequences] int64, real tokens of each row, 1 to T; None for T in all.
            sequences: [n_sequences] int64 ids, which name the draws of stochastic rounding; None for 0, 1, …

        Returns:
            Logits after the last token [n_sequences, vocab].

        Raises:
            InputError: transformers would let padded tokens change a row of this model.
            ValueError: another number of sequences, or a length outside 1 to T.
        """
        n, width = token_ids.shape
        if n != self.n_sequences:
            raise ValueError(f"token_ids: expected {self.n_sequences} sequences, got {n}")
        lengths = self._check_lengths(lengths, width)
        logits = self._rows.prefill(token_ids, lengths)
        self._ids = torch.arange(n, device=self.device) if sequences is None else sequences.to(self.device)
        self._take_states([lengths] * len(self.blocks))
        return logits

    @torch.no_grad()
    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Feed one token per sequence to every block.

        Args:
            token_ids: [n_sequences] int64, or [n_blocks, n_sequences] where blocks run free.

        Returns:
            Logits [n_blocks, n_sequences, vocab], a view.

        Raises:
            RuntimeError: before a prefill, or a recurrent layer decoded without driftgate.
        """
        out = self._continue(token_ids[..., None])
        if self._layers_done != self.n_layers:
            done = f"{self._layers_done} of {self.n_layers} recurrent layers" if self._layers_done else "no decode step"
            raise RuntimeError(
                f"{done} went through driftgate's kernels: the model took another path; load it without hub kernels"
            )
        self.states.advance()
        return out

    @torch.no_grad()
    def extend(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Feed several tokens per sequence in one forward, as a prompt's continuation, through the model's own prefill.

        Every block's buffer is folded into its checkpoint first, and the model starts from what the checkpoint reads
        back as; afterwards the blocks start from the model's states, with empty buffers.

        Args:
            token_ids: [n_sequences, T] int64, or [n_blocks, n_sequences, T]; T >= 1, one token is a ``step``.

        Returns:
            Logits after the last token [n_blocks, n_sequences, vocab], a view.
        """
        if token_ids.shape[-1] == 1:
            return self.step(token_ids[..., 0])
        n, pools = self.n_sequences, self.states.pools()
        tokens = [block.pool.tokens[:n] + token_ids.shape[-1] for block in self.blocks]
        errors = [pool.error.clone() for pool in pools]
        self._give_states()
        out = self._continue(token_ids)
        self._take_states(tokens)
        for pool, error in zip(pools, errors, strict=True):
            pool.error.copy_(error)  # a state that was not finite stays known
        return out

    def _continue(self, token_ids: torch.Tensor) -> torch.Tensor:
        """A forward of all rows behind what they have seen: token_ids [..., n_sequences, T] as ``extend`` has them."""
        self._layers_done = 0
        logits = self._rows.feed(
            token_ids[self._row_sequence] if token_ids.ndim == 2 else self._spread(token_ids.flatten(0, 1))
        )
        return logits[: len(self.blocks) * self.n_sequences].view(len(self.blocks), self.n_sequences, -1)

    def _take_states(self, tokens: Sequence[torch.Tensor]) -> None:
        """Start every block from the model's states; tokens: [n_sequences] seen so far, of each block."""
        self.states.start(tokens, self._ids)
        for layer in range(self.n_layers):
            self.states.write(layer, self._rows.take_state(layer))

    def _give_states(self) -> None:
        """Fold every block and give its states to the model, which then goes on from them."""
        self.states.fold()
        for layer in range(self.n_layers):
            self._rows.give_state(layer, self._spread(self.states.read(layer)))

    def _check_lengths(self, lengths: torch.Tensor | None, width: int) -> torch.Tensor:
        """Real tokens of each row [n_sequences] int64, on the model's device."""
        if lengths is None:
            return torch.full((self.n_sequences,), width, dtype=torch.int64, device=self.device)
        if tuple(lengths.shape) != (self.n_sequences,) or not bool(((lengths >= 1) & (lengths <= width)).all()):
            raise ValueError(f"lengths: expected {self.n_sequences} numbers from 1 to {width}, got {lengths.tolist()}")
        return lengths.to(self.device, torch.int64)

    def _spread(self, used: torch.Tensor) -> torch.Tensor:
        """What the blocks' rows have, [n_blocks × n_sequences, ...], for all rows: the padding is the first again."""
        return torch.cat((used, used[:1].expand(self.n_rows - len(used), *used.shape[1:])))

    def _decode(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What replaces the family's decode function; it leaves the state of the model's cache as it is."""
        function = self.family.decode
        inputs = function.read(*args, shape=self.shape, **kwargs)
        out = self._mimic_step(layer, inputs, args, kwargs) if self.mimic else self.states.step(layer, inputs)
        for observe in self.observers:
            observe(layer, inputs, out)
        self.kernel_calls += len(self.blocks)
        self._layers_done += 1
        return function.answer(out, args, kwargs)

    def _mimic_step(
        self, layer: int, inputs: StepInputs, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """A layer's step of all rows, the way transformers rounds."""
        mimic = self.family.decode.mimic
        assert mimic is not None
        out = torch.zeros_like(inputs.values)
        used = slice(0, len(self.blocks) * self.n_sequences)
        out[used], states = mimic(self.states.read(layer), used, *args[1:], **kwargs)
        self.states.write(layer, states)
        return out
