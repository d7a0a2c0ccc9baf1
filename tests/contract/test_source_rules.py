"""Rules that every source file keeps: sizes, words, and who reads the process's surroundings."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

import pytest

from contract.source_tree import Module, all_modules, modules_of, parse_module

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70

_MODEL_NAMES = re.compile(
    r"llama|mistral|mixtral|qwen|gpt[_-]?oss|gpt2|smollm|deepseek|gemma|glm|kimi|bloom|falcon|z[_-]image|flux",
    re.IGNORECASE,
)
_ENVIRONMENT = {"os": {"environ", "environb", "getenv", "putenv", "unsetenv"}, "sys": {"argv", "orig_argv"}}
_VAGUE_CLASS = re.compile(r"(Manager|Helper|Mixin|Meta|Info)$")


def oversized(module: Module) -> Iterator[str]:
    lines = module.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{module.name}: {lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{module.where(node.lineno)}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def model_names(module: Module) -> Iterator[str]:
    for number, line in enumerate(module.text.splitlines(), start=1):
        if found := _MODEL_NAMES.search(line):
            yield f"{module.where(number)}: names the model {found.group()!r}"


def environment_reads(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = {node.attr} & _ENVIRONMENT.get(node.value.id, set())
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            used = {alias.name for alias in node.names} & _ENVIRONMENT.get(node.module or "", set())
        else:
            continue
        for name in used:
            yield f"{module.where(node.lineno)}: uses {name}; only cli reads arguments and the environment"


def mode_tests(module: Module) -> Iterator[str]:
    """Questions about which backend or phase this is: differences are data in a spec, or a subclass."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "type", "getattr", "hasattr"):
            asked = [node.args[0]] if node.args else []
        elif isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            asked = [node.subject]
        else:
            continue
        for expression in map(ast.unparse, asked):
            if re.search(r"(^|[._])backend(\.name)?$", expression) or re.search(r"(^|\.)phase$", expression):
                yield f"{module.where(node.lineno)}: asks about {expression}"


def vague_classes(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and _VAGUE_CLASS.search(node.name):
            yield f"{module.where(node.lineno)}: class {node.name}; name what it owns or does"


def test_sizes() -> None:
    assert not [fault for module in all_modules() for fault in oversized(module)]


def test_generic_layers_name_no_model() -> None:
    assert not [fault for module in modules_of("graph", "backends", "runners") for fault in model_names(module)]


def test_only_cli_reads_arguments_and_environment() -> None:
    others = [module for module in all_modules() if module.unit != "cli"]
    assert not [fault for module in others for fault in environment_reads(module)]


def test_runners_ask_no_mode() -> None:
    assert not [fault for module in modules_of("runners") for fault in mode_tests(module)]


def test_class_names_say_something() -> None:
    assert not [fault for module in all_modules() for fault in vague_classes(module)]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (oversized, "x = 1\n" * 401),
        (oversized, "def f():\n" + "    x = 1\n" * 70),
        (model_names, "# as GPT-OSS does\n"),
        (model_names, "QWEN = 1\n"),
        (environment_reads, "import os\nx = os.environ.get('HOME')\n"),
        (environment_reads, "def f():\n    return os.getenv('HOME')\n"),
        (environment_reads, "from sys import argv\n"),
        (mode_tests, "if isinstance(self.backend, Full):\n    pass\n"),
        (mode_tests, "if self.spec.phase == 'prefill':\n    pass\n"),
        (mode_tests, "ok = backend.name in ('full',)\n"),
        (mode_tests, "match phase:\n    case 'decode':\n        pass\n"),
        (vague_classes, "class BufferManager:\n    pass\n"),
    ],
)
def test_a_broken_rule_is_seen(rule: Callable[[Module], Iterator[str]], text: str) -> None:
    assert list(rule(parse_module(text, "breakgraph.runners.sample")))


def test_the_largest_allowed_sizes_pass() -> None:
    function = "def f():\n" + "    x = 1\n" * 69
    assert not list(oversized(parse_module(function + "x = 1\n" * 330, "breakgraph.runners.sample")))
