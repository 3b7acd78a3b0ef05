"""The engine that drives vLLM in separate processes (`engine = "vllm"`); see docs/vllm.md."""
