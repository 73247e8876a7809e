"""Codes whose scales are missing are refused by the headers of the weight files, never loaded as values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import make_tiny_model
from safetensors.torch import load_file, save_file
from weight_cases import SCHEMES, store_quantized

from driftgate.accuracy.models import check_model
from driftgate.accuracy.quantized_weights import check_scales
from driftgate.accuracy.weight_files import StoredWeight
from driftgate.errors import InputError

UP = "model.layers.0.mlp.up_proj.weight"
SCALES = [("fp8", "_scale"), ("nvfp4", "_scale"), ("nvfp4", "_global_scale"), ("fp8 in blocks", "_scale_inv")]


def stored(**tensors: str) -> dict[str, StoredWeight]:
    return {
        name.replace("__", "."): StoredWeight(dtype=dtype, shape=(4, 4), shard="model.safetensors")
        for name, dtype in tensors.items()
    }


def drop(folder: Path, *names: str) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file({k: v for k, v in weights.items() if k not in names}, path, metadata={"format": "pt"})


@pytest.fixture(scope="module", params=SCHEMES)
def quantized(request, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("quantized")
    store_quantized(make_tiny_model().bfloat16(), folder, request.param)
    return request.param, folder


def test_codes_with_their_scales_pass(quantized):
    scheme, folder = quantized
    if scheme != "fp8 in blocks":
        pytest.importorskip("compressed_tensors")
    assert check_model(folder).model_type == "qwen3_5_text"


@pytest.mark.parametrize(("scheme", "end"), SCALES)
def test_one_scale_that_is_missing_is_named(tmp_path, scheme, end):
    """transformers loads such codes as values, hundreds of times too large, without a word."""
    if scheme != "fp8 in blocks":
        pytest.importorskip("compressed_tensors")
    store_quantized(make_tiny_model().bfloat16(), tmp_path, scheme)
    drop(tmp_path, UP + end)
    with pytest.raises(
        InputError, match=f"{UP}.* is stored as .* codes, and the weight files lack .*{UP}{end}"
    ) as caught:
        check_model(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_codes_of_a_config_that_says_nothing_of_them_are_refused(tmp_path, dtype):
    make_tiny_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {UP: weights[UP].to(dtype)}, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"{UP} is stored as (F8_E4M3|I8) codes"):
        check_model(tmp_path)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a__weight": "BF16", "a__A_log": "F32", "a__position_ids": "I64", "a__mask": "BOOL"},
        {"a__weight": "F8_E4M3", "a__weight_scale": "BF16"},
        {"experts__gate_up_proj": "F8_E4M3", "experts__gate_up_proj_scale_inv": "F32"},
        {"a__weight": "I8", "a__weight_scale": "F32", "a__weight_zero_point": "I8"},
        {"a__weight_packed": "U8", "a__weight_scale": "F8_E4M3", "a__weight_global_scale": "F32"},
        {"a__weight_packed": "U8", "a__weight_scale": "U8"},
        {"a__weight_packed": "I32", "a__weight_scale": "BF16", "a__weight_shape": "I64"},
    ],
)
def test_what_people_store_passes(tmp_path, tensors):
    check_scales(tmp_path, stored(**tensors))


@pytest.mark.parametrize(
    "tensors", [{"experts__gate_up_proj": "F8_E4M3"}, {"a__weight_packed": "I32"}, {"a__weight": "F8_E5M2"}]
)
def test_bare_codes_are_refused(tmp_path, tensors):
    with pytest.raises(InputError, match="the weight files lack"):
        check_scales(tmp_path, stored(**tensors))


def test_a_folder_whose_weights_are_not_fetched_yet_is_judged_by_its_config(tmp_path):
    from driftgate.accuracy.models import check_config

    store_quantized(make_tiny_model(), tmp_path, "fp8 in blocks")
    (tmp_path / "model.safetensors").unlink()
    assert check_config(tmp_path).model_type == "qwen3_5_text"
