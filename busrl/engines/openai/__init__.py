"""The engine behind an OpenAI-compatible endpoint (`engine = "openai"`); see docs/endpoint.md."""
