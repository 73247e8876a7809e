"""Record a dump inside vLLM's worker. NOT RUN HERE: written against vLLM's public sources of summer 2026.

Hooks: ``worker_extension_cls`` and ``LLM.collective_rpc`` put ``start_recording`` into the worker; there the global
that a layer's module calls for a decode step is wrapped, so every argument is seen as the engine's kernel gets it:

- Gated DeltaNet (Qwen3-Next, Qwen3.5): ``fused_recurrent_gated_delta_rule_packed_decode`` of
  ``vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn``; it takes plain decode batches where
  VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE is 1
- Mamba-2 (Nemotron-H, Granite 4, Falcon-H1): ``selective_state_update`` of
  ``vllm.model_executor.layers.mamba.mamba_mixer2``

Wrapped globals are not seen inside a CUDA graph, hence ``enforce_eager``. Prompts of one length keep the batch
together; without prefix caching a request keeps its slot. With tensor parallelism every rank writes its own heads.

    pip install --no-deps driftgate        # needs torch, safetensors and pydantic, which vLLM brings
    PYTHONPATH=examples/record python examples/record/vllm_worker.py MODEL dump.safetensors --steps 256
    driftgate replay dump.rank0.safetensors --plan nvfp4/fp32@16
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from typing import Any

from collect import Collector, watch

GDN = ("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn", "fused_recurrent_gated_delta_rule_packed_decode")
MAMBA2 = ("vllm.model_executor.layers.mamba.mamba_mixer2", "selective_state_update")


class Recorder:
    """Mixed into vLLM's worker by ``worker_extension_cls``."""

    rank: int

    def start_recording(self, path: str, steps: int, model: str, start: int, layers: list[int] | None) -> None:
        """Called between forwards; the next decode call of each layer is the first that is kept."""
        import vllm

        file = Path(path)
        self.collector = Collector(
            file.with_suffix(f".rank{self.rank}{file.suffix}"),
            steps=steps,
            model=model,
            engine=f"vLLM {vllm.__version__}",
            layers=layers,
            start=start,
        )
        watch(importlib.import_module(GDN[0]), GDN[1], self.collector.take_gdn)
        watch(importlib.import_module(MAMBA2[0]), MAMBA2[1], self.collector.take_mamba2)

    def is_recorded(self) -> bool:
        """Whether the dump was written."""
        return self.collector.written


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
    os.environ["VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE"] = "1"

    from vllm import LLM, SamplingParams

    engine = LLM(
        model=options.model,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=options.sequences,
        worker_extension_cls="vllm_worker.Recorder",
    )
    start = options.prompt_tokens
    engine.collective_rpc("start_recording", args=(options.dump, options.steps, options.model, start, options.layers))
    prompts: list[Any] = [{"prompt_token_ids": _prompt(engine, n, start)} for n in range(options.sequences)]
    # the prefill gives the first token; one forward after the last recorded step writes the dump
    sampling = SamplingParams(max_tokens=options.steps + 3, ignore_eos=True, temperature=1.0, seed=0)
    engine.generate(prompts, sampling)
    if not all(engine.collective_rpc("is_recorded")):
        raise SystemExit("no dump: the decode calls did not go through the functions that are wrapped")


def _prompt(engine: Any, number: int, length: int) -> list[int]:
    """Tokens of some text, repeated to one length; put your own prompts here."""
    tokens = engine.get_tokenizer().encode(
        f"Story {number}. Once upon a time, far from the sea, there was a lighthouse."
    )
    return (tokens * length)[:length]


if __name__ == "__main__":
    main()
