"""Stored states: the checkpoints, or the read copies, of all layers and slots in one format."""

from __future__ import annotations

import math
from typing import Literal

import torch

from driftgate.kernels.contract import HeadShape
from driftgate.quant.codecs import decode_rows, encode_rows, find_nonfinite_rows
from driftgate.quant.formats import Format
from driftgate.quant.philox import Noise

__all__ = ["ALIGNMENT", "StoredStates", "allocate"]

ALIGNMENT = 16
"""Bytes; kernels load that many at once."""


def allocate(n_layers: int, *dims: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros [n_layers, *dims], each layer aligned: a kernel sees one layer, and loads and adds up alike in all."""
    step = ALIGNMENT // dtype.itemsize
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
        codes: [n_layers, n_slots, HV, d_v, row] in the format's storage type; NVFP4 and MXFP4: two codes a byte.
        block_scales: [n_layers, n_slots, HV, d_v, ceil(d_k/block)] raw bytes of formats with blocks, else None.
        row_scales: [n_layers, n_slots, HV, d_v] float32 of formats with such scales, else None.
        memoise: keep what was decoded until the next ``write``; only where nothing but ``write`` stores states, as on
            the backend ``torch``, never beside kernels that store on their own.
    """

    def __init__(self, fmt: Format, shape: HeadShape, *, n_layers: int, n_slots: int, device: torch.device) -> None:
        self.format = fmt
        self.shape = shape

        def spread(t: torch.Tensor) -> torch.Tensor:
            rows = allocate(n_layers, n_slots, shape.value_heads, *t.shape[1:], dtype=t.dtype, device=device)
            return rows.copy_(t)

        zero = encode_rows(fmt, torch.zeros(1, shape.d_v, shape.d_k, device=device))
        self.codes = spread(zero.codes)
        self.block_scales = None if zero.block_scales is None else spread(zero.block_scales)
        self.row_scales = None if zero.row_scales is None else spread(zero.row_scales)
        self.memoise = False
        self._decoded: dict[int, torch.Tensor] = {}

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is stored, without absent parts."""
        return tuple(t for t in (self.codes, self.block_scales, self.row_scales) if t is not None)

    @property
    def nbytes_per_state(self) -> int:
        """Bytes of one layer of one slot."""
        return sum(t[0, 0].numel() * t.element_size() for t in self.tensors())

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Dequantised states [len(slots), HV, d_v, d_k] float32."""
        if not self.memoise or self.format.name == "fp32":  # FP32 is read as it is stored, there is nothing to keep
            return self._decode(layer, slots)
        if layer not in self._decoded:
            self._decoded[layer] = self._decode(layer, torch.arange(self.codes.shape[1], device=self.codes.device))
        return self._decoded[layer][slots]

    def _decode(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        blocks, rows = (None if t is None else t[layer, slots] for t in (self.block_scales, self.row_scales))
        return decode_rows(self.format, self.codes[layer, slots], blocks, rows, self.shape.d_k)

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

    def copy_slot(self, source: int, target: int) -> None:
        """Copy what all layers store of one slot to another."""
        for tensor in self.tensors():
            tensor[:, target] = tensor[:, source]
        self.forget()

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
        if any(step % ALIGNMENT for step in steps):
            raise ValueError(
                f"codes: expected an address and layer and slot strides that are multiples of {ALIGNMENT} bytes, "
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

    def audit(self, name: str) -> None:
        """Check that the stored type is the format's, and that rows and slots are 16-byte aligned (I7).

        Args:
            name: of these states, for the error.

        Raises:
            ValueError: names the states, what was expected and what is there.
        """
        wanted = getattr(torch, self.format.storage)
        if self.codes.dtype != wanted:
            raise ValueError(f"{name}: expected {wanted} for {self.format.name}, got {self.codes.dtype}")
        for tensor in self.tensors():
            strides = [s * tensor.element_size() for s in tensor.stride()[:2]]
            if tensor.data_ptr() % ALIGNMENT or (tensor is self.codes and any(s % ALIGNMENT for s in strides)):
                raise ValueError(
                    f"{name}: expected a {ALIGNMENT}-byte aligned pool with slot strides that are multiples of "
                    f"{ALIGNMENT} bytes, got address {tensor.data_ptr()} and strides {strides}"
                )
