"""What a dump holds: decode steps of recurrent layers, checked at birth; ``dump.py`` reads, writes and records them.

Tensors of a decoder layer i are ``layers.i.NAME``; all layers share sequences and steps, their heads may differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from driftgate.errors import EmptyRunError
from driftgate.kernels.contract import HeadShape, Recurrence

__all__ = ["ACTIVATIONS", "CONSTANTS", "Dump", "LayerDump", "name_type"]

ACTIVATIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONSTANTS = ("A", "D")
_OPTIONAL = ("D", "z")


@dataclass(frozen=True, kw_only=True)
class LayerDump:
    """Decode steps of one recurrent layer.

    Attributes:
        layer: decoder-layer index as in the checkpoint.
        recurrence: whose inputs they are.
        streams: by argument name of ``decode_step``, [sequences, steps, ...]; q and k as delivered, before any norm.
        constants: Mamba-2: A and, where there is one, D, [HV] float32.
        initial_state: [sequences, HV, d_v, d_k] float32, before the first step.
        qk_l2norm: whether the layer normalises q and k; of no effect in Mamba-2.
        scale: multiplies q; None for d_k^-1/2; of no effect in Mamba-2.

    Raises:
        ValueError: a tensor is missing, superfluous, of a wrong shape or type, or holds a value that no step can take;
            one line that names it.
    """

    layer: int
    recurrence: Recurrence
    streams: Mapping[str, torch.Tensor]
    initial_state: torch.Tensor
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    qk_l2norm: bool = True
    scale: float | None = None

    def __post_init__(self) -> None:
        found, wanted = self.tensors(), self._wanted_names()
        for name in found:
            if name not in wanted:
                known = f"{self.recurrence.value} takes {', '.join(wanted)}"
                raise ValueError(f"{self.full_name(name)}: no such tensor; {known}")
        for name, required in wanted.items():
            if required and name not in found:
                raise ValueError(f"{self.full_name(name)}: missing; a {self.recurrence.value} layer needs it")
        self._check_shapes()
        for name, x in found.items():
            self._check_values(name, x)

    @property
    def values(self) -> torch.Tensor:
        """What steps add to the state, [sequences, steps, HV, d_v]: v or x."""
        return self.streams["v" if self.recurrence.delta_rule else "x"]

    @property
    def activation(self) -> torch.dtype:
        """Type of q, k and v (C, B and x)."""
        return self.values.dtype

    @property
    def shape(self) -> HeadShape:
        """Heads of the layer."""
        keys = self.streams["k" if self.recurrence.delta_rule else "B"]
        return HeadShape(
            key_heads=keys.shape[2], value_heads=self.values.shape[2], d_k=keys.shape[3], d_v=self.values.shape[3]
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything by its name behind ``layers.i.``."""
        return {**self.streams, **self.constants, "initial_state": self.initial_state}

    def full_name(self, name: str) -> str:
        """Name of a tensor in a file."""
        return f"layers.{self.layer}.{name}"

    def _wanted_names(self) -> dict[str, bool]:
        """Names that the recurrence knows, and whether they are needed."""
        extra = () if self.recurrence.delta_rule else ("A", *_OPTIONAL)
        return {name: name not in _OPTIONAL for name in (*self.recurrence.inputs, *extra, "initial_state")}

    def _check_shapes(self) -> None:
        keys, values = ("k", "v") if self.recurrence.delta_rule else ("B", "x")
        for name in (keys, values):
            x = self.streams[name]
            if x.ndim != 4:
                raise ValueError(
                    f"{self.full_name(name)}: expected [sequences, steps, heads, width], got shape {list(x.shape)}"
                )
        if self.activation not in ACTIVATIONS.values():
            raise ValueError(
                f"{self.full_name(values)}: expected one of {', '.join(ACTIVATIONS)}, got {name_type(self.activation)}"
            )
        try:
            shape = self.shape
        except ValueError as error:
            raise ValueError(f"layers.{self.layer}: {error}") from error
        lead = self.values.shape[:2]
        heads, state = (*lead, shape.value_heads), (shape.value_heads, shape.d_v, shape.d_k)
        gate = (*heads, shape.d_k) if self.recurrence.channel_decay else heads
        kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            **dict.fromkeys(("q", "k", "B", "C"), ((*lead, shape.key_heads, shape.d_k), self.activation)),
            **dict.fromkeys(("v", "x", "z"), ((*heads, shape.d_v), self.activation)),
            **dict.fromkeys(("beta", "dt"), (heads, torch.float32)),
            **dict.fromkeys(CONSTANTS, ((shape.value_heads,), torch.float32)),
            "g": (gate, torch.float32),
            "initial_state": ((lead[0], *state), torch.float32),
        }
        for name, x in self.tensors().items():
            expected, kind = kinds[name]
            if tuple(x.shape) != expected:
                raise ValueError(f"{self.full_name(name)}: expected shape {list(expected)}, got {list(x.shape)}")
            if x.dtype != kind:
                raise ValueError(f"{self.full_name(name)}: expected {name_type(kind)}, got {name_type(x.dtype)}")

    def _check_values(self, name: str, x: torch.Tensor) -> None:
        """Finite, but for a decay of -inf (a document boundary); logs of decays and A at most 0, dt at least 0."""
        bad, why = ~x.isfinite(), "a dump holds finite values"
        if name == "g":
            bad, why = ~(x <= 0), "g is the log of a decay, 0 or less (-inf: forget everything)"
        elif name == "A":
            bad, why = bad | (x > 0), "A is -exp(A_log)"
        elif name == "dt":
            bad, why = bad | (x < 0), "dt is 0 or more, after bias and softplus"
        if bool(bad.any()):
            place = bad.nonzero()[0].tolist()
            raise ValueError(f"{self.full_name(name)}{place} is {x[tuple(place)].item()}; {why}; record it again")


@dataclass(frozen=True, kw_only=True)
class Dump:
    """Decode steps of a model's recurrent layers.

    Attributes:
        layers: by rising decoder-layer index.
        model: name of the model.
        recorder: what wrote it, in words.
        start: tokens that every sequence had seen before the first step; ``+track`` counts from there.

    Raises:
        ValueError: no layer, or layers that do not belong together.
        EmptyRunError: no sequence or no step.
    """

    layers: tuple[LayerDump, ...]
    model: str
    recorder: str
    start: int = 0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers: expected at least one recurrent layer, got none")
        indices = [layer.layer for layer in self.layers]
        if indices != sorted(set(indices)) or indices[0] < 0:
            raise ValueError(f"layers: expected rising decoder-layer indices, got {indices}")
        first = self.layers[0]
        if not first.values.shape[0] * first.values.shape[1]:
            raise EmptyRunError(f"no steps: {self.n_sequences} sequences of {self.n_steps} steps; record at least one")
        for layer in self.layers[1:]:
            for what in ("n_sequences", "n_steps", "activation"):
                wanted, got = (_count(part, what) for part in (first, layer))
                if wanted != got:
                    raise ValueError(f"layers.{layer.layer}: expected {what} {wanted} as in the first layer, got {got}")

    @property
    def n_sequences(self) -> int:
        """Sequences that decoded together."""
        return int(self.layers[0].values.shape[0])

    @property
    def n_steps(self) -> int:
        """Decode steps of each."""
        return int(self.layers[0].values.shape[1])

    @property
    def activation(self) -> torch.dtype:
        """Type of q, k and v (C, B and x)."""
        return self.layers[0].activation

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything by its name in the file."""
        return {layer.full_name(name): x for layer in self.layers for name, x in layer.tensors().items()}

    @cached_property
    def hashes(self) -> dict[str, str]:
        """sha256 of each tensor's bytes (row-major, little endian), by name."""
        return {name: _hash(x) for name, x in self.tensors().items()}

    @property
    def digest(self) -> str:
        """sha256 over the names and hashes of all tensors: what was measured on, whatever the file was called."""
        lines = "".join(f"{self.hashes[name]}  {name}\n" for name in sorted(self.hashes))
        return hashlib.sha256(lines.encode()).hexdigest()


def _count(layer: LayerDump, what: str) -> Any:
    return {
        "n_sequences": layer.values.shape[0],
        "n_steps": layer.values.shape[1],
        "activation": name_type(layer.activation),
    }[what]


def name_type(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _hash(x: torch.Tensor) -> str:
    return hashlib.sha256(x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
