// Small messages between the processes of one host, through memory that all of them see.
//
// Every process has a line that says how many messages it has posted, and places for two of them. It may post one only
// after it has read the one before of all others, so nobody can be two ahead: what is overwritten has been read by all.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define PAUSE() asm volatile("yield")
#else
#define PAUSE()
#endif

namespace {

constexpr int64_t LINE = 64;
// Looks between two at the clock.
constexpr int LOOKS = 256;

struct Line {
  std::atomic<uint64_t> posted;
  uint64_t bytes[2];  // of the last two messages
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(Line) <= LINE, "processes share it");

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

// Bytes of memory, zeros at first, for so many processes.
extern "C" int64_t megakv_mailbox_bytes(int ranks, int64_t slot) { return ranks * (LINE + 2 * slot); }

// Message `number`, the same size for all, which goes into `received` [ranks, bytes]. With `send` it is posted first. Waits
// for `seconds`, of which the first `spinning` without going to sleep. Returns 0; 1 if some have not posted theirs: then it
// is called again without `send`; 2 if another has posted one of another size.
extern "C" int megakv_mailbox_exchange(void* memory, int ranks, int own, int64_t slot, uint64_t number, const void* send,
                                       int64_t bytes, void* received, double seconds, double spinning) {
  char* const lines = (char*)memory;
  char* const slots = lines + ranks * LINE;
  const auto line = [&](int rank) { return (Line*)(lines + rank * LINE); };
  const auto place = [&](int rank) { return slots + (2 * rank + number % 2) * slot; };
  if (send) {
    std::memcpy(place(own), send, bytes);
    line(own)->bytes[number % 2] = bytes;
    line(own)->posted.store(number + 1, std::memory_order_release);
  }
  double begun = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    Line* const other = line(rank);
    for (int looks = 0; other->posted.load(std::memory_order_acquire) <= number; ++looks) {
      PAUSE();
      if (looks % LOOKS) continue;
      const double time = now();
      if (!begun) begun = time;
      if (time - begun > seconds) return 1;
      if (time - begun > spinning) {
        const timespec moment{0, 50000};
        nanosleep(&moment, nullptr);
      }
    }
    if (other->bytes[number % 2] != (uint64_t)bytes) return 2;
    std::memcpy((char*)received + rank * bytes, place(rank), bytes);
  }
  return 0;
}
