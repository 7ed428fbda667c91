#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstring>
#include <exception>
#include <optional>
#include <vector>

#include "base/memory.h"

namespace c10d_ext {

// The memory that the engine reads and writes where it cannot be a tensor's own: copies are made
// when an operation begins and when all has arrived, so in the order of calls.
class Staging {
 public:
  // Only for one that has ended.
  void renew() {
    travel_dtype_.reset();
  }
  // Elements are converted to `dtype` to travel.
  void travel_as(c10::ScalarType dtype) {
    travel_dtype_ = dtype;
  }
  bool converts() const {
    return travel_dtype_.has_value();
  }

  // A dense tensor of what the values of `t` are when it begins, kept until the end.
  const at::Tensor& dense_values(const at::Tensor& t) {
    if (C10_LIKELY(travels_as_it_is(t))) {
      kept_.push_back(alias_of(t));
    } else {
      kept_.push_back(scratch(t));
      fills_.push_back({alias_of(t), kept_.back()});
    }
    return kept_.back();
  }
  // A dense tensor that becomes `out` in the end; `out` itself where it can.
  const at::Tensor& landing(const at::Tensor& out) {
    if (C10_LIKELY(travels_as_it_is(out))) {
      return out;
    }
    landings_.push_back({scratch(out), out});
    return landings_.back().from;
  }
  // Memory for what is at `data` when it begins.
  std::byte* copy_of(const std::byte* data, size_t bytes) {
    overlaps_.push_back({data, at::empty({static_cast<int64_t>(bytes)}, at::kByte)});
    return static_cast<std::byte*>(overlaps_.back().copy.mutable_data_ptr());
  }

  void fill() {
    if (C10_UNLIKELY(!fills_.empty())) {
      copy(fills_);
    }
  }
  void fill_overlaps() {
    for (const auto& [data, copy] : overlaps_) {
      std::memcpy(copy.mutable_data_ptr(), data, copy.nbytes());
    }
  }
  void land() {
    if (C10_UNLIKELY(!landings_.empty())) {
      copy(landings_);
    }
  }
  template <class F>
  void attempt(const F& something) {
    try {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      something();
    } catch (...) {
      trouble_ = std::current_exception();
    }
  }
  // What went wrong with a copy.
  const std::exception_ptr& trouble() const {
    return trouble_;
  }
  void release() {
    landings_.clear();
    fills_.clear();
    overlaps_.clear();
    kept_.clear();
  }

 private:
  struct Copy {
    at::Tensor from;
    at::Tensor to;
  };
  struct Overlap {
    const std::byte* data;
    at::Tensor copy;
  };

  bool travels_as_it_is(const at::Tensor& t) const {
    return is_dense(t) && (!travel_dtype_ || *travel_dtype_ == t.scalar_type());
  }
  at::Tensor scratch(const at::Tensor& t) const {
    return at::empty(t.sizes(), t.options().dtype(travel_dtype_.value_or(t.scalar_type())));
  }
  void copy(const std::vector<Copy>& copies) {
    attempt([&] {
      for (const auto& [from, to] : copies) {
        copy_values(to, from);
      }
    });
  }

  std::optional<c10::ScalarType> travel_dtype_;
  c10::SmallVector<at::Tensor, 2> kept_;
  std::vector<Copy> fills_;        // when it begins
  std::vector<Overlap> overlaps_;  // the same, of what shares memory with what is written
  std::vector<Copy> landings_;     // when all is there
  std::exception_ptr trouble_;     // with these
};

}  // namespace c10d_ext
