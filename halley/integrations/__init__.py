"""Plug-ins that let Halley run experts of Transformers, torchtitan, Megatron-Core and DeepSpeed.

Each plug-in imports its framework and no other. Its ``enable`` changes the framework (Transformers,
DeepSpeed) or returns a changed configuration (torchtitan, Megatron-Core). Start with
``contract.py``.
"""
