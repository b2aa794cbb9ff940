"""Reinforcement learning of multi-agent LLM teams in JAX (Dr. MAS)."""
