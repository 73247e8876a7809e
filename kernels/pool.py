"""StatePool: checkpoints, read copies, buffers and cursors of all recurrent layers of one plan.

Notable: a slot's cursor serves every layer and moves once per forward (``advance``); whether the next step flushes is
a device tensor too, so that one launch serves rows at different cursors and can be captured in a CUDA Graph. Index
``n_slots`` of the per-slot tensors is a dump place for padded rows. The slot of a new request starts at cursor 0
whatever its buffer holds.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from driftgate.kernels.contract import HeadShape, ReplayOptions
from driftgate.quant.codecs import decode_rows, encode_rows, find_nonfinite_rows
from driftgate.quant.formats import Format, get_format

__all__ = ["StatePool", "StoredStates"]

PAD_SLOT = -1
_ALIGNMENT = 16


def _allocate(n_layers: int, *dims: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros [n_layers, *dims], each layer aligned: a kernel sees one layer, and loads and adds up alike in all."""
    step = _ALIGNMENT // dtype.itemsize
    size = math.prod(dims)
    rows = torch.zeros(n_layers, -(-size // step) * step, dtype=dtype, device=device)
    return rows[:, :size].view(n_layers, *dims)


class StoredStates:
    """States of all layers and slots as they are stored in one format.

    Attributes:
        format: the number format.
        codes: [n_layers, n_slots, HV, d_v, row]; FP32, BF16 or FP16 elements, else raw bytes (NVFP4: two codes a byte).
        block_scales: [n_layers, n_slots, HV, d_v, ceil(d_k/16)] raw E4M3 bytes (NVFP4), else None.
        row_scales: [n_layers, n_slots, HV, d_v] float32 (FP8, NVFP4), else None.
        memoise: keep what was decoded until the next ``write``; only where nothing but ``write`` stores states, as on
            the backend ``torch``, never beside kernels that store on their own.
    """

    def __init__(self, fmt: Format, shape: HeadShape, *, n_layers: int, n_slots: int, device: torch.device) -> None:
        self.format = fmt
        self.shape = shape
        zeros = torch.zeros(1, 1, 1, shape.d_v, shape.d_k, device=device)
        tensors = encode_rows(fmt, zeros)[:3]
        lead = (n_layers, n_slots, shape.value_heads)
        self.codes, self.block_scales, self.row_scales = (
            None if t is None else _allocate(*lead, *t.shape[3:], dtype=t.dtype, device=device).copy_(t)
            for t in tensors
        )
        self.memoise = False
        self._decoded: dict[int, torch.Tensor] = {}

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is stored, without absent parts."""
        return tuple(t for t in (self.codes, self.block_scales, self.row_scales) if t is not None)

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Dequantised states [len(slots), HV, d_v, d_k] float32."""
        if not self.memoise or self.format.name == "fp32":  # FP32 is read as it is stored, there is nothing to keep
            return self._decode(layer, slots)
        if layer not in self._decoded:
            self._decoded[layer] = self._decode(layer, torch.arange(self.codes.shape[1], device=self.codes.device))
        return self._decoded[layer][slots]

    def forget(self) -> None:
        """Drop what was decoded, after the tensors were written to directly."""
        self._decoded.clear()

    def _decode(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        parts = [None if t is None else t[layer, slots] for t in (self.codes, self.block_scales, self.row_scales)]
        return decode_rows(self.format, *parts, self.shape.d_k)

    def write(
        self,
        layer: int,
        slots: torch.Tensor,
        states: torch.Tensor,
        *,
        nonfinite: Literal["raise", "saturate"] = "raise",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise states [len(slots), HV, d_v, d_k] into their slots, nearest even.

        Args:
            layer, slots: where; slots [n] int64.
            states: float32.
            nonfinite: ``raise``, or ``saturate`` as kernels do.

        Returns:
            What a later read gives, [n, HV, d_v, d_k] float32, and which slots had a non-finite element, [n] bool.

        Raises:
            ValueError: a state holds NaN or infinity and ``nonfinite="raise"``; names slot and head.
        """
        if self.format.name == "fp32" and nonfinite == "saturate":
            self.codes[layer, slots] = states
            return states, ~states.sum(dim=(1, 2, 3)).isfinite()  # cheap; a finite sum overflows only beyond 1e33
        encoded = encode_rows(self.format, states, nonfinite=nonfinite)
        for stored, new in zip((self.codes, self.block_scales, self.row_scales), encoded, strict=True):
            if stored is not None:
                stored[layer, slots] = new
        read_back = decode_rows(self.format, *encoded, self.shape.d_k)
        if layer in self._decoded:
            self._decoded[layer][slots] = read_back
        return read_back, find_nonfinite_rows(states).any(dim=(1, 2))

    @property
    def nbytes_per_state(self) -> int:
        """Bytes of one layer of one slot."""
        return sum(t[0, 0].numel() * t.element_size() for t in self.tensors())


class StatePool:
    """Everything that replay stores for [slots] sequences.

    Args:
        shape: heads of every recurrent layer.
        options: formats, L, readout and fold.
        n_slots: sequences that can be held.
        n_layers: recurrent layers.
        activation_dtype: type of q, k and v as the model delivers them; k and v are buffered in it.
        device: where everything lies.

    Attributes:
        checkpoint, copy: StoredStates; copy is None unless READ differs from RECURRENCE.
        keys: [n_layers, n_slots, H, places, d_k], as delivered.
        values: [n_layers, n_slots, HV, places, d_v], as delivered, or None.
        log_decay, beta: [n_layers, n_slots, HV, places] float32 (beta or None).
        corrections: û [n_layers, n_slots, HV, places, d_v] float32 or bfloat16, or None.
        cursor: [n_slots + 1] int32, buffered entries that the next step finds.
        flush: [n_slots + 1] int32, whether the next step flushes.
        tokens: [n_slots + 1] int64, tokens that a slot has seen.
        error: [n_slots + 1] int32, non-zero once a non-finite element was quantised.
    """

    def __init__(
        self,
        shape: HeadShape,
        options: ReplayOptions,
        *,
        n_slots: int,
        n_layers: int = 1,
        activation_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if n_slots < 1 or n_layers < 1:
            raise ValueError(f"n_slots and n_layers: expected at least 1, got {n_slots} and {n_layers}")
        device = torch.device(device)
        self.shape, self.options = shape, options
        self.n_slots, self.n_layers = n_slots, n_layers
        self.activation_dtype, self.device = activation_dtype, device

        def stored(name: str) -> StoredStates:
            return StoredStates(get_format(name), shape, n_layers=n_layers, n_slots=n_slots, device=device)

        def buffer(*dims: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return _allocate(n_layers, n_slots, *dims, dtype=dtype, device=device)

        self.checkpoint = stored(options.recurrence)
        self.copy = stored(options.read) if options.split else None
        self.keys = self.values = self.log_decay = self.beta = self.corrections = None
        heads, places = shape.value_heads, options.places
        if not options.step_by_step:
            self.keys = buffer(shape.key_heads, places, shape.d_k, dtype=activation_dtype)
            self.log_decay = buffer(heads, places)
        if options.keeps_inputs:
            self.values = buffer(heads, places, shape.d_v, dtype=activation_dtype)
            self.beta = buffer(heads, places)
        if options.keeps_corrections:
            kind = torch.float32 if options.buffer == "fp32" else torch.bfloat16
            self.corrections = buffer(heads, places, shape.d_v, dtype=kind)
        self.cursor = torch.zeros(n_slots + 1, dtype=torch.int32, device=device)
        self.flush = torch.zeros(n_slots + 1, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(n_slots + 1, dtype=torch.int64, device=device)
        self.error = torch.zeros(n_slots + 1, dtype=torch.int32, device=device)
        self.audit()
        self.reset(torch.arange(n_slots, device=device))

    def memoise_reads(self) -> None:
        """Decode stored states once between writes: for the backend ``torch`` alone."""
        for states in (self.checkpoint, self.copy):
            if states is not None:
                states.memoise = True

    @property
    def read_states(self) -> StoredStates:
        """What steps between flushes read: the copy, or the checkpoint where there is none."""
        return self.copy if self.copy is not None else self.checkpoint

    def audit(self) -> None:
        """Check that stored types are those that the plan names, and that rows and slots are 16-byte aligned (I7).

        Raises:
            ValueError: names the tensor, what was expected and what is there.
        """
        for name, states in (("checkpoint", self.checkpoint), ("copy", self.copy)):
            if states is None:
                continue
            wanted = getattr(torch, states.format.storage)
            if states.codes.dtype != wanted:
                raise ValueError(f"{name}: expected {wanted} for {states.format.name}, got {states.codes.dtype}")
            for tensor in states.tensors():
                strides = [s * tensor.element_size() for s in tensor.stride()[:2]]
                if tensor.data_ptr() % _ALIGNMENT or (tensor is states.codes and any(s % _ALIGNMENT for s in strides)):
                    raise ValueError(
                        f"{name}: expected a {_ALIGNMENT}-byte aligned pool with slot strides that are multiples of "
                        f"{_ALIGNMENT} bytes, got address {tensor.data_ptr()} and strides {strides}"
                    )

    def reset(self, slots: torch.Tensor) -> None:
        """Hand slots to new requests: zero state, cursor 0, no tokens seen. slots: [n] int, no padding."""
        shape = self.shape
        zeros = torch.zeros(len(slots), shape.value_heads, shape.d_v, shape.d_k, device=self.device)
        for layer in range(self.n_layers):
            self.write(layer, slots, zeros)
        self.start(slots, tokens=0)

    def write(self, layer: int, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Take over states after a prefill: the checkpoint, and the first copy made from what it reads back as.

        Args:
            layer: recurrent layer, counted from 0.
            slots: [n] int, no padding.
            states: [n, HV, d_v, d_k] float32.

        Raises:
            ValueError: a shape that does not fit, or NaN or infinity.
        """
        expected = (len(slots), self.shape.value_heads, self.shape.d_v, self.shape.d_k)
        if tuple(states.shape) != expected:
            raise ValueError(f"states: expected shape {expected}, got {tuple(states.shape)}")
        read_back, _ = self.checkpoint.write(layer, slots, states)
        if self.copy is not None:
            self.copy.write(layer, slots, read_back)

    def start(self, slots: torch.Tensor, *, tokens: torch.Tensor | int) -> None:
        """Set slots to cursor 0 after a prefill of ``tokens`` tokens (an int, or [n] int64)."""
        index = slots.long()
        self.cursor[index] = 0
        self.error[index] = 0
        self.tokens[index] = torch.as_tensor(tokens, dtype=torch.int64, device=self.device)
        self.flush[index] = self._flushes(self.cursor[index], self.tokens[index])

    def force_flush(self, slots: torch.Tensor) -> None:
        """Make the next step of slots [n] a flush."""
        self.flush[slots.long()] = 1

    def advance(self, slots: torch.Tensor, *, pad_slot: int = PAD_SLOT) -> None:
        """Move the cursors once all layers took their step.

        Args:
            slots: [B] int, the slot of each row of the forward.
            pad_slot: value of ``slots`` that marks a padded row.
        """
        index = torch.where(slots == pad_slot, self.n_slots, slots).long()
        flushed = self.flush[index] != 0
        tokens = self.tokens[index] + 1
        cursor = self.cursor[index]
        if not self.options.step_by_step:
            cursor = torch.where(flushed, 0, cursor + 1)
        self.cursor[index], self.tokens[index] = cursor, tokens
        self.flush[index] = self._flushes(cursor, tokens)

    def _flushes(self, cursor: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Whether a step that finds ``cursor`` entries after ``tokens`` tokens flushes, int32."""
        options = self.options
        if options.step_by_step:
            return torch.ones_like(cursor)
        flush = cursor >= options.length - 1
        if options.track:
            flush = flush | ((tokens + 1) % options.track == 0)
        return flush.to(torch.int32)

    def copy_slot(self, source: int, target: int) -> None:
        """Copy one sequence to another slot, which then starts at cursor 0.

        Raises:
            ValueError: the source has buffered entries; flush it first (``gdn.flush_now``).
        """
        pending = int(self.cursor[source])
        if pending and not self.options.step_by_step:
            raise ValueError(f"source: expected slot {source} flushed, got {pending} buffered entries; call flush_now")
        for states in (self.checkpoint, self.copy):
            for tensor in states.tensors() if states is not None else ():
                tensor[:, target] = tensor[:, source]
            if states is not None:
                states.forget()
        self.start(torch.tensor([target], device=self.device), tokens=self.tokens[source].clone())

    def bytes_per_sequence(self) -> dict[str, int]:
        """Bytes of one slot over all layers: checkpoint, read_copy and buffer."""
        parts = (self.keys, self.values, self.log_decay, self.beta, self.corrections)
        return {
            "checkpoint": self.n_layers * self.checkpoint.nbytes_per_state,
            "read_copy": self.n_layers * (self.copy.nbytes_per_state if self.copy is not None else 0),
            "buffer": sum(t[:, 0].numel() * t.element_size() for t in parts if t is not None),
        }
