"""The server against its own OpenAPI document: whatever fits or breaks it, nothing is answered with a 5xx."""

from __future__ import annotations

from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode

from unit.server.conftest import MODEL, RunningServer

POSTS = ["/v1/completions", "/v1/chat/completions"]
GETS = ["/v1/models", "/v1/models/{model}", "/v1/graphs", "/health", "/metrics"]
CASES = [
    *((path, mode) for path in POSTS for mode in GenerationMode),
    # Nothing that is sent with these can be wrong.
    *((path, GenerationMode.POSITIVE) for path in GETS),
]
ERROR_KEYS = {"message", "type", "param", "code"}


def tame(body: Any) -> Any:
    """Names the model, and asks for few and short answers; all else stays as it was made."""
    if not isinstance(body, dict):
        return body
    limits = {"n": 2, "max_tokens": 4, "max_completion_tokens": 4}
    small = {name: min(body[name], top) for name, top in limits.items() if isinstance(body.get(name), int)}
    named = {"model": MODEL} if isinstance(body.get("model"), str) else {}
    return {"max_tokens": 4, **body, **small, **named}


@pytest.fixture(scope="module")
def document(server: RunningServer) -> dict[str, Any]:
    with httpx.Client(base_url=server.url) as client:
        found: dict[str, Any] = client.get("/openapi.json").json()
    return found


def test_every_path_is_in_the_document(document: dict[str, Any]) -> None:
    assert sorted(document["paths"]) == sorted(POSTS + GETS)
    statuses = {status for path in document["paths"].values() for way in path.values() for status in way["responses"]}
    assert "422" not in statuses


@pytest.mark.parametrize(("path", "mode"), CASES)
def test_no_case_is_answered_with_a_5xx(
    server: RunningServer, document: dict[str, Any], path: str, mode: GenerationMode
) -> None:
    (operation,) = [
        found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations() if found.ok().path == path
    ]
    seen: list[int] = []

    @hypothesis.settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        case.body = tame(case.body)
        response = case.call(base_url=server.url)
        assert response.status_code < 500, response.text
        seen.append(response.status_code)
        if response.status_code >= 400:
            assert response.json()["error"].keys() == ERROR_KEYS

    check()
    if mode is GenerationMode.POSITIVE and path != "/v1/models/{model}":
        assert 200 in seen
    server.assert_idle()
