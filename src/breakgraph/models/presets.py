"""Model shapes by short name, to run with random weights where no checkpoint is at hand."""

from __future__ import annotations

from pathlib import Path

CONFIG_FOLDER = Path(__file__).parent / "configs"

PRESETS = tuple(sorted(path.stem for path in CONFIG_FOLDER.glob("*.json")))
"""Short names; each is the configuration of a published model."""


def preset_path(name: str) -> Path:
    """The configuration file of a preset."""
    assert name in PRESETS, f"{name!r} is not one of {PRESETS}"
    return CONFIG_FOLDER / f"{name}.json"
