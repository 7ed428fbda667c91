#include "control/payload.h"

#include <cstring>
#include <stdexcept>

namespace c10d_ext {

Payload& Payload::put(int64_t number) {
  words_.append(reinterpret_cast<const char*>(&number), sizeof(number));
  return *this;
}

Payload& Payload::put(std::string_view text) {
  put(static_cast<int64_t>(text.size()));
  words_ += text;
  return *this;
}

Payload& Payload::put_data(const SharedBytes& data) {
  if (data.size() < kMuch) {
    return put(std::string_view(data));
  }
  put(static_cast<int64_t>(data.size()));
  attach(data);
  return *this;
}

Payload& Payload::put(const Payload& other) {
  words_ += other.words_;
  attached_.insert(attached_.end(), other.attached_.begin(), other.attached_.end());
  return *this;
}

void Payload::attach(SharedBytes data) {
  if (!data.empty()) {
    attached_.push_back(std::move(data));
  }
}

size_t Payload::attached_bytes() const {
  size_t bytes = 0;
  for (const auto& piece : attached_) {
    bytes += piece.size();
  }
  return bytes;
}

void Payload::refuse() {
  throw std::runtime_error("a sentence is too short");
}

int64_t Payload::number() {
  int64_t number = 0;
  if (left() < sizeof(number)) {
    refuse();
  }
  std::memcpy(&number, words_.data() + at_, sizeof(number));
  at_ += sizeof(number);
  return number;
}

size_t Payload::size() {
  const int64_t size = number();
  if (size < 0) {
    refuse();
  }
  return static_cast<size_t>(size);
}

int64_t Payload::number_within(int64_t least, int64_t most) {
  const int64_t taken = number();
  if (taken < least || taken > most) {
    throw std::runtime_error("a number that means nothing");
  }
  return taken;
}

std::string_view Payload::text_view() {
  const size_t count = size();
  if (count > left()) {
    refuse();
  }
  const auto text = std::string_view(words_).substr(at_, count);
  at_ += count;
  return text;
}

void Payload::expect_end() const {
  if (left() != 0) {
    throw std::runtime_error("a sentence that goes on");
  }
  expect_no_more_data();
}

void Payload::expect_no_more_data() const {
  if (piece_ != attached_.size()) {
    throw std::runtime_error("data that no word is about");
  }
}

SharedBytes Payload::data() {
  const size_t begin = at_, count = size();
  if (count < kMuch) {
    at_ = begin;
    const size_t from = at_ + sizeof(int64_t);
    if (count > 0 && (rest_at_ > from || rest_at_ + rest_.size() < from + count)) {
      rest_ = SharedBytes::copy_of(std::string_view(words_).substr(from));
      rest_at_ = from;
    }
    return text_view().empty() ? SharedBytes() : rest_.part(from - rest_at_, count);
  }
  if (piece_ == attached_.size() || count > attached_[piece_].size() - at_of_piece_) {
    refuse();
  }
  const SharedBytes data = attached_[piece_].part(at_of_piece_, count);
  at_of_piece_ += count;
  if (at_of_piece_ == attached_[piece_].size()) {
    ++piece_;
    at_of_piece_ = 0;
  }
  return data;
}

}  // namespace c10d_ext
