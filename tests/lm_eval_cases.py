"""What the tests of lm-eval's tasks and of the lm-eval model share: a model, requests, task files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from lm_eval.api.instance import Instance

from driftgate.evals.lm_eval import DriftgateLM
from driftgate.evals.tasks import make_streams

PLAN = "nvfp4@16"
PAIRS = [
    ("<bos>o-n+?o", "-"), ("o-n+", "?o-"), ("o-n+  \n", "o"), ("", "o-n"), ("", "<bos>o-"), (" \n", "o"),
]  # fmt: skip
CHOOSE = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "gold"}
GENERATE = {
    "output_type": "generate_until", "doc_to_target": "answer",
    "generation_kwargs": {"until": ["?"], "max_gen_toks": 4},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip


def ask(kind: str, *arguments: object, doc: int = 0) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("t", doc, 1))


def load_lm() -> DriftgateLM:
    return DriftgateLM("tiny-gdn", PLAN, batch=16, device="cpu")


def load_hf(lm: DriftgateLM) -> Any:
    """lm-eval's own model on the same weights, one request at a time."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=lm.loaded.model, tokenizer=lm.tokenizer, batch_size=1, device="cpu")


def write_documents(folder: Path) -> None:
    """A recall question of each of six streams, to be chosen among, generated and scored."""
    streams = make_streams(tasks=["recall"], n_sequences=6, length=64, seed=5)
    docs, seen = [], set()
    for q in streams.questions:
        if q.sequence in seen:
            continue
        seen.add(q.sequence)
        words = [chr(t) if t < 256 else "<bos>" for t in streams.token_ids[q.sequence, : q.position + 1]]
        docs.append({"stream": "".join(words), "choices": [chr(c) for c in q.choices], "gold": q.gold})
        docs[-1]["answer"] = docs[-1]["choices"][q.gold]
    (folder / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))


def write_task(folder: Path, name: str, **fields: Any) -> str:
    """A task file over the documents; returns its path."""
    common = {
        "task": name, "dataset_path": "json", "test_split": "test", "target_delimiter": "",
        "dataset_kwargs": {"data_files": {"test": str(folder / "docs.jsonl")}, "cache_dir": str(folder / "cache")},
        "doc_to_text": "stream", "metadata": {"version": 2.5},
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(common | fields))
    return str(path)
