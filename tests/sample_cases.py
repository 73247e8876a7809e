"""Files of scored answers as lm-eval, inspect_ai and people write them, from a string of right and wrong.

Field names and nesting are those of lm-eval 0.4.9 (``EvaluationTracker.save_results_samples``) and of an inspect_ai log
of version 2; ``1`` is right, ``0`` wrong, ``-`` an answer that could not be read.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def flips(lost: int, gained: int, n: int = 198, *, right: int = 150) -> tuple[str, str]:
    """Answers of two sides, the second of which loses and gains so many."""
    base = "1" * right + "0" * (n - right)
    return base, "0" * lost + "1" * (right - lost) + "1" * gained + "0" * (n - right - gained)


def lm_eval_rows(
    answers: str, *, metrics: tuple[str, ...] = ("exact_match",), filters: tuple[str, ...] = ("none",), choices: int = 0
) -> list[Row]:
    """Lines of ``--log_samples``: all documents of the first filter, then of the next."""
    return [lm_eval_row(i, answer, metrics, name, choices) for name in filters for i, answer in enumerate(answers)]


def lm_eval_row(number: int, answer: str, metrics: tuple[str, ...], filter: str, choices: int) -> Row:
    prompt = f"Question {number}?"
    requests = [(prompt, f" {letter}") for letter in "ABCDEFGH"[:choices]] or [(prompt, {"until": ["\n"]})]
    scored = [[["-1.5", "False"]] for _ in requests] if choices else [["The answer is (A)."]]
    return {
        "doc_id": number,
        "doc": {"question": prompt, "answer": "(A)"},
        "target": "0" if choices else "(A)",
        "arguments": {f"gen_args_{i}": {"arg_0": a, "arg_1": b} for i, (a, b) in enumerate(requests)},
        "resps": scored,
        "filtered_resps": [s[0] for s in scored] if choices else ["[invalid]" if answer == "-" else "(A)"],
        "filter": filter,
        "metrics": list(metrics),
        "doc_hash": sha(prompt),
        "prompt_hash": sha(prompt),
        "target_hash": sha("(A)"),
        **dict.fromkeys(metrics, float(answer == "1")),
    }  # fmt: skip


def plain_rows(answers: str, **fields: Any) -> list[Row]:
    return [{"item_id": f"q{i}", "correct": answer == "1", **fields} for i, answer in enumerate(answers)]


def inspect_sample(number: int, answer: str, *, epoch: int = 1, scorer: str = "choice", **fields: Any) -> Row:
    value = {"1": "C", "0": "I", "-": "N"}[answer]
    return {
        "id": number,
        "epoch": epoch,
        "input": [{"id": f"drawn-{epoch}-{answer}-{number}", "role": "user", "content": f"Question {number}?"}],
        "choices": ["one", "two", "three", "four"],
        "target": "A",
        "messages": [],
        "output": {
            "model": "m",
            "choices": [{"message": {"role": "assistant", "content": "A"}, "stop_reason": "stop"}],
            "usage": {"input_tokens": 9, "output_tokens": 3, "total_tokens": 12},
        },
        "scores": {scorer: {"value": value, "answer": "" if answer == "-" else "A", "history": []}},
        **fields,
    }  # fmt: skip


def inspect_log(samples: list[Row], *, status: str = "success", task: str = "gpqa") -> Row:
    return {"version": 2, "status": status, "eval": {"task": task, "model": "m"}, "results": {}, "samples": samples}


def write_lines(path: Path, rows: list[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path: Path, document: Row) -> Path:
    path.write_text(json.dumps(document, indent=2), encoding="utf-8")
    return path


def write_eval(path: Path, log: Row, *, chunked: bool = False) -> Path:
    """An .eval archive: one file for each sample, or a folder with ``sample.json`` and pieces beside it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_journal/start.json", "{}")
        for sample in log["samples"]:
            name = f"samples/{sample['id']}_epoch_{sample['epoch']}"
            archive.writestr(f"{name}/sample.json" if chunked else f"{name}.json", json.dumps(sample))
            if chunked:
                archive.writestr(f"{name}/events/0.json", "[]")
        archive.writestr("header.json", json.dumps({k: v for k, v in log.items() if k != "samples"}))
    return path


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
