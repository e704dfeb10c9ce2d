"""Fit the empirical rule that chooses between pass-KV and pass-Q: what every rank of ``megakv fit-policy`` runs.

On several hosts start it by hand: ``deepspeed --hostfile FILE launcher/fit.py --model DIR --json FIT``.
"""

from __future__ import annotations

import argparse

from megakv.costmodel.policy_fit import PolicyFit
from megakv.costmodel.policy_points import fit_policy
from megakv.launcher.environment import adopt_slurm, own_rank
from megakv.launcher.hardware import layer_shape
from megakv.launcher.ranks import DTYPES, Progress, add_rank_arguments, join_ranks
from megakv.launcher.voice import one_voice, quiet_libraries

DEFAULT_SECONDS = 120.0
DEFAULT_TOKENS = (1024, 4096, 16384)


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """What a rank of ``megakv fit-policy`` takes."""
    add_rank_arguments(
        parser,
        seconds=DEFAULT_SECONDS,
        seconds_help=f"how long it may take, about (default {DEFAULT_SECONDS:g}); slow points are left out",
    )
    parser.add_argument("--model", required=True, help="directory, hub id or config file; no weights are read")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=DEFAULT_TOKENS,
        help=f"contexts T + P to measure at (default {' '.join(map(str, DEFAULT_TOKENS))})",
    )


def check_tokens(tokens: list[int], ring: int) -> None:
    """Refuse contexts without a point to measure.

    Raises
    ------
    ValueError
        Naming the value and what is allowed.
    """
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


def main() -> None:
    """Entry of every rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_fit_arguments(parser)
    arguments = parser.parse_args()
    quiet_libraries()
    with one_voice():
        adopt_slurm()
        comm = join_ranks(arguments)
        check_tokens(arguments.tokens, comm.mesh.cp_size)
        shape = layer_shape(arguments)
        progress = Progress("fit-policy")
        fit = fit_policy(
            comm,
            shape,
            dtype=DTYPES[arguments.dtype],
            totals=arguments.tokens,
            seconds=arguments.seconds,
            report=progress.step,
        )
        progress.close()
        if own_rank() == 0:
            fit.save(arguments.json)


if __name__ == "__main__":
    main()
