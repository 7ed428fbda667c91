#pragma once

// Bytes that are passed on without a copy. No torch in here.

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace c10d_ext {

// Of a part of some bytes that never change, but for lent ones. Who holds a part holds them all.
class SharedBytes {
 public:
  SharedBytes() = default;
  SharedBytes(std::string bytes) {  // NOLINT(google-explicit-constructor)
    if (bytes.size() <= kLittle) {
      *this = copy_of(bytes);
      return;
    }
    const auto all = std::make_shared<const std::string>(std::move(bytes));
    first_ = {all, all->data()};
    size_ = all->size();
  }
  SharedBytes(const char* text)  // NOLINT(google-explicit-constructor)
      : SharedBytes(std::string(text)) {}
  SharedBytes(std::shared_ptr<const char> first, size_t size)
      : first_(std::move(first)), size_(size) {}
  // Of little bytes in one piece of memory, in which they are aligned.
  static SharedBytes copy_of(std::string_view bytes) {
    if (bytes.size() > kLittle) {
      return SharedBytes(std::string(bytes));
    }
    const auto all = std::make_shared<Little>();
    bytes.copy(all->bytes, bytes.size());
    return {std::shared_ptr<const char>(all, all->bytes), bytes.size()};
  }

  const char* data() const {
    return first_ ? first_.get() : "";
  }
  size_t size() const {
    return size_;
  }
  bool empty() const {
    return size_ == 0;
  }
  operator std::string_view() const {  // NOLINT(google-explicit-constructor)
    return {data(), size_};
  }
  // From there on, and not more than there is.
  SharedBytes part(size_t from, size_t count) const {
    SharedBytes part(std::shared_ptr<const char>(first_, data() + from), count);
    part.are_lent_ = are_lent_;
    return part;
  }

  // These are another's, who may change them once what they are said for is over: from there on
  // nobody says them.
  static SharedBytes lent(std::shared_ptr<const char> first, size_t size) {
    SharedBytes bytes(std::move(first), size);
    bytes.are_lent_ = true;
    return bytes;
  }
  // So many are yet to come: nobody reads them.
  static SharedBytes to_come(size_t size) {
    return {std::shared_ptr<const char>(), size};
  }
  // What may be kept for longer.
  SharedBytes kept() const {
    return are_lent_ ? copy_of(*this) : *this;
  }

  friend bool operator==(const SharedBytes& a, const SharedBytes& b) {
    return std::string_view(a) == std::string_view(b);
  }

 private:
  // So much is copied in less time than it takes to keep a string.
  static constexpr size_t kLittle = 256;
  struct Little {
    Little() {}  // NOLINT(modernize-use-equals-default): with nothing in it
    alignas(std::max_align_t) char bytes[kLittle];
  };

  std::shared_ptr<const char> first_;
  size_t size_ = 0;
  bool are_lent_ = false;
};

}  // namespace c10d_ext
