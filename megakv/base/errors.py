"""The one exception class of MegaKV's own; wrong values are plain ``ValueError``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class MegaKVError(RuntimeError):
    """A failure at run time that a user can act on: a lost peer, a broken checkpoint, a session past its capacity.

    The message names the setting to change, its value and what would work.

    Attributes
    ----------
    sequences : Tensor, optional
        Prompt and tokens ``[B, S]`` that `generate` had when it failed, so that nothing it found is lost.
    """

    sequences: Tensor | None = None


class PeerLostError(MegaKVError):
    """A peer's process is gone, or it did not answer in time. Any rank may be the one that notices."""
