"""Measure training steps of torchtitan and Transformers: their own expert parallelism, and Halley.

    python -m benchmarks.frameworks benchmarks/results       # 2 GPUs, all models, best settings
    python -m benchmarks.frameworks DIR --frameworks torchtitan --models mixtral-8x7b
    python -m benchmarks.frameworks DIR --frameworks torchtitan --variants standard,halley
    python -m benchmarks.frameworks DIR --device cpu --smoke --samples 2    # 2 CPU ranks

One run measures all variants of a framework on the same weights and tokens. A step is forward,
backward and AdamW. torchtitan's steps are those of its ``Trainer``, one job for each variant, and
the log of the trainer gives the time of each step. Steps of Transformers alternate between the
variants in one job. The first variant is the reference: if another variant's loss of step 3,
or the first gradient norm of its experts, differs by more than 1 %, it gets no time. A job that
fails gets a line with its error. ``VARIANTS`` in ``__main__.py`` lists the variants.

Models have their published width, and fewer layers. Mixtral has the layers of Qwen3 in torchtitan,
which has no Mixtral. The vocabulary is cut in proportion to the layers, so that the share of the
head in a step is that of the whole model. Tokens are runs of consecutive numbers below 1024, which
a model learns within a few steps.

``used_mib`` is the used memory of the GPU at the end of a step. Before that step, torch's cache is
emptied. It counts gaps of the allocator, buffers of NCCL, symmetric memory and the CUDA context.
Transformers' job has it if it runs one variant. ``peak_mib`` counts tensors and the pools of CUDA
graphs only. A step beyond ``max_load``, which runs twice, needs more memory than both.

torchtitan 0.3.0 asks for torch 2.12 or newer. With torch 2.11, ``torchtitan_job.py`` adds the names
that are missing, experts stay out of FSDP, blocks are compiled without run-time assertions, and all
steps use the attention mask of the first. This changes all variants alike, and needs as many ranks
of expert parallelism as GPUs. Data sets and TensorBoard are not used, so torchtitan runs without
these packages.

A machine without a network needs these wheels, 16 MiB for Python 3.12, beside torch and the
other dependencies of Transformers::

    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 -d WHEELS \\
        torchtitan==0.3.0 transformers==5.24.0 spmd_types==0.2.3 torchdata==0.11.0 tyro==1.0.17 \\
        docstring_parser==0.18.0 typeguard==4.6.1 xxhash==4.1.0
    pip install --no-index --no-deps --target SITE WHEELS/*.whl && export PYTHONPATH=SITE

``job.py`` defines a job and its result. ``__main__.py`` starts jobs, compares them and writes the
lines. ``torchtitan_job.py`` prepares torchtitan, which ``torchtitan_setup.py`` configures.
"""
