"""Events of a call wait for whoever takes them, up to a bound."""

import asyncio

from megakv.serving.http.answers import Channel
from megakv.serving.request import Finished, Progress, Token


def test_a_channel_wakes_whoever_waits_and_keeps_what_is_of_interest() -> None:
    async def main() -> None:
        channel = Channel(most=3)
        waiting = asyncio.create_task(channel.take(30))
        await asyncio.sleep(0)
        channel.add(0, Token(1))
        assert await waiting == [(0, Token(1))] and await channel.take(0.01) == []
        for read in (1, 2):
            channel.add(0, Progress(0, read, 9))
        channel.add(0, Token(2))
        assert await channel.take(30) == [(0, Progress(0, 2, 9)), (0, Token(2))]
        for number in range(5):
            channel.add(0, Token(number))
        [(_, last)] = await channel.take(30)
        assert isinstance(last, Finished) and last.why == "error"

    asyncio.run(asyncio.wait_for(main(), 20))
