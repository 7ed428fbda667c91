#include "control/frame_reader.h"

#include <algorithm>
#include <cstring>

namespace c10d_ext {

namespace {

// From the beginning of `bytes`, until `text` has that length.
void move_to(std::string& text, std::string_view& bytes, size_t length) {
  const size_t count = std::min(bytes.size(), length - text.size());
  text += bytes.substr(0, count);
  bytes.remove_prefix(count);
}

}  // namespace

std::pair<char*, size_t> FrameReader::attached_room() {
  return {attached_.get() + has_attached_, attached_ ? lengths_.attached - has_attached_ : 0};
}

void FrameReader::take_attached(size_t count) {
  has_attached_ += count;
  if (has_attached_ < lengths_.attached) {
    return;
  }
  const char* first = attached_.get();
  SharedBytes attached({std::move(attached_), first}, has_attached_);
  frames_.push_back({lengths_.kind, Payload(std::move(words_), std::move(attached))});
  heading_.clear();
  words_.clear();
  attached_.reset();
  has_attached_ = 0;
}

bool FrameReader::take(std::string_view bytes, size_t limit) {
  std::string all;
  if (has_postponed()) {
    all = std::exchange(postponed_, {}).append(bytes);
    bytes = all;
  }
  while (!bytes.empty() && !is_over_) {
    if (heading_.size() < sizeof(Heading)) {
      move_to(heading_, bytes, sizeof(Heading));
      if (heading_.size() < sizeof(Heading)) {
        break;
      }
      std::memcpy(&lengths_, heading_.data(), sizeof(Heading));
      if (lengths_.words > limit || lengths_.attached > limit - lengths_.words) {
        is_over_ = frames_.empty();
        postponed_ = std::exchange(heading_, {}).append(bytes);
        break;
      }
    }
    move_to(words_, bytes, lengths_.words);
    if (words_.size() < lengths_.words) {
      break;
    }
    if (!attached_ && lengths_.attached > 0) {
      attached_ = std::make_unique_for_overwrite<char[]>(lengths_.attached);
    }
    const auto [room, most] = attached_room();
    const size_t count = std::min(bytes.size(), most);
    if (count > 0) {
      std::memcpy(room, bytes.data(), count);
      bytes.remove_prefix(count);
    }
    take_attached(count);
  }
  return !is_over_;
}

std::optional<Frame> FrameReader::next() {
  if (frames_.empty()) {
    return std::nullopt;
  }
  Frame first = std::move(frames_.front());
  frames_.pop_front();
  return first;
}

}  // namespace c10d_ext
