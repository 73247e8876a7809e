"""The certificate: bit-exact invariants of replay, run on the kernels themselves; equality of bits, never a tolerance.

I1  L = 1: outputs and state equal a step-by-step baseline that stores the state in the same format, at every step.
I2  FP32 checkpoint read in FP32: outputs at every step (exact readout) or at every flush, and the state at every flush,
    natural, forced, tracked or without a step, equal the baseline. Between flushes the checkpoint does not move.
I3  isolation: with exact fold the checkpoint trajectory, and the outputs at flushes, are the same for every read
    format; the stored copy is quantize(dequantize(checkpoint)), rebuilt here from stored bytes; a flush of a checkpoint
    below FP32 stores what FP32 baseline steps make of the dequantised one.
I4  a row's bits depend neither on the other rows, on its slot, on padded rows nor on strides; padded rows and an empty
    batch write nothing.
I5  two runs are equal; stochastic rounding draws by seed, sequence and token alone; a CUDA Graph replays the bits.
I6  speculative windows: committed tokens and states at flushes equal sequential decode (FP32, exact route); rejected
    drafts leave no trace in any plan.
I7  the stored type is the type that the plan names: an FP32 state 1 + 2^-12 under beta = 0, g = 0 keeps its bits.

What is asked: ``cases.py``; how: ``invariants.py``, ``independence.py`` (I4), ``repeats.py`` (I5), ``windows.py`` (I6);
inputs: ``step_data.py``; what a difference looks like: ``causes.py``; the part with a tolerance: ``tolerance.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from driftgate.accuracy.cases import INVARIANTS, CaseGroup
from driftgate.accuracy.cases import list_groups as _list_groups
from driftgate.accuracy.invariants import Found, check_group
from driftgate.accuracy.plan_run import Kernels
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.records import BitwiseRecord
from driftgate.errors import EmptyRunError, UsageError
from driftgate.kernels.contract import Backend, HeadShape, Recurrence
from driftgate.kernels.launch import choose_launch

if TYPE_CHECKING:
    from driftgate.accuracy.observers import RecordedInputs

__all__ = [
    "DEFAULT_FORMATS", "DEFAULT_LENGTHS", "DEFAULT_RECURRENCES", "DEFAULT_SHAPES", "INVARIANTS", "CaseGroup", "Kernels",
    "certify", "count_cases", "find_kernels", "list_groups", "run_group",
]  # fmt: skip

DEFAULT_RECURRENCES = (Recurrence.GDN, Recurrence.KDA, Recurrence.MAMBA2)
DEFAULT_SHAPES = (
    HeadShape(key_heads=1, value_heads=2, d_k=16, d_v=16),
    HeadShape(key_heads=2, value_heads=4, d_k=40, d_v=24),
    HeadShape(key_heads=1, value_heads=1, d_k=128, d_v=40),  # two tiles of d_v
)
DEFAULT_LENGTHS = (1, 2, 3, 5, 8, 16)
DEFAULT_FORMATS = ("fp32", "bf16", "fp16", "fp8", "nvfp4")


def certify(
    *,
    backend: Backend,
    recurrences: Sequence[Recurrence] = DEFAULT_RECURRENCES,
    shapes: Sequence[HeadShape] = DEFAULT_SHAPES,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    formats: Sequence[str] = DEFAULT_FORMATS,
    invariants: Sequence[str] = tuple(INVARIANTS),
    recorded: RecordedInputs | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
    implementation: Kernels | None = None,
) -> list[BitwiseRecord]:
    """Run the invariants, one group of cases after the other.

    Args:
        backend: which code takes the steps; with ``implementation`` only its name in the records.
        recurrences: whose kernels; with ``implementation`` one; not used with ``recorded``.
        shapes: heads of the random cases, the first with every length, the others with 1 and the middle one; not used
            with ``recorded``.
        lengths: values of L.
        formats: formats of checkpoints and copies, by name.
        invariants: names from ``INVARIANTS``.
        recorded: inputs of a checkpoint's layers instead of random ones; up to three layers, each a row of the batch
            (Mamba-2: one layer, twice); its own recurrence; I1, I2, I3 and I7 alone.
        seed: of the random inputs and states.
        device: where everything runs.
        progress: called with the number of new records after each group; ``count_cases`` says how many there will be.
        implementation: the kernels to certify; None for driftgate's own on that backend.

    Returns:
        One record per case and plan; ``case["n_compared"]`` says how many elements were compared, by what they are.

    Raises:
        EmptyRunError: nothing to compare, or a baseline that left its states as they were.
        RuntimeError: this process cannot run the backend.
        UsageError: an unknown format or invariant, or an implementation for more than one recurrence.
    """
    groups = list_groups(
        backend=backend, recurrences=recurrences, shapes=shapes, lengths=lengths, formats=formats,
        invariants=invariants, recorded=recorded,
    )  # fmt: skip
    if implementation is not None and len({group.recurrence for group in groups}) > 1:
        raise UsageError("an implementation goes with one recurrence; name it")
    records = []
    for group in groups:
        new = run_group(
            group, backend=backend, device=device, seed=seed, recorded=recorded, implementation=implementation
        )
        records += new
        if progress is not None:
            progress(len(new))
    if not records:
        raise EmptyRunError("these kernels have nothing that the invariants ask for; choose others")
    return records


def list_groups(
    *,
    backend: Backend,
    recurrences: Sequence[Recurrence] = DEFAULT_RECURRENCES,
    shapes: Sequence[HeadShape] = DEFAULT_SHAPES,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    formats: Sequence[str] = DEFAULT_FORMATS,
    invariants: Sequence[str] = tuple(INVARIANTS),
    recorded: RecordedInputs | None = None,
) -> list[CaseGroup]:
    """What ``certify`` runs for these arguments, in groups that share compiled kernels and can be pickled.

    Raises:
        EmptyRunError: there is none.
        UsageError: an unknown format or invariant.
    """
    return _list_groups(
        backend=backend, recurrences=recurrences, shapes=shapes, lengths=lengths, formats=formats,
        invariants=invariants, recorded=recorded,
    )  # fmt: skip


def count_cases(
    *,
    backend: Backend,
    recurrences: Sequence[Recurrence] = DEFAULT_RECURRENCES,
    shapes: Sequence[HeadShape] = DEFAULT_SHAPES,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    formats: Sequence[str] = DEFAULT_FORMATS,
    invariants: Sequence[str] = tuple(INVARIANTS),
    recorded: RecordedInputs | None = None,
) -> int:
    """Records that ``certify`` returns for these arguments."""
    groups = list_groups(
        backend=backend, recurrences=recurrences, shapes=shapes, lengths=lengths, formats=formats,
        invariants=invariants, recorded=recorded,
    )  # fmt: skip
    return sum(group.n_records for group in groups)


def run_group(
    group: CaseGroup,
    *,
    backend: Backend,
    device: torch.device | str = "cpu",
    seed: int = 0,
    recorded: RecordedInputs | None = None,
    implementation: Kernels | None = None,
) -> list[BitwiseRecord]:
    """Run one group of cases; arguments and errors as ``certify`` has them."""
    kernels = implementation or find_kernels(group.recurrence, backend, group.shape)
    common: dict[str, object] = {
        "backend": backend.value,
        "data": "random" if recorded is None else "recorded",
        "seed": seed,
    }
    return [
        _record(found, common) for found in check_group(kernels, group, recorded=recorded, seed=seed, device=device)
    ]


def find_kernels(recurrence: Recurrence, backend: Backend, shape: HeadShape) -> Kernels:
    """Kernels of driftgate for a recurrence; under the interpreter with the tiles that a GPU runs.

    Raises:
        RuntimeError: this process cannot run the backend.
    """
    module: Kernels = import_module(f"driftgate.kernels.{recurrence.value}").implementation(backend)
    return tile_kernels(module, shape) if backend is Backend.TRITON_INTERPRET else module


def tile_kernels(kernels: Kernels, shape: HeadShape) -> Kernels:
    """Triton kernels with the tiles that a GPU runs: the interpreter by itself takes a head as one."""
    launch = choose_launch(shape, interpreted=False)
    names = [name for name in ("decode_step", "replay_step", "flush_now", "verify_window") if hasattr(kernels, name)]
    return SimpleNamespace(**{name: partial(getattr(kernels, name), launch=launch) for name in names})


def _record(found: Found, common: dict[str, object]) -> BitwiseRecord:
    case, shape, options, tally, data = found.case, found.data.shape, found.plan, found.tally, found.data
    described = {
        "check": case.check.value,
        "plan": str(PrecisionPlan(options=options)),
        "recurrence_format": options.recurrence,
        "read_format": options.read,
        "stochastic": options.stochastic,
        "length": options.length,
        "key_heads": shape.key_heads,
        "value_heads": shape.value_heads,
        "d_k": shape.d_k,
        "d_v": shape.d_v,
        "activation": str(data.activation).removeprefix("torch."),
        "steps": data.n_steps,
        "n_compared": tally.n_compared,
    }
    return BitwiseRecord(
        invariant=case.invariant,
        recurrence=case.recurrence.value,
        case=described | common,
        equal=tally.n_different == 0,
        n_different=tally.n_different,
        max_ulp=tally.max_ulp,
        first_different=tally.report(),
    )
