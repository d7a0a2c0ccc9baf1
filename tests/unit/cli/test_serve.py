from __future__ import annotations

import importlib.util
import socket
import sys
from typing import Any

import pytest

from breakgraph.cli import serve as command
from breakgraph.cli.main import main
from breakgraph.server import run as server_run
from breakgraph.server.config import ServerConfig

EXTRA = ("fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn")


@pytest.fixture
def without_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing of the extra were installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] in EXTRA or name == "breakgraph.server.run"]:
        monkeypatch.delitem(sys.modules, name)
    for name in EXTRA:
        monkeypatch.setitem(sys.modules, name, None)
    found = importlib.util.find_spec
    monkeypatch.setattr(command, "find_spec", lambda name: None if name in EXTRA else found(name))


@pytest.mark.usefixtures("without_extra")
def test_without_the_extra_it_says_what_to_install(model_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *model_args]) == 2
    message = "serve needs fastapi, prometheus_client, uvicorn; run: pip install 'breakgraph[server]'"
    assert capsys.readouterr().err == f"breakgraph: {message}\n"


@pytest.mark.usefixtures("without_extra")
def test_without_the_extra_generate_works(model_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "--prompt", "hello", "--max-tokens", "2", "--temperature", "0"]
    assert main([*argv, *model_args]) == 0
    assert capsys.readouterr().out.strip()


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever address is asked for, it is free."""
    monkeypatch.setattr(server_run, "bind", lambda config: socket.socket())


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, unbound: None) -> list[tuple[Any, ServerConfig]]:
    """What would be served, instead of serving it."""
    found: list[tuple[Any, ServerConfig]] = []
    monkeypatch.setattr(server_run, "serve", lambda llm, config, bound: found.append((llm, config)))
    return found


def test_options_reach_the_server_and_the_engine(
    model_args: list[str], served: list[tuple[Any, ServerConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAKGRAPH_API_KEY", "from the environment")
    argv = ["--port", "1234", "--max-waiting", "3", "--request-timeout", "1.5", "--served-model-name", "mine"]
    assert main(["serve", *argv, *model_args]) == 0
    ((llm, config),) = served
    assert config == ServerConfig(
        port=1234, max_waiting=3, request_timeout=1.5, served_model_name="mine", api_key="from the environment"
    )
    assert llm.config.sizes.max_num_seqs == 2


def test_without_options_it_listens_on_loopback_alone(
    model_args: list[str], served: list[tuple[Any, ServerConfig]]
) -> None:
    assert main(["serve", *model_args]) == 0
    assert served[0][1] == ServerConfig()
    assert ServerConfig().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "70000"], "port must be an integer from 0 to 65535, got 70000"),
        (["--load-format", "dummy"], "--load-format dummy has no tokenizer"),
        (["--replicas", "0"], "--replicas must be an integer >= 1, got 0"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1 port 8000"),
        (["--host", "no such host"], "cannot listen on no such host port 8000"),
        (["--api-key", ""], "api_key must be a non-empty string, got ''; leave it out for none"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    model_args: list[str], argv: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *model_args, *argv]) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("breakgraph: ")
    assert message in last


def test_an_empty_key_in_the_environment_is_no_open_server(
    model_args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAKGRAPH_API_KEY", "")
    assert main(["serve", *model_args]) == 2
    assert "api_key must be a non-empty string" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_in_use_is_seen_before_a_model_is_loaded(
    model_args: list[str], host: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakgraph.engine.llm.LLM", None)
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as other:
        port = str(other.getsockname()[1])
        assert main(["serve", *model_args, "--host", host, "--port", port]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"breakgraph: cannot listen on {host} port {port}: ")
    assert "give another --host or --port" in error


def test_until_it_serves_clients_are_refused() -> None:
    with server_run.bind(ServerConfig(port=0)) as bound, pytest.raises(ConnectionRefusedError):
        socket.create_connection(bound.getsockname())


def test_replicas_without_ray_say_what_to_install(
    model_args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "ray" else found(name))
    assert main(["serve", *model_args, "--replicas", "2"]) == 2
    assert capsys.readouterr().err == "breakgraph: replicas need Ray Serve; run: pip install 'breakgraph[ray]'\n"


def test_options_reach_the_replicas(model_args: list[str], monkeypatch: pytest.MonkeyPatch, unbound: None) -> None:
    from breakgraph.server import replicas

    asked: list[Any] = []
    monkeypatch.setattr(replicas, "serve_replicas", lambda *arguments: asked.append(arguments))
    assert main(["serve", *model_args, "--replicas", "3", "--port", "1", "--ray-address", "10.0.0.1:6379"]) == 0
    ((engine, config, _, num_replicas, address),) = asked
    assert (engine["max_num_seqs"], config, num_replicas, address) == (2, ServerConfig(port=1), 3, "10.0.0.1:6379")
