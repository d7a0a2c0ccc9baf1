"""A tiny llama in a folder, with a tokenizer of single bytes, and the reference that answers are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from breakgraph import LLM
from tiny_models import save_tiny_model
from unit.engine.byte_tokenizer import byte_tokenizer
from unit.engine.small import SMALL, Reference


@pytest.fixture(scope="session")
def _saved_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    model = save_tiny_model("llama", folder)
    byte_tokenizer().save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="session")
def llama_folder(_saved_llama: tuple[Path, PreTrainedModel]) -> Path:
    return _saved_llama[0]


@pytest.fixture(scope="session")
def reference(_saved_llama: tuple[Path, PreTrainedModel]) -> Reference:
    """Greedy tokens of transformers' own generate, one prompt at a time."""
    model = _saved_llama[1]

    def generate(prompt: Sequence[int], max_tokens: int) -> list[int]:
        tokens = torch.tensor([list(prompt)])
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max_tokens, do_sample=False
        )
        return [int(token) for token in output[0, tokens.shape[1] :]]

    return generate


@pytest.fixture(scope="module")
def llm(llama_folder: Path, device: torch.device) -> Iterator[LLM]:
    """Breakable prefill, full decode; shared by the tests of a module, each of which leaves it idle."""
    with LLM(str(llama_folder), device=str(device), **SMALL) as llm:
        yield llm


@pytest.fixture
def idle(llm: LLM) -> Iterator[LLM]:
    """The shared LLM with an empty prefix cache; afterwards nothing may be left in it."""
    llm.reset_prefix_cache()
    yield llm
    stats = llm.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_kv_blocks"] == stats["num_kv_blocks"] - 1
