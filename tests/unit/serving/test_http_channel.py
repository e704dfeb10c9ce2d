"""Events from the thread that computes wake whoever waits for them, however many do, and again."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from megakv.serving.http.answers import Channel, Mailbox
from megakv.serving.request import Token


def test_a_mailbox_wakes_all_that_wait() -> None:
    async def main() -> None:
        mailbox = Mailbox()
        channels = [Channel() for _ in range(5)]
        with ThreadPoolExecutor(1) as computing:
            for number in range(3):
                waiting = [asyncio.create_task(channel.take(30)) for channel in channels]
                await asyncio.sleep(0)
                for channel in channels:
                    computing.submit(mailbox.put, channel, number, Token(number)).result()
                assert await asyncio.gather(*waiting) == [[(number, Token(number))]] * len(channels)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_what_comes_after_the_end_is_not_kept() -> None:
    async def begin() -> Mailbox:
        return Mailbox()

    mailbox = asyncio.run(begin())
    for _ in range(2):
        mailbox.put(Channel(), 0, Token(0))
    assert not mailbox._events
