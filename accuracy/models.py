"""Loading a checkpoint folder the way people have it; every fault of a file is said in one line before a run starts."""

from __future__ import annotations

import hashlib
import json
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from driftgate.accuracy.adapters.families import find_family
from driftgate.accuracy.adapters.hooks import quiet_transformers
from driftgate.accuracy.free_memory import SPREAD, spread_limits
from driftgate.accuracy.quantized_weights import check_dequantized, check_quantization, dequantize_at_load
from driftgate.accuracy.weight_files import StoredWeight, loaded_bytes, main_dtype, read_headers, refuse_too_large
from driftgate.errors import InputError, UsageError

__all__ = [
    "LoadedModel", "check_config", "check_model", "hash_file", "load_model", "load_tokenizer", "resolve_device",
    "weights_memory",
]  # fmt: skip

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KEPT_IN_FP32 = (r"\.A_log$", r"\.dt_bias$", r"\.D$")
"""Names of the weights that set a recurrence's decay and skip, as transformers matches them."""


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
                if isinstance(token, int) and 0 <= token < self.vocab_size:
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
        device: ``cpu``, ``cuda``, ``cuda:N``, or ``cuda+cpu`` for all GPUs and this machine's memory beyond.
        dtype: ``fp32``, ``bf16`` or ``fp16`` for weights and activations; None for the checkpoint's own. A_log,
            dt_bias and D are FP32 in any case, which holds whatever a checkpoint stores.

    Raises:
        InputError: something in the folder is missing, cut short, not covered, disagrees with the config, or NaN; or
            the weights do not fit into the memory of the device.
    """
    parsed = check_model(folder, device=device, dtype=dtype)
    wanted = _choose_dtype(parsed, read_headers(folder), dtype)
    dequantize_at_load(parsed)
    with quiet_transformers(), warnings.catch_warnings(action="ignore"), _kept_in_fp32(parsed) as home:
        try:
            model, info = home.from_pretrained(
                folder,
                config=parsed,
                dtype=wanted,
                **_placement(device),
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,  # nor ask for it on the terminal
                ignore_mismatched_sizes=True,  # told by name below, where transformers only says that there are some
                output_loading_info=True,
            )
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise InputError(
                f"{folder}: the memory of {device} ran out while its weights were loaded; give another --device"
            ) from error
        except Exception as error:  # a config can make the constructors raise anything, AssertionError among it
            raise InputError(f"{folder}: weights do not fit config.json: {_one_line(error)}") from error
        if "disk" in (getattr(model, "hf_device_map", None) or {}).values():  # it would come back rounded to BF16
            raise InputError(f"{folder}: its layers do not fit into GPU and memory; give a smaller checkpoint")
        _check_loaded(folder, info)
        check_dequantized(folder, model, wanted)
        tokenizer = load_tokenizer(folder)
    for key, weight in model.named_parameters():
        if not weight.is_meta and not bool(torch.isfinite(weight).all()):  # meta: kept aside by accelerate
            raise InputError(f"{folder}: weight {key} holds NaN or infinity; the checkpoint is damaged, fetch it again")
    text = text_config(model.config)
    real = int(text.vocab_size)
    if tokenizer is not None:  # ids may have gaps, so that the last lies beyond their number
        real = min(real, max(tokenizer.get_vocab().values(), default=0) + 1)
    return LoadedModel(
        name=name,
        folder=folder,
        model=model.eval().requires_grad_(False),
        tokenizer=tokenizer,
        vocab_size=real,
        family=find_family(parsed).name,
        hashes={p.name: hash_file(p) for p in sorted(folder.iterdir()) if p.suffix in (".safetensors", ".json")},
    )


def check_model(folder: Path, *, device: str | None = None, dtype: str | None = None) -> Any:
    """Everything that a checkpoint folder shows before its weights are loaded.

    Args:
        folder: in Hugging Face layout.
        device: where the weights must fit; None to leave that open.
        dtype: as ``load_model`` takes it.

    Returns:
        The config, as transformers reads it.

    Raises:
        InputError: as ``load_model``, but for what only the weights show.
    """
    parsed = check_config(folder)
    weights = read_headers(folder)
    if device is not None:
        refuse_too_large(folder, weights, device=device, dtype=_choose_dtype(parsed, weights, dtype))
    return parsed


def check_config(folder: Path) -> Any:
    """The part of ``check_model`` for which config.json is enough.

    Raises:
        InputError: no config of a model that driftgate covers, or weights in a form that it does not.
    """
    check_quantization(folder, _read_config(folder))
    from transformers import AutoConfig

    with quiet_transformers(), warnings.catch_warnings(action="ignore"):
        try:
            parsed = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a config can make its class raise anything, ZeroDivisionError among it
            raise InputError(f"{folder}/config.json: {_one_line(error)}") from error
    text = text_config(parsed)
    if not find_family(parsed).has_recurrence(parsed):
        raise InputError(f"{folder}: the checkpoint has no recurrent layer (no linear_attention); nothing to measure")
    for field, least in (("pad_token_id", -text.vocab_size), ("bos_token_id", 0)):  # the padding may count from the end
        token = getattr(text, field, None)
        if isinstance(token, int) and not least <= token < text.vocab_size:
            raise InputError(
                f"{folder}/config.json: {field} {token} is outside the vocabulary of {text.vocab_size}; correct one"
            )
    return parsed


def weights_memory(folder: Path, parsed: Any, dtype: str | None = None) -> int:
    """Bytes that the weights of a folder take once they are loaded; ``parsed`` and ``dtype`` as ``check_model`` has."""
    weights = read_headers(folder)
    return loaded_bytes(weights, _choose_dtype(parsed, weights, dtype))


def text_config(config: Any) -> Any:
    """The part of a config that describes the language model; itself where there is no other."""
    return getattr(config, "text_config", config)


def hash_file(path: Path) -> str:
    """sha256 of a file, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def resolve_device(device: str) -> str:
    """``auto`` becomes ``cuda`` where there is a GPU; ``cuda+cpu`` spreads a model over all GPUs and this machine.

    Raises:
        UsageError: not a device name.
        InputError: a GPU is asked for and there is none.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device("cuda" if device == SPREAD else device)
    except RuntimeError as error:
        raise UsageError(f"unknown device {device!r}; use auto, cpu, cuda or cuda:N, or {SPREAD}") from error
    if kind.type == "cuda" and (not torch.cuda.is_available() or (kind.index or 0) >= torch.cuda.device_count()):
        raise InputError(f"device {device} is not on this machine; use --device cpu")
    if kind.type not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} is not covered; use auto, cpu, cuda or cuda:N, or {SPREAD}")
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


def _placement(device: str) -> dict[str, Any]:
    """Where transformers puts the weights, straight there: no second copy on this machine."""
    if device == SPREAD:
        return {"device_map": "auto", "max_memory": spread_limits()}
    return {"device_map": {"": "cuda:0" if device == "cuda" else device}}


def _choose_dtype(parsed: Any, weights: Mapping[str, StoredWeight], dtype: str | None) -> torch.dtype:
    """Dtype of weights and activations: what is asked for, else what the config says, else what most weights have."""
    if dtype is not None:
        return DTYPES[dtype]
    said = getattr(text_config(parsed), "dtype", None) or getattr(parsed, "dtype", None)
    found = said if isinstance(said, torch.dtype) else main_dtype(weights)
    if found not in DTYPES.values():
        name = str(found).removeprefix("torch.")
        raise InputError(f"the checkpoint is {name}, which no kernel takes; give --dtype {' or '.join(DTYPES)}")
    return found


@contextmanager
def _kept_in_fp32(parsed: Any) -> Iterator[Any]:
    """The auto class that loads a config's model; meanwhile the model's class keeps the small weights in FP32.

    Some families have a multimodal class alone; of those with both it is the text class.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    causal = type(parsed) in MODEL_FOR_CAUSAL_LM_MAPPING
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING if causal else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind, field = known[type(parsed)], "_keep_in_fp32_modules_strict"
    own = field in vars(kind)
    before = getattr(kind, field)
    setattr(kind, field, [*(before or ()), *KEPT_IN_FP32])
    try:
        yield AutoModelForCausalLM if causal else AutoModelForImageTextToText
    finally:
        if own:
            setattr(kind, field, before)
        else:
            delattr(kind, field)


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
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the Rust tokenizer raises plain Exception
        raise InputError(f"{folder}: the tokenizer is damaged or not covered: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return textwrap.shorten(str(error), 450, placeholder=" ...") or type(error).__name__
