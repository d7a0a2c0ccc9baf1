"""GGUF files through `transformers`, which dequantises them; and their conversion into a safetensors folder.

Reading one takes tens of seconds, most of it metadata in Python, so a model that is used again should be converted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from breakgraph.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

CONVERT_STAGES = ("read the tokenizer", "read the weights", "write safetensors")


def load_gguf_config(path: Path) -> PreTrainedConfig:
    """The configuration that a GGUF file's metadata describes.

    Raises:
        WeightsError: the file is no GGUF file, or of an architecture that `transformers` cannot read.
    """
    from transformers import AutoConfig

    _require_gguf(path)
    try:
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:  # the reader raises whatever its parser stumbles over
        raise WeightsError(f"{path} cannot be read as GGUF: {type(error).__name__}: {error}") from error


def load_gguf_tokenizer(path: Path, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer in a GGUF file, with the end token that the file's metadata names.

    Raises:
        ConfigError: it holds none that can be read.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        # AutoTokenizer chooses this class as well, after reading the file once more.
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
    except Exception as error:
        raise ConfigError(f"the tokenizer in {path} cannot be read: {type(error).__name__}: {error}") from error
    # For llama tokenizers transformers 5.17 takes the end token from the begin token's id.
    end = config.eos_token_id
    if isinstance(end, int):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def convert_gguf(path: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Writes a bfloat16 model folder with everything that `path` holds.

    Args:
        folder: An existing folder; what is in it after an exception is of no use.
        progress: Called with each of CONVERT_STAGES as it begins.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    progress(CONVERT_STAGES[0])
    config = load_gguf_config(path)
    load_gguf_tokenizer(path, config).save_pretrained(folder)
    progress(CONVERT_STAGES[1])
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, config=config, gguf_file=path.name, dtype=torch.bfloat16, local_files_only=True
    )
    progress(CONVERT_STAGES[2])
    # save_pretrained refuses: it takes the dequantised model for a quantised one.
    tied = model.all_tied_weights_keys if model.config.tie_word_embeddings else {}
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # it is made for its owner alone
    described: dict[str, Any] = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        described.pop(key, None)
    described |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    model.generation_config.save_pretrained(folder)


def _require_gguf(path: Path) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{path.name} needs the gguf package to be read: pip install gguf") from error
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise WeightsError(f"{path} is no GGUF file: it begins with {magic!r}; fetch or copy it again")
