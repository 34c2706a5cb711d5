"""Functions of many small operators, which on a GPU are bound by memory until they are one."""

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch


_P = ParamSpec("_P")
_T = TypeVar("_T")


def compiled_on_gpu(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Compile a function of tensors at its first call with one on a GPU; elsewhere run it as it is.

    Part of a model that is compiled, it is part of that model's graphs.
    """

    @cache
    def compiled() -> Callable[_P, _T]:
        return torch.compile(function)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in args)
        return compiled()(*args, **kwargs) if on_gpu else function(*args, **kwargs)

    return call
