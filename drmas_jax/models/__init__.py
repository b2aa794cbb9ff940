"""The decoder and its families.

transformer.py is the one decoder, layers.py its arithmetic. weights.py reads
and writes Hugging Face folders, files.py what is in one safetensors file. Every
other file is a family: the sizes of its public checkpoints, how its config.json
is read and written, and the Hugging Face name of each parameter.
"""
