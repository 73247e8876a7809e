"""Kernels that users name: how they are found, what is refused, and the inputs that they are given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from driftgate.accuracy.step_data import draw_inputs
from driftgate.accuracy.user_kernels import DecodeAdapter, load_kernel, pack_inputs
from driftgate.errors import InputError, UsageError
from driftgate.kernels.contract import HeadShape, Recurrence, ReplayOptions
from driftgate.kernels.gdn import reference
from driftgate.kernels.pool import StatePool

ROOT = Path(__file__).parents[1]
SHAPE = HeadShape(key_heads=2, value_heads=4, d_k=24, d_v=16)
STEP = "def step(inputs, state, slots, *, scale, qk_l2norm, pad_slot):\n    return inputs['v']\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """``module(text)`` writes a module into the current directory and returns its name."""
    monkeypatch.chdir(tmp_path)
    names: list[str] = []

    def write(text: str) -> str:
        names.append(f"mykernels_{tmp_path.name}_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(text)
        return names[-1]

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_a_module_of_the_current_directory_is_found_and_the_path_stays_as_it_was(module):
    before = list(sys.path)
    kernel = load_kernel(f"{module(STEP)}:step")
    assert sys.path == before
    assert (kernel.recurrence, kernel.formats, kernel.decode_only) == (Recurrence.GDN, ("fp32",), True)


def test_attributes_say_recurrence_formats_and_packing(module):
    name = module(STEP + "step.recurrence = 'kda'\nstep.formats = ['bf16', 'fp32']\nstep.packed = True\n")
    kernel = load_kernel(f"{name}:step")
    assert (kernel.recurrence, kernel.formats) == (Recurrence.KDA, ("bf16", "fp32"))
    assert isinstance(kernel.kernels, DecodeAdapter) and kernel.kernels.packed


def test_recurrence_is_what_the_flag_says_where_the_kernel_says_nothing(module):
    name = module(STEP)
    assert load_kernel(f"{name}:step", recurrence="mamba2").recurrence is Recurrence.MAMBA2


@pytest.mark.parametrize("text", ["driftgate.kernels.gdn:reference", "driftgate.kernels.mamba2:reference"])
def test_an_object_with_replay_is_taken_as_it_is(text):
    recurrence = text.split(".")[2].split(":")[0]
    kernel = load_kernel(text, recurrence=recurrence)
    assert not kernel.decode_only and kernel.formats == ()
    assert callable(kernel.kernels.replay_step)


def test_a_class_is_made_first(module):
    functions = "".join(
        f"    def {name}(self, *args, **kwargs):\n        pass\n"
        for name in ("decode_step", "replay_step", "flush_now")
    )
    kernel = load_kernel(f"{module('class Mine:' + chr(10) + functions)}:Mine")
    assert type(kernel.kernels).__name__ == "Mine"


REFUSED = {
    "no colon": (STEP, "{name}", UsageError, "package.module:function"),
    "no name": (STEP, "{name}:", UsageError, "package.module:function"),
    "a path": (STEP, "./{name}.py:step", UsageError, "package.module:function"),
    "no module": (STEP, "{name}x:step", InputError, "no module"),
    "no function": (STEP, "{name}:stop", InputError, "did you mean step"),
    "no functions": ("a = 1\n", "{name}:step", InputError, "it defines none"),
    "no callable": ("step = 3\n", "{name}:step", InputError, "expected a function or an object"),
    "too few arguments": ("def step(inputs, state):\n    pass\n", "{name}:step", InputError, "its signature is"),
    "another argument": (STEP.replace("pad_slot", "pad"), "{name}:step", InputError, "pad_slot"),
    "import raises": ("raise RuntimeError('no GPU here')\n", "{name}:step", InputError, "no GPU here"),
    "import exits": ("import sys; sys.exit(3)\n", "{name}:step", InputError, "SystemExit"),
    "import needs": ("import no_such_package\n", "{name}:step", InputError, "needs no_such_package"),
    "syntax": ("def step(:\n", "{name}:step", InputError, "SyntaxError"),
    "recurrence": (STEP + "step.recurrence = 'rwkv'\n", "{name}:step", InputError, "rwkv"),
    "formats": (STEP + "step.formats = ('fp8',)\n", "{name}:step", InputError, "which one tensor holds"),
    "formats that are none": (STEP + "step.formats = 3\n", "{name}:step", InputError, "formats is 3"),
    "packed Mamba-2": (STEP + "step.packed, step.recurrence = True, 'mamba2'\n", "{name}:step", InputError, "packed"),
    "object of other signatures": (
        "class Mine:\n    def decode_step(self, q): pass\n    replay_step = flush_now = decode_step\n",
        "{name}:Mine", InputError, "decode_step",
    ),
    "class with arguments": (
        "class Mine:\n    def __init__(self, a): pass\n"
        "    def decode_step(self, **k): pass\n    replay_step = flush_now = decode_step\n",
        "{name}:Mine", InputError, "Mine() raised",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_in_one_line(module, name):
    source, text, kind, says = REFUSED[name]
    before = list(sys.path)
    with pytest.raises(kind) as caught:
        load_kernel(text.format(name=module(source)))
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert sys.path == before


def test_another_recurrence_than_the_kernel_says_is_refused(module):
    name = module(STEP + "step.recurrence = 'gdn'\n")
    with pytest.raises(UsageError, match="says that it computes gdn"):
        load_kernel(f"{name}:step", recurrence="kda")


def test_the_root_of_the_repository_is_no_place_for_kernels(monkeypatch):
    """Its folders are named like packages that transformers looks for."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(InputError, match="own repository"):
        load_kernel("evals.scoring:score")


def test_a_module_here_takes_the_place_of_no_installed_one(tmp_path, monkeypatch):
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="unknown function"):
        load_kernel("colorsys:step")


def make_pool(data, *, length: int = 0) -> StatePool:
    pool = StatePool(data.shape, ReplayOptions(length=length), n_slots=data.n_slots, activation_dtype=data.activation)
    pool.write(0, torch.arange(data.n_slots), data.states)
    return pool


@pytest.mark.parametrize("strided", [False, True])
def test_packed_inputs_are_the_heads_of_q_then_k_then_v(strided):
    data = draw_inputs(SHAPE, torch.float32, n_rows=2, n_steps=1, seed=0)
    inputs = (data.stride() if strided else data).inputs(0)
    packed = pack_inputs(inputs)
    mixed = packed["mixed_qkv"]
    assert set(packed) == {"mixed_qkv", "g", "beta"}
    assert mixed.shape == (3, 2 * 2 * 24 + 4 * 16) and (mixed.stride(0) > mixed.shape[1]) is strided
    q, k, v = mixed.split([48, 48, 64], dim=1)
    for name, part in (("q", q), ("k", k), ("v", v)):
        torch.testing.assert_close(part.view(inputs[name].shape), inputs[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("packed", [False, True])
def test_a_function_takes_the_step_that_the_adapter_says(packed):
    """A function that calls the twin gives the twin's bits, whichever way its inputs come."""

    def step(inputs, state, slots, *, scale, qk_l2norm, pad_slot):
        if packed:
            q, k, v = inputs["mixed_qkv"].split([48, 48, 64], dim=1)
            inputs = {"q": q.view(3, 2, 24), "k": k.view(3, 2, 24), "v": v.view(3, 4, 16)} | {
                name: inputs[name] for name in ("g", "beta")
            }
        pool = make_pool(data)
        pool.checkpoint.codes[0] = state
        out = reference.decode_step(
            **inputs, pool=pool, layer=0, slots=slots, pad_slot=pad_slot, scale=scale, qk_l2norm=qk_l2norm
        )
        state.copy_(pool.checkpoint.codes[0])
        return out

    data = draw_inputs(SHAPE, torch.float32, n_rows=2, n_steps=1, seed=0)
    ours, theirs = make_pool(data), make_pool(data, length=1)
    adapter = DecodeAdapter(step, name="m:step", packed=packed)
    expected = reference.decode_step(**data.inputs(0), pool=ours, layer=0, slots=data.slots)
    got = adapter.replay_step(**data.inputs(0), pool=theirs, layer=0, slots=data.slots)
    assert torch.equal(expected, got)
    assert torch.equal(ours.checkpoint.codes, theirs.checkpoint.codes)
    assert not torch.equal(theirs.checkpoint.codes[0], data.states)


FAULTS = {
    "raises": (lambda inputs, *a, **k: 1 / 0, "raised ZeroDivisionError"),
    "returns nothing": (lambda inputs, *a, **k: None, "returned NoneType"),
    "returns two": (lambda inputs, state, *a, **k: (inputs["v"], state), "returned tuple"),
    "another shape": (lambda inputs, *a, **k: inputs["v"].flatten(1), "expected (3, 4, 16)"),
    "another type": (lambda inputs, *a, **k: inputs["v"].double(), "torch.float64"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_function_that_fails_or_returns_something_else_is_told_in_one_line(name):
    function, says = FAULTS[name]
    data = draw_inputs(SHAPE, torch.float32, n_rows=2, n_steps=1, seed=0)
    adapter = DecodeAdapter(function, name="m:step", packed=False)
    with pytest.raises(InputError) as caught:
        adapter.decode_step(**data.inputs(0), pool=make_pool(data), layer=0, slots=data.slots)
    assert says in str(caught.value) and "m:step" in str(caught.value) and "\n" not in str(caught.value)


def test_a_longer_buffer_is_refused():
    data = draw_inputs(SHAPE, torch.float32, n_rows=2, n_steps=1, seed=0)
    adapter = DecodeAdapter(lambda *a, **k: None, name="m:step", packed=False)
    with pytest.raises(UsageError, match="L = 1, got 2"):
        adapter.replay_step(**data.inputs(0), pool=make_pool(data, length=2), layer=0, slots=data.slots)
