"""The one exception class of MegaKV's own; wrong values are plain ``ValueError``."""


class MegaKVError(RuntimeError):
    """A failure at run time that a user can act on: a lost peer, a broken checkpoint, a session past its capacity.

    The message names the setting to change, its value and what would work.
    """


class PeerLostError(MegaKVError):
    """A peer's process is gone, or it did not answer in time. Any rank may be the one that notices."""
