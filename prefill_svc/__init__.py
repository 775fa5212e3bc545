"""Prefill replicas: read prompts and lease their KV."""
