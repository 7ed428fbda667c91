#pragma once

// What ranks say to each other over a connection. No torch in here.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "control/shared_bytes.h"

namespace c10d_ext {

// Numbers, texts and data, in the order in which they are taken out again. Much data is not among
// the words, but attached to them, and passed on from rank to rank without a copy.
class Payload {
 public:
  // So much data is attached: what is less is copied in less time than it takes to pass on.
  static constexpr size_t kMuch = 4096;

  Payload() = default;
  explicit Payload(std::string words, SharedBytes attached = {}) : words_(std::move(words)) {
    attach(std::move(attached));
  }

  // Room for words of so many bytes.
  void reserve(size_t bytes) {
    words_.reserve(bytes);
  }
  Payload& put(int64_t number);
  Payload& put(std::string_view text);
  Payload& put_data(const SharedBytes& data);
  // All that the other one is made of.
  Payload& put(const Payload& other);
  template <class Number>
  Payload& put(const std::vector<Number>& numbers) {
    put(static_cast<int64_t>(numbers.size()));
    for (const Number number : numbers) {
      put(static_cast<int64_t>(number));
    }
    return *this;
  }

  // Throw std::runtime_error where there is no such thing left, or it is none that is asked for.
  int64_t number();
  int64_t number_within(int64_t least, int64_t most);
  template <class Enum>
  Enum one_of(Enum last) {
    return static_cast<Enum>(number_within(0, static_cast<int64_t>(last)));
  }
  std::string text() {
    return std::string(text_view());
  }
  std::string_view text_view();  // of what lives as long as this
  SharedBytes data();
  template <class Number = int64_t>
  std::vector<Number> numbers() {
    const auto count = size();
    if (count > left()) {
      refuse();
    }
    std::vector<Number> all;
    for (size_t i = 0; i < count; ++i) {
      all.push_back(static_cast<Number>(number()));
    }
    return all;
  }

  // Throw std::runtime_error where there is more than was taken out, or more attached: who holds a
  // part of that holds it all.
  void expect_end() const;
  void expect_no_more_data() const;
  // The numbers with which it begins, so many of them.
  Payload first_numbers(size_t count) const {
    return Payload(words_.substr(0, count * sizeof(int64_t)));
  }

  const std::string& words() const {
    return words_;
  }
  const std::vector<SharedBytes>& attached() const {
    return attached_;
  }
  size_t attached_bytes() const;

 private:
  void attach(SharedBytes data);
  // A length.
  size_t size();
  size_t left() const {
    return words_.size() - at_;
  }
  [[noreturn]] static void refuse();

  std::string words_;
  std::vector<SharedBytes> attached_;
  // What is taken out next: of the words, and of what is attached.
  size_t at_ = 0, piece_ = 0, at_of_piece_ = 0;
  // The words from `rest_at_` on, of which data is handed out in parts.
  SharedBytes rest_;
  size_t rest_at_ = 0;
};

}  // namespace c10d_ext
