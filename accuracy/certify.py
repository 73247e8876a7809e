"""The bit-exact invariants of replay, run on the kernels themselves: equality of bits, never a tolerance.

I1  L = 1: outputs and state equal a step-by-step baseline that stores the state in the same format, at every step.
I2  FP32 checkpoint read in FP32: outputs at every step (exact readout) or at every flush, and the state at every flush,
    natural, forced, tracked or without a step, equal the baseline. Between flushes the checkpoint does not move.
I3  isolation: with exact fold the checkpoint trajectory is the same for every read format, and the stored copy is
    quantize(dequantize(checkpoint)), rebuilt here from stored bytes.
I7  the stored type is the type that the plan names: an FP32 state 1 + 2^-12 under beta = 0, g = 0 keeps its bits.

How: ``invariants.py``; inputs: ``step_data.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from driftgate.accuracy.invariants import Found, Kernels, check_cases, list_cases
from driftgate.accuracy.plans import PrecisionPlan
from driftgate.accuracy.records import BitwiseRecord
from driftgate.errors import EmptyRunError
from driftgate.kernels.contract import Backend, HeadShape
from driftgate.kernels.gdn import implementation as find_implementation

if TYPE_CHECKING:
    from driftgate.accuracy.observers import RecordedInputs

__all__ = ["DEFAULT_FORMATS", "DEFAULT_LENGTHS", "DEFAULT_SHAPES", "Kernels", "certify", "count_cases"]

DEFAULT_SHAPES = (
    HeadShape(key_heads=1, value_heads=2, d_k=16, d_v=16),
    HeadShape(key_heads=2, value_heads=4, d_k=40, d_v=24),
)
DEFAULT_LENGTHS = (1, 2, 3, 5, 8, 16)
DEFAULT_FORMATS = ("fp32", "bf16", "fp16", "fp8", "nvfp4")


def certify(
    *,
    backend: Backend,
    shapes: Sequence[HeadShape] = DEFAULT_SHAPES,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    formats: Sequence[str] = DEFAULT_FORMATS,
    recorded: RecordedInputs | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
    implementation: Kernels | None = None,
) -> list[BitwiseRecord]:
    """Run I1, I2, I3 and I7.

    Args:
        backend: which code takes the steps; with ``implementation`` only its name in the records.
        shapes: heads of the random cases; not used with ``recorded``.
        lengths: values of L.
        formats: formats of checkpoints and copies, by name.
        recorded: inputs of a checkpoint's layers instead of random ones; up to three layers, each a row of the batch.
        seed: of the random inputs and states.
        device: where everything runs.
        progress: called with 1 after each record; ``count_cases`` says how many there will be.
        implementation: the kernels to certify; None for driftgate's own on that backend.

    Returns:
        One record per case; ``case["n_compared"]`` says how many elements were compared, by what they are.

    Raises:
        EmptyRunError: nothing to compare, or a baseline that left its states as they were.
        RuntimeError: this process cannot run the backend.
        UsageError: an unknown format.
    """
    kernels = implementation if implementation is not None else find_implementation(backend)
    common: dict[str, object] = {
        "backend": backend.value,
        "data": "random" if recorded is None else "recorded",
        "seed": seed,
    }
    records = []
    for found in check_cases(
        kernels, shapes=shapes, lengths=lengths, formats=formats, recorded=recorded, seed=seed, device=device
    ):
        records.append(_record(found, common))
        if progress is not None:
            progress(1)
    if not records:
        raise EmptyRunError("no case to certify; give at least one shape, length and format")
    return records


def count_cases(
    *,
    shapes: Sequence[HeadShape] = DEFAULT_SHAPES,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    formats: Sequence[str] = DEFAULT_FORMATS,
    recorded: RecordedInputs | None = None,
) -> int:
    """Records that ``certify`` returns for these arguments."""
    return sum(len(case.plans) for case in list_cases(shapes, lengths, formats, recorded))


def _record(found: Found, common: dict[str, object]) -> BitwiseRecord:
    shape, options, tally, data = found.data.shape, found.plan, found.tally, found.data
    described = {
        "plan": str(PrecisionPlan(options=options)),
        "recurrence_format": options.recurrence,
        "read_format": options.read,
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
        invariant=found.case.invariant,
        recurrence="gdn",
        case=described | common,
        equal=tally.n_different == 0,
        n_different=tally.n_different,
        max_ulp=tally.max_ulp,
        first_different=tally.report(),
    )
