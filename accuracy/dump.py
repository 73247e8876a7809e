"""Dumps: what recurrent layers were given during decode steps, in one safetensors file; docs/dump.md has the schema.

Notable: a dump names the sha256 of every tensor, and nothing is measured before shapes, types, hashes and finiteness
were checked: a file that was written with a wrong offset must not look like drift. The only metadata key holds one
JSON document, so that equal dumps are equal files.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from driftgate.accuracy.dump_layers import CONSTANTS, Dump, LayerDump, name_type
from driftgate.errors import EmptyRunError, InputError
from driftgate.kernels.contract import Backend, Recurrence

if TYPE_CHECKING:
    import numpy as np

    from driftgate.accuracy.adapters.decode_functions import StepInputs

__all__ = ["SCHEMA_VERSION", "Dump", "DumpRecorder", "LayerDump", "load_dump", "record", "save_dump"]

SCHEMA_VERSION = 1
METADATA_KEY = "driftgate_dump"


class _LayerHeader(BaseModel):
    model_config = ConfigDict(extra="forbid")
    layer: int
    recurrence: str
    qk_l2norm: bool = True
    scale: float | None = Field(default=None, allow_inf_nan=False)


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid")
    schema_version: int
    model: str
    recorder: str
    activation_dtype: str
    start: int = Field(ge=0)
    layers: list[_LayerHeader]
    sha256: dict[str, str]


def save_dump(path: str | Path, dump: Dump) -> None:
    """Write a dump atomically; equal dumps give equal files.

    Raises:
        InputError: the place cannot be written to.
    """
    path = Path(path)
    header = _Header(
        schema_version=SCHEMA_VERSION,
        model=dump.model,
        recorder=dump.recorder,
        activation_dtype=name_type(dump.activation),
        start=dump.start,
        layers=[
            _LayerHeader(layer=x.layer, recurrence=x.recurrence.value, qk_l2norm=x.qk_l2norm, scale=x.scale)
            for x in dump.layers
        ],
        sha256=dump.hashes,
    )
    metadata = {METADATA_KEY: json.dumps(header.model_dump(), sort_keys=True)}
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        save_file({name: x.cpu().contiguous().clone() for name, x in dump.tensors().items()}, temporary, metadata)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}; choose another") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def load_dump(path: str | Path) -> Dump:
    """Read a dump and check all of it.

    Raises:
        InputError: not a readable file, no dump, another schema, an unknown recurrence, a tensor that is missing, does
            not fit or is not what was recorded; one line that names it.
        EmptyRunError: it holds no step.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file; give a dump that `driftgate record` wrote")
    try:
        with safe_open(path, framework="pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a readable .safetensors file ({' '.join(str(error).split())})") from error
    header = _read_header(path, metadata)
    try:
        dump = _assemble(header, tensors)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    if name_type(dump.activation) != header.activation_dtype:
        raise InputError(
            f"{path}: activations are {name_type(dump.activation)}, its metadata say {header.activation_dtype}"
        )
    for name, digest in dump.hashes.items():
        if header.sha256.get(name) != digest:
            raise InputError(f"{path}: {name} is not what was recorded (sha256 {digest[:12]}…); record it again")
    return dump


def _read_header(path: Path, metadata: Mapping[str, str] | None) -> _Header:
    text = (metadata or {}).get(METADATA_KEY)
    if text is None:
        raise InputError(f"{path}: no dump, its metadata lack {METADATA_KEY}; docs/dump.md has the schema")
    try:
        version = json.loads(text)["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: its metadata {METADATA_KEY} name no schema_version; record it again") from error
    if version != SCHEMA_VERSION:
        raise InputError(f"{path}: schema {version!r}, this driftgate reads {SCHEMA_VERSION}; record it again")
    try:
        return _Header.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path}: metadata {where}: {first['msg']}; record it again") from error


def _assemble(header: _Header, tensors: dict[str, torch.Tensor]) -> Dump:
    """A dump of the tensors that the header names; ValueError otherwise."""
    known = [r.value for r in Recurrence]
    rest, layers = dict(tensors), []
    for entry in header.layers:
        if entry.recurrence not in known:
            raise ValueError(
                f"layers.{entry.layer}: unknown recurrence {entry.recurrence!r}; known: {', '.join(known)}"
            )
        prefix = f"layers.{entry.layer}."
        own = {name.removeprefix(prefix): rest.pop(name) for name in list(rest) if name.startswith(prefix)}
        for name in header.sha256:
            if name.startswith(prefix) and name not in tensors:
                raise ValueError(f"{name}: missing, though the metadata name it; record it again")
        if "initial_state" not in own:
            raise ValueError(f"{prefix}initial_state: missing; a layer needs the state before its first step")
        layers.append(
            _make_layer(
                own, layer=entry.layer, recurrence=Recurrence(entry.recurrence), qk_l2norm=entry.qk_l2norm,
                scale=entry.scale,
            )
        )  # fmt: skip
    if rest:
        raise ValueError(f"{min(rest)}: belongs to no layer that the metadata name; leave it out")
    return Dump(layers=tuple(layers), model=header.model, recorder=header.recorder, start=header.start)


def _make_layer(tensors: Mapping[str, torch.Tensor], *, recurrence: Recurrence, **fields: Any) -> LayerDump:
    """A layer of its tensors by short name, streams in the order of a step's arguments."""
    rest = dict(tensors)
    state = rest.pop("initial_state")
    constants = {name: rest.pop(name) for name in CONSTANTS if name in rest}
    streams = {name: rest[name] for name in recurrence.inputs if name in rest} | rest
    return LayerDump(recurrence=recurrence, streams=streams, constants=constants, initial_state=state, **fields)


class DumpRecorder:
    """Collects decode steps of recurrent layers, whoever takes them, in any order of layers.

    Args:
        steps: that are kept of each layer; later ones are ignored.
        model: name of the model.
        recorder: what records, in words.
        start: tokens that every sequence had seen before the first step.
    """

    def __init__(self, *, steps: int, model: str, recorder: str, start: int = 0) -> None:
        self.steps, self.model, self.recorder, self.start = steps, model, recorder, start
        self._first: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, list[dict[str, torch.Tensor]]] = {}

    @property
    def complete(self) -> bool:
        """Whether every layer that was seen has all its steps."""
        return bool(self._inputs) and all(len(steps) == self.steps for steps in self._inputs.values())

    def is_new(self, layer: int) -> bool:
        """Whether the next step of a layer is its first, which needs its state."""
        return layer not in self._first

    def start_layer(
        self,
        layer: int,
        recurrence: Recurrence,
        state: torch.Tensor,
        *,
        constants: Mapping[str, torch.Tensor] | None = None,
        qk_l2norm: bool = True,
        scale: float | None = None,
    ) -> None:
        """Say what a layer is, before its first step.

        Args:
            layer: decoder-layer index.
            recurrence: whose inputs will come.
            state: [sequences, HV, d_v, d_k] before the step, any floating type.
            constants, qk_l2norm, scale: as ``LayerDump`` has them.
        """
        kept = {name: x.detach().float().cpu().clone() for name, x in (constants or {}).items()}
        self._first[layer] = {
            "recurrence": recurrence, "initial_state": state.detach().float().cpu().clone(), "constants": kept,
            "qk_l2norm": qk_l2norm, "scale": scale,
        }  # fmt: skip
        self._inputs[layer] = []

    def add(self, layer: int, inputs: Mapping[str, torch.Tensor]) -> None:
        """Keep a step of a layer.

        Args:
            layer: decoder-layer index that ``start_layer`` named.
            inputs: by argument name of ``decode_step``, [sequences, ...], the same sequences in every call.
        """
        steps = self._inputs[layer]
        if len(steps) < self.steps:
            steps.append({name: x.detach().cpu().clone() for name, x in inputs.items()})

    def dump(self) -> Dump:
        """What was collected, cut to the steps that every layer has.

        Raises:
            EmptyRunError: nothing was collected.
            ValueError: the tensors do not belong together.
        """
        n = min((len(steps) for steps in self._inputs.values()), default=0)
        if not n:
            raise EmptyRunError("no decode step was recorded; decode at least one token after recording began")
        layers = []
        for layer, steps in sorted(self._inputs.items()):
            streams = {name: torch.stack([step[name] for step in steps[:n]], dim=1) for name in steps[0]}
            layers.append(LayerDump(layer=layer, streams=streams, **self._first[layer]))
        return Dump(layers=tuple(layers), model=self.model, recorder=self.recorder, start=self.start)


def record(
    model: torch.nn.Module,
    token_ids: np.ndarray,
    *,
    steps: int,
    prefill: int = 1,
    name: str = "model",
    backend: Backend = Backend.TORCH,
    progress: Callable[[int], None] | None = None,
) -> Dump:
    """Decode streams teacher-forced with the FP32 baseline, and keep what its recurrent layers are given.

    Args:
        model: a loaded causal language model of a covered family, in eval mode.
        token_ids: [n_sequences, prefill + steps or more] int64.
        steps: decode steps, 1 or more.
        prefill: tokens of each sequence that the model prefills itself, 1 or more.
        name: of the model.
        backend: which code takes the decode steps.
        progress: called with the number of steps just done.

    Raises:
        EmptyRunError: no step is asked for.
        ValueError: the streams are too short.
        InputError: the model's family is not covered.
    """
    from driftgate.accuracy.adapters.wrapping import wrap

    if steps < 1 or not len(token_ids):
        raise EmptyRunError(f"no steps: {len(token_ids)} sequences of {steps} steps; ask for at least one of each")
    if prefill < 1 or token_ids.shape[1] < prefill + steps:
        raise ValueError(f"token_ids: expected {prefill} + {steps} tokens or more, got {token_ids.shape[1]}")
    n = len(token_ids)
    with wrap(model, ["baseline"], n_sequences=n, backend=backend) as wrapped:
        recurrence = wrapped.family.recurrence
        kept = DumpRecorder(steps=steps, model=name, recorder="driftgate record", start=prefill)
        tokens = torch.from_numpy(token_ids).to(wrapped.device)

        def observe(layer: int, inputs: StepInputs, _out: torch.Tensor) -> None:
            index, own = wrapped.layer_indices[layer], inputs.take_rows(slice(0, n))
            if kept.is_new(index):
                kept.start_layer(index, recurrence, states[layer], constants=own.constants)
            kept.add(index, own.streams)

        wrapped.observers.append(observe)
        wrapped.prefill(tokens[:, :prefill])
        slots = torch.arange(n)
        states = [wrapped.blocks[0].read_checkpoint(layer, slots) for layer in range(wrapped.n_layers)]
        for position in range(prefill, prefill + steps):
            wrapped.step(tokens[:, position])
            if progress is not None:
                progress(1)
    return kept.dump()
