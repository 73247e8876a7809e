"""How the kernels are launched: arguments from a pool, staged inputs, grids, and which kernels a step takes.

Notable: a step is two or three launches whatever its rows do: flushes, then (for products) what all tiles share, then
the rows that do not flush. A flush takes many registers, and it shares the baseline's configuration, which a readout
does only where it has to give the baseline's bits.
"""

from __future__ import annotations

import torch
import triton

from driftgate.kernels.arguments import StepArguments
from driftgate.kernels.contract import Backend, Fold, Readout, ReplayOptions
from driftgate.kernels.launch import Launch, choose_key_launch, choose_launch, choose_read_launch
from driftgate.kernels.pool import PAD_SLOT, StatePool, StoredStates
from driftgate.kernels.readout import LEAST_PLACES
from driftgate.kernels.replay import READOUTS, decode_kernel, flush_kernel, key_kernel, product_kernel, read_kernel
from driftgate.kernels.step import INTERPRETED
from driftgate.kernels.validate import check_rows
from driftgate.quant.device import FORMAT_IDS

__all__ = ["find_grid", "fold_now", "layer_buffers", "plan_constants", "require", "stage_inputs", "stored_arguments"]
__all__ += ["stored_constants", "take_baseline_step", "take_replay_step"]

FLUSH_PROGRAMS = 2048
"""Programs that a flush launch is brought down to, by more rows to a program; with fewer each serves one row."""

_ARGUMENTS = (
    "q", "k", "v", "g", "beta", "D", "z", "out", "slots", "cursor", "base", "flush", "error", "seed", "tokens",
    "streams", "codes", "block_scales", "row_scales", "codes_slot", "blocks_slot", "rows_slot",
    "copy_codes", "copy_blocks", "copy_rows", "copy_codes_slot", "copy_blocks_slot", "copy_rows_slot",
    "keys", "values", "log_decay", "betas", "corrections", "products", "vectors", "scale", "places", "n_rows",
)  # fmt: skip
"""Names of the kernels' ordinary arguments, in the order of ``_launch``."""


def take_baseline_step(
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    arguments: StepArguments,
    *,
    pad_slot: int,
    launch: Launch | None,
    alternative: bool = False,
) -> torch.Tensor:
    """Launch the baseline kernel on checked arguments; o [B, HV, d_v] of v's type."""
    launch = launch or choose_launch(pool.shape, interpreted=INTERPRETED, alternative=alternative)
    inputs, out = stage_inputs(arguments)
    if len(slots):
        decode_kernel[find_grid(pool, slots, launch)](
            *inputs, out, slots, pool.error, pool.seed, pool.tokens, pool.streams[layer],
            *stored_arguments(pool.checkpoint, layer), arguments.scale,
            **plan_constants(pool, pad_slot, launch, arguments), **stored_constants(pool.checkpoint), **launch.flags(),
        )  # fmt: skip
    return out


def take_replay_step(
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    arguments: StepArguments,
    *,
    pad_slot: int,
    launch: Launch | None,
) -> torch.Tensor:
    """Launch the replay kernels on checked arguments; o [B, HV, d_v] of v's type.

    Rows that flush and rows that do not are served by a launch each: a flush takes many registers, and it shares the
    baseline's configuration, which a readout does only where it has to give the baseline's bits.
    """
    exact = choose_launch(pool.shape, interpreted=INTERPRETED) if launch is None else launch
    inputs, out = stage_inputs(arguments)
    common = (pool, layer, slots, inputs, out, arguments, pad_slot)
    read = exact
    if pool.options.readout is not Readout.EXACT_READOUT:
        read = choose_read_launch(pool.shape, pool.recurrence, pool.read_states.format.name, interpreted=INTERPRETED)
    _launch(flush_kernel, *common, exact)
    if pool.options.readout is Readout.OUTPUT_ONLY:
        shared = _multiply_keys(pool, layer, slots, inputs, arguments, pad_slot)
        _launch(product_kernel, *common, read, shared=shared)
    else:
        _launch(read_kernel, *common, read)
    return out


def fold_now(
    pool: StatePool, slots: torch.Tensor, *, rates: torch.Tensor | None, normalise: bool, launch: Launch | None
) -> None:
    """Fold the buffers of slots [n] without a step, in every layer; a slot at cursor 0 is left as it is.

    rates: A [n_layers, HV] of Mamba-2, else None.
    """
    check_rows(pool, 0, slots, PAD_SLOT)
    if pool.options.step_by_step or not len(slots):
        return
    launch = launch or choose_launch(pool.shape, interpreted=INTERPRETED)
    absent = pool.keys
    for layer in range(pool.n_layers):
        g = absent if rates is None else rates[layer]
        arguments = StepArguments(q=absent, k=absent, v=absent, g=g, beta=absent, normalise=normalise)
        inputs = [absent, absent, absent, g, absent, absent, absent]
        _launch(flush_kernel, pool, layer, slots, inputs, absent, arguments, PAD_SLOT, launch, take_step=False)
    pool.empty_buffers(slots)


def require(backend: Backend) -> None:
    """Check that this process runs the kernels the way that a backend says.

    Raises:
        RuntimeError: says which variable to set, or that there is no GPU.
    """
    if (backend is Backend.TRITON_INTERPRET) != INTERPRETED:
        wanted = "TRITON_INTERPRET=1" if backend is Backend.TRITON_INTERPRET else "no TRITON_INTERPRET"
        raise RuntimeError(f"backend {backend.value} needs a process that was started with {wanted}")
    if backend is Backend.TRITON and not torch.cuda.is_available():
        raise RuntimeError("backend triton needs a CUDA device; use --backend torch or triton-interpret")


def _multiply_keys(
    pool: StatePool,
    layer: int,
    slots: torch.Tensor,
    inputs: list[torch.Tensor],
    arguments: StepArguments,
    pad_slot: int,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Launch ``key_kernel``: products and vectors for ``product_kernel``."""
    options, shape = pool.options, pool.shape
    if not len(slots):
        return None
    channels = pool.recurrence.channel_decay
    heads = shape.value_heads if channels else shape.key_heads
    products = torch.empty(len(slots), heads, 2, _block_places(options), device=pool.device)
    vectors = torch.empty(len(slots), heads, 2, shape.d_k, device=pool.device) if channels else products
    launch = choose_key_launch(shape)
    key_kernel[(len(slots) * heads,)](
        inputs[0], inputs[1], inputs[3], slots, pool.cursor, pool.base, pool.flush, pool.keys[layer],
        pool.keys[layer] if pool.log_decay is None else pool.log_decay[layer], products, vectors,
        arguments.scale, options.places,
        PAD=pad_slot, H=shape.key_heads, HV=shape.value_heads, DK=shape.d_k, BL=_block_places(options),
        RING=options.window > 0, CHANNELS=channels, NORMALISE=arguments.normalise, BK=launch.block_k,
        **launch.flags(),
    )  # fmt: skip
    return products, vectors


def _block_places(options: ReplayOptions) -> int:
    """Tile of buffered entries; equal for all L up to 17."""
    return max(LEAST_PLACES, triton.next_power_of_2(max(options.length - 1, 1)))


def _launch(  # type: ignore[no-untyped-def]
    kernel, pool, layer, slots, inputs, out, arguments, pad_slot, launch, *, take_step=True, shared=None
) -> None:
    """Launch ``flush_kernel``, ``read_kernel`` or ``product_kernel`` on one layer.

    Each takes the arguments that it names and no others: what a kernel does not use must not compile it again.
    """
    if not len(slots):
        return
    options, recurrence = pool.options, pool.recurrence
    copy = pool.copy if pool.copy is not None else pool.checkpoint
    copy_constants = stored_constants(copy)
    programs, tiles = find_grid(pool, slots, launch)
    rows = 1
    if kernel is flush_kernel and not INTERPRETED:
        rows = min(16, triton.next_power_of_2(max(1, programs * tiles // FLUSH_PROGRAMS)))
        programs = triton.cdiv(len(slots), rows) * pool.shape.value_heads
    if kernel is product_kernel:
        tiles = 1
    values = (
        *inputs, out, slots, pool.cursor, pool.base, pool.flush, pool.error, pool.seed, pool.tokens,
        pool.streams[layer], *stored_arguments(pool.checkpoint, layer), *stored_arguments(copy, layer),
        *layer_buffers(pool, layer), *(shared or (out, out)), arguments.scale, options.places, len(slots),
    )  # fmt: skip
    constants = {
        **plan_constants(pool, pad_slot, launch, arguments), **stored_constants(pool.checkpoint),
        **{f"COPY_{name}": copy_constants[name] for name in ("ROW", "BLOCKS", "FORMAT")},
    }  # fmt: skip
    constants |= dict(
        BL=_block_places(options), RING=options.window > 0,
        SPLIT=options.split, READOUT=READOUTS[options.readout], DOT=options.dot.value,
        EXACT_FOLD=options.fold is Fold.EXACT, KEEP_INPUTS=options.keeps_inputs(recurrence),
        KEEP_CORRECTIONS=options.keeps_corrections(recurrence), TAKE_STEP=take_step, ROWS=rows,
    )  # fmt: skip
    every = dict(zip(_ARGUMENTS, values, strict=True)) | constants
    kernel[(programs, tiles)](**{name: every[name] for name in kernel.arg_names}, **launch.flags())


def stage_inputs(arguments: StepArguments) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Staged inputs in the order of the kernels' arguments, and the output."""
    a = arguments
    optional = [a.q if x is None else x for x in (a.D, a.z)]
    inputs = [_stage(x) for x in (a.q, a.k, a.v, a.g, a.beta, *optional)]
    return inputs, torch.empty_like(inputs[2])


def find_grid(pool: StatePool, slots: torch.Tensor, launch: Launch) -> tuple[int, int]:
    """Programs: (row and head, tile of d_v)."""
    return len(slots) * pool.shape.value_heads, triton.cdiv(pool.shape.d_v, launch.block_v)


def plan_constants(pool: StatePool, pad_slot: int, launch: Launch, arguments: StepArguments) -> dict[str, object]:
    """Constants of a kernel that follow from head shape, recurrence, launch and inputs."""
    shape, recurrence = pool.shape, pool.recurrence
    return {
        "PAD": pad_slot, "H": shape.key_heads, "HV": shape.value_heads, "DK": shape.d_k, "DV": shape.d_v,
        "SR": pool.options.stochastic, "DELTA": recurrence.delta_rule, "CHANNELS": recurrence.channel_decay,
        "NORMALISE": arguments.normalise, "HAS_D": arguments.D is not None, "HAS_Z": arguments.z is not None,
        "BV": launch.block_v, "BK": launch.block_k,
    }  # fmt: skip


def _stage(x: torch.Tensor) -> torch.Tensor:
    """Contiguous and 16-byte aligned, so that one specialisation of the kernels exists."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def layer_buffers(pool: StatePool, layer: int) -> list[torch.Tensor]:
    """One layer's buffers in the order of the kernel's arguments; the keys stand in for absent ones."""
    parts = (pool.keys, pool.values, pool.log_decay, pool.beta, pool.corrections)
    return [pool.keys[layer] if b is None else b[layer] for b in parts]


def stored_arguments(states: StoredStates, layer: int) -> tuple[object, ...]:
    """Pointers of one layer's stored states (the codes for absent ones) and slot strides as ``find_head`` has them."""
    codes = states.codes[layer]
    blocks = codes if states.block_scales is None else states.block_scales[layer]
    rows = codes if states.row_scales is None else states.row_scales[layer]
    codes_slot = codes.stride(0) * codes.element_size() // 16
    return codes, blocks, rows, codes_slot, blocks.stride(0), rows.stride(0)


def stored_constants(states: StoredStates) -> dict[str, int]:
    """Elements of a stored row, blocks of a row, and the format's id in kernels."""
    return {
        "ROW": states.codes.shape[-1],
        "BLOCKS": 0 if states.block_scales is None else states.block_scales.shape[-1],
        "FORMAT": int(FORMAT_IDS[states.format.name]),
    }
