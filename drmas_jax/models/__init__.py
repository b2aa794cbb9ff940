"""The decoder and its families.

transformer.py is the one decoder, layers.py its arithmetic, weights.py reads
and writes Hugging Face folders. Every other file is a family: how its
config.json is read and written, and the Hugging Face name of each parameter.
"""
