"""``driftgate record``: what a model's recurrent layers are given, as a dump for ``driftgate replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from driftgate.errors import EmptyRunError, InputError, unknown_name

__all__ = ["record"]


def record(
    model: Annotated[str, typer.Argument(help="Embedded checkpoint or folder.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The dump to write, a .safetensors file.")],
    steps: Annotated[int, typer.Option(help="Decode steps of each sequence.")] = 256,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences, decoded together.")] = 4,
    prefill: Annotated[int, typer.Option(min=1, help="Tokens before the first recorded step.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampled tokens.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    backend: Annotated[str, typer.Option(help="auto, triton, triton-interpret or torch.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; default as stored.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No progress bar.")] = False,
) -> None:
    """Record the inputs of a model's recurrent layers while the FP32 baseline decodes its own generation."""
    from driftgate.console import progress, show
    from driftgate.main_job import find_model
    from driftgate.replay_command import pick_backend

    if steps < 1:
        raise EmptyRunError(f"--steps {steps}: no step would be recorded; give 1 or more")
    if dtype not in (None, "fp32", "bf16", "fp16"):
        raise unknown_name("dtype", str(dtype), ("fp32", "bf16", "fp16"))
    folder = find_model(model)
    way, device = pick_backend(backend, device)
    _check_file(file)

    from driftgate.accuracy.dump import record as record_layers
    from driftgate.accuracy.dump import save_dump
    from driftgate.accuracy.generation import continue_streams
    from driftgate.accuracy.models import load_model

    loaded = load_model(folder, name=model, device=device, dtype=dtype)
    length = prefill + steps
    sampling = length - 2  # the first token is given, the second is sampled after it, the last is not fed
    with progress("decode steps", sampling + steps, not (quiet or no_progress)) as advance:
        tokens = continue_streams(
            loaded.model, [(loaded.first_token,)] * sequences, length=length, seed=seed, batch=sequences, backend=way,
            vocab_size=loaded.vocab_size, progress=advance,
        )  # fmt: skip
        dump = record_layers(
            loaded.model, tokens, steps=steps, prefill=prefill, name=model, backend=way, progress=advance
        )  # fmt: skip
    save_dump(file, dump)
    if not quiet:
        size = file.stat().st_size / 1e6
        show(f"{file}: {len(dump.layers)} layers, {sequences} sequences of {steps} steps, {size:.1f} MB")


def _check_file(file: Path) -> None:
    """Look whether a dump could be written, before a model is loaded.

    Raises:
        InputError: the place is taken, or there is no such folder.
    """
    if file.exists():
        raise InputError(f"{file} exists; choose another file, or delete it")
    if not file.parent.is_dir():
        raise InputError(f"{file}: its folder does not exist; make it first")
