"""Loading a checkpoint folder: what people have loads in silence, every fault is one line that names the thing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from family_cases import FAMILIES, make_family_model
from safetensors.torch import load_file, save_file

from driftgate.accuracy.models import check_model, hash_file, load_model, resolve_device
from driftgate.errors import InputError, UsageError

LINEAR, FULL = "linear_attention", "full_attention"
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tiny_checkpoint, tmp_path) -> Path:
    """A copy of the checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def load(folder: Path, **options: str):
    return load_model(folder, name="tiny", device="cpu", **options)


def refusal(folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """The one line with which a checkpoint is refused; nothing else may be printed."""
    capfd.readouterr()
    with pytest.raises(InputError) as caught:
        load(folder)
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert message.splitlines() == [message]
    assert len(message) < 600
    assert capfd.readouterr() == ("", "")
    return message


def change_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def test_a_checkpoint_loads_with_its_own_numbers(tiny_checkpoint, tiny_model):
    loaded = load(tiny_checkpoint)
    assert (loaded.name, loaded.family, loaded.vocab_size) == ("tiny", "qwen3_5", 96)
    assert loaded.tokenizer is None
    assert not loaded.model.training
    stored, wanted = loaded.model.state_dict(), tiny_model.state_dict()
    assert stored.keys() == wanted.keys()
    assert all(torch.equal(stored[k], wanted[k]) for k in wanted)
    assert loaded.n_parameters == sum(p.numel() for p in tiny_model.parameters())
    assert not any(p.requires_grad for p in loaded.model.parameters())


def test_attention_is_eager(tiny_checkpoint):
    assert load(tiny_checkpoint).model.config._attn_implementation == "eager"


def test_loading_prints_nothing(tiny_checkpoint, capfd):
    capfd.readouterr()
    load(tiny_checkpoint)
    assert capfd.readouterr() == ("", "")


def test_loading_leaves_the_settings_of_transformers(tiny_checkpoint):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        logging.set_verbosity_info()
        logging.disable_progress_bar()
        load(tiny_checkpoint)
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.INFO, False)
    finally:
        logging.set_verbosity(before[0])
        if before[1]:
            logging.enable_progress_bar()


@pytest.mark.parametrize(
    ("text", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_weights_take_the_dtype_that_is_asked_for(tiny_checkpoint, text, dtype):
    model = load(tiny_checkpoint, dtype=text).model
    assert model.dtype == dtype
    assert model.get_input_embeddings().weight.dtype == dtype


def test_without_a_dtype_weights_keep_the_stored_one(make_model, tmp_path):
    make_model().to(torch.bfloat16).save_pretrained(tmp_path)
    assert load(tmp_path).model.dtype == torch.bfloat16


def test_hashes_are_those_of_the_files(tiny_checkpoint):
    hashes = load(tiny_checkpoint).hashes
    assert sorted(hashes) == ["config.json", "generation_config.json", WEIGHTS]
    assert hashes[WEIGHTS] == hash_file(tiny_checkpoint / WEIGHTS)


def test_shards_load(make_model, tmp_path):
    make_model().save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert load(tmp_path).vocab_size == 96


def test_a_multimodal_checkpoint_loads_as_its_text_part(tiny_model, tmp_path):
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    sizes = ("hidden_size", "intermediate_size", "num_position_embeddings", "out_hidden_size")
    vision = dict.fromkeys(sizes, 16) | {"depth": 1, "num_heads": 2}
    config = Qwen3_5Config(text_config=tiny_model.config.to_dict(), vision_config=vision)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert any("visual" in key for key in load_file(tmp_path / WEIGHTS))
    loaded = load(tmp_path)
    assert (type(loaded.model), loaded.family) == (type(tiny_model), "qwen3_5")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_model_of_every_family_loads_with_its_own_weights(name, tmp_path):
    model = make_family_model(name)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.family == name.split()[0]
    stored, wanted = loaded.model.state_dict(), model.state_dict()
    text = name.endswith("multimodal")  # a class of the text alone: same weights, other names
    renamed = {key.replace("language_model.", "") if text else key: x for key, x in wanted.items()}
    assert all(torch.equal(x, renamed[key]) for key, x in stored.items())


def test_a_padded_embedding_is_cut_to_the_tokenizer(folder):
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(90)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    loaded = load(folder)
    assert (loaded.vocab_size, len(loaded.tokenizer)) == (90, 90)


def test_a_quantization_config_of_null_is_none(folder):
    change_config(folder, quantization_config=None)
    assert load(folder).family == "qwen3_5"


def test_a_checkpoint_without_recurrent_layers_is_refused(make_model, tmp_path, capfd):
    make_model(layer_types=[FULL] * 3).save_pretrained(tmp_path)
    assert f"{tmp_path}: the checkpoint has no recurrent layer (no linear_attention)" in refusal(tmp_path, capfd)


def test_another_architecture_lists_those_that_are_covered(tmp_path, capfd):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert "'llama'" in (message := refusal(tmp_path, capfd))
    assert "covered: bamba, falcon_h1, " in message


def test_an_architecture_that_transformers_does_not_know_is_named(folder, capfd):
    change_config(folder, model_type="qwen99")
    assert "model type `qwen99`" in refusal(folder, capfd)


@pytest.mark.parametrize("left", [0, 4, 2000, -1])
def test_weights_that_are_cut_are_named(folder, capfd, left):
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:left])
    assert f"{path} is cut short or damaged" in refusal(folder, capfd)


def test_weights_that_are_missing_are_named(folder, capfd):
    (folder / WEIGHTS).unlink()
    assert f"{folder / WEIGHTS} is missing" in refusal(folder, capfd)


def test_a_shard_that_is_missing_is_named(make_model, tmp_path, capfd):
    make_model().save_pretrained(tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[-1]
    shard.unlink()
    assert f"{shard} is missing" in refusal(tmp_path, capfd)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": [1]}', "{}"])
def test_an_index_that_is_none_is_named(folder, capfd, text):
    path = folder / f"{WEIGHTS}.index.json"
    path.write_text(text)
    assert f"{path} is no weight index" in refusal(folder, capfd)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(folder, capfd, value):
    change_weights(folder, lambda w: w["model.norm.weight"].__setitem__(3, value))
    assert f"{folder}: weight model.norm.weight holds NaN or infinity" in refusal(folder, capfd)


def test_another_hidden_size_names_a_weight_and_both_shapes(folder, capfd):
    change_config(folder, hidden_size=64)
    message = refusal(folder, capfd)
    assert str(folder) in message
    assert "lm_head.weight is [96, 32], config.json asks for [96, 64]" in message


def test_a_layer_that_the_files_lack_is_named(folder, capfd):
    change_config(folder, num_hidden_layers=4, layer_types=[LINEAR, FULL, LINEAR, LINEAR])
    assert "config.json asks for model.layers.3." in refusal(folder, capfd)


def test_a_layer_that_the_config_leaves_out_is_named(folder, capfd):
    change_config(folder, num_hidden_layers=2, layer_types=[LINEAR, FULL])
    assert "the weight files hold model.layers.2." in refusal(folder, capfd)


def test_a_weight_that_the_files_lack_is_named(folder, capfd):
    change_weights(folder, lambda w: w.__delitem__("model.layers.0.linear_attn.A_log"))
    assert "config.json asks for model.layers.0.linear_attn.A_log" in refusal(folder, capfd)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": "wide"}, "'hidden_size' expected int"),
        ({"num_hidden_layers": 5}, "num_hidden_layers"),
        ({"layer_types": ["mystery"] * 3}, "mystery"),
    ],
)
def test_a_config_that_is_wrong_in_itself_is_named(folder, capfd, fields, named):
    change_config(folder, **fields)
    message = refusal(folder, capfd)
    assert message.startswith(f"{folder}/config.json: ")
    assert named in message


@pytest.mark.parametrize("fields", [{"pad_token_id": 96}, {"pad_token_id": 500}, {"vocab_size": 8, "pad_token_id": 9}])
def test_a_padding_token_outside_the_vocabulary_is_named(folder, capfd, fields):
    change_config(folder, **fields)
    message = refusal(folder, capfd)
    assert f"{folder}/config.json: pad_token_id {fields['pad_token_id']} is outside the vocabulary" in message


def test_a_config_that_the_constructors_cannot_use_is_named(folder, capfd):
    change_config(folder, num_key_value_heads=0)
    assert f"{folder}: weights do not fit config.json: " in refusal(folder, capfd)


def test_a_folder_is_checked_without_its_weights(folder, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    assert check_model(folder).vocab_size == 96


def test_a_folder_without_config_is_named(folder, capfd):
    (folder / "config.json").unlink()
    assert f"{folder} has no config.json" in refusal(folder, capfd)


@pytest.mark.parametrize("data", [b"", b'{"model_type": ', b"\xff\xfe{}"])
def test_a_config_that_is_no_json_is_named(folder, capfd, data):
    (folder / "config.json").write_bytes(data)
    assert f"{folder / 'config.json'} is no readable JSON" in refusal(folder, capfd)


@pytest.mark.parametrize("text", ["[]", "{}", '"qwen3_5_text"'])
def test_a_config_without_model_type_is_named(folder, capfd, text):
    (folder / "config.json").write_text(text)
    assert f"{folder / 'config.json'} names no model_type" in refusal(folder, capfd)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_tokenizer_is_named(folder, capfd, name):
    (folder / name).write_text("{")
    assert f"{folder}: the tokenizer is damaged" in refusal(folder, capfd)


def test_modelopt_is_refused_in_config_json(folder, capfd):
    change_config(folder, quantization_config={"quant_method": "modelopt"})
    assert f"{folder}: quant_method modelopt would be loaded without its scales" in refusal(folder, capfd)


def test_modelopt_is_refused_by_its_own_file(folder, capfd):
    (folder / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}}')
    assert "modelopt would be loaded without its scales" in refusal(folder, capfd)


def test_devices_are_resolved():
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["gpu", "", "mps", "meta", "cuda:x"])
def test_a_device_that_is_none_of_ours_is_a_usage_error(name):
    with pytest.raises(UsageError, match="use auto, cpu, cuda or cuda:N"):
        resolve_device(name)


def test_a_gpu_that_is_not_there_is_an_input_error():
    with pytest.raises(InputError, match="device cuda:63 is not on this machine"):
        resolve_device("cuda:63")


@pytest.mark.parametrize("known", [True, False])
def test_code_that_comes_with_a_checkpoint_is_never_run_nor_asked_about(folder, capfd, monkeypatch, known):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    (folder / "own.py").write_text("raise SystemExit('ran')")
    change_config(folder, auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    if known:
        assert load(folder).family == "qwen3_5"
        return
    change_config(folder, model_type="their_own")
    assert f"{folder}/config.json: " in refusal(folder, capfd)
