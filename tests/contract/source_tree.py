"""The sources of breakgraph as syntax trees: what each module imports and how large it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
_MODULE_NAME = re.compile(r"breakgraph(\.[A-Za-z_]\w*)+")


@dataclass(frozen=True)
class Import:
    """One import. `target` is the dotted module, or module.name of a `from` import; `lazy` is one in a function."""

    target: str
    line: int
    lazy: bool


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    text: str
    is_package: bool

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def unit(self) -> str:
        """The first name below breakgraph: the package or module that a layer is."""
        return self.name.split(".")[1] if "." in self.name else "__init__"

    def where(self, line: int) -> str:
        return f"{self.path.name}:{line} ({self.name})"

    def imports(self) -> list[Import]:
        """Every import outside `if TYPE_CHECKING:`, with modules named by string for lazy loading."""
        return list(self._imports_below(self.tree, lazy=False))

    def _imports_below(self, node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                for other in child.orelse:
                    yield from self._imports_below(other, lazy)
                continue
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = self._absolute(child.module, child.level)
                yield from (Import(f"{base}.{alias.name}", child.lineno, lazy) for alias in child.names)
            elif isinstance(child, ast.Constant) and isinstance(child.value, str):
                name = child.value.partition(":")[0]
                if _MODULE_NAME.fullmatch(name) and is_module(name):
                    yield Import(name, child.lineno, lazy=True)
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from self._imports_below(child, lazy or inside)

    def _absolute(self, module: str | None, level: int) -> str:
        if level == 0:
            return module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - level + (1 if self.is_package else 0)]
        return ".".join([*parts, *([module] if module else [])])


def is_module(name: str) -> bool:
    path = SRC.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def parse_module(text: str, name: str, is_package: bool = False) -> Module:
    return Module(name=name, path=SRC / (name.replace(".", "/") + ".py"), text=text, is_package=is_package)


def all_modules() -> list[Module]:
    modules = []
    for path in sorted((SRC / "breakgraph").rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(Module(name=name, path=path, text=path.read_text(encoding="utf-8"), is_package=is_package))
    return modules


def modules_of(*units: str) -> list[Module]:
    return [module for module in all_modules() if module.unit in units]
