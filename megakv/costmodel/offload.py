"""Seconds of one layer whose keys and values lie off the accelerator (KVPR, Equations 6 to 11), and past the paper.

Of ``s'`` cached tokens a layer recomputes ``l`` from their activations, lets the host's processor attend to ``a`` where
they lie, and is sent the keys and values of the other ``s' - l - a``. Every time here is a maximum of straight lines in
``l``, so that its smallest value over all integers is found exactly, by the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Self


class Line(NamedTuple):
    """``intercept + slope * l`` seconds."""

    intercept: float
    slope: float

    def at(self, tokens: int) -> float:
        """Seconds at a split point."""
        return self.intercept + self.slope * tokens


@dataclass(frozen=True)
class LayerCosts:
    """What one layer's work costs at one step, in seconds; per token means per cached token of all sequences.

    Parameters
    ----------
    kv_s : float
        Sending a token's keys and values: ``2 kv_dim p / v_com`` (Equation 6 with kv_dim in place of h).
    activation_s : float
        Sending a token's activations: ``h p / v_com`` (Equation 6); 0 where they stay on the accelerator.
    recompute_s : float
        Recomputing a token's keys and values: ``4 h kv_dim / v_gpu`` (Equations 8 and 9).
    transfer_s, launch_s : float
        What each transfer and each recomputation costs whatever its size.
    device_s : float
        All other work of the layer on the accelerator, but for attending to cached tokens.
    attend_s : float
        Attending to a token on the accelerator.
    host_attend_s, host_fixed_s : float
        Attending to a token on the host, and what doing so at all costs.
    disk_kv_s, disk_activation_s : float
        As `kv_s` and `activation_s`, of a token whose rows lie on disk, where any do.
    head_s, tail_s : float
        Sending weights before the activations, and weights beside the keys and values, where weights are offloaded.
    """

    kv_s: float
    activation_s: float
    recompute_s: float
    transfer_s: float = 0.0
    launch_s: float = 0.0
    device_s: float = 0.0
    attend_s: float = 0.0
    host_attend_s: float = 0.0
    host_fixed_s: float = 0.0
    disk_kv_s: float = 0.0
    disk_activation_s: float = 0.0
    head_s: float = 0.0
    tail_s: float = 0.0

    @classmethod
    def of_machine(
        cls,
        *,
        hidden: int,
        kv_dim: int,
        element_bytes: int,
        link_bytes_s: float,
        flops_s: float,
        batch: int = 1,
    ) -> Self:
        """The paper's form: a token of each of `batch` sequences, by bandwidth and speed alone.

        Parameters
        ----------
        hidden, kv_dim : int
            Width of the activations, and of the keys (as of the values) of one token.
        element_bytes : int
        link_bytes_s, flops_s : float
            v_com and v_gpu.
        batch : int
            Sequences of equal length; `l` then counts tokens of each.
        """
        return cls(
            kv_s=2 * batch * kv_dim * element_bytes / link_bytes_s,
            activation_s=batch * hidden * element_bytes / link_bytes_s,
            recompute_s=4 * batch * hidden * kv_dim / flops_s,
        )

    def with_offloaded_weights(self, *, kv_weights_s: float, other_weights_s: float, fine: bool = True) -> Self:
        """Row-by-row with weights offloaded too (Figure 3a).

        Parameters
        ----------
        kv_weights_s, other_weights_s : float
            Sending W_K and W_V, and all other weights of the layer.
        fine : bool
            W_K and W_V come first, so that recomputation need not wait for the others (Figure 5b).
        """
        if fine:
            return replace(self, head_s=kv_weights_s, tail_s=other_weights_s)
        return replace(self, head_s=kv_weights_s + other_weights_s, tail_s=0.0)

    def in_column(self, *, weights_s: float, num_gpu_batches: int) -> Self:
        """Column-by-column: the next layer's weights come in as many pieces as batches share them (Algorithm 1)."""
        return replace(self, head_s=0.0, tail_s=weights_s / num_gpu_batches)


def split_lines(costs: LayerCosts, tokens: int, recomputing: bool, streaming: bool) -> tuple[Line, ...]:
    """Equation 10: activations first, then recomputation beside the transfer of the other keys and values.

    Parameters
    ----------
    costs : LayerCosts
    tokens : int
        s'.
    recomputing, streaming : bool
        Whether l > 0, and whether l < s'.
    """
    head = costs.head_s + recomputing * costs.transfer_s
    sent = head + costs.tail_s + streaming * costs.transfer_s + costs.kv_s * tokens
    return (
        Line(head + recomputing * costs.launch_s, costs.activation_s + costs.recompute_s),
        Line(sent, costs.activation_s - costs.kv_s),
    )


def split_seconds(costs: LayerCosts, tokens: int, recomputed: int) -> float:
    """Equation 10 at a split point."""
    lines = split_lines(costs, tokens, recomputed > 0, recomputed < tokens)
    return max(line.at(recomputed) for line in lines)


def chunked_lines(costs: LayerCosts, tokens: int, chunk: int, chunks: int, streaming: bool) -> tuple[Line, ...]:
    """One layer by itself whose activations come in chunks, each recomputed as it lands.

    The last chunk to be recomputed waits for whichever is slower; as all but the last chunk are of one size, only the
    first chunk, the last but one and the last can set the time.

    Parameters
    ----------
    costs : LayerCosts
    tokens : int
        s'.
    chunk, chunks : int
        Tokens of a chunk, and how many are sent: ``(chunks - 1) * chunk < l <= chunks * chunk``.
    streaming : bool
        Whether l < s'.
    """
    wait, launch, x, c = costs.transfer_s, costs.launch_s, costs.activation_s, costs.recompute_s
    sent = costs.head_s + costs.tail_s + (chunks + streaming) * wait + costs.kv_s * tokens
    lines = [Line(sent, x - costs.kv_s)]
    for index in {1, chunks - 1} if chunks > 1 else ():
        landed = costs.head_s + index * (wait + x * chunk)
        lines.append(Line(landed + (chunks - index + 1) * launch - c * (index - 1) * chunk, c))
    if chunks:
        lines.append(Line(costs.head_s + chunks * wait + launch - c * (chunks - 1) * chunk, x + c))
    return tuple(lines)


def chunked_seconds(costs: LayerCosts, tokens: int, recomputed: int, chunk: int) -> float:
    """Seconds of a layer by itself that recomputes `recomputed` tokens in chunks."""
    lines = chunked_lines(costs, tokens, chunk, -(-recomputed // chunk), recomputed < tokens)
    return max(line.at(recomputed) for line in lines)


def steady_lines(
    costs: LayerCosts, tokens: int, resident: int, on_host: int, chunks: int, streaming: bool
) -> tuple[Line, ...]:
    """A layer among many: while it computes, the next one's transfers run, so the busier side sets the pace.

    Parameters
    ----------
    costs : LayerCosts
    tokens, resident, on_host : int
        Cached tokens, those of them that never leave the accelerator, and those that the host attends to.
    chunks : int
        Pieces in which activations come.
    streaming : bool
        Whether any keys and values are sent.
    """
    rest = tokens - resident - on_host
    sent = costs.head_s + costs.tail_s + (chunks + streaming) * costs.transfer_s + costs.kv_s * rest
    busy = costs.device_s + chunks * costs.launch_s + costs.attend_s * (tokens - on_host)
    return Line(sent, costs.activation_s - costs.kv_s), Line(busy, costs.recompute_s)


def sending_seconds(nbytes: float, bytes_s: float) -> float:
    """Seconds of a link for so many bytes."""
    return nbytes / bytes_s


def link_rate(nbytes: float, busy_s: float) -> float:
    """Bytes per second of a link that moved so many while it was at work."""
    return nbytes / busy_s


def link_utilisation(nbytes: float, bytes_s: float, seconds: float) -> float:
    """Of what a link could have carried in some time, what it did carry; 0 where its bandwidth is not known."""
    carried = bytes_s * seconds
    return nbytes / carried if carried else 0.0


def affine(few: tuple[int, float], many: tuple[int, float], *, share: float = 0.0) -> tuple[float, float]:
    """Seconds per unit, and those that any number takes, from the seconds of a few units and of many.

    Parameters
    ----------
    few, many : tuple of int and float
        Units and seconds.
    share : float
        Of the seconds of many, those that it takes longer than a few at least: a difference that noise has swallowed
        would mean units that cost nothing.
    """
    slope = max(many[1] - few[1], share * many[1]) / max(many[0] - few[0], 1)
    return slope, max(0.0, few[1] - few[0] * slope)


TOKENS_ERR, FIXED_ERR = 1.0, 4.0
"""How far what was measured alone may be off beside other work, in parts of it: memory is shared with transfers, and
calls wait for Python, which one thread has at a time."""


def shown_parts(seconds: float, tokens_s: float, fixed_s: float) -> tuple[float, float]:
    """What work took over what was expected of it: of what depends on its tokens, and of what does not.

    One measurement cannot tell the two apart. What is more, or less, than expected goes to both by how much they may be
    off: in the least squares' sense, that is the likeliest pair that adds up to what was measured.

    Parameters
    ----------
    seconds : float
        Measured.
    tokens_s, fixed_s : float
        Expected, of both; together more than 0.
    """
    by_tokens, by_fixed = (TOKENS_ERR * tokens_s) ** 2, (FIXED_ERR * fixed_s) ** 2
    excess = (seconds - tokens_s - fixed_s) / (by_tokens + by_fixed)
    tokens, fixed = max(0.0, tokens_s + excess * by_tokens), max(0.0, fixed_s + excess * by_fixed)
    # Neither takes less than nothing.
    scale = seconds / (tokens + fixed)
    return (scale * tokens / tokens_s if tokens_s else 1.0), (scale * fixed / fixed_s if fixed_s else 1.0)


def other_work_seconds(seconds: float, layers: int, attended: int, attend_s: float) -> float:
    """Seconds of one of several layers, without attending to so many tokens in each."""
    return max(0.0, seconds - attend_s * layers * attended) / layers


def may_pay(input_bytes: float, kv_bytes: float) -> bool:
    """Whether recomputing may pay on any machine: activations must be fewer bytes than keys and values."""
    return input_bytes < kv_bytes


def shared_attend_seconds(alone_s: float, ranks: int) -> float:
    """Seconds per token of the host's attention where so many ranks of a host attend at once.

    Attending to one query reads every key and value once: memory bandwidth is the limit, and it is divided.
    """
    return alone_s * ranks


def host_seconds(costs: LayerCosts, on_host: int) -> float:
    """Until the host's part of attention is there: its queries come from the same layer, so nothing runs ahead."""
    return costs.device_s + costs.host_fixed_s + costs.host_attend_s * on_host if on_host else 0.0


def steady_seconds(
    costs: LayerCosts, tokens: int, recomputed: int, *, resident: int = 0, on_host: int = 0, chunk: int
) -> float:
    """Seconds between two layers in the middle of many."""
    streaming = recomputed + on_host + resident < tokens
    lines = steady_lines(costs, tokens, resident, on_host, -(-recomputed // chunk), streaming)
    return max(host_seconds(costs, on_host), *(line.at(recomputed) for line in lines))


@dataclass(frozen=True)
class StepTimes:
    """What the layers of one step take, for its pipeline.

    Parameters
    ----------
    sent_s : float
        The link's work for one layer.
    landed_s : float
        Of it, what comes before the last activations are there.
    recompute_s, layer_s : float
        The accelerator's work for one layer: recomputation, and all else but `attend_s`.
    last_s : float
        Of recomputation, what can only begin with the last activations: all of it, where they come whole.
    host_s : float
        Attention on the host, from when the layer's queries are there.
    outside_s : float
        Its work outside the layers, between the last layer of a step and the first of the next.
    first_s : float
        Of `landed_s`, what comes before the first activations are there.
    attend_s : float
        The accelerator's attention to cached tokens, once all of them are there; the host attends meanwhile.
    """

    sent_s: float
    landed_s: float
    recompute_s: float
    layer_s: float
    last_s: float
    host_s: float = 0.0
    outside_s: float = 0.0
    first_s: float = 0.0
    attend_s: float = 0.0
