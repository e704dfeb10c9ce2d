// Messages between processes, see channel.h, for whoever has nothing else to compute.

#include "channel.h"

extern "C" int64_t megakv_channel_bytes(int64_t ranks, int64_t slot) { return Channel::bytes(ranks, slot); }

// received [ranks, bytes], of so many bytes in all, = what all send. Returns how it ended: see `Fault`.
extern "C" int megakv_channel_exchange(Channel* channel, const void* send, int64_t bytes, void* received, int64_t size) {
  return ended([&] {
    channel->check();
    require(within(size, 1, 0, channel->ranks, bytes, bytes), Fault::CHANNEL);
    exchange(*channel, send, bytes, received);
  });
}
