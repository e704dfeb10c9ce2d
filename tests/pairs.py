"""Whether this processor multiplies bfloat16 by pairs, and the library is compiled so."""

import functools

from megakv.attention.prefill import PrefillKernel
from megakv.base.library import library


@functools.cache
def without_pairs() -> str:
    """Why it does not; empty if it does."""
    try:
        PrefillKernel(library("prefill"), pairs=True)
    except OSError as error:
        return str(error)
    return ""
