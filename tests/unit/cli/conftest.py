"""A tiny llama in a folder, for the commands that run a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_models import save_tiny_model
from unit.engine.byte_tokenizer import byte_tokenizer


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny_model("llama", folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def model_args(llama_folder: Path) -> list[str]:
    """Flags of a small engine on the CPU device with two captures."""
    sizes = ["--max-num-batched-tokens", "16", "--max-num-seqs", "2", "--max-model-len", "64"]
    ladders = ["--prefill-buckets", "16", "--decode-buckets", "2"]
    return ["--model", str(llama_folder), "--device", "cpu", *sizes, *ladders]
