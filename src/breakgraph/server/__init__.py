"""An HTTP server with OpenAI's API. Needs the extra `breakgraph[server]`; only `breakgraph serve` loads it."""
