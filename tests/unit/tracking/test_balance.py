"""What KV heads cost the ranks, from what ranks report."""

import pytest

from megakv.tracking.measurements import head_balance


def test_ranks_wait_for_the_slowest_of_their_group_in_every_layer() -> None:
    kept = [[30, 10], [10, 10], [20, 40], [20, 20]]
    seconds = [[3.0, 1.0], [1.0, 1.0], [1.0, 4.0], [1.0, 2.0]]
    balance = head_balance(kept, seconds, 2, mapping=("m.json", "abc", 0.9))
    assert balance.kept_tokens == [40, 20, 60, 40] and balance.attention_s == [4.0, 2.0, 5.0, 3.0]
    assert balance.busy_rates == [1.0, 0.5, 1.0, 0.6]
    # Layers of two groups: 2/3, 1, 1 and 3/4.
    assert balance.utilisation == balance.kept_utilisation == pytest.approx((2 / 3 + 1 + 1 + 3 / 4) / 4)
    scalars = balance.scalars()
    assert scalars["fairkv/mapped_utilisation"] == 0.9
    assert scalars["fairkv/kept_tokens/rank2"] == 60.0 and scalars["fairkv/busy_rate/rank3"] == 0.6


def test_without_times_there_are_no_rates() -> None:
    balance = head_balance([[1], [3]], [[], []], 2, mapping=None)
    assert balance.busy_rates == balance.attention_s == [] and balance.utilisation is None
    assert balance.kept_utilisation == pytest.approx(2 / 3)
    assert balance.mapping is None and balance.digest is None
