"""What an operator sees: the graphs as data and as a page, and the metrics."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from breakgraph.server.graphs import graphs_page, of_replicas
from unit.server.conftest import MODEL, RunningServer

BODY = {"model": MODEL, "prompt": "some words", "max_tokens": 6, "temperature": 0}


def samples(http: httpx.Client) -> dict[tuple[str, ...], float]:
    """Value by name and label values."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_graphs_say_what_is_captured_and_what_ran(http: httpx.Client, server: RunningServer) -> None:
    before = http.get("/v1/graphs").json()
    assert http.post("/v1/completions", json=BODY).status_code == 200
    after = http.get("/v1/graphs").json()
    assert [phase["phase"] for phase in after["phases"]] == ["prefill", "decode"]
    for phase, earlier, steps in zip(after["phases"], before["phases"], (1, 5), strict=True):
        assert phase["num_replays"] - earlier["num_replays"] == steps
        assert (phase["hit_rate"], phase["num_eager_steps"]) == (1.0, 0)
        assert sum(bucket["num_replays"] for bucket in phase["buckets"]) == phase["num_replays"]
    prefill, decode = after["phases"]
    assert [bucket["bucket"] for bucket in prefill["buckets"]] == [32]
    assert (prefill["buckets"][0]["num_breaks"], decode["buckets"][0]["num_breaks"]) == (2, 0)
    stats = server.stats()
    assert after["memory"]["pool_bytes"] == stats["pool_bytes"] > 0
    assert after["memory"]["num_free_kv_blocks"] == 64


class _Page(HTMLParser):
    """Text, and everything that would be loaded from elsewhere."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.open: list[str] = []
        self.loads: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {name}" for name, to in attrs if name in ("src", "href") and not str(to).startswith("#")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_browser_gets_a_page_that_needs_nothing_else(http: httpx.Client, server: RunningServer) -> None:
    http.post("/v1/completions", json=BODY)
    response = http.get("/v1/graphs", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    page = _Page(response.text)
    assert (page.open, page.loads) == ([], [])
    text = " ".join(page.text)
    for expected in ("Prefill", "Decode", "100.0 %", "backend breakable", "KV cache", "0 of 64", "bucket (requests)"):
        assert expected in text


COMMON: dict[str, Any] = {
    "model": "<script>",
    "device": "cpu",
    "emulated": True,
    "dtype": "float32",
    "max_model_len": 8,
}


def engine_state(num_running: int = 0, num_replays: int = 0, num_eager: int = 3) -> dict[str, Any]:
    num_steps = num_replays + num_eager
    return COMMON | {
        "phases": [
            {
                "phase": "decode",
                "attention": "<b>",
                "backend": "eager",
                "num_replays": num_replays,
                "num_eager_steps": num_eager,
                "hit_rate": num_replays / num_steps if num_steps else None,
                "num_eager_steps_by_reason": {"backend_eager": num_eager, "<b>": 1},
                "num_padded_tokens": 0,
                "buckets": [],
            }
        ],
        "requests": {"num_running": num_running, "num_waiting": 7, "num_preemptions": 0},
        "prefix_cache": {"num_prompt_tokens": 0, "num_prefix_cached_tokens": 0},
        "memory": dict.fromkeys(("weight_bytes", "kv_cache_bytes", "pool_bytes", "output_bytes"), 0)
        | {"num_kv_blocks": 5, "num_free_kv_blocks": 4 - num_running},
    }


def test_what_a_page_shows_is_escaped() -> None:
    of_several = of_replicas({"<b>'": engine_state(), "b": engine_state()})
    for page in (graphs_page(engine_state()), graphs_page(of_several)):
        assert "<script>" not in page
        assert "<b>" not in page.replace("<b class=", "")
        assert "this phase does not capture" in page
        assert "Nothing is captured." in page
    assert "<section id='&lt;b&gt;&#x27;'>" in graphs_page(of_several)


def test_the_page_of_replicas_has_all_of_them_at_a_glance_then_each() -> None:
    states = {"one": engine_state(num_running=2, num_replays=1), "two": engine_state(num_eager=0)}
    text = graphs_page(of_replicas(states))
    page = _Page(text)
    assert (page.open, page.loads) == ([], [])
    words = " ".join(" ".join(page.text).split())
    glance, *each = words.split(" Replica ")
    assert "one 2 7 2 of 4 25.0 % of 4 steps two 0 7 0 of 4 no step yet" in glance
    assert [part.split()[0] for part in each] == ["one", "two"]
    assert ["2 of 4" in part for part in each] == [True, False]
    for name in states:
        assert text.index(f"href='#{name}'") < text.index(f"id='{name}'")
    assert "Replica" not in graphs_page(states["one"])


def test_metrics_count_what_happened(http: httpx.Client) -> None:
    before = samples(http)
    assert http.post("/v1/completions", json=BODY).status_code == 200
    assert http.post("/v1/completions", json=BODY | {"n": 0}).status_code == 400
    assert http.get("/elsewhere").status_code == 404
    after = samples(http)

    def grown(*name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("breakgraph_http_requests_total", "/v1/completions", "200") == 1
    assert grown("breakgraph_http_requests_total", "/v1/completions", "400") == 1
    assert grown("breakgraph_http_requests_total", "other", "404") == 1
    assert grown("breakgraph_generated_tokens_total") == 6
    assert grown("breakgraph_prompt_tokens_total") == len("some words")
    assert grown("breakgraph_answers_total", "length") == 1
    assert grown("breakgraph_time_to_first_token_seconds_count") == 1
    assert grown("breakgraph_inter_token_seconds_count") == 5
    assert grown("breakgraph_answer_seconds_count") == 1
    assert grown("breakgraph_graph_replays_total", "32", "prefill") == 1
    assert grown("breakgraph_graph_replays_total", "8", "decode") == 5
    assert grown("breakgraph_steps_ahead_total") == 5
    assert grown("breakgraph_steps_not_ahead_total", "all_end") == 1
    assert grown("breakgraph_void_rows_total") == 0
    assert after["breakgraph_kv_blocks", "free"] == after["breakgraph_kv_blocks", "usable"] == 64
    assert after["breakgraph_memory_bytes", "kv_cache"] > 0
    assert (after["breakgraph_requests_running",], after["breakgraph_requests_waiting",]) == (0, 0)
