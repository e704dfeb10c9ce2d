// Small messages between processes: each sends all others as many bytes, and has what all of them sent.
//
// On one host they go through memory that all of them see. Every process has a line there that says how many messages it
// has posted, and places for two of them. It may post one only after it has read the one before of all others, so nobody
// can be two ahead: what is overwritten has been read by all. Between hosts they go over connections, of each to each.

#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define PAUSE() asm volatile("yield")
#else
#define PAUSE()
#endif
#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

#include "faults.h"

namespace {

constexpr int64_t LINE = 64;
// Looks at memory between two at the clock.
constexpr int LOOKS = 64;
// How long others are waited for before somebody sees whether they are still there.
constexpr double SLICE_S = 0.05;

struct Line {
  std::atomic<uint64_t> posted;
  uint64_t bytes[2];  // of the last two messages
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(Line) <= LINE, "processes share it");

// Why a message did not come: nobody goes on waiting, sizes differ, which memory shows, or a connection is over; from CLOSED
// on it says whose.
enum Failure : int64_t { NONE = 0, GIVEN_UP = 2, SIZES = 3, CLOSED = 16 };

struct Channel {
  int (*waiting)(double seconds);  // asked now and then, after so many seconds: whether to give up
  void* memory;                    // none: then
  const int* links;                // there is a connection to each of the others
  int64_t ranks, own;
  int64_t slot, memory_bytes;  // bytes of a place in memory, and of all of it
  uint64_t number;  // of the next message there
  double spinning;  // seconds before this process goes to sleep
  int64_t failed;

  // Bytes of memory, zeros at first, for so many processes.
  static int64_t bytes(int64_t ranks, int64_t slot) { return ranks * (LINE + 2 * slot); }

  void check() const {
    require(own >= 0 && own < ranks && slot > 0 && (!memory || memory_bytes >= bytes(ranks, slot)), Fault::CHANNEL);
  }
};

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Ends whatever waits, out of all calls.
[[noreturn]] inline void fail(Channel& channel, int64_t why) {
  channel.failed = why;
  throw Fault::MESSAGE;
}

// One wait for others, from its first look on.
class Wait {
 public:
  explicit Wait(Channel& channel) : channel(channel) {}

  // Whether this process should sleep a while.
  bool long_enough() {
    const double time = now();
    if (!begun) begun = asked = time;
    if (time - asked > SLICE_S) {
      asked = time;
      if (channel.waiting && channel.waiting(time - begun)) fail(channel, GIVEN_UP);
    }
    return time - begun > channel.spinning;
  }

 private:
  Channel& channel;
  double begun = 0, asked = 0;
};

inline void through_memory(Channel& channel, const char* send, int64_t bytes, char* received, int64_t step) {
  char* const lines = (char*)channel.memory;
  const auto line = [&](int64_t rank) { return (Line*)(lines + rank * LINE); };
  const uint64_t number = channel.number++;
  const auto place = [&](int64_t rank) {
    return lines + channel.ranks * LINE + (2 * rank + (int64_t)(number % 2)) * channel.slot;
  };
  std::memcpy(place(channel.own), send, bytes);
  line(channel.own)->bytes[number % 2] = bytes;
  line(channel.own)->posted.store(number + 1, std::memory_order_release);
  Wait wait(channel);
  for (int64_t rank = 0; rank < channel.ranks; ++rank) {
    for (int looks = 1; line(rank)->posted.load(std::memory_order_acquire) <= number; ++looks) {
      PAUSE();
      if (looks % LOOKS) continue;
      if (!wait.long_enough()) {
        // Whoever is waited for may be waiting for this core: another process has its own.
        sched_yield();
        continue;
      }
      const timespec moment{0, 50000};
      nanosleep(&moment, nullptr);
      looks = 0;
    }
    if (line(rank)->bytes[number % 2] != (uint64_t)bytes) fail(channel, SIZES);
    std::memcpy(received + rank * step, place(rank), bytes);
  }
}

inline void through_links(Channel& channel, const char* send, int64_t bytes, char* received) {
  std::vector<int64_t> sent(channel.ranks), come(channel.ranks);
  sent[channel.own] = come[channel.own] = bytes;
  std::memcpy(received + channel.own * bytes, send, bytes);
  const auto moved = [&](int64_t rank, ssize_t count) -> int64_t {
    if (count > 0) return count;
    if (count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) fail(channel, CLOSED + rank);
    return 0;
  };
  Wait wait(channel);
  while (true) {
    std::vector<pollfd> left;
    for (int64_t rank = 0; rank < channel.ranks; ++rank) {
      const int link = channel.links[rank];
      int64_t &out = sent[rank], &in = come[rank];
      if (out < bytes) out += moved(rank, ::send(link, send + out, bytes - out, MSG_DONTWAIT | MSG_NOSIGNAL));
      if (in < bytes) in += moved(rank, recv(link, received + rank * bytes + in, bytes - in, MSG_DONTWAIT));
      const int wanted = (out < bytes ? POLLOUT : 0) | (in < bytes ? POLLIN : 0);
      if (wanted) left.push_back({link, (short)wanted, 0});
    }
    if (left.empty()) return;
    // Where there are more threads than cores, whoever is waited for may be waiting for this one.
    wait.long_enough() ? (void)poll(left.data(), left.size(), (int)(SLICE_S * 1e3)) : (void)sched_yield();
  }
}

// received [ranks, bytes] = what all send.
inline void exchange(Channel& channel, const void* send, int64_t bytes, void* received) {
  channel.failed = NONE;
  if (!channel.memory) return through_links(channel, (const char*)send, bytes, (char*)received);
  for (int64_t first = 0; first < bytes; first += channel.slot)
    through_memory(channel, (const char*)send + first, std::min(channel.slot, bytes - first), (char*)received + first,
                   bytes);
}

}  // namespace
