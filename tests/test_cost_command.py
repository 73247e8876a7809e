"""``driftgate cost``: shapes read from configs alone, one document for people and programs, one line for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from family_cases import FAMILIES, make_family_model

from driftgate import cli
from driftgate.accuracy.config_shapes import SHAPES, read_config, read_shapes
from driftgate.errors import InputError
from driftgate.kernels.contract import HeadShape, Recurrence

GDN: dict[str, Any] = {
    "model_type": "qwen3_5_text", "num_hidden_layers": 4, "full_attention_interval": 4, "hidden_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "dtype": "bfloat16",
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config.json of three Gated DeltaNet layers and one of attention."""
    return write(tmp_path / "config.json", GDN)


def write(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(json.dumps(config))
    return path


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run ``driftgate cost`` with these arguments: exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["driftgate", "cost", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_says_what_its_model_holds(name: str):
    """Against the mixers of the real class, built from that config."""
    from driftgate.accuracy.adapters import find_family

    model = make_family_model(name)
    found = read_shapes(json.loads(model.config.to_json_string()), source=name)
    family = find_family(model.config)
    mixers = family.find_mixers(model)
    assert found.recurrence is family.recurrence
    assert {found.heads} == {family.head_shape(mixer) for mixer in mixers}
    assert found.recurrent_layers == tuple(mixer.layer_idx for mixer in mixers)
    assert {found.conv_kernel} == {mixer.conv1d.weight.shape[-1] for mixer in mixers}
    text = getattr(model.config, "text_config", model.config)
    assert found.n_layers == text.num_hidden_layers
    assert found.activation_bytes == 4 or text.dtype is None


PUBLISHED = {  # of the default config: heads, recurrent and attention layers, cached elements of a token and layer
    "Qwen3NextConfig": (HeadShape(key_heads=16, value_heads=32, d_k=128, d_v=128), 36, 12, 2 * 2 * 256),
    "Qwen3_5Config": (HeadShape(key_heads=16, value_heads=32, d_k=128, d_v=128), 24, 8, 2 * 4 * 256),
    "Qwen3_5MoeConfig": (HeadShape(key_heads=16, value_heads=32, d_k=128, d_v=128), 30, 10, 2 * 2 * 256),
    "OlmoHybridConfig": (HeadShape(key_heads=30, value_heads=30, d_k=96, d_v=192), 24, 8, 2 * 30 * 128),
    "KimiLinearConfig": (HeadShape(key_heads=32, value_heads=32, d_k=128, d_v=128), 21, 6, 512 + 64),
    "Mamba2Config": (HeadShape(key_heads=8, value_heads=128, d_k=128, d_v=64), 64, 0, 0),
    "NemotronHConfig": (HeadShape(key_heads=8, value_heads=128, d_k=128, d_v=64), 1, 1, 2 * 8 * 128),
    "BambaConfig": (HeadShape(key_heads=1, value_heads=128, d_k=256, d_v=64), 32, 0, 2 * 8 * 128),
    "FalconH1Config": (HeadShape(key_heads=1, value_heads=128, d_k=256, d_v=8), 32, 32, 2 * 8 * 128),
    "GraniteMoeHybridConfig": (HeadShape(key_heads=1, value_heads=128, d_k=256, d_v=64), 32, 0, 2 * 32 * 128),
    "Zamba2Config": (HeadShape(key_heads=1, value_heads=8, d_k=64, d_v=640), 54, 9, 2 * 32 * 160),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_default_configs_of_transformers(name: str):
    import transformers

    config = json.loads(getattr(transformers, name)().to_json_string())
    found = read_shapes(config, source=name)
    counts = (len(found.recurrent_layers), len(found.attention_layers))
    assert (found.heads, *counts, found.kv_elements) == PUBLISHED[name]


MAMBA = {
    "mamba_num_heads": 4, "n_groups": 1, "ssm_state_size": 16, "expand": 2, "conv_kernel": 4, "num_attention_heads": 2,
}  # fmt: skip


def test_older_words_of_stored_configs():
    nemotron = MAMBA | {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*E", "hidden_size": 32}
    found = read_shapes(nemotron, source="x")
    assert (found.recurrent_layers, found.attention_layers, found.heads.d_v) == ((0, 2), (3,), 16)
    own = {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 3}
    kimi = {"model_type": "kimi_linear", "num_hidden_layers": 4, "linear_attn_config": own, "kv_lora_rank": 16}
    found = read_shapes(kimi | {"head_dim": 72, "num_heads": 9}, source="x")
    assert (found.recurrent_layers, found.attention_layers) == ((0, 1, 3), (2,))
    assert (found.heads.value_heads, found.heads.d_k, found.conv_kernel, found.kv_elements) == (2, 8, 3, 16)
    assert found.recurrence is Recurrence.KDA
    granite = {
        "model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "hidden_size": 32,
        "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
        "num_attention_heads": 4, "torch_dtype": "float32",
    }  # fmt: skip
    found = read_shapes(granite, source="x")
    assert (found.recurrent_layers, found.attention_layers) == ((0,), (1,))
    assert (found.heads.d_v, found.kv_elements, found.activation_bytes) == (16, 2 * 32, 4)
    assert read_shapes(GDN, source="x").recurrent_layers == (0, 1, 2)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "another family": ({"model_type": "llama"}, "model_type 'llama'; covered: bamba"),
    "a key that is missing": ({"linear_key_head_dim": None}, "no linear_key_head_dim"),
    "heads that do not divide": ({"linear_num_key_heads": 5}, "multiple of key_heads = 5"),
    "a word for a number": ({"linear_num_key_heads": "many"}, "make no layer"),
    "no recurrent layer": ({"layer_types": ["full_attention"]}, "none of its 1 layers is recurrent"),
    "an interval of 0": ({"full_attention_interval": 0, "layer_types": None}, "make no layer"),
    "more layers than memory": (
        {"num_hidden_layers": 10**9, "layer_types": None},
        "num_hidden_layers of 10+ cannot be",
    ),
    "a text part that is none": ({"text_config": 7}, "make no layer"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_config_is_one_line(name: str):
    change, message = FAULTS[name]
    with pytest.raises(InputError, match=message) as caught:
        read_shapes(GDN | change, source="here/config.json")
    assert str(caught.value).startswith("here/config.json") and "\n" not in str(caught.value)


def test_shapes_need_neither_torch_nor_transformers(config: Path):
    code = (
        "import sys; from pathlib import Path; from driftgate.accuracy.config_shapes import read_config, read_shapes; "
        f"read_shapes(read_config(Path({str(config)!r})), source=''); "
        "import driftgate.cost_command, driftgate.kernels.cost; "
        "assert not {'torch', 'transformers', 'triton'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_every_model_type_of_the_adapters_is_covered():
    from driftgate.accuracy.adapters.families import FAMILIES as adapters
    from driftgate.accuracy.adapters.families import find_family

    with pytest.raises(InputError):
        find_family(type("Config", (), {"model_type": "none"})())  # fills the catalogue
    assert {kind for family in adapters.values() for kind in family.model_types} <= set(SHAPES)


def test_the_document(call, config: Path):
    code, out, err = call(config, "--json", "--plan", "nvfp4/fp32@8", "--plan", "fp32@16+cached", "--weights-gib", 8)
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["schema_version"] == 1
    assert list(document["plans"]) == ["baseline", "nvfp4/fp32@8", "fp32@16+cached"]
    baseline, split, cached = document["plans"].values()
    assert (baseline["bytes_per_head"], baseline["bytes_per_layer"], baseline["bytes"]) == (2**16, 2**21, 3 * 2**21)
    assert document["model"]["fp8_kv_bytes_per_token"] == 2 * 4 * 256
    assert baseline["fp8_kv_tokens"] == 3 * 2**21 / 2048
    assert (split["ideal_one_pass"], split["ideal_two_passes"]) == (0.5625, 0.625)
    assert baseline["ideal_one_pass"] is None and baseline["batch_ring"] is None
    assert split["bytes"] == split["checkpoint_bytes"] + split["read_copy_bytes"] + split["buffer_bytes"]
    assert split["traffic_ratio"] < cached["traffic_ratio"] < 1 < cached["operations_ratio"]
    assert split["bytes"] > cached["bytes"] > baseline["bytes"]
    assert set(split["gains"]) == {"0.1", "0.25", "0.5"}
    assert split["gains"]["0.5"] == pytest.approx(1 / (0.5 + 0.5 * split["traffic_ratio"]))
    other = document["model"]["conv_bytes"] + 2 * 2048 * 8192
    assert baseline["batch"] == (80 - 8) * 2**30 // (baseline["bytes"] + other)
    assert baseline["batch_snapshots"] == (80 - 8) * 2**30 // (5 * baseline["bytes"] + other)
    assert cached["batch_snapshots"] < cached["batch_ring"] < cached["batch"]
    assert split["batch_ring"] is None, "4 drafts and the last token need L of 10"


def test_tables_fit_80_columns_and_say_that_a_split_costs_memory(call, config: Path):
    code, out, err = call(config, "--plan", "nvfp4/fp32@16+cached+buf=bf16", "--plan", "fp8@8", "--plan", "fp32@16")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == str(config)
    assert max(map(len, lines[1:])) <= 80, max(lines[1:], key=len)
    assert "…" not in out
    assert lines[1] == "qwen3_5_text: 3 gdn layers of 4, 16/32 heads of 128x128"
    assert lines[3] == "FP32 state: 64.0 KiB a head, 2.00 MiB a layer, 6.00 MiB a sequence"
    rows = [line.split() for line in lines]
    assert any(row[:5] == ["fp8@8", "56.3", "%", "62.5", "%"] for row in rows)
    assert any(row[:5] == ["fp32@16", "53.1", "%", "56.3", "%"] for row in rows)
    more = [line for line in lines if "MORE memory than FP32 alone" in line]
    assert [line.split(":")[0] for line in more] == ["nvfp4/fp32@16+cached+buf=bf16", "fp32@16"]
    assert more[0].endswith("copy, buffer")
    assert "no weights counted: none lie beside config.json; give --weights-gib" in lines


def test_weights_are_those_of_the_files_beside_the_config(call, config: Path):
    def weights(path: Path, *arguments: object) -> tuple[float, str]:
        machine = json.loads(call(path, "--json", *arguments)[1])["machine"]
        return machine["weights_gib"], machine["weights_from"]

    assert weights(config) == (0.0, "no weight files")
    (config.parent / "model-1.safetensors").write_bytes(bytes(2**20))
    assert weights(config.parent) == (2**-10, "the weight files")
    other = write(config.parent / "other.json", GDN)
    assert weights(other) == (0.0, "no weight files"), "what lies beside it may belong to anything"
    index = write(config.parent / "model.safetensors.index.json", {"metadata": {"total_size": 2**31}})
    assert weights(config) == (2.0, index.name)
    assert weights(config, "--weights-gib", 3) == (3.0, "--weights-gib")


def test_what_does_not_fit_is_said(call, config: Path):
    code, out, _ = call(config, "--weights-gib", 100)
    assert code == 0 and "no sequence fits: raise --hbm, or lower --weights-gib or --context" in out


def test_an_embedded_checkpoint_and_a_chosen_share(call):
    code, out, err = call("tiny-gdn", "--json", "--recurrent-share", 0.3, "--context", 0, "--drafts", 0)
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert list(document["plans"]) == ["baseline", "fp32@16", "fp8/fp32@16", "nvfp4/fp32@16", "nvfp4/fp8@16"]
    assert document["machine"]["weights_gib"] > 0
    for cost in document["plans"].values():
        assert list(cost["gains"]) == ["0.3"]
        assert cost["batch_snapshots"] == cost["batch"]
    assert call("tiny-gdn", "--quiet") == (0, "", "")


BAD: dict[str, tuple[tuple[object, ...], int, str]] = {
    "a plan": (("--plan", "fp8@0"), 2, "L must be 1 to"),
    "no memory": (("--hbm", "0"), 2, "--hbm 0: expected GiB, more than 0"),
    "memory without a number": (("--hbm", "nan"), 2, "--hbm nan: expected"),
    "weights below 0": (("--weights-gib", "-1"), 2, "--weights-gib -1: expected GiB, 0 or more"),
    "a context below 0": (("--context", "-5"), 2, "--context -5: expected 0 or more"),
    "drafts below 0": (("--drafts", "-1"), 2, "--drafts -1: expected 0 or more"),
    "a share above 1": (("--recurrent-share", "1.5"), 2, "--recurrent-share 1.5: expected a fraction"),
    "a share of 0": (("--recurrent-share", "0"), 2, "--recurrent-share 0: expected a fraction"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_one_line(call, config: Path, name: str):
    arguments, code, message = BAD[name]
    found, out, err = call(config, *arguments)
    assert (found, out) == (code, "")
    assert err.startswith("driftgate: ") and message in err and err.count("\n") == 1


FILES: dict[str, tuple[str, str | None, int, str]] = {
    "no such name": ("tiny-gnd", None, 2, "unknown model 'tiny-gnd'; did you mean tiny-gdn"),
    "no such path": ("./nowhere", None, 4, "./nowhere does not exist; give a config.json"),
    "no such file": ("nowhere.json", None, 4, "nowhere.json does not exist; give a config.json"),
    "no JSON": ("./config.json", "{", 4, "config.json is no readable JSON"),
    "a list": ("./config.json", "[]", 4, "config.json names no model_type"),
    "no model type": ("./config.json", "{}", 4, "config.json names no model_type"),
    "no recurrence": ("./config.json", '{"model_type": "gpt2"}', 4, "no recurrent layers are known of model_type"),
    "an empty folder": (".", None, 4, "config.json: no such file"),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_files_are_one_line(call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str):
    model, text, code, message = FILES[name]
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(model).write_text(text)
    found, out, err = call(model)
    assert (found, out) == (code, "")
    assert message in err and err.count("\n") == 1


def test_a_damaged_weight_index_is_one_line(call, config: Path):
    write(config.parent / "model.safetensors.index.json", {"metadata": {}})
    code, _, err = call(config)
    assert code == 4 and "names no total_size; fetch it again, or give --weights-gib" in err


def test_reading_a_config_needs_text(tmp_path: Path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="no readable JSON"):
        read_config(tmp_path / "config.json")
