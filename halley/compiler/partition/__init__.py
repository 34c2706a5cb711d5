"""The partition pass: segments of forward around MoE layers run in 2 to 8 microbatches.

The all-to-all of one microbatch overlaps the computation of another. ``num_parts``, in options and
plans, is the number of microbatches. ``partition_plan`` is the entry: read it first, then
``segment`` and ``divide``.

    graph
      -> propagation      batch dimension of each value, by the rules in rules and view_rules
      -> segment_search   which segments, in how many microbatches: dynamic programming over
           segment          the pipeline of one segment, or why there is none
           pipeline_cost    its time in simulation, with the operators of concat_cost
      -> divide           rewrites the graph: a copy of each node for each microbatch
           concat           full-batch values from the results of the microbatches
"""
