"""Checkpoints as people have them: small weights in FP32, shards, sizes said before loading, stored FP8 and NVFP4."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_model
from family_cases import FAMILIES, make_family_model
from safetensors.torch import load_file, save_file
from weight_cases import SCHEMES, store_quantized

from driftgate import memory
from driftgate.accuracy import weight_files
from driftgate.accuracy.adapters import wrap
from driftgate.accuracy.models import check_model, load_model, text_config, weights_memory
from driftgate.accuracy.weight_files import loaded_bytes, main_dtype, read_headers
from driftgate.errors import InputError
from driftgate.evals.suite import load_suite

SMALL = ("A_log", "dt_bias", "D")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def is_small(name: str) -> bool:
    return name.rpartition(".")[2] in SMALL


def load(folder: Path, **options: str | None):
    return load_model(folder, name="tiny", device="cpu", **options)


def save_mixed(name: str, folder: Path, *, said: str | None = "bfloat16", **options: object) -> dict[str, torch.Tensor]:
    """A BF16 checkpoint with its small weights in FP32, and those weights; ``said`` is the dtype of its config."""
    model = make_family_model(name)
    small = {key: weight.clone() for key, weight in model.named_parameters() if is_small(key)}
    assert small and any(not torch.equal(weight.bfloat16().float(), weight) for weight in small.values())
    state = {key: weight if is_small(key) else weight.bfloat16() for key, weight in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state, **options)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for fields in (config, config.get("text_config", {})):
        fields.pop("dtype", None)
        if said is not None:
            fields["dtype"] = said
    path.write_text(json.dumps(config))
    return small


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert message.splitlines() == [message]
    return message


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_decay_and_skip_keep_their_precision_in_a_bf16_checkpoint(name, dtype, tmp_path):
    small = save_mixed(name, tmp_path)
    model = load(tmp_path, dtype=dtype).model
    found = {key: weight for key, weight in model.named_parameters() if is_small(key)}
    stored = {key.replace("language_model.", ""): weight for key, weight in small.items()}
    assert len(found) == len(small)
    for key, weight in found.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, stored[key.replace("language_model.", "")]), key
    assert model.dtype == model.get_output_embeddings().weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5", "kimi_linear"])
def test_a_bf16_model_with_small_weights_in_fp32_decodes(name, tmp_path):
    save_mixed(name, tmp_path)
    tokens = torch.arange(1, 7).view(2, 3)
    with wrap(load(tmp_path).model, ["baseline", "fp32@2"], n_sequences=2, backend="torch") as model:
        model.prefill(tokens[:, :1])
        steps = [model.step(tokens[:, i]) for i in (1, 2)]
    assert all(bool(torch.isfinite(logits).all()) for logits in steps)
    assert torch.allclose(steps[1][0].float(), steps[1][1].float(), atol=0.1)


def test_the_class_of_the_model_is_left_as_it_was(tmp_path):
    from transformers import KimiLinearForCausalLM, Qwen3_5ForCausalLM

    kinds = {"qwen3_5": Qwen3_5ForCausalLM, "kimi_linear": KimiLinearForCausalLM}
    field = "_keep_in_fp32_modules_strict"
    before = {name: (field in vars(kind), getattr(kind, field)) for name, kind in kinds.items()}
    for name in kinds:
        save_mixed(name, tmp_path / name)
        load(tmp_path / name)
    config = json.loads((tmp_path / "qwen3_5/config.json").read_text())
    (tmp_path / "qwen3_5/config.json").write_text(json.dumps(config | {"num_key_value_heads": 0}))
    refused(lambda: load(tmp_path / "qwen3_5"))
    assert {name: (field in vars(kind), getattr(kind, field)) for name, kind in kinds.items()} == before


def test_without_a_dtype_in_the_config_most_weights_decide(tmp_path):
    save_mixed("mamba2", tmp_path, said=None)
    assert {weight.dtype for weight in read_headers(tmp_path).values()} == {"F32", "BF16"}
    assert load(tmp_path).model.dtype == torch.bfloat16


def test_shards_of_a_mixed_checkpoint_load(tmp_path):
    small = save_mixed("qwen3_5", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    weights = dict(load(tmp_path).model.named_parameters())
    assert all(torch.equal(weights[key], weight) for key, weight in small.items())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen3_5 multimodal"])  # its vision part stays
def test_the_size_that_is_said_is_the_size_that_is_taken(name, dtype, tmp_path):
    save_mixed(name, tmp_path, max_shard_size="40KB")
    said = weights_memory(tmp_path, check_model(tmp_path), dtype)
    taken = sum(weight.nbytes for weight in load(tmp_path, dtype=dtype).model.parameters())
    assert said == pytest.approx(taken, rel=0.1)
    if dtype == "fp32":
        assert said >= taken


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    save_mixed("qwen3_5", tmp_path)
    parsed = check_model(tmp_path)
    half, full = (weights_memory(tmp_path, parsed, dtype) for dtype in ("bf16", "fp32"))
    assert full == 2 * half
    monkeypatch.setattr(weight_files, "device_memory", lambda device: full - 1)
    assert load(tmp_path).vocab_size == 96
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    message = refused(lambda: load(tmp_path, dtype="fp32"))
    assert message.startswith(f"{tmp_path}: its weights need {memory.format_bytes(full)} of memory as float32, ")
    assert "are free on cpu; give --dtype bf16, another --device" in message
    monkeypatch.setattr(weight_files, "device_memory", lambda device: half - 1)
    assert "as bfloat16" in (message := refused(lambda: load(tmp_path)))
    assert "--dtype" not in message


@pytest.mark.parametrize("error", [MemoryError("of 8 TB"), torch.OutOfMemoryError("CUDA")])
def test_memory_that_runs_out_all_the_same_is_named(tiny_checkpoint, monkeypatch, error):
    from transformers import AutoModelForCausalLM

    def load_too_much(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load_too_much)
    message = refused(lambda: load(tiny_checkpoint))
    assert message.startswith(f"{tiny_checkpoint}: the memory of cpu ran out while its weights were loaded")


def test_a_machine_that_does_not_say_what_is_free_loads(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(weight_files, "device_memory", lambda device: None)
    assert load(tiny_checkpoint).vocab_size == 96


def test_packed_codes_count_as_the_weights_that_they_become():
    def stored(dtype, *shape):
        return weight_files.StoredWeight(dtype=dtype, shape=shape, shard=WEIGHTS)

    weights = {
        "a.weight_packed": stored("U8", 4, 8), "b.weight_packed": stored("I32", 4, 2), "c.weight": stored("F8_E4M3", 3),
        "d.index": stored("I64", 5), "e.weight": stored("F32", 7),
    }  # fmt: skip
    assert loaded_bytes(weights, torch.bfloat16) == 2 * 64 + 2 * 64 + 2 * 3 + 8 * 5 + 2 * 7
    assert main_dtype(weights) == torch.float32


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_of_every_family_is_counted(name):
    if name == "glm5_next" and version("transformers") < "5.24":
        pytest.skip("that transformers keeps keys and values of it in place of the latent vector")
    model = make_family_model(name)
    out = model(input_ids=torch.ones(1, 8, dtype=torch.long), use_cache=True)
    cache = next(out[key] for key in ("cache", "past_key_values", "cache_params") if out.get(key) is not None)
    kept = [getattr(layer, part, None) for layer in cache.layers for part in ("keys", "values")]
    real = sum(tensor.numel() // 8 for tensor in kept if tensor is not None)
    config = text_config(model.config)
    suite = load_suite("quick").changed(steps=1000, prefill=24, sequences=1)
    rows = len(suite.plans) + 3
    grown = memory.needed_memory(suite, config, dtype="fp32") - memory.needed_memory(suite, config, device="cuda")
    assert grown == pytest.approx(2 * 4 * real * 1024 * rows, rel=0.5 if real else 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_states_of_every_family_are_counted(name):
    model = make_family_model(name)
    suite = load_suite("quick").changed(sequences=2)
    config = text_config(model.config)
    held = memory.held_memory(suite, config, weights=0)
    assert memory.held_memory(suite, config, weights=1000) == held + 1000
    with wrap(model, ["baseline"], n_sequences=2, backend="torch") as wrapped:
        shape = wrapped.shape
        one = 2 * 4 * shape.value_heads * shape.d_v * shape.d_k * wrapped.n_layers
    assert held == 2 * one * (len(suite.plans) + 3)


def test_weights_beside_the_steps_are_refused(tiny_model, monkeypatch):
    suite = load_suite("quick")
    needed = memory.needed_memory(suite, tiny_model.config)
    monkeypatch.setattr(memory, "available_memory", lambda: needed + 999)
    assert memory.check_memory(suite, tiny_model.config, held=999) == needed
    message = refused(lambda: memory.check_memory(suite, tiny_model.config, held=1000))
    assert "of memory beside 1 kB of weights and states" in message


def test_a_gpu_is_asked_for_its_own_memory(tiny_model, monkeypatch):
    suite, config = load_suite("quick"), tiny_model.config
    rows, length = 16 * (len(suite.plans) + 3), suite.steps + suite.prefill
    cache = 2 * 16 * 4 * rows * length
    monkeypatch.setattr(memory, "available_memory", lambda: 2**50)
    monkeypatch.setattr(memory, "device_memory", lambda device: {"cuda:1": cache + 1000}[device])
    options = {"device": "cuda:1", "dtype": "fp32"}
    assert memory.check_memory(suite, config, held=1000, **options) < 2**50
    message = refused(lambda: memory.check_memory(suite, config, held=1001, **options))
    assert "are free on cuda:1; give fewer --steps" in message


def decode(model: torch.nn.Module, *, backend: str) -> list[torch.Tensor]:
    """Logits of two steps of a baseline and a split plan."""
    tokens = torch.arange(1, 7).view(2, 3).to(model.device)
    with wrap(model, ["baseline", "nvfp4/fp32@2"], n_sequences=2, backend=backend) as wrapped:
        wrapped.prefill(tokens[:, :1])
        return [wrapped.step(tokens[:, i]) for i in (1, 2)]


def test_layers_that_accelerate_keeps_aside_decode_as_they_would(tmp_path):
    from accelerate import cpu_offload

    save_mixed("qwen3_5", tmp_path)
    model = load(tmp_path).model
    before = decode(model, backend="torch")
    cpu_offload(model.model.layers[2], execution_device=torch.device("cpu"))
    assert all(weight.is_meta for weight in model.model.layers[2].parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, decode(model, backend="torch"), strict=True))


@pytest.mark.gpu
def test_a_model_that_does_not_fit_on_the_gpu_lies_in_this_machine_too(tmp_path, monkeypatch):
    from driftgate.accuracy import models

    save_mixed("qwen3_5", tmp_path)
    size = weights_memory(tmp_path, check_model(tmp_path))
    before = decode(load_model(tmp_path, name="tiny", device="cuda").model, backend="triton")
    monkeypatch.setattr(models, "spread_limits", lambda: {0: size // 2, "cpu": 2**30})
    model = load_model(tmp_path, name="tiny", device="cuda+cpu").model
    assert any(weight.is_meta for weight in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, decode(model, backend="triton"), strict=True))


def test_layers_on_disk_are_refused(tmp_path, monkeypatch):
    from driftgate.accuracy import models

    save_mixed("qwen3_5", tmp_path / "model")
    names = ["embed_tokens", "norm", "rotary_emb", "layers.0", "layers.1", "layers.2"]
    places = {f"model.{name}": "disk" if name.endswith("2") else "cpu" for name in names} | {"lm_head": "cpu"}
    options = {"device_map": places, "offload_folder": str(tmp_path / "aside")}
    monkeypatch.setattr(models, "_placement", lambda device: options)
    assert "its layers do not fit into GPU and memory" in refused(lambda: load(tmp_path / "model"))


def test_all_gpus_and_this_machine_count_together(monkeypatch):
    from driftgate.accuracy import free_memory, models

    gpus = {"cuda:0": 100, "cuda:1": 50}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(free_memory, "available_memory", lambda: 7)
    known = free_memory.device_memory
    monkeypatch.setattr(free_memory, "device_memory", lambda device: gpus.get(device) or known(device))
    assert free_memory.device_memory("cuda+cpu") == 127
    assert free_memory.device_memory("cpu") == 7
    assert models._placement("cuda+cpu") == {"device_map": "auto", "max_memory": {0: 80, 1: 40, "cpu": 7}}
    assert models._placement("cuda") == {"device_map": {"": "cuda:0"}}
    assert models._placement("cuda:1") == {"device_map": {"": "cuda:1"}}


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_too_small_names_the_way_to_spread(tmp_path, monkeypatch, device):
    save_mixed("qwen3_5", tmp_path)
    monkeypatch.setattr(weight_files, "device_memory", lambda device: 1000)
    assert "1 kB are free on cuda" in (message := refused(lambda: check_model(tmp_path, device=device)))
    assert "give --device cuda+cpu, another --device" in message
    assert "cuda+cpu, " not in refused(lambda: check_model(tmp_path, device="cuda+cpu"))


def test_an_index_that_does_not_belong_to_its_shards_is_named(make_model, tmp_path):
    make_model().save_pretrained(tmp_path, max_shard_size="40KB")
    index = json.loads((tmp_path / INDEX).read_text())
    names = sorted(index["weight_map"])
    other = next(n for n in names if index["weight_map"][n] != index["weight_map"][names[0]])
    index["weight_map"][names[0]] = index["weight_map"][other]
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert f"has no weight {names[0]}, which {INDEX} places there" in refused(lambda: check_model(tmp_path))


def test_a_checkpoint_without_safetensors_names_what_is_there(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "pytorch_model.bin")
    message = refused(lambda: check_model(tmp_path))
    assert (
        message
        == f"{tmp_path / WEIGHTS} is missing, only pytorch_model.bin is there; save the checkpoint as safetensors"
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_stored_codes_load_as_the_values_that_they_stand_for(scheme, tmp_path):
    if scheme != "fp8 in blocks":
        pytest.importorskip("compressed_tensors")
    values = store_quantized(make_tiny_model().bfloat16(), tmp_path, scheme)
    loaded = load(tmp_path)
    weights = loaded.model.state_dict()
    for name, value in values.items():
        assert torch.equal(weights[name], value.bfloat16()), name
        assert value.abs().max() > 0.1
    tokens = torch.arange(1, 7).view(2, 3)
    with wrap(loaded.model, ["baseline"], n_sequences=2, backend="torch") as model:
        model.prefill(tokens[:, :1])
        assert bool(torch.isfinite(model.step(tokens[:, 1])).all())
    full = sum(weight.nbytes for weight in loaded.model.parameters())
    assert math.isclose(weights_memory(tmp_path, check_model(tmp_path)), full, rel_tol=0.2)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_stored_codes_in_another_dtype_load_or_are_refused(scheme, dtype, tmp_path):
    if scheme != "fp8 in blocks":
        pytest.importorskip("compressed_tensors")
    store_quantized(make_tiny_model().bfloat16(), tmp_path, scheme)
    if scheme == "nvfp4" and version("transformers") < "5.24":
        assert "is dequantised to bfloat16 by the installed" in refused(lambda: load(tmp_path, dtype=dtype))
        return
    model = load(tmp_path, dtype=dtype).model
    assert bool(torch.isfinite(model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits).all())


def test_a_weight_that_came_out_in_another_dtype_is_named(tiny_checkpoint):
    from driftgate.accuracy.quantized_weights import check_dequantized

    model = load(tiny_checkpoint).model
    check_dequantized(tiny_checkpoint, model, torch.bfloat16)
    model.model.layers[1].mlp.up_proj.to(torch.bfloat16)
    message = refused(lambda: check_dequantized(tiny_checkpoint, model, torch.float16))
    assert "model.layers.1.mlp.up_proj.weight is dequantised to bfloat16 by the installed transformers" in message


def test_compressed_tensors_without_the_package_names_it(tmp_path, monkeypatch):
    from driftgate.accuracy import quantized_weights

    store_quantized(make_tiny_model().bfloat16(), tmp_path, "fp8")
    monkeypatch.setattr(quantized_weights, "find_spec", lambda name: None)
    message = refused(lambda: load(tmp_path))
    assert message.startswith(f"{tmp_path}: its weights need the package compressed-tensors; `pip install")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method gptq is not covered (compressed-tensors, fp8 are)"),
        ({"bits": 4}, "quant_method None is not covered"),
        ("fp8", "quantization_config is no mapping"),
    ],
)
def test_other_forms_of_weights_are_refused(fields, says, tiny_checkpoint, tmp_path):
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
    assert says in refused(lambda: check_model(tmp_path))


def test_a_weight_that_is_stored_in_another_shape_in_one_shard_is_named(make_model, tmp_path):
    make_model().save_pretrained(tmp_path, max_shard_size="40KB")
    place = json.loads((tmp_path / INDEX).read_text())["weight_map"]["model.norm.weight"]
    weights = load_file(tmp_path / place)
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, tmp_path / place, metadata={"format": "pt"})
    assert "model.norm.weight is [7], config.json asks for [32]" in refused(lambda: load(tmp_path))
