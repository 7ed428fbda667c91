#include "control/frame_reader.h"

#include <algorithm>
#include <cstring>

namespace c10d_ext {

namespace {

// So many from the beginning of `bytes`, as far as there are.
std::string_view take_from(std::string_view& bytes, size_t count) {
  const auto taken = bytes.substr(0, count);
  bytes.remove_prefix(taken.size());
  return taken;
}

}  // namespace

std::pair<char*, size_t> FrameReader::attached_room() {
  return attached_ ? std::pair(attached_->rest(), attached_->left()) : std::pair<char*, size_t>();
}

void FrameReader::take_attached(size_t count) {
  SharedBytes attached;
  if (attached_) {
    attached_->take(count);
    if (attached_->left() > 0) {
      return;
    }
    attached = Landing::bytes_of(attached_);
  }
  frames_.push_back({lengths_.kind, Payload(std::move(words_), std::move(attached))});
  has_heading_ = 0;
  words_.clear();
  attached_.reset();
}

bool FrameReader::take(std::string_view bytes, size_t limit, const FindLanding& find) {
  std::string all;
  if (has_postponed()) {
    all = std::exchange(postponed_, {}).append(bytes);
    bytes = all;
  }
  while (!bytes.empty() && !is_over_) {
    if (has_heading_ < sizeof(Heading)) {
      const auto more = take_from(bytes, sizeof(Heading) - has_heading_);
      std::memcpy(reinterpret_cast<char*>(&lengths_) + has_heading_, more.data(), more.size());
      has_heading_ += more.size();
      if (has_heading_ < sizeof(Heading)) {
        break;
      }
      if (lengths_.words > limit || lengths_.attached > limit - lengths_.words) {
        is_over_ = frames_.empty();
        postpone(bytes);
        break;
      }
    }
    words_ += take_from(bytes, lengths_.words - words_.size());
    if (words_.size() < lengths_.words) {
      break;
    }
    if (!attached_ && lengths_.attached > 0 && find && has_next()) {
      postpone(bytes);  // who waits for it is known once those are taken
      break;
    }
    if (!attached_ && lengths_.attached > 0) {
      attached_ = find ? find(lengths_.kind, words_, lengths_.attached) : nullptr;
      attached_ = attached_ ? attached_ : std::make_shared<Landing>(lengths_.attached);
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

void FrameReader::postpone(std::string_view bytes) {
  postponed_.assign(reinterpret_cast<const char*>(&lengths_), sizeof(Heading));
  postponed_.append(words_).append(bytes);
  has_heading_ = 0;
  words_.clear();
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
