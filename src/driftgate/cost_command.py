"""``driftgate cost``: what plans cost on a model, from its config alone: bytes, traffic, operations, batch, gain.

Notable: only the command itself needs typer; ``compute_costs`` gives the JSON document and ``cost_tables`` what a
terminal shows. No weights are read; their size comes from the file headers or from ``--weights-gib``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from driftgate.accuracy.config_shapes import ModelShapes, read_config, read_shapes
from driftgate.accuracy.plans import BASELINE, PrecisionPlan
from driftgate.console import AsJson, Quiet, show, write
from driftgate.errors import InputError, UsageError, unknown_name

__all__ = ["Machine", "compute_costs", "cost", "cost_notes", "cost_tables", "find_config", "find_weights"]

DEFAULT_PLANS = ("fp32@16", "fp8/fp32@16", "nvfp4/fp32@16", "nvfp4/fp8@16")
DEFAULT_SHARES = (0.1, 0.25, 0.5)
NO_FILES = "no weight files"
KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is served with what.

    Attributes:
        hbm_gib: memory of the accelerator.
        weights_gib: that weights take of it.
        weights_from: where that number comes from.
        context: tokens of each sequence in the caches of attention layers.
        drafts: T, drafted tokens of a speculative step.
        shares: fractions of the baseline's decode step that its state traffic takes.
    """

    hbm_gib: float
    weights_gib: float
    weights_from: str
    context: int
    drafts: int
    shares: tuple[float, ...]


def cost(
    model: Annotated[str, typer.Argument(help="Embedded checkpoint, a folder with config.json, or a config.json.")],
    plan: Annotated[
        list[str] | None, typer.Option(help=f"Plan; repeatable; default {' '.join(DEFAULT_PLANS)}.")
    ] = None,
    hbm: Annotated[float, typer.Option(metavar="GIB", help="Memory of the accelerator.")] = 80.0,
    weights_gib: Annotated[
        float | None, typer.Option(metavar="GIB", help="Memory of the weights; default the weight files beside it.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of a sequence in the caches of attention layers.")] = 8192,
    drafts: Annotated[int, typer.Option(help="T, drafted tokens of a speculative step.")] = 4,
    recurrent_share: Annotated[
        float | None,
        typer.Option(metavar="FRACTION", help="Of a decode step, in state traffic; default 0.1, 0.25 and 0.5."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Say what plans cost on a model: memory, traffic, operations, greatest batch, gain. No weights, no GPU."""
    for name, value, least in (("--hbm", hbm, 0.0), ("--weights-gib", weights_gib, 0.0)):
        if value is not None and (not math.isfinite(value) or value < least or (name == "--hbm" and value == 0)):
            raise UsageError(f"{name} {value:g}: expected GiB, {'more than 0' if name == '--hbm' else '0 or more'}")
    for name, count in (("--context", context), ("--drafts", drafts)):
        if count < 0:
            raise UsageError(f"{name} {count}: expected 0 or more")
    if recurrent_share is not None and not 0 < recurrent_share <= 1:
        raise UsageError(f"--recurrent-share {recurrent_share:g}: expected a fraction above 0, at most 1")
    plans = {str(p): p for p in map(PrecisionPlan.parse, plan or DEFAULT_PLANS)}
    path = find_config(model)
    shapes = read_shapes(read_config(path), source=str(path))
    found, source = find_weights(path)
    if weights_gib is not None:
        found, source = weights_gib, "--weights-gib"
    machine = Machine(
        hbm_gib=hbm, weights_gib=found, weights_from=source, context=context, drafts=drafts,
        shares=DEFAULT_SHARES if recurrent_share is None else (recurrent_share,),
    )  # fmt: skip
    document = compute_costs(shapes, plans, machine, name=model)
    if as_json:
        write(json.dumps(document, indent=1, allow_nan=False) + "\n")
    elif not quiet:
        show(*cost_tables(document), *cost_notes(document))


def find_config(model: str) -> Path:
    """The config.json that was meant.

    Raises:
        UsageError: neither an embedded checkpoint nor something that looks like a path.
        InputError: there is nothing at that path.
    """
    from driftgate.evals.checkpoints import find_checkpoint, list_checkpoints

    embedded = find_checkpoint(model)
    path = embedded if embedded is not None else Path(model).expanduser()
    if path.is_dir():
        return path / "config.json"
    if path.is_file():
        return path
    if "/" in model or model.startswith(".") or model.endswith(".json"):
        raise InputError(f"{model} does not exist; give a config.json, its folder or one of `driftgate ls models`")
    raise unknown_name("model", model, list_checkpoints())


def find_weights(config: Path) -> tuple[float, str]:
    """GiB of the weight files beside a config.json, and what that number is; 0 where there are none.

    Raises:
        InputError: a weight index that cannot be read.
    """
    if config.name != "config.json":  # what lies beside a file of another name may belong to anything
        return 0.0, NO_FILES
    folder = config.parent
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return float(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]) / GIB, index.name
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{index} names no total_size; fetch it again, or give --weights-gib") from error
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return size / GIB, "the weight files" if size else NO_FILES


def compute_costs(
    shapes: ModelShapes, plans: Mapping[str, PrecisionPlan], machine: Machine, *, name: str
) -> dict[str, Any]:
    """What JSON holds: ``model``, ``machine``, and by plan, the baseline first, what it costs.

    Bytes are of one sequence unless they say otherwise; ``ideal_*`` are None for the baseline, ``batch_ring`` is None
    where a plan's buffer cannot hold the drafts.
    """
    from driftgate.kernels.cost import conv_bytes

    conv = len(shapes.recurrent_layers) * conv_bytes(
        shapes.heads, kernel=shapes.conv_kernel, activation_bytes=shapes.activation_bytes
    )
    kv = len(shapes.attention_layers) * shapes.kv_elements
    other = conv + kv * shapes.activation_bytes * machine.context
    model = asdict(shapes) | {"name": name, "recurrence": shapes.recurrence.value}
    model |= {"conv_bytes": conv, "fp8_kv_bytes_per_token": kv, "kv_bytes": other - conv}
    listed = {"baseline": BASELINE} | dict(plans)
    return {
        "schema_version": 1,
        "model": model,
        "machine": asdict(machine),
        "plans": {text: _plan_cost(shapes, plan, machine, other=other, kv=kv) for text, plan in listed.items()},
    }


def _plan_cost(shapes: ModelShapes, plan: PrecisionPlan, machine: Machine, *, other: int, kv: int) -> dict[str, Any]:
    """other: bytes of a sequence that every plan keeps; kv: bytes of a token's keys and values in FP8."""
    from driftgate.kernels.cost import (
        end_to_end_gain,
        greatest_batch,
        ideal_ratio,
        mean_operations,
        sequence_bytes,
    )
    from driftgate.kernels.traffic import compute_traffic, entry_bytes

    recurrence, heads, options = shapes.recurrence, shapes.heads, plan.options
    s, n = shapes.activation_bytes, len(shapes.recurrent_layers)
    layer = sequence_bytes(recurrence, heads, options, activation_bytes=s)
    traffic = compute_traffic(heads, options, entry_bytes(recurrence, heads, options, s))
    operations = mean_operations(recurrence, heads, options)
    total = n * layer.total

    def batch(state_bytes: int) -> int:
        return greatest_batch(
            machine.hbm_gib * GIB, weights=machine.weights_gib * GIB, per_sequence=state_bytes + other
        )

    return {
        "bytes_per_head": layer.state / heads.value_heads,
        "bytes_per_layer": layer.state,
        "checkpoint_bytes": n * layer.checkpoint,
        "read_copy_bytes": n * layer.read_copy,
        "buffer_bytes": n * layer.buffer,
        "bytes": total,
        "fp8_kv_tokens": total / kv if kv else None,
        "ideal_one_pass": None if options.step_by_step else ideal_ratio(options.length),
        "ideal_two_passes": None if options.step_by_step else ideal_ratio(options.length, passes=2),
        "state_ratio": traffic.state_ratio,
        "traffic_ratio": traffic.ratio,
        "traffic_per_step": n * traffic.per_step,
        "operations_per_step": n * operations,
        "operations_ratio": operations / mean_operations(recurrence, heads, BASELINE.options),
        "batch": batch(total),
        "batch_snapshots": batch(total + machine.drafts * n * layer.state),
        "batch_ring": _ring_batch(shapes, plan, machine.drafts, batch),
        "gains": {f"{share:g}": end_to_end_gain(share, traffic.ratio) for share in machine.shares},
    }


def _ring_batch(shapes: ModelShapes, plan: PrecisionPlan, drafts: int, batch: Callable[[int], int]) -> int | None:
    """Greatest batch where the last token and its drafts lie in the buffer's ring; None where they cannot."""
    from dataclasses import replace

    from driftgate.kernels.cost import sequence_bytes

    if plan.options.step_by_step:
        return None
    try:
        options = replace(plan.options, window=drafts + 1)
    except ValueError:
        return None
    layer = sequence_bytes(shapes.recurrence, shapes.heads, options, activation_bytes=shapes.activation_bytes)
    return batch(len(shapes.recurrent_layers) * layer.total)


def cost_tables(document: Mapping[str, Any]) -> list[Table | str]:
    """Memory, then traffic and operations, then batches and gains; 80 columns."""
    plans, machine = document["plans"], document["machine"]
    memory = _table("memory", "head\nKiB", "layer\nMiB", "buffer\nMiB", "sequence\nMiB", "tokens of\nFP8 KV")
    work = _table("traffic", "one\npass", "two\npasses", "\nstates", "all\nbytes", "opera-\ntions")
    gains = [f"gain at\n{100 * float(share):g} %" for share in next(iter(plans.values()))["gains"]]
    fits = _table("batch", "greatest\nbatch", f"with {machine['drafts']}\nsnapshots", "drafts\nin ring", *gains)
    for name, c in plans.items():
        tokens = c["fp8_kv_tokens"]
        memory.add_row(
            name, _number(c["bytes_per_head"] / KIB), _number(c["bytes_per_layer"] / MIB),
            _number(c["buffer_bytes"] / MIB), _number(c["bytes"] / MIB), "-" if tokens is None else f"{tokens:,.0f}",
        )  # fmt: skip
        work.add_row(
            name, *(_percent(c[key]) for key in ("ideal_one_pass", "ideal_two_passes", "state_ratio", "traffic_ratio")),
            f"{c['operations_ratio']:.2f} x",
        )  # fmt: skip
        batches = ("-" if c[key] is None else f"{c[key]:,}" for key in ("batch", "batch_snapshots", "batch_ring"))
        fits.add_row(name, *batches, *(f"{gain:.2f} x" for gain in c["gains"].values()))
    return [*_describe(document), "", memory, "", work, "", fits, ""]


def cost_notes(document: Mapping[str, Any]) -> list[str]:
    """What a reader must know beside the tables."""
    plans, machine, model = document["plans"], document["machine"], document["model"]
    operations = plans["baseline"]["operations_per_step"]
    lines = [
        "head, layer: checkpoint and read copy; sequence: all layers with their buffers",
        "traffic, over the baseline's; one pass: (1+1/L)/2, FP32 with free buffers; two",
        "  passes: (1+2/L)/2, the flush reads the state again, or writes a copy as wide;",
        "  states: these formats, free buffers; all bytes: with buffer and read copy",
        f"operations: floating-point, mean of a cycle; baseline {operations / 1e6:,.1f} M a token",
        f"weights: {machine['weights_gib']:.2f} GiB ({machine['weights_from']})",
        f"batch: in {machine['hbm_gib']:g} GiB beside the weights, with convolutions and",
        f"  {machine['context']:,} tokens of KV in {8 * model['activation_bytes']} bits; activations left out",
        f"snapshots: a copy of the state for each of {machine['drafts']} drafts; ring: drafts in the buffer",
        "gain: of a decode step by Amdahl's law, by the share of it that is state traffic",
    ]
    if machine["weights_from"] == NO_FILES:
        lines.append("no weights counted: none lie beside config.json; give --weights-gib")
    if plans["baseline"]["batch"] == 0:
        lines.append("no sequence fits: raise --hbm, or lower --weights-gib or --context")
    return lines + _note_splits(plans)


def _note_splits(plans: Mapping[str, Any]) -> list[str]:
    """A plan that keeps a copy, or a buffer, beside an FP32 checkpoint saves traffic and costs memory."""
    baseline = plans["baseline"]["bytes"]
    more = [
        f"{name}: {100 * (c['bytes'] / baseline - 1):.1f} % MORE memory than FP32 alone: "
        + ("copy, buffer" if c["read_copy_bytes"] else "buffer")
        for name, c in plans.items()
        if c["bytes"] > baseline
    ]
    return [*more, "such plans save traffic, not memory; a recurrence below FP32 saves both"] if more else []


def _describe(document: Mapping[str, Any]) -> list[str]:
    model, baseline = document["model"], document["plans"]["baseline"]
    heads, recurrent, attention = model["heads"], len(model["recurrent_layers"]), len(model["attention_layers"])
    kv = f"attention layers: {attention}, {model['fp8_kv_bytes_per_token']:,} bytes of FP8 KV a token"
    return [
        str(model["name"]),
        f"{model['family']}: {recurrent} {model['recurrence']} layers of {model['n_layers']}, "
        f"{heads['key_heads']}/{heads['value_heads']} heads of {heads['d_v']}x{heads['d_k']}",
        kv if attention else "no attention layer",
        f"FP32 state: {_number(baseline['bytes_per_head'] / KIB)} KiB a head, "
        f"{_number(baseline['bytes_per_layer'] / MIB)} MiB a layer, {_number(baseline['bytes'] / MIB)} MiB a sequence",
    ]


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _number(value: float) -> str:
    """Three digits or more."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value + 1e-9:.1f} %"  # 56.25 is shown as 56.3
