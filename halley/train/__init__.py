"""The reference trainer: data, optimizer, checkpoints, export and the training loop.

Start with ``trainer.py``, which reads top to bottom, then ``step.py``.
"""
