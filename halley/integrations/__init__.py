"""Plug-ins: Halley runs the experts of Transformers, torchtitan, Megatron-Core and DeepSpeed.

Each plug-in has ``enable``, imports its framework and no other. Start with ``contract.py``.
"""
