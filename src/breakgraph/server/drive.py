"""Sends load to a running server over HTTP, as its clients would, and times what they see."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx

from breakgraph.errors import ConfigError
from breakgraph.server.load import Load, Trace, answer_lengths, arrival_times, graph_use, make_prompts, summary


async def run_load(
    load: Load, api_key: str | None, check_device: Callable[[str], None] = lambda device: None
) -> dict[str, Any]:
    """Sends it all and returns the summary.

    Raises ConfigError when the server cannot be asked what it has, and what `check_device` raises for the server's
    device, before anything is sent.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None)
    try:
        url = httpx.URL(load.url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"url must be like http://127.0.0.1:8000, got {load.url!r}: {error}") from error
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=None) as http:
        try:
            models = (await http.get("/v1/models")).raise_for_status().json()
            before = (await http.get("/v1/graphs")).raise_for_status().json()
        except httpx.HTTPError as error:
            raise ConfigError(f"no answer from {load.url}: {error or type(error).__name__}") from error
        check_device(before["device"])
        model = models["data"][0]["id"]
        began = time.perf_counter()

        async def one(prompt: str, max_tokens: int, at: float) -> Trace:
            await asyncio.sleep(at - (time.perf_counter() - began))
            trace = Trace(time.perf_counter() - began)
            body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
            if load.mix is not None:
                body["ignore_eos"] = True
            try:
                await _stream(http, body, trace, began)
            except httpx.HTTPError as error:
                trace.error = type(error).__name__
            return trace

        requests = zip(make_prompts(load), answer_lengths(load), arrival_times(load), strict=True)
        traces = await asyncio.gather(*(one(*request) for request in requests))
        took_sec = time.perf_counter() - began
        after = (await http.get("/v1/graphs")).raise_for_status().json()
    setting = {"model": model, "device": after["device"], "dtype": after["dtype"]}
    return {**setting, **summary(traces, took_sec), "graphs": graph_use(before, after)}


async def _stream(http: httpx.AsyncClient, body: dict[str, Any], trace: Trace, began: float) -> None:
    streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=streaming) as response:
        if response.status_code != 200:
            trace.error = f"status {response.status_code}"
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                trace.error = str(event["error"]["code"])
            elif event["usage"] is not None:
                trace.num_prompt_tokens = event["usage"]["prompt_tokens"]
                trace.num_tokens = event["usage"]["completion_tokens"]
            elif event["choices"][0]["text"]:
                trace.token_times.append(time.perf_counter() - began)
