"""Times are the device's: counted when it has come to a moment, which nobody waits for."""

from dataclasses import dataclass

import pytest

from megakv.distributed.ledger import Ledger


@dataclass
class Device:
    """A device that is behind the host: moments are numbers, of which it has come to some."""

    asked: float = 0.0
    reached: float = 0.0

    def mark(self) -> float:
        self.asked += 1.0
        return self.asked

    def passed(self, mark: float) -> bool:
        return mark <= self.reached

    def seconds(self, first: float, last: float) -> float:
        assert last <= self.reached, "asked for a moment that has not passed"
        return last - first


def test_times_are_counted_when_the_device_has_come_there() -> None:
    device = Device()
    ledger = Ledger(timeline=True, clock=device)
    posted = ledger.mark()
    with ledger.compute("attention", 3):
        device.asked += 4.0
    waited = ledger.mark()
    device.asked += 10.0
    ledger.transfer("pass_kv", 3, posted, waited)
    ledger.sent("pass_kv", 3, 100)
    tally = ledger.tallies["pass_kv", 3]
    assert tally.bytes_sent == 100
    assert ledger.waited_s() == 0.0 and not ledger.computed and not ledger.spans
    # It has come behind attention, which is counted, and not behind the transfer.
    device.reached = waited
    ledger.read()
    assert ledger.computed == {("attention", 3, False): 5.0} and ledger.waited_s() == 0.0
    device.reached = device.asked
    ledger.read()
    assert tally.seconds == pytest.approx(device.asked - posted) and tally.seconds_exposed == pytest.approx(11.0)
    assert [(span.name, span.kind, span.end - span.start) for span in ledger.spans] == [
        ("attention", "compute", 5.0),
        ("pass_kv", "communication", device.asked - posted),
        ("pass_kv", "wait", 11.0),
    ]
    # Nothing of an earlier run is counted in a later one.
    ledger.transfer("pass_kv", 3, ledger.mark(), ledger.mark())
    ledger.reset()
    device.reached = device.asked
    assert ledger.waited_s() == 0.0 and not ledger.tallies
