"""Plug-ins: run the experts of Transformers, torchtitan, Megatron-Core and DeepSpeed by Halley.

Each framework is imported only by its own plug-in. Start with ``contract.py``.
"""
