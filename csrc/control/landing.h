#pragma once

// The memory for data that is attached to a sentence. No torch in here.

#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>

#include "control/shared_bytes.h"

namespace c10d_ext {

// A Landing holds the memory that the data of one sentence comes to: its own, or memory that is
// lent by who waits for the data. What has come before the sentence is known is copied there. Not
// for several threads at once.
//
// The owner of lent memory has it for itself when it hears of its end, for until then nothing else
// is taken from the line: the landing is found once all sentences before are taken, what is
// complete is taken next, and who is given the data of lent memory for another one copies it.
class Landing {
 public:
  explicit Landing(size_t size)
      : own_(std::make_unique_for_overwrite<char[]>(size)), first_(own_.get()), size_(size) {}
  Landing(std::shared_ptr<char> lent, size_t size)
      : lent_(std::move(lent)), first_(lent_.get()), size_(size) {}

  size_t size() const {
    return size_;
  }
  // Where the next bytes belong, and how many.
  char* rest() const {
    return first_ + landed_;
  }
  size_t left() const {
    return size_ - landed_;
  }
  void take(size_t count) {
    landed_ += count;
  }

  // Keeps the landing for one sentence. False: another one has it, or it was given back.
  bool reserve() {
    return !std::exchange(is_reserved_, true);
  }
  // Gives lent memory back to its owner: no other sentence has it from here on. What has come of a
  // sentence that is not complete, and what comes, goes to memory of its own.
  void give_back() {
    if (lent_ && is_reserved_ && left() > 0) {
      own_ = std::make_unique_for_overwrite<char[]>(size_);
      std::memcpy(own_.get(), first_, landed_);
      first_ = own_.get();
      lent_.reset();
    }
    is_reserved_ = true;
  }

  // All that has come, once that is all.
  static SharedBytes bytes_of(const std::shared_ptr<Landing>& landing) {
    const std::shared_ptr<const char> first(landing, landing->first_);
    return landing->lent_ ? SharedBytes::lent(first, landing->size_)
                          : SharedBytes(first, landing->size_);
  }

 private:
  std::shared_ptr<char> lent_;
  std::unique_ptr<char[]> own_;
  char* first_;
  size_t size_;
  size_t landed_ = 0;
  bool is_reserved_ = false;
};

}  // namespace c10d_ext
