"""The job whose fields are changed one by one, and the files that the original and the changed jobs refer to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load_file, save_file

from e2e.fakes.model import write_model
from e2e.fakes.tiny import write_tiny_model

CHAT = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}<assistant>"


def manifest() -> dict[str, Any]:
    """Return the job as data. It sets only required fields and fields that make the job small."""
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "fields"},
        "spec": {
            "models": [{"name": "policy", "source": "job://model"}],
            "training": {"steps": 4, "promptsPerStep": 2, "samplesPerPrompt": 2},
            "tasks": [
                {
                    "name": "sums",
                    "data": {"reasoningGym": {"dataset": "chain_sum"}},
                    "reward": "exact",
                    "sampling": {"maxTokens": 16},
                },
                {"name": "more", "data": {"reasoningGym": {"dataset": "products"}}, "reward": "exact"},
            ],
            "rewards": [{"name": "exact", "builtin": "reasoning_gym"}],
            "rollouts": [{"name": "main"}],
        },
    }


def write_storage(storage: Path) -> None:
    """Write models, data and programs that manifests refer to as job://PATH."""
    for name in ("model", "other-model"):
        write_model(storage / name)
        write_tiny_model(storage / name)
        (storage / name / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    other = storage / "other-model" / "model.safetensors"
    save_file({key: tensor * 0.9 for key, tensor in load_file(other).items()}, other, {"format": "pt"})
    for name in ("rows", "others"):
        rows = [
            {
                "question": f"{name} {i}",
                "prompt": f"asked {i}",
                "answer": str(i),
                "result": str(i + 1),
                "chat": [{"role": "user", "content": f"said {name} {i}"}],
            }
            for i in range(40)
        ]
        (storage / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pq.write_table(pa.Table.from_pylist(rows), storage / f"{name}.parquet")
        _save_splits(storage / name, {"train": rows[:20], "test": rows[20:], "third": rows[5:25]})
    for name in ("make-model", "make-other"):
        program = storage / name
        program.write_text(f"#!/bin/sh\n# {name}\n")
        os.chmod(program, 0o755)


def _save_splits(directory: Path, splits: dict[str, list[dict[str, Any]]]) -> None:
    """Write the files of DatasetDict.save_to_disk (library `datasets`) that rljob reads."""
    for split, rows in splits.items():
        (directory / split).mkdir(parents=True)
        table = pa.Table.from_pylist(rows)
        with (
            pa.OSFile(str(directory / split / "data.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as out,
        ):
            out.write_table(table)
        state = {"_data_files": [{"filename": "data.arrow"}], "_split": split}
        (directory / split / "state.json").write_text(json.dumps(state))
    (directory / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
