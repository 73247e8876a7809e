"""Loading a checkpoint folder the way people have it; every fault of a file is said in one line before a run starts."""

from __future__ import annotations

import hashlib
import json
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from driftgate.accuracy.adapters.families import find_family
from driftgate.accuracy.adapters.hooks import quiet_transformers
from driftgate.errors import InputError, UsageError

__all__ = ["LoadedModel", "check_model", "hash_file", "load_model", "load_tokenizer", "resolve_device"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A checkpoint in memory.

    Attributes:
        name: as the user named it.
        folder: where it lies.
        model: in eval mode, on its device.
        tokenizer: None if the folder has none.
        vocab_size: real columns of the logits.
        family: name of the adapter.
        hashes: sha256 of each file that decides the numbers, by file name.
    """

    name: str
    folder: Path
    model: Any
    tokenizer: Any
    vocab_size: int
    family: str
    hashes: dict[str, str]

    @property
    def first_token(self) -> int:
        """Token that a stream begins with: BOS, else EOS, else 0."""
        for owner in (self.tokenizer, text_config(self.model.config)):
            for name in ("bos_token_id", "eos_token_id"):
                token = getattr(owner, name, None)
                if isinstance(token, int):
                    return token
        return 0

    @property
    def n_parameters(self) -> int:
        """Number of weights."""
        return sum(p.numel() for p in self.model.parameters())


def load_model(folder: Path, *, name: str, device: str, dtype: str | None = None) -> LoadedModel:
    """Load a checkpoint folder (config.json, safetensors, tokenizer).

    Args:
        folder: in Hugging Face layout.
        name: how to call it in messages and reports.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``fp32``, ``bf16`` or ``fp16`` for weights and activations; None for what the checkpoint stores.

    Raises:
        InputError: something in the folder is missing, cut short, not covered, disagrees with the config, or NaN.
    """
    parsed = check_model(folder)
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    # some families have a multimodal class alone; of those with both, the text class
    home: Any = AutoModelForCausalLM if type(parsed) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    with quiet_transformers(), warnings.catch_warnings(action="ignore"):
        try:
            model, info = home.from_pretrained(
                folder,
                dtype="auto" if dtype is None else DTYPES[dtype],
                attn_implementation="eager",
                local_files_only=True,
                ignore_mismatched_sizes=True,  # told by name below, where transformers only says that there are some
                output_loading_info=True,
            )
        except Exception as error:  # a config can make the constructors raise anything, AssertionError among it
            raise InputError(f"{folder}: weights do not fit config.json: {_one_line(error)}") from error
        _check_loaded(folder, info)
        tokenizer = load_tokenizer(folder)
    for key, weight in model.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            raise InputError(f"{folder}: weight {key} holds NaN or infinity; the checkpoint is damaged, fetch it again")
    text = text_config(model.config)
    real = int(text.vocab_size) if tokenizer is None else min(int(text.vocab_size), len(tokenizer))
    return LoadedModel(
        name=name,
        folder=folder,
        model=model.to(device).eval().requires_grad_(False),
        tokenizer=tokenizer,
        vocab_size=real,
        family=find_family(parsed).name,
        hashes={p.name: hash_file(p) for p in sorted(folder.iterdir()) if p.suffix in (".safetensors", ".json")},
    )


def check_model(folder: Path) -> Any:
    """Everything that a checkpoint folder shows before its weights are loaded.

    Returns:
        The config, as transformers reads it.

    Raises:
        InputError: as ``load_model``, but for what only the weights show.
    """
    config = _read_config(folder)
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") == "modelopt" or (folder / "hf_quant_config.json").exists():
        raise InputError(
            f"{folder}: quant_method modelopt would be loaded without its scales; dequantise it to BF16 first"
        )
    _check_weights(folder)
    from transformers import AutoConfig

    with quiet_transformers(), warnings.catch_warnings(action="ignore"):
        try:
            parsed = AutoConfig.from_pretrained(folder, local_files_only=True)
        except (ValueError, KeyError, TypeError, AttributeError, OSError, StrictDataclassError) as error:
            raise InputError(f"{folder}/config.json: {_one_line(error)}") from error
    text = text_config(parsed)
    if not find_family(parsed).has_recurrence(parsed):
        raise InputError(f"{folder}: the checkpoint has no recurrent layer (no linear_attention); nothing to measure")
    pad = getattr(text, "pad_token_id", None)
    if isinstance(pad, int) and not -text.vocab_size <= pad < text.vocab_size:
        raise InputError(
            f"{folder}/config.json: pad_token_id {pad} is outside the vocabulary of {text.vocab_size}; correct one"
        )
    return parsed


def text_config(config: Any) -> Any:
    """The part of a config that describes the language model; itself where there is no other."""
    return getattr(config, "text_config", config)


def hash_file(path: Path) -> str:
    """sha256 of a file, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def resolve_device(device: str) -> str:
    """``auto`` becomes ``cuda`` where there is a GPU.

    Raises:
        UsageError: not a device name.
        InputError: a GPU is asked for and there is none.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"unknown device {device!r}; use auto, cpu, cuda or cuda:N") from error
    if kind.type == "cuda" and (not torch.cuda.is_available() or (kind.index or 0) >= torch.cuda.device_count()):
        raise InputError(f"device {device} is not on this machine; use --device cpu")
    if kind.type not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} is not covered; use auto, cpu, cuda or cuda:N")
    return device


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{folder} has no config.json; give a checkpoint folder in Hugging Face layout") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is no readable JSON: {_one_line(error)}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise InputError(f"{path} names no model_type; give a checkpoint folder in Hugging Face layout")
    return config


def _check_weights(folder: Path) -> None:
    """Every shard is there and whole, before transformers starts to load."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{index} is no weight index; fetch the checkpoint again") from error
    else:
        shards = ["model.safetensors"]
    for shard in shards:
        path = folder / shard
        if not path.exists():
            raise InputError(f"{path} is missing; fetch the checkpoint again")
        try:
            with safe_open(path, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is cut short or damaged ({_one_line(error)}); fetch it again") from error


def _check_loaded(folder: Path, info: dict[str, Any]) -> None:
    """Config and files name the same weights in the same shapes: transformers would draw or drop the others."""
    for key, stored, wanted in sorted(info["mismatched_keys"]):
        raise InputError(f"{folder}: {key} is {list(stored)}, config.json asks for {list(wanted)}; fetch both again")
    for key in sorted(info["missing_keys"]):
        raise InputError(f"{folder}: config.json asks for {key}, which the weight files lack; fetch both again")
    for key in sorted(info["unexpected_keys"]):
        raise InputError(f"{folder}: the weight files hold {key}, which config.json leaves out; fetch both again")


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checkpoint, None where it has none."""
    from transformers import AutoTokenizer

    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the Rust tokenizer raises plain Exception
        raise InputError(f"{folder}: the tokenizer is damaged or not covered: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return textwrap.shorten(str(error), 450, placeholder=" ...") or type(error).__name__
