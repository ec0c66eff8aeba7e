"""Fused Triton kernels and a thin speculator for the drafting side of LLM speculative decoding."""

__version__ = "0.1.0"
