#pragma once

// Frames of a network between namespaces, and in which order a host sends them.

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

// Before a frame: what a kernel says of it (virtio_net_hdr), which is passed on as it is; and the
// largest one with that.
constexpr size_t kOffload = 10, kLargest = 65536 + 256;

struct Frame {
  std::array<char, kLargest> bytes;
  size_t size;
};
using FramePtr = std::shared_ptr<Frame>;

// One that nobody has any more, if there is any: its memory is there, and in a cache.
inline FramePtr new_frame() {
  static std::vector<std::unique_ptr<Frame>> unused;
  std::unique_ptr<Frame> frame(unused.empty() ? new Frame : unused.back().release());
  if (!unused.empty()) {
    unused.pop_back();
  }
  return {frame.release(), [](Frame* used) { unused.emplace_back(used); }};
}

// What a host has to send: its connections take turns, those that had nothing to send first.
class FairQueue {
 public:
  bool is_empty() const {
    return count_ == 0;
  }
  bool is_full() const {
    return count_ >= kMost;
  }

  void push(FramePtr frame) {
    const uint64_t key = connection_of(*frame);
    const auto [found, is_new] = connections_.try_emplace(key);
    if (is_new) {
      fresh_.push_back(key);
    }
    found->second.frames.push_back(std::move(frame));
    ++count_;
  }

  // Not where it is empty.
  FramePtr pop() {
    for (;;) {
      auto& turn = fresh_.empty() ? waiting_ : fresh_;
      const uint64_t key = turn.front();
      auto& [frames, credit] = connections_.at(key);
      if (credit > 0 && !frames.empty()) {
        FramePtr frame = std::move(frames.front());
        frames.pop_front();
        --count_;
        credit -= static_cast<int64_t>(frame->size);
        return frame;
      }
      turn.pop_front();
      if (frames.empty() && &turn == &waiting_) {
        connections_.erase(key);
      } else {  // also one that is at its end: what it sends next is not fresh
        credit += credit > 0 ? 0 : kQuantum;
        waiting_.push_back(key);
      }
    }
  }

 private:
  static constexpr size_t kMost = 4096;
  static constexpr int64_t kQuantum = 9000;

  struct Connection {
    std::deque<FramePtr> frames;
    int64_t credit = kQuantum;
  };

  // Of TCP over IPv4; all else is one.
  static uint64_t connection_of(const Frame& frame) {
    constexpr size_t kType = 12, kHeader = 14, kProtocol = 23, kTo = 30, kAddresses = 34;
    const auto at = [&](size_t i) {
      return uint64_t{static_cast<unsigned char>(frame.bytes[kOffload + i])};
    };
    if (frame.size < kOffload + kAddresses || at(kType) != 8 || at(kType + 1) != 0 ||
        at(kProtocol) != 6) {
      return 0;
    }
    const size_t ports = kHeader + (at(kHeader) & 15) * 4;
    uint64_t key = at(kTo + 3);
    for (size_t i = 0; i < 4 && kOffload + ports + i < frame.size; ++i) {
      key = key << 8 | at(ports + i);
    }
    return key;
  }

  std::map<uint64_t, Connection> connections_;
  std::deque<uint64_t> fresh_, waiting_;
  size_t count_ = 0;
};
