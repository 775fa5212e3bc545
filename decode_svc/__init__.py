"""Decode replicas: write answers, pulling prompts' KV from prefill replicas."""
