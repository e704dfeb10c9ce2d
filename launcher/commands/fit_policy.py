"""``megakv fit-policy``, and what each of its ranks runs: the empirical rule that chooses between pass-KV and pass-Q.

On several hosts start them by hand:
``deepspeed --hostfile FILE --module megakv.launcher.commands.fit_policy --model DIR --json FIT``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from megakv.launcher.commands.profile import join_and_measure, measure, model_shape
from megakv.launcher.ranks import add_rank_arguments, dtype_of

if TYPE_CHECKING:
    from megakv.distributed.comm import Communicator
    from megakv.forward.policy_fit import PolicyFit

DEFAULT_SECONDS = 120.0
DEFAULT_TOKENS = (1024, 4096, 16384)


def add_arguments(parser: argparse.ArgumentParser, *, ranks: bool = True) -> None:
    """What the command takes; its ranks all but their number."""
    add_rank_arguments(
        parser,
        seconds=DEFAULT_SECONDS,
        seconds_help=f"how long it may take, about (default {DEFAULT_SECONDS:g}); slow points are left out",
        ranks=ranks,
    )
    parser.add_argument("--model", required=True, help="directory, hub id or config file; no weights are read")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=DEFAULT_TOKENS,
        help=f"contexts T + P to measure at (default {' '.join(map(str, DEFAULT_TOKENS))})",
    )


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Measure on ranks of this machine, and fit."""
    from megakv.forward.policy_fit import load_fit

    check_tokens(arguments.tokens, arguments.ranks // max(1, arguments.tp))
    measure(__name__, arguments)
    return summary(load_fit(arguments.json, setting="--json"))


def check_tokens(tokens: list[int], ring: int) -> None:
    """Refuse contexts without a point to measure."""
    if min(tokens) < 2 * ring:
        raise ValueError(f"--tokens {min(tokens)}: allowed: {2 * ring} or more, twice the context-parallel ranks")


def summary(fit: PolicyFit) -> dict[str, object]:
    """The constants and how well they choose."""
    return {
        "alpha": fit.alpha,
        "beta": fit.beta,
        "gamma": fit.gamma,
        "points": len(fit.points),
        "accuracy": round(fit.accuracy, 3),
        "accuracy where the methods differ by over 2%": round(fit.clear_accuracy, 3),
    }


def _measured(arguments: argparse.Namespace, comm: Communicator, report: Callable[[int], None]) -> PolicyFit:
    from megakv.planner.measure.policy_points import fit_policy

    check_tokens(arguments.tokens, comm.mesh.cp_size)
    return fit_policy(
        comm,
        model_shape(arguments).attention(tp_size=arguments.tp).absorbed,
        dtype=dtype_of(arguments),
        totals=arguments.tokens,
        seconds=arguments.seconds,
        report=report,
    )


if __name__ == "__main__":
    join_and_measure(__doc__, add_arguments, _measured)
