"""Requests on their way to the thread that serves."""

from megakv.serving.inbox import Inbox
from megakv.serving.request import Request


def test_it_is_drained_when_what_came_before_was_taken() -> None:
    inbox = Inbox(4)
    inbox.enter("serving")
    assert not inbox.drained
    inbox.submit(Request("a", (1,), 1, lambda event: None))
    inbox.enter("draining")
    # Who serves may have looked for requests right before that one came.
    assert not inbox.drained
    inbox.take()
    assert inbox.drained
