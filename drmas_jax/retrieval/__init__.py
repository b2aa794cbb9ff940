"""Passages for queries.

    bm25      an index of words over a folder of passages; the default
    memory    the same of a few passages that a module has, without files
    dense     an encoder in JAX, and an exact search on the devices
    client    a server of either, or of Search-R1 or Dr. MAS, over HTTP
    serve     python -m drmas_jax.retrieval.serve

The first four have `make(..)`, whose keyword-only parameters are the options
of a config's entry, and which returns a `retriever.Source`.
"""
