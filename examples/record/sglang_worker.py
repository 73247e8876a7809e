"""Record a dump inside SGLang's model worker. NOT RUN HERE: written against SGLang's public sources of summer 2026.

Hook: ``forward_hooks`` of ``sglang.Engine`` (``--forward-hooks`` of the server) imports a factory in every model
worker and calls it once the model is loaded. ``make_hook`` wraps the globals that decode steps go through, so every
argument is seen as the engine's kernel gets it, and returns a hook that does nothing:

- Gated DeltaNet (Qwen3-Next, Qwen3.5): ``fused_recurrent_gated_delta_rule_packed_decode`` of
  ``sglang.srt.layers.attention.linear.kernels.gdn_triton``, the decode backend ``triton``
- Mamba-2 (Nemotron-H, Granite 4, Falcon-H1): ``selective_state_update`` of ``sglang.srt.layers.attention.mamba.mamba``

Wrapped globals are not seen inside a CUDA graph, hence ``disable_cuda_graph``; without the radix cache a request keeps
its slot. A warm-up is no recording: that begins with the first batch of ``sequences`` requests, 2 or more. For one GPU:
with tensor parallelism all ranks would write the same file.

    pip install --no-deps driftgate        # needs torch, safetensors and pydantic, which SGLang brings
    PYTHONPATH=examples/record python examples/record/sglang_worker.py MODEL dump.safetensors --steps 256
    driftgate replay dump.safetensors --plan nvfp4/fp32@16
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from collect import FIRST_SLOT, Collector, watch

GDN = ("sglang.srt.layers.attention.linear.kernels.gdn_triton", "fused_recurrent_gated_delta_rule_packed_decode")
MAMBA2 = ("sglang.srt.layers.attention.mamba.mamba", "selective_state_update")


def make_hook(config: dict[str, Any]) -> Callable[..., None]:
    """Called by SGLang in each model worker with the ``config`` of the hook."""
    import sglang

    collector = Collector(
        Path(config["path"]),
        steps=config["steps"],
        model=config["model"],
        engine=f"SGLang {sglang.__version__}",
        layers=config["layers"],
        start=config["start"],
    )

    def from_first_batch(slots: str, take: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        def take_batch(call: dict[str, Any]) -> None:
            if collector.slots or int((call[slots] >= FIRST_SLOT).sum()) == config["sequences"]:
                take(call)

        return take_batch

    watch(importlib.import_module(GDN[0]), GDN[1], from_first_batch("ssm_state_indices", collector.take_gdn))
    watch(importlib.import_module(MAMBA2[0]), MAMBA2[1], from_first_batch("state_batch_indices", collector.take_mamba2))
    return lambda *_: None


def main() -> None:
    """Decode a few prompts of one length and record their steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("dump")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, nargs="*", help="decoder-layer indices of the recurrent layers")
    options = parser.parse_args()

    import sglang
    from transformers import AutoTokenizer

    start = options.prompt_tokens
    config = {
        "path": str(Path(options.dump).resolve()), "steps": options.steps, "model": options.model, "start": start,
        "sequences": options.sequences, "layers": options.layers,
    }  # fmt: skip
    hook = {
        "name": "record",
        "target_modules": ["lm_head"],
        "hook_factory": "sglang_worker:make_hook",
        "config": config,
    }
    engine = sglang.Engine(
        model_path=options.model,
        disable_cuda_graph=True,
        disable_radix_cache=True,
        linear_attn_decode_backend="triton",
        forward_hooks=[hook],
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts = [_prompt(tokenizer, n, start) for n in range(options.sequences)]
    # the prefill gives the first token; one forward after the last recorded step writes the dump
    engine.generate(
        input_ids=prompts,
        sampling_params={"max_new_tokens": options.steps + 3, "ignore_eos": True, "temperature": 1.0},
    )
    engine.shutdown()
    if not Path(config["path"]).exists():
        raise SystemExit("no dump: the decode calls did not go through the functions that are wrapped")


def _prompt(tokenizer: Any, number: int, length: int) -> list[int]:
    """Tokens of some text, repeated to one length; put your own prompts here."""
    tokens = tokenizer.encode(f"Story {number}. Once upon a time, far from the sea, there was a lighthouse.")
    return (tokens * length)[:length]


if __name__ == "__main__":
    main()
