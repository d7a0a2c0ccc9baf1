"""The result file: what a measurement ran, where, with which versions and shapes, and its numbers with units.

Every committed figure is rendered from such a file. The schema is closed: reading refuses unknown, missing
and mistyped fields and names their path in the document, e.g. `rows[2].metrics.latency.unit`.
Reading and writing need no torch; only `here` does, to name the device.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
import subprocess
import tempfile
import types
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from breakgraph import __version__
from breakgraph.errors import ConfigError

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 1
UNITS = ("ms", "s", "us", "bytes", "MiB", "count", "ratio", "tokens/s", "GB/s", "TFLOP/s", "percent", "bool")
_WHOLE_UNITS = ("bytes", "count")

Scalar = str | int | float | bool | None


class _FieldError(ConfigError):
    """A bad field; readers prefix the path at which they met it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field, self.message = field, message


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number. `bool` takes true or false, `bytes` and `count` whole numbers, every other unit a finite float."""

    value: int | float | bool
    unit: str

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise _FieldError("unit", f"expected one of {', '.join(UNITS)}, got {self.unit!r}")
        if isinstance(self.value, bool) != (self.unit == "bool"):
            raise _FieldError("value", f"unit {self.unit!r} does not take {self.value!r}")
        if self.unit in _WHOLE_UNITS and not isinstance(self.value, int):
            raise _FieldError("value", f"unit {self.unit!r} takes whole numbers, got {self.value!r}")
        if not math.isfinite(self.value):
            raise _FieldError("value", f"expected a finite number, got {self.value!r}; leave the metric out instead")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured case: its name, the parameters that tell it from its neighbours, and its metrics by name."""

    name: str
    params: Mapping[str, Scalar]
    metrics: Mapping[str, Metric]

    def __post_init__(self) -> None:
        if not self.metrics:
            raise _FieldError("metrics", "expected at least one metric, got none")
        for name, value in self.params.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise _FieldError(f"params.{name}", f"expected a finite number, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What ran. `git_commit` is None outside a checkout; `-dirty` is appended when tracked files were changed."""

    command: str
    git_commit: str | None
    started_at: str

    def __post_init__(self) -> None:
        try:
            aware = datetime.fromisoformat(self.started_at).tzinfo is not None
        except ValueError:
            aware = False
        if not aware:
            raise _FieldError("started_at", f"expected ISO 8601 with a UTC offset, got {self.started_at!r}")


@dataclass(frozen=True, kw_only=True)
class Where:
    """The machine, without its name. `emulated` marks the CPU device of `graph`: it claims no speed."""

    device: Literal["cpu", "gpu"]
    device_name: str
    driver: str | None
    emulated: bool

    def __post_init__(self) -> None:
        if self.emulated and self.device != "cpu":
            raise _FieldError("emulated", "only the device 'cpu' can be emulated, got 'gpu'")


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Versions of what took part; None for what is not installed."""

    breakgraph: str
    torch: str
    transformers: str | None
    triton: str | None
    python: str
    cuda: str | None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model: the name of a preset, or the configuration fields that matter; and the dtype of its weights."""

    model: str | Mapping[str, Scalar]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """One result file. `excluded` lists what the numbers leave out, `notes` what a reader must know."""

    run: Run
    where: Where
    versions: Versions
    shape: Shape
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise _FieldError("schema_version", f"this breakgraph reads {SCHEMA_VERSION}, got {self.schema_version!r}")
        if not self.rows:
            raise _FieldError("rows", "expected at least one row, got none")


def to_json(result: Result) -> str:
    """The document as `write_result` writes it."""
    document = dataclasses.asdict(result)
    _parse(Result, _as_json_types(document))  # constructors check values, this checks types
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(text: str) -> Result:
    """Parse a document. Raises: ConfigError naming the path of the first bad field."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"expected a JSON document, got text that does not parse: {error}") from None
    result: Result = _parse(Result, document)
    return result


def write_result(path: Path | str, result: Result) -> None:
    """Write the file in one step: readers see the old document or the new one, never a part. Makes the folder.

    Raises:
        ConfigError: it cannot be written there.
    """
    path = Path(path)
    text = to_json(result)
    check_writable(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_writable(path: Path | str) -> None:
    """Before something is measured that is to be written there. Makes the folder.

    Raises:
        ConfigError: it cannot be written there.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"no result can be written to {path}: {error.strerror or error}") from None
    if path.is_dir():
        raise ConfigError(f"no result can be written to {path}: it is a folder")


def read_result(path: Path | str) -> Result:
    """Read a result file. Raises: ConfigError naming the file and the path of the first bad field."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"no result file at {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"result file {path}: expected UTF-8 text: {error}") from None
    try:
        return from_json(text)
    except ConfigError as error:
        raise ConfigError(f"result file {path}: {error}") from None


def here(command: str, device: torch.device | str) -> tuple[Run, Where, Versions]:
    """The facts of this process: what runs, on what, with which versions.

    Args:
        command: the command line to repeat the measurement with.
        device: a torch device; "cpu" is recorded as emulated.
    """
    import torch

    run = Run(command=command, git_commit=_git_commit(), started_at=datetime.now(UTC).isoformat(timespec="seconds"))
    kind = torch.device(device)
    if kind.type == "cpu":
        where = Where(device="cpu", device_name=cpu_name(), driver=None, emulated=True)
    else:
        name = torch.cuda.get_device_name(kind)
        where = Where(device="gpu", device_name=name, driver=gpu_driver(), emulated=False)
    versions = Versions(
        breakgraph=__version__,
        torch=str(torch.__version__),  # a subclass of str
        transformers=installed_version("transformers"),
        triton=installed_version("triton"),
        python=platform.python_version(),
        cuda=torch.version.cuda,
    )
    return run, where, versions


def installed_version(package: str) -> str | None:
    """The version pip knows, without importing the package; None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's marketing name where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def gpu_driver() -> str | None:
    """The NVIDIA driver's version; None where nvidia-smi is missing or fails."""
    lines = _output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return lines.splitlines()[0].strip() if lines else None


def _git_commit() -> str | None:
    """The checkout this package runs from, not the one a virtual environment happens to lie in."""
    package = Path(__file__).resolve().parents[1]
    root = _output_of(["git", "-C", str(package), "rev-parse", "--show-toplevel"])
    if not root or Path(root).resolve() / "src" / "breakgraph" != package:
        return None
    return _output_of(["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]) or None


def _output_of(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _as_json_types(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_json_types(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_as_json_types(item) for item in value]
    return value


def _parse(hint: Any, value: Any, path: str = "") -> Any:
    """Turn JSON `value` into what the type hint says, or raise with the path of the first misfit."""
    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _parse_record(hint, value, path)
    if origin is Literal:
        if value in args:
            return value
    elif origin in (types.UnionType, Union):
        return _parse_union(hint, value, path)
    elif origin is tuple:
        if isinstance(value, list):
            return tuple(_parse(args[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    elif origin is Mapping:
        if isinstance(value, dict):
            return {key: _parse(args[1], item, f"{path}.{key}") for key, item in value.items() if _is_name(key, path)}
    elif type(value) is hint or (hint is float and type(value) is int):
        return value
    raise _misfit(hint, value, path)


def _parse_record(cls: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise _misfit(dict, value, path)
    hints = get_type_hints(cls)
    for name in value:
        if name not in hints:
            raise ConfigError(f"{_join(path, name)}: unknown field; expected one of {', '.join(hints)}")
    for name in hints:
        if name not in value:
            raise ConfigError(f"{_join(path, name)}: missing field")
    parsed = {name: _parse(hints[name], item, _join(path, name)) for name, item in value.items()}
    try:
        return cls(**parsed)
    except _FieldError as error:
        raise ConfigError(f"{_join(path, error.field)}: {error.message}") from None


def _parse_union(hint: Any, value: Any, path: str) -> Any:
    wanted = Mapping if isinstance(value, dict) else type(value)
    for choice in get_args(hint):
        if (get_origin(choice) or choice) is wanted:
            return _parse(choice, value, path)
    raise _misfit(hint, value, path)


def _is_name(key: Any, path: str) -> bool:
    if not isinstance(key, str) or not key:
        raise ConfigError(f"{path}: expected non-empty names as keys, got {key!r}")
    return True


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _misfit(hint: Any, value: Any, path: str) -> ConfigError:
    expected = hint.__name__ if isinstance(hint, type) else re.sub(r"\w+\.", "", str(hint))
    got = "null" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"
    return ConfigError(f"{path or 'document'}: expected {expected}, got {got}")
