"""StatePool: checkpoints, read copies, buffers and cursors of all recurrent layers of one plan.

Notable: a slot's cursor serves every layer and moves once per forward (``advance``); whether the next step flushes is
a device tensor too, so that one launch serves rows at different cursors and can be captured in a CUDA Graph. Index
``n_slots`` of the per-slot tensors is a dump place for padded rows. The slot of a new request starts at cursor 0
whatever its buffer holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from driftgate.kernels.contract import HeadShape, Recurrence, ReplayOptions
from driftgate.quant.codecs import decode_rows, encode_rows, find_nonfinite_rows
from driftgate.quant.formats import Format, get_format
from driftgate.quant.philox import Noise, hash_stream

__all__ = ["StatePool", "StoredStates"]

PAD_SLOT = -1
_ALIGNMENT = 16


def _allocate(n_layers: int, *dims: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros [n_layers, *dims], each layer aligned: a kernel sees one layer, and loads and adds up alike in all."""
    step = _ALIGNMENT // dtype.itemsize
    size = math.prod(dims)
    rows = torch.zeros(n_layers, -(-size // step) * step, dtype=dtype, device=device)
    return rows[:, :size].view(n_layers, *dims)


def _overlap(codes: torch.Tensor) -> bool:
    """Whether two slots of [n_layers, n_slots, HV, d_v, row], each contiguous, share memory."""
    taken = codes[0, 0].numel()
    for stride, n in sorted(zip(codes.stride()[:2], codes.shape[:2], strict=True)):
        if n > 1 and stride < taken:
            return True
        taken += (n - 1) * stride
    return False


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

    def adopt(self, codes: torch.Tensor) -> None:
        """Keep the elements in a tensor of the caller's, in place: an engine's paged pool, say.

        Args:
            codes: as ``codes``; a slot is contiguous, layers and slots may lie any multiple of 16 bytes apart.

        Raises:
            ValueError: names what was expected and got; nothing is adopted.
        """
        inner = codes.stride()[2:] if codes.ndim == 5 else ()
        if codes.shape != self.codes.shape or codes.dtype != self.codes.dtype or codes.device != self.codes.device:
            expected = f"{tuple(self.codes.shape)} {self.codes.dtype} on {self.codes.device}"
            raise ValueError(f"codes: expected {expected}, got {tuple(codes.shape)} {codes.dtype} on {codes.device}")
        if inner != self.codes.stride()[2:]:
            raise ValueError(f"codes: expected contiguous slots, strides {self.codes.stride()[2:]}, got {inner}")
        steps = [codes.data_ptr(), *(n * codes.element_size() for n in codes.stride()[:2])]
        if any(step % _ALIGNMENT for step in steps):
            raise ValueError(
                f"codes: expected an address and layer and slot strides that are multiples of {_ALIGNMENT} bytes, "
                f"got {steps}"
            )
        if _overlap(codes):
            raise ValueError(f"codes: expected slots that lie apart, got layer and slot strides {codes.stride()[:2]}")
        codes.copy_(self.codes)
        self.codes = codes
        self.forget()

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
        noise: Noise | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise states [len(slots), HV, d_v, d_k] into their slots.

        Args:
            layer, slots: where; slots [n] int64.
            states: float32.
            nonfinite: ``raise``, or ``saturate`` as kernels do.
            noise: random bits of stochastic rounding; None for nearest even.

        Returns:
            What a later read gives, [n, HV, d_v, d_k] float32, and which slots had a non-finite element, [n] bool.

        Raises:
            ValueError: a state holds NaN or infinity and ``nonfinite="raise"``; names slot and head.
        """
        if self.format.name == "fp32" and nonfinite == "saturate":
            self.codes[layer, slots] = states
            return states, ~states.sum(dim=(1, 2, 3)).isfinite()  # cheap; a finite sum overflows only beyond 1e33
        encoded = encode_rows(self.format, states, nonfinite=nonfinite, noise=noise)
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
        recurrence: which; decides what an entry of the buffer is.
        n_slots: sequences that can be held.
        n_layers: recurrent layers.
        activation_dtype: type of q, k and v (C, B and x) as the model delivers them; k and v are buffered in it.
        seed: key of stochastic rounding, 64 bits; sequences name their streams in ``start``.
        device: where everything lies.
        layer_numbers: of its layers among all recurrent layers of the model, which name the draws of stochastic
            rounding; None for 0, 1, …

    Attributes:
        checkpoint, copy: StoredStates; copy is None unless READ differs from RECURRENCE.
        keys: k, or B, [n_layers, n_slots, H, places, d_k], as delivered.
        values: v, or x, [n_layers, n_slots, HV, places, d_v], as delivered, or None.
        log_decay: g [n_layers, n_slots, HV, places] float32, KDA [..., places, d_k]; None in Mamba-2 (it is A·dt).
        beta: β, or dt, [n_layers, n_slots, HV, places] float32, or None.
        corrections: û [n_layers, n_slots, HV, places, d_v] float32 or bfloat16, or None.
        cursor: [n_slots + 1] int32, buffered entries that the next step finds.
        flush: [n_slots + 1] int32, whether the next step flushes.
        tokens: [n_slots + 1] int64, tokens that a slot has seen.
        base: [n_slots + 1] int32, place of the oldest entry; moves with speculative windows alone, else 0.
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
        device = torch.device(device)
        self.shape, self.options, self.recurrence = shape, options, recurrence
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
        if not options.step_by_step and recurrence.delta_rule:
            self.log_decay = buffer(heads, places, *([shape.d_k] if recurrence.channel_decay else []))
        if options.keeps_inputs(recurrence):
            self.values = buffer(heads, places, shape.d_v, dtype=activation_dtype)
            self.beta = buffer(heads, places)
        if options.keeps_corrections(recurrence):
            kind = torch.float32 if options.buffer == "fp32" else torch.bfloat16
            self.corrections = buffer(heads, places, shape.d_v, dtype=kind)

        def per_slot(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(n_slots + 1, dtype=dtype, device=device)

        self.cursor, self.flush, self.base, self.error = (per_slot(torch.int32) for _ in range(4))
        self.tokens = per_slot(torch.int64)
        self.seed = torch.tensor([seed], dtype=torch.int64, device=device)
        self.streams = _allocate(n_layers, n_slots + 1, dtype=torch.int64, device=device)
        self.audit()
        self.reset(torch.arange(n_slots, device=device))

    def memoise_reads(self) -> None:
        """Decode stored states once between writes: for the backend ``torch`` alone."""
        for states in (self.checkpoint, self.copy):
            if states is not None:
                states.memoise = True

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffer's tensors by attribute name, without absent ones."""
        names = ("keys", "values", "log_decay", "beta", "corrections")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

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
        self.start(slots, tokens=0)
        for layer in range(self.n_layers):
            self.write(layer, slots, zeros)

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
        index = self._index(slots)
        self.cursor[index] = 0
        self.base[index] = 0
        self.error[index] = 0
        self.tokens[index] = torch.as_tensor(tokens, dtype=torch.int64, device=self.device)
        self.flush[index] = self._flushes(self.cursor[index], self.tokens[index])
        if self.options.stochastic:
            ids = torch.as_tensor(sequences, dtype=torch.int64, device=self.device)
            layers = torch.tensor(self.layer_numbers, device=self.device)[:, None]
            self.streams[:, index] = hash_stream(ids, layers).expand(self.n_layers, len(index))

    def force_flush(self, slots: torch.Tensor) -> None:
        """Make the next step of slots [n] a flush."""
        self.flush[self._index(slots)] = 1

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
        if self.options.window:
            self.base[index] = torch.where(flushed, 0, self.base[index])
        self.cursor[index], self.tokens[index] = cursor, tokens
        self.flush[index] = self._flushes(cursor, tokens)

    def commit(self, slots: torch.Tensor, lengths: torch.Tensor, n: torch.Tensor, *, pad_slot: int = PAD_SLOT) -> None:
        """Keep the accepted tokens of the windows that all layers verified last: once after each ``verify_window``.

        A row that flushed in the call holds no entries but the window's now: its base moves over those that were
        folded, its cursor becomes n. The cursor of any other row advances by n. Entries behind the cursor are never
        read again. With n = 0 a row goes on from the tokens that it had: one that flushed has them folded, S_h in the
        checkpoint instead of the buffer (rounded to its format, as by any flush), and no entries.
        A flush that ``force_flush`` asked for, and no step took, is forgotten.

        Args:
            slots: [B] int, the slot of each row.
            lengths: [B] int32, as ``verify_window`` had them: with the cursor they say which rows flushed.
            n: [B] int32, inputs to keep, 1 + accepted drafts, 0 to lengths.
            pad_slot: value of ``slots`` that marks a padded row.

        Raises:
            ValueError: a plan without windows, a shape or type that does not fit, or, on a CPU, a number out of range.
        """
        options = self.options
        if not options.window:
            raise ValueError(f"pool: expected a plan with a window, got window = 0 at L = {options.length}")
        for name, counts in (("lengths", lengths), ("n", n)):
            if counts.shape != slots.shape or counts.dtype != torch.int32 or counts.device.type != self.device.type:
                expected = f"{tuple(slots.shape)} int32 on {self.device}"
                raise ValueError(
                    f"{name}: expected {expected}, got {tuple(counts.shape)} {counts.dtype} on {counts.device}"
                )
        padded = slots == pad_slot
        if self.device.type == "cpu":
            wrong = (n < 0) | (n > lengths) | (lengths < 1) | (lengths > options.window)
            if bool((wrong & ~padded).any()):
                raise ValueError(
                    f"n: expected 0 to lengths, and lengths 1 to {options.window}, got n = {n[~padded].tolist()} and "
                    f"lengths = {lengths[~padded].tolist()}"
                )
        index = torch.where(padded, self.n_slots, slots).long()
        cursor, base = self.cursor[index], self.base[index]
        flushed = cursor + lengths + options.window > options.length
        self.base[index] = torch.where(flushed, (base + cursor) % options.places, base)
        cursor = torch.where(flushed, n, cursor + n)
        tokens = self.tokens[index] + n
        self.cursor[index], self.tokens[index] = cursor, tokens
        self.flush[index] = self._flushes(cursor, tokens)

    def empty_buffers(self, slots: torch.Tensor) -> None:
        """Cursor 0 for slots [n] whose entries were folded without a step."""
        index = slots.long()
        self.cursor[index] = 0
        self.base[index] = 0
        self.flush[index] = self._flushes(self.cursor[index], self.tokens[index])

    def _flushes(self, cursor: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Whether a step that finds ``cursor`` entries after ``tokens`` tokens flushes, int32."""
        options = self.options
        if options.step_by_step:
            return torch.ones_like(cursor)
        flush = cursor >= options.length - 1
        if options.track:
            flush = flush | ((tokens + 1) % options.track == 0)
        return flush.to(torch.int32)

    def _index(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots [n] as an index; one that is no slot would reach the last slot, or the dump place."""
        if slots.device.type == "cpu" and len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < self.n_slots:
            raise ValueError(f"slots: expected 0 to {self.n_slots - 1}, got {slots.tolist()}")
        return slots.long()

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
        for states in (self.checkpoint, self.copy):
            for tensor in states.tensors() if states is not None else ():
                tensor[:, target] = tensor[:, source]
            if states is not None:
                states.forget()
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
