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


def test_of_a_capture_what_is_sent_is_said_and_nothing_is_counted() -> None:
    device = Device()
    ledger = Ledger(timeline=True, clock=device)
    ledger.enter_dense()
    asked = device.asked
    with ledger.capturing() as sent:
        with ledger.compute("attention", 1):
            posted = ledger.mark()
            ledger.sent("sum", 1, 64)
            ledger.transfer("sum", 1, posted, posted)
        assert not ledger.leave_dense()
    assert sent == [("sum", 1, 64)] and device.asked == asked
    device.reached = 9.0
    ledger.read()
    assert not ledger.tallies and not ledger.computed and not ledger.spans
    # A replay.
    for each in sent:
        ledger.sent(*each)
    assert ledger.tallies["sum", 1].bytes_sent == 64 and ledger.leave_dense()
