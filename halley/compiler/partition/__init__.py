"""The partition pass: forward around MoE layers as pipelines of parts of the batch.

``axes`` sweeps over a graph by the ``rules``, ``ranges`` chooses by what ``pipeline_cost`` says,
``divide`` rewrites; ``plan`` is the pass.
"""
