"""The tokenizer of a model folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from breakgraph.errors import ConfigError
from breakgraph.models.source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase | None:
    """None for random weights and for folders without a tokenizer: prompts are token ids then.

    Raises:
        ConfigError: its files are there, but cannot be read.
    """
    folder = source.folder
    if folder is None:
        return None
    if source.gguf_file is not None:
        from breakgraph.models.gguf import load_gguf_tokenizer

        return load_gguf_tokenizer(folder / source.gguf_file, source.config)
    if not any((folder / file).is_file() for file in _FILES):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # every tokenizer class has its own
        raise ConfigError(f"the tokenizer in {folder} cannot be read: {type(error).__name__}: {error}") from error
    return tokenizer
