"""Dumps: what a file must hold, what is refused and in which words, and recording."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from dump_cases import change_file, draw_dump, draw_layer
from safetensors import safe_open
from safetensors.torch import save_file

from driftgate.accuracy.dump import Dump, DumpRecorder, load_dump, record, save_dump
from driftgate.errors import EmptyRunError, InputError
from driftgate.kernels.contract import Backend, Recurrence, ReplayOptions
from driftgate.kernels.gdn import reference
from driftgate.kernels.mamba2 import reference as mamba2
from driftgate.kernels.pool import StatePool

ROOT = Path(__file__).resolve().parents[1]
RECURRENCES = [recurrence.value for recurrence in Recurrence]


def same(a: Dump, b: Dump) -> bool:
    x, y = a.tensors(), b.tensors()
    return list(x) == list(y) and all(torch.equal(x[n], y[n]) and x[n].dtype == y[n].dtype for n in x)


@pytest.mark.parametrize("activation", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_a_dump_comes_back_as_it_was(tmp_path, recurrence, activation):
    layers = tuple(
        replace(draw_layer(recurrence, layer=layer, heads=heads, activation=activation), scale=0.5, qk_l2norm=False)
        for layer, heads in ((1, (1, 2, 16, 8)), (4, (2, 4, 8, 16)))
    )
    dump = Dump(layers=layers, model="some model", recorder="tests", start=7)
    save_dump(tmp_path / "a.safetensors", dump)
    found = load_dump(tmp_path / "a.safetensors")
    assert same(dump, found)
    assert (found.model, found.recorder, found.start, found.digest) == ("some model", "tests", 7, dump.digest)
    assert [(x.layer, x.recurrence, x.scale, x.qk_l2norm, x.shape) for x in found.layers] == [
        (x.layer, x.recurrence, 0.5, False, x.shape) for x in layers
    ]


def test_equal_dumps_are_equal_files(tmp_path):
    for name in ("a", "b"):
        save_dump(tmp_path / name, draw_dump("mamba2"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    save_dump(tmp_path / "b", draw_dump("mamba2", seed=1))
    assert (tmp_path / "a").read_bytes() != (tmp_path / "b").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_hashes_are_those_that_the_schema_tells_writers_to_make(tmp_path):
    dump = draw_dump("gdn", activation=torch.bfloat16)
    save_dump(tmp_path / "a", dump)
    with safe_open(tmp_path / "a", framework="pt") as file:
        v = file.get_tensor("layers.0.v")
    digest = hashlib.sha256(v.contiguous().view(torch.uint8).numpy()).hexdigest()
    assert dump.hashes["layers.0.v"] == digest


def put(name, value):
    """A fault: one element of a tensor, hash and all."""

    def change(tensors, header):
        tensors[name].view(-1)[5] = value
        header["sha256"][name] = hashlib.sha256(tensors[name].numpy()).hexdigest()

    return change


def edit(change):
    return lambda tensors, header: change(tensors, header)


FAULTS = {
    "bytes moved": (
        edit(lambda t, h: t.update({"layers.0.v": t["layers.0.v"].roll(1, -1)})),
        "layers.0.v is not what was recorded",
    ),
    "no hash": (edit(lambda t, h: h["sha256"].pop("layers.0.k")), "layers.0.k is not what was recorded"),
    "missing tensor": (edit(lambda t, h: t.pop("layers.0.beta")), "layers.0.beta: missing"),
    "missing state": (
        edit(lambda t, h: (t.pop("layers.0.initial_state"), h["sha256"].pop("layers.0.initial_state"))),
        "layers.0.initial_state: missing",
    ),
    "never recorded": (
        edit(lambda t, h: (t.pop("layers.0.g"), h["sha256"].pop("layers.0.g"))),
        "layers.0.g: missing; a gdn layer needs it",
    ),
    "superfluous tensor": (edit(lambda t, h: t.update({"layers.0.w": t["layers.0.v"].clone()})), "layers.0.w: no such"),
    "strange layer": (
        edit(lambda t, h: t.update({"layers.9.q": t["layers.0.q"].clone()})),
        "layers.9.q: belongs to no",
    ),
    "wrong shape": (
        edit(lambda t, h: t.update({"layers.0.q": t["layers.0.q"][..., :8].contiguous()})),
        "layers.0.q: expected shape [2, 16, 1, 16], got [2, 16, 1, 8]",
    ),
    "steps before sequences": (
        edit(lambda t, h: t.update({"layers.0.g": t["layers.0.g"].transpose(0, 1).contiguous()})),
        "layers.0.g: expected shape [2, 16, 2], got [16, 2, 2]",
    ),
    "no heads": (
        edit(lambda t, h: t.update({"layers.0.v": t["layers.0.v"].flatten(2)})),
        "layers.0.v: expected [sequences, steps, heads, width]",
    ),
    "odd heads": (
        edit(lambda t, h: t.update({"layers.0.k": t["layers.0.k"].expand(-1, -1, 3, -1).contiguous()})),
        "layers.0: value_heads: expected a multiple",
    ),
    "wrong type": (
        edit(lambda t, h: t.update({"layers.0.beta": t["layers.0.beta"].bfloat16()})),
        "layers.0.beta: expected float32, got bfloat16",
    ),
    "wrong activation": (edit(lambda t, h: h.update(activation_dtype="bfloat16")), "activations are float32"),
    "unknown recurrence": (
        edit(lambda t, h: h["layers"][0].update(recurrence="gla")),
        "layers.0: unknown recurrence 'gla'; known: gdn, kda, mamba2",
    ),
    "another recurrence": (
        edit(lambda t, h: h["layers"][0].update(recurrence="mamba2")),
        "layers.0.beta: no such tensor",
    ),
    "NaN": (put("layers.0.k", torch.nan), "layers.0.k[0, 0, 0, 5] is nan"),
    "infinity": (put("layers.0.initial_state", torch.inf), "layers.0.initial_state[0, 0, 0, 5] is inf"),
    "decay, not its log": (put("layers.0.g", 0.99), "g is the log of a decay"),
    "future schema": (edit(lambda t, h: h.update(schema_version=2)), "schema 2, this driftgate reads 1"),
    "no schema": (edit(lambda t, h: h.pop("schema_version")), "name no schema_version"),
    "negative start": (edit(lambda t, h: h.update(start=-1)), "metadata start"),
    "unknown field": (edit(lambda t, h: h.update(tokens=3)), "metadata tokens"),
    "layer without tensors": (
        edit(lambda t, h: h["layers"].append({**h["layers"][0], "layer": 1})),
        "layers.1.initial",
    ),
    "layer twice": (edit(lambda t, h: h["layers"].append(h["layers"][0])), "layers.0.initial_state: missing"),
    "no layer": (edit(lambda t, h: (t.clear(), t.update(x=torch.ones(1)), h.update(layers=[]))), "x: belongs to no"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_refused_in_one_line(tmp_path, fault):
    change, message = FAULTS[fault]
    path = tmp_path / "a.safetensors"
    save_dump(path, draw_dump("gdn"))
    change_file(path, change)
    with pytest.raises(InputError) as caught:
        load_dump(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


MAMBA2_FAULTS = {"dt before softplus": ("dt", -0.5, "dt is 0 or more"), "A_log": ("A", 1.0, r"A is -exp\(A_log\)")}


@pytest.mark.parametrize("fault", MAMBA2_FAULTS)
def test_mamba2_gates_must_be_those_of_the_kernel(fault):
    name, value, message = MAMBA2_FAULTS[fault]
    layer = draw_layer("mamba2")
    layer.tensors()[name].view(-1)[1] = value
    with pytest.raises(ValueError, match=rf"layers\.0\.{name}\[.*\] is {value}; {message}"):
        replace(layer)


def test_what_is_no_dump_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    for content, message in ((b"", "not a readable"), (b"\xff" * 64, "not a readable")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            load_dump(path)
    save_file({"x": torch.ones(3)}, path)
    with pytest.raises(InputError, match="no dump, its metadata lack driftgate_dump"):
        load_dump(path)
    with pytest.raises(InputError, match="no such file"):
        load_dump(tmp_path)
    save_dump(path, draw_dump("gdn"))
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(InputError, match="not a readable"):
        load_dump(path)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot write .*missing"):
        save_dump(tmp_path / "missing" / "a", draw_dump("gdn"))


def test_layers_must_belong_together():
    layers = draw_layer("gdn"), draw_layer("gdn", layer=1, n_steps=8)
    with pytest.raises(ValueError, match=r"layers\.1: expected n_steps 16 as in the first layer, got 8"):
        Dump(layers=layers, model="", recorder="")
    with pytest.raises(ValueError, match="rising decoder-layer indices"):
        Dump(layers=(layers[0], layers[0]), model="", recorder="")
    with pytest.raises(EmptyRunError, match="no steps"):
        draw_dump("gdn", n_steps=0)


def test_a_recorded_model_replays_to_the_outputs_that_it_had(tiny_model):
    """Recorded inputs and states through the baseline kernel give the bits of a run of the model."""
    from driftgate.accuracy.adapters.wrapping import wrap

    tokens = np.random.default_rng(0).integers(3, 96, (2, 12))
    dump = record(tiny_model, tokens, steps=8, prefill=3, name="tiny")
    assert [x.layer for x in dump.layers] == [0, 2]
    assert (dump.n_sequences, dump.n_steps, dump.start, dump.model) == (2, 8, 3, "tiny")
    seen: list[tuple[int, torch.Tensor]] = []
    with wrap(tiny_model, ["baseline"], n_sequences=2) as wrapped:
        wrapped.observers.append(lambda layer, _inputs, out: seen.append((layer, out[:2].clone())))
        wrapped.prefill(torch.from_numpy(tokens[:, :3]))
        for position in range(3, 11):
            wrapped.step(torch.from_numpy(tokens[:, position]))
    slots = torch.arange(2)
    for number, layer in enumerate(dump.layers):
        pool = StatePool(layer.shape, ReplayOptions(), n_slots=2, activation_dtype=layer.activation)
        pool.write(0, slots, layer.initial_state)
        outs = [out for n, out in seen if n == number]
        for t, expected in enumerate(outs):
            inputs = {name: x[:, t] for name, x in layer.streams.items()}
            assert torch.equal(reference.decode_step(**inputs, pool=pool, layer=0, slots=slots), expected)
        assert len(outs) == 8


def test_recording_nothing_is_refused(tiny_model):
    tokens = np.ones((1, 4), dtype=np.int64)
    with pytest.raises(EmptyRunError, match="no steps"):
        record(tiny_model, tokens, steps=0)
    with pytest.raises(ValueError, match=r"expected 1 \+ 4 tokens or more, got 4"):
        record(tiny_model, tokens, steps=4)
    with pytest.raises(EmptyRunError, match="no decode step was recorded"):
        DumpRecorder(steps=4, model="", recorder="").dump()


@pytest.fixture(scope="module")
def collect() -> ModuleType:
    path = ROOT / "examples" / "record" / "collect.py"
    spec = importlib.util.spec_from_file_location("collect", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Engine(ModuleType):
    """Kernels with the signatures that engines have, on a pool whose slot 0 is padding; outputs are kept."""

    def __init__(self, states: torch.Tensor, recurrence: Recurrence) -> None:
        super().__init__("engine")
        self.states, self.recurrence, self.outs = states, recurrence, []

    def packed_decode(
        self,
        mixed_qkv,
        a,
        b,
        A_log,
        dt_bias,
        scale,
        initial_state,
        out,
        ssm_state_indices,
        use_qk_l2norm_in_kernel=False,
    ):
        heads, d_v, d_k = initial_state.shape[1:]
        live = ssm_state_indices > 0
        keys = (mixed_qkv.shape[1] - heads * d_v) // 2
        q, k, v = mixed_qkv[live].split([keys, keys, heads * d_v], dim=1)
        g = -A_log.exp() * torch.nn.functional.softplus(a[live] + dt_bias)
        pool = StatePool(self.shape(heads, d_v, d_k, keys // d_k), ReplayOptions(), n_slots=int(live.sum()))
        slots = torch.arange(pool.n_slots)
        pool.write(0, slots, initial_state[ssm_state_indices[live]])
        self.outs.append(
            reference.decode_step(
                q.unflatten(1, (-1, d_k)), k.unflatten(1, (-1, d_k)), v.unflatten(1, (-1, d_v)), g, b[live].sigmoid(),
                pool=pool, layer=0, slots=slots, scale=scale, qk_l2norm=use_qk_l2norm_in_kernel,
            )
        )  # fmt: skip
        initial_state[ssm_state_indices[live]] = pool.checkpoint.read(0, slots)

    def state_update(
        self, state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None, out=None
    ):
        heads, d_v, d_k = state.shape[1:]
        rates = torch.nn.functional.softplus(dt[..., 0] + dt_bias[:, 0]) if dt_softplus else dt[..., 0]
        pool = StatePool(
            self.shape(heads, d_v, d_k, B.shape[1]), ReplayOptions(), n_slots=len(x), recurrence=Recurrence.MAMBA2
        )
        slots = torch.arange(len(x))
        pool.write(0, slots, state[state_batch_indices])
        self.outs.append(
            mamba2.decode_step(x, B, C, rates, A=A[:, 0, 0], D=D[:, 0], z=z, pool=pool, layer=0, slots=slots)
        )
        state[state_batch_indices] = pool.checkpoint.read(0, slots)

    @staticmethod
    def shape(value_heads, d_v, d_k, key_heads):
        from driftgate.kernels.contract import HeadShape

        return HeadShape(key_heads=key_heads, value_heads=value_heads, d_k=d_k, d_v=d_v)


def test_what_engines_hand_over_is_read_as_their_kernels_do(collect, tmp_path):
    """Two layers of packed Gated DeltaNet with a padded row; the batch is in another order at the last step."""
    from driftgate.accuracy.replay_track import Steps, Track

    random = torch.Generator().manual_seed(0)
    pools = torch.randn(2, 4, 2, 8, 16, generator=random)
    engine = Engine(pools, Recurrence.GDN)
    rates, bias = torch.randn(2, 2, generator=random), torch.randn(2, generator=random)
    recorder = collect.Collector(tmp_path / "a.safetensors", steps=3, model="m", engine="fake", layers=[1, 5], start=9)
    collect.watch(engine, "packed_decode", recorder.take_gdn)
    orders = [[3, 0, 1], [3, 0, 1], [1, 0, 3], [3, 0, 1]]
    for slots in orders:
        for layer in range(2):
            packed, a, b = (torch.randn(3, n, generator=random) for n in (2 * 16 + 2 * 8, 2, 2))
            engine.packed_decode(
                packed, a, b, A_log=rates[layer], dt_bias=bias, scale=0.3, initial_state=pools[layer], out=None,
                ssm_state_indices=torch.tensor(slots, dtype=torch.int32), use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
    dump = load_dump(tmp_path / "a.safetensors")
    assert ([x.layer for x in dump.layers], dump.n_steps, dump.start) == ([1, 5], 3, 9)
    assert dump.recorder == "examples/record, fake"
    for number, layer in enumerate(dump.layers):
        steps = Steps(layer, n_steps=3, start=9, backend=Backend.TORCH, device="cpu", seed=0)
        track = Track(steps, ReplayOptions())
        for t in range(3):
            expected = engine.outs[2 * t + number]
            got = track.step(t)
            assert torch.equal(got if orders[t][0] == 3 else got.flip(0), expected)


def test_mamba2_of_engines_is_read_as_their_kernels_do(collect, tmp_path):
    from driftgate.accuracy.replay_track import Steps, Track

    random = torch.Generator().manual_seed(0)
    pool = torch.randn(3, 2, 8, 16, generator=random)
    engine = Engine(pool, Recurrence.MAMBA2)
    A, D, bias = -torch.rand(2, generator=random), torch.randn(2, generator=random), torch.randn(2, generator=random)
    recorder = collect.Collector(tmp_path / "a.safetensors", steps=2, model="m", engine="fake")
    collect.watch(engine, "state_update", recorder.take_mamba2)
    for _ in range(3):
        x, z = torch.randn(2, 2, 2, 8, generator=random)
        B, C = torch.randn(2, 2, 1, 16, generator=random)
        dt = torch.randn(2, 2, generator=random)[..., None].expand(-1, -1, 8)
        wide = {"A": A[:, None, None].expand(-1, 8, 16), "D": D[:, None].expand(-1, 8)}
        engine.state_update(
            pool, x, dt, B=B, C=C, **wide, z=z, dt_bias=bias[:, None].expand(-1, 8), dt_softplus=True,
            state_batch_indices=torch.tensor([2, 1]),
        )  # fmt: skip
    (layer,) = load_dump(tmp_path / "a.safetensors").layers
    track = Track(Steps(layer, n_steps=2, start=0, backend=Backend.TORCH, device="cpu", seed=0), ReplayOptions())
    assert [torch.equal(track.step(t), engine.outs[t]) for t in range(2)] == [True, True]


def test_a_request_that_ends_too_early_is_said(collect, tmp_path):
    recorder = collect.Collector(tmp_path / "a", steps=4, model="m", engine="fake")
    call = {
        "mixed_qkv": torch.ones(2, 48), "a": torch.ones(2, 2), "b": torch.ones(2, 2), "A_log": torch.ones(2),
        "dt_bias": torch.ones(2), "scale": 1.0, "initial_state": torch.ones(4, 2, 8, 16),
        "ssm_state_indices": torch.tensor([1, 2]), "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    recorder.take_gdn(call)
    with pytest.raises(RuntimeError, match="a followed request ended"):
        recorder.take_gdn(
            {name: x[:1] if name in ("mixed_qkv", "a", "b", "ssm_state_indices") else x for name, x in call.items()}
        )
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["vllm_worker", "sglang_worker"])
def test_recorders_say_that_they_were_not_run(name):
    text = (ROOT / "examples" / "record" / f"{name}.py").read_text("utf-8")
    assert "NOT RUN HERE" in text.splitlines()[0]
    compile(text, name, "exec")
    assert sys.modules.get("vllm") is None
