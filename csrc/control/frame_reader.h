#pragma once

// Sentences as they go over a connection: how long the words are, which kind they are of, how much
// is attached to them; then the words, and what is attached. No torch in here.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "control/landing.h"
#include "control/payload.h"

namespace c10d_ext {

struct Frame {
  uint32_t kind;
  Payload words;
};

// Before the words.
struct Heading {
  uint32_t words;
  uint32_t kind;
  uint64_t attached;
};

// Finds the memory for what is attached to a sentence, once all words of that are here and all
// sentences before it are taken, and reserves it; null where nobody waits for it.
using FindLanding = std::function<std::shared_ptr<Landing>(uint32_t kind, const std::string& words,
                                                           size_t attached)>;

// Makes sentences of what comes.
class FrameReader {
 public:
  // Where the next bytes belong that are attached to a sentence: nowhere, if none is to come.
  std::pair<char*, size_t> attached_room();
  // So many have come there.
  void take_attached(size_t count);
  // Others have. False: the next sentence is longer than `limit`, and this reads no more. `find`
  // may be empty.
  bool take(std::string_view bytes, size_t limit, const FindLanding& find = {});
  // Whether a sentence waits for those before it to be taken: it is too long, or wants a landing.
  // It is tried anew with the next bytes, or with none.
  bool has_postponed() const {
    return !postponed_.empty();
  }

  bool has_next() const {
    return !frames_.empty();
  }
  std::optional<Frame> next();

 private:
  // Keeps what has come of the sentence that is being read, and the bytes behind that.
  void postpone(std::string_view bytes);

  std::string postponed_;
  bool is_over_ = false;
  // Of the sentence that is being read.
  Heading lengths_{};
  size_t has_heading_ = 0;
  std::string words_;
  std::shared_ptr<Landing> attached_;

  std::deque<Frame> frames_;
};

}  // namespace c10d_ext
