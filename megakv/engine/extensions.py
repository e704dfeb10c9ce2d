"""Methods and policies from packages of others: registered in Python, named in the JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING

from megakv.attention.method import AttentionMethod
from megakv.attention.methods import METHODS as ATTENTION
from megakv.attention.methods import MethodEntry
from megakv.fairkv.method import CompressionMethod
from megakv.fairkv.methods import METHODS as COMPRESSION
from megakv.injection.policy import POLICIES, Policy
from megakv.offload.method import METHODS as OFFLOAD
from megakv.weights import formats

if TYPE_CHECKING:
    from megakv.offload.method import OffloadMethod
    from megakv.weights.formats import WeightFormat


def register_prefill_method(
    name: str,
    make: Callable[[], AttentionMethod],
    *,
    contiguous: bool = False,
    keys_stay: bool = False,
    decode: bool = False,
) -> None:
    """Make an attention method a value of ``megakv.context_parallel.prefill``.

    Parameters
    ----------
    name
        Value in the JSON.
    make
        Class of the method, or a function that makes it once for an engine: `megakv.attention.method.AttentionMethod`.
    contiguous
        Whether its ranks compute consecutive tokens, instead of balanced chunks.
    keys_stay
        Whether no cached key and value leaves its rank: queries travel, or every rank has them.
    decode
        Whether it is a value of ``megakv.context_parallel.decode``, too.

    Raises
    ------
    ValueError
        If the name is taken, or `make` is a method itself.
    """
    try:
        signature(make).bind()
    except TypeError:
        raise ValueError(
            f"attention method {name!r}: {make!r} takes arguments; allowed: its class, or lambda: method"
        ) from None
    ATTENTION.register(name, MethodEntry(make, prefill=True, decode=decode, contiguous=contiguous, keys_stay=keys_stay))


def register_offload_method(name: str, method: OffloadMethod) -> None:
    """Make a way to divide cached tokens a value of ``megakv.offload.method``, and a choice of ``auto``.

    Parameters
    ----------
    name
        Value in the JSON.
    method
        What splits a group's tokens: `megakv.offload.method.OffloadMethod`.

    Raises
    ------
    ValueError
        If the name is taken, or `method` is a class.
    """
    if isinstance(method, type):
        raise ValueError(f"offload method {name!r}: {method!r} is a class; allowed: what it makes, {method.__name__}()")
    OFFLOAD.register(name, method)


def register_compression_method(method: type[CompressionMethod]) -> None:
    """Make a compression method a value of ``megakv.fairkv.method``; its fields become keys of ``megakv.fairkv``.

    Parameters
    ----------
    method
        A subclass of `megakv.fairkv.method.CompressionMethod`, with a `name`.

    Raises
    ------
    ValueError
        If the name is taken.
    """
    COMPRESSION.register(method.name, method)


def register_weight_format(kind: type[WeightFormat]) -> None:
    """Make a weight format a value of ``megakv.weights.format``, or let it recognise folders of quantised weights.

    Parameters
    ----------
    kind
        A subclass of `megakv.weights.formats.WeightFormat`, with a `name`. With `at_load` plain weights are brought
        into it as they are read; without, it is asked before those of MegaKV whether it `recognises` a folder whose
        config.json has a ``quantization_config``.

    Raises
    ------
    ValueError
        If the name is taken.
    """
    formats.register(kind)


def register_policy(model_type: str, policy: Policy) -> None:
    """Tell what MegaKV must know of a model type beyond transformers' attention interface.

    Raises
    ------
    ValueError
        If the model type has a policy.
    """
    POLICIES.register(model_type, policy)


def import_plugins(modules: object, source: str) -> None:
    """Import the modules of ``megakv.plugins``, installed or in the working directory: they register what they bring.

    Raises
    ------
    ValueError
        If they are no list of names, or one cannot be imported.
    """
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise ValueError(f"{source}: megakv.plugins = {modules!r}: allowed: a list of modules, such as ['my_methods']")
    # Console scripts, and ranks that deepspeed starts, do not look there by themselves. Last: it hides no package.
    if modules and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            raise ValueError(
                f"{source}: megakv.plugins names {name!r}, which cannot be imported on this host: {error}; install it, "
                f"or start in the folder that it lies in, not in {os.getcwd()}"
            ) from error
