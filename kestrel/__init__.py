"""Kestrel: an LLM server that treats the KV cache of a prefix as a build artifact."""

__version__ = "0.1.0"
