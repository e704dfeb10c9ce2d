"""The mode of autograd in which an engine works, whatever mode its caller is in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def without_autograd(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function without gradients, and outside of inference mode.

    Caches, buffers and tables outlive the call that makes them. Those made in inference mode could not be written to
    outside of it, so that one call of a user who is in it would break all later ones of users who are not.
    """

    @functools.wraps(function)
    def entered(*args: P.args, **kwargs: P.kwargs) -> T:
        # In this order: leaving inference mode turns gradients on.
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return entered
