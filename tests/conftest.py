"""What all tests share: a guard against a shadowed package, and a tiny random Qwen3.5 checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("driftgate", deadline=None, derandomize=True)  # the same examples on every machine
settings.load_profile("driftgate")


def pytest_configure() -> None:
    """``python -m pytest`` puts this folder on the path, where transformers takes kernels/ for another package."""
    if any(Path(entry or ".").resolve() == ROOT for entry in sys.path):
        pytest.exit("the repository root is on sys.path; run `pytest`, not `python -m pytest`", returncode=2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` without a CUDA device and ``long`` without RUN_LONG=1, and say so."""
    skips = {}
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            skips["gpu"] = pytest.mark.skip(reason="needs a CUDA device")
    if os.environ.get("RUN_LONG") != "1":
        skips["long"] = pytest.mark.skip(reason="set RUN_LONG=1")
    for item in items:
        for marker, skip in skips.items():
            if item.get_closest_marker(marker):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., object]]:
    """``interpreted(file, function, **arguments)`` calls a function of a case file under Triton's interpreter.

    One process with TRITON_INTERPRET=1 serves the session; arguments and results are what JSON holds.
    """
    command = [
        sys.executable,
        "-P",
        "-W",
        "error::RuntimeWarning",
        str(Path(__file__).parent / "interpreter_worker.py"),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as worker:

        def call(file: str | Path, function: str, **arguments: object) -> object:
            request = {"file": str(file), "function": function, "arguments": arguments}
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
            assert line, "the interpreter process died; its standard error says why"
            reply = json.loads(line)
            if "error" in reply:
                pytest.fail(reply["error"], pytrace=False)
            return reply["result"]

        yield call
        worker.stdin.close()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: threads only cost time, and would make bits depend on the machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_tiny_model(*, seed: int = 0, **changes: object):
    """A Qwen3.5 of two recurrent layers around one attention layer, FP32, eager, ready to decode.

    transformers' own initialisation leaves the logits almost independent of the state, so weights are drawn anew:
    matrices N(0, 1/fan_in), convolutions 0.5 N(0, 1), dt_bias 0.5 N(0, 1) - 1, A_log U(-1, 1).
    """
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    fields = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 256,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
    config = Qwen3_5TextConfig(**(fields | changes))
    config._attn_implementation = "eager"
    model = Qwen3_5ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("A_log"):
                weight.copy_(2 * torch.rand(weight.shape, generator=generator) - 1)
            elif name.endswith("dt_bias"):
                weight.copy_(0.5 * noise - 1)
            elif "conv1d" in name:
                weight.copy_(0.5 * noise)
            elif weight.ndim >= 2:
                weight.copy_(noise / weight.shape[-1] ** 0.5)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def make_model():
    """Builds a tiny model, with other config fields where wanted."""
    return make_tiny_model


@pytest.fixture(scope="session")
def tiny_model():
    """One tiny model for all tests; they leave it as it is."""
    return make_tiny_model()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of that model as people have it; tests that damage it copy it first."""
    folder = tmp_path_factory.mktemp("tiny-qwen3.5")
    make_tiny_model().save_pretrained(folder)
    return folder
