"""The engine behind an OpenAI-compatible endpoint (`engine = "openai"`); see docs/engines.md.

`engine` is what the rollout role talks to, `client` the requests in flight on a loop of their own, `answers` what the
server may say, `backoff` when to ask again, `updates` how a server is told of new weights.
"""
