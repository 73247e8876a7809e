"""StatePool: checkpoints, read copies, buffers and cursors of all recurrent layers of one plan.

Notable: what is stored of a state is in ``states.py``, when a slot flushes in ``schedule.py``; here they meet the
buffers and the draws of stochastic rounding. The slot of a new request starts at cursor 0 whatever its buffer holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from driftgate.kernels.contract import HeadShape, Recurrence, ReplayOptions
from driftgate.kernels.schedule import PAD_SLOT, FlushSchedule
from driftgate.kernels.states import StoredStates, allocate
from driftgate.quant.formats import get_format
from driftgate.quant.philox import Noise, hash_stream

__all__ = ["PAD_SLOT", "StatePool", "StoredStates"]


class StatePool(FlushSchedule):
    """Everything that replay stores for [slots] sequences.

    Args:
        shape: heads of every recurrent layer.
        options: formats, L, readout and fold.
        recurrence: which; decides what an entry of the buffer is.
        n_slots: sequences that can be held.
        n_layers: recurrent layers.
        activation_dtype: type of q, k and v (C, B and x) as the model delivers them; k and v are buffered in it.
        seed: key of stochastic rounding, 64 bits; sequences name their streams in ``start``.
        device: where everything lies.
        layer_numbers: of its layers among all recurrent layers of the model, which name the draws of stochastic
            rounding; None for 0, 1, …

    Attributes:
        cursor, flush, tokens, base: [n_slots + 1], of ``FlushSchedule``; they serve every layer.
        checkpoint, copy: StoredStates; copy is None unless READ differs from RECURRENCE.
        keys: k, or B, [n_layers, n_slots, H, places, d_k], as delivered.
        values: v, or x, [n_layers, n_slots, HV, places, d_v], as delivered, or None.
        log_decay: g [n_layers, n_slots, HV, places] float32, KDA [..., places, d_k]; None in Mamba-2 (it is A·dt).
        beta: β, or dt, [n_layers, n_slots, HV, places] float32, or None.
        corrections: û [n_layers, n_slots, HV, places, d_v] float32 or bfloat16, or None.
        error: [n_slots + 1] int32, non-zero once a non-finite element was quantised.
        seed: [1] int64, key of stochastic rounding.
        streams: [n_layers, n_slots + 1] int64, ``hash_stream`` of a slot's sequence and the layer.
    """

    def __init__(
        self,
        shape: HeadShape,
        options: ReplayOptions,
        *,
        recurrence: Recurrence = Recurrence.GDN,
        n_slots: int,
        n_layers: int = 1,
        activation_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        device: torch.device | str = "cpu",
        layer_numbers: Sequence[int] | None = None,
    ) -> None:
        if n_slots < 1 or n_layers < 1:
            raise ValueError(f"n_slots and n_layers: expected at least 1, got {n_slots} and {n_layers}")
        self.layer_numbers = tuple(range(n_layers) if layer_numbers is None else layer_numbers)
        if len(self.layer_numbers) != n_layers:
            raise ValueError(f"layer_numbers: expected {n_layers}, one a layer, got {len(self.layer_numbers)}")
        super().__init__(options, n_slots=n_slots, device=device)
        self.shape, self.recurrence = shape, recurrence
        self.n_layers, self.activation_dtype = n_layers, activation_dtype
        self.checkpoint = self._make_states(options.recurrence)
        self.copy = self._make_states(options.read) if options.split else None
        self._make_buffers()
        self.error = self._per_slot(torch.int32)
        self.seed = torch.tensor([seed], dtype=torch.int64, device=self.device)
        self.streams = allocate(n_layers, n_slots + 1, dtype=torch.int64, device=self.device)
        self.audit()
        self.reset(torch.arange(n_slots, device=self.device))

    def _make_states(self, name: str) -> StoredStates:
        return StoredStates(
            get_format(name), self.shape, n_layers=self.n_layers, n_slots=self.n_slots, device=self.device
        )

    def _make_buffers(self) -> None:
        """What the plan's readout and fold need of an entry; the rest is None."""

        def buffer(*dims: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return allocate(self.n_layers, self.n_slots, *dims, dtype=dtype, device=self.device)

        options, recurrence, shape = self.options, self.recurrence, self.shape
        heads, places = shape.value_heads, options.places
        self.keys = self.values = self.log_decay = self.beta = self.corrections = None
        if not options.step_by_step:
            self.keys = buffer(shape.key_heads, places, shape.d_k, dtype=self.activation_dtype)
        if not options.step_by_step and recurrence.delta_rule:
            self.log_decay = buffer(heads, places, *([shape.d_k] if recurrence.channel_decay else []))
        if options.keeps_inputs(recurrence):
            self.values = buffer(heads, places, shape.d_v, dtype=self.activation_dtype)
            self.beta = buffer(heads, places)
        if options.keeps_corrections(recurrence):
            kind = torch.float32 if options.buffer == "fp32" else torch.bfloat16
            self.corrections = buffer(heads, places, shape.d_v, dtype=kind)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffer's tensors by attribute name, without absent ones."""
        names = ("keys", "values", "log_decay", "beta", "corrections")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def states(self) -> dict[str, StoredStates]:
        """What is stored by attribute name: the checkpoint, and the copy where there is one."""
        return {"checkpoint": self.checkpoint, **({"copy": self.copy} if self.copy is not None else {})}

    @property
    def read_states(self) -> StoredStates:
        """What steps between flushes read: the copy, or the checkpoint where there is none."""
        return self.copy if self.copy is not None else self.checkpoint

    def memoise_reads(self) -> None:
        """Decode stored states once between writes: for the backend ``torch`` alone."""
        for states in self.states().values():
            states.memoise = True

    def audit(self) -> None:
        """Check that stored types are those that the plan names, and that rows and slots are 16-byte aligned (I7).

        Raises:
            ValueError: names the tensor, what was expected and what is there.
        """
        for name, states in self.states().items():
            states.audit(name)

    def reset(self, slots: torch.Tensor) -> None:
        """Hand slots to new requests: zero state, cursor 0, no tokens seen. slots: [n] int, no padding."""
        shape = self.shape
        zeros = torch.zeros(len(slots), shape.value_heads, shape.d_v, shape.d_k, device=self.device)
        self.start(slots, tokens=0)
        for layer in range(self.n_layers):
            self.write(layer, slots, zeros)

    def start(self, slots: torch.Tensor, *, tokens: torch.Tensor | int, sequences: torch.Tensor | int = 0) -> None:
        """Set slots to cursor 0 after a prefill.

        Args:
            slots: [n] int, no padding.
            tokens: that each has seen, an int or [n] int64.
            sequences: ids of the sequences, an int or [n] int64; with the seed they choose the draws of stochastic
                rounding, so that these depend on no slot.

        Raises:
            ValueError: a number that is no slot; on a GPU this is not looked at, it would cost a synchronisation.
        """
        super().start(slots, tokens=tokens)
        index = slots.long()
        self.error[index] = 0
        if self.options.stochastic:
            ids = torch.as_tensor(sequences, dtype=torch.int64, device=self.device)
            layers = torch.tensor(self.layer_numbers, device=self.device)[:, None]
            self.streams[:, index] = hash_stream(ids, layers).expand(self.n_layers, len(index))

    def write(self, layer: int, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Take over states after a prefill: the checkpoint, and the first copy made from what it reads back as.

        Under stochastic rounding the draws are those of the tokens and sequences that ``start`` named last: call it
        first.

        Args:
            layer: recurrent layer, counted from 0.
            slots: [n] int, no padding.
            states: [n, HV, d_v, d_k] float32.

        Raises:
            ValueError: a slot or shape that does not fit, or NaN or infinity.
        """
        self._index(slots)
        expected = (len(slots), self.shape.value_heads, self.shape.d_v, self.shape.d_k)
        if tuple(states.shape) != expected:
            raise ValueError(f"states: expected shape {expected}, got {tuple(states.shape)}")
        read_back, _ = self.checkpoint.write(layer, slots, states, noise=self.noise(layer, slots))
        if self.copy is not None:
            self.copy.write(layer, slots, read_back)

    def noise(self, layer: int, slots: torch.Tensor, *, ahead: int = 0) -> Noise | None:
        """Random bits of a write of slots [n] in a layer after ``ahead`` more tokens; None for nearest even."""
        if not self.options.stochastic:
            return None
        index = slots.long()
        return Noise(
            seed=int(self.seed), tokens=self.tokens[index] + ahead, streams=self.streams[layer, index], first_element=0
        )

    def copy_slot(
        self, source: int, target: int, *, flush_now: Callable[[StatePool, torch.Tensor], None] | None = None
    ) -> None:
        """Copy one sequence to another slot, which then starts at cursor 0.

        Args:
            source, target: slots.
            flush_now: folds the buffer of a source that has one, in the source as well: ``gdn.flush_now``,
                ``partial(mamba2.flush_now, A=A)``. None refuses such a source.

        Raises:
            ValueError: a number that is no slot, or a source with buffered entries.
        """
        self._index(torch.tensor([source, target]))
        if flush_now is not None:
            flush_now(self, torch.tensor([source], dtype=torch.int32, device=self.device))
        pending = int(self.cursor[source])
        if pending:
            raise ValueError(f"source: expected slot {source} flushed, got {pending} buffered entries; give flush_now")
        for states in self.states().values():
            states.copy_slot(source, target)
        error = self.error[source].clone()
        self.start(torch.tensor([target], device=self.device), tokens=self.tokens[source].clone())
        self.error[target] = error
        self.streams[:, target] = self.streams[:, source]

    def bytes_per_sequence(self) -> dict[str, int]:
        """Bytes of one slot over all layers: checkpoint, read_copy and buffer."""
        return {
            "checkpoint": self.n_layers * self.checkpoint.nbytes_per_state,
            "read_copy": self.n_layers * (self.copy.nbytes_per_state if self.copy is not None else 0),
            "buffer": sum(t[:, 0].numel() * t.element_size() for t in self.buffers().values()),
        }
