#pragma once

// Groups of some of the ranks of another.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/group.h"
#include "control/global_ranks.h"

namespace c10d_ext {

// A backend of ours as far as it is about what it is called and which ranks it has.
class SplittableBackend : public c10d::Backend {
 public:
  using Milliseconds = std::chrono::milliseconds;

  const std::string getBackendName() const override {
    return options_.backend;
  }
  bool supportsSplitting() const override {
    return true;
  }
  bool supportsCoalescing() const override {
    return true;
  }
  bool supportsShrinking() const override {
    return true;
  }

  c10::intrusive_ptr<Options> getBackendOptions() override {
    // A copy: who splits a group writes the new group's name into it.
    auto options = c10::make_intrusive<Options>(options_);
    options->timeout = timeout_;
    options->global_ranks_in_group = global_ranks_.ranks;
    return options;
  }

  void setTimeout(Milliseconds timeout) override {
    // torch makes such a one of timedelta.max, too.
    C10D_EXT_CHECK_VALUE(
        timeout >= Milliseconds(0), "set_timeout", Group({}, options_.group_name, rank_, size_),
        "the timeout must be from 0 to 292000 years, got ", timeout.count(), " ms");
    timeout_ = timeout;
  }

  // Null on ranks that are not in `ranks`.
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) override {
    return connect_part("split", store, ranks, opts->timeout, opts->group_name);
  }

  c10::intrusive_ptr<Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                    const c10::intrusive_ptr<Options>& opts, const int& rank,
                                    const int& size) override {
    const auto below = c10::make_intrusive<c10d::PrefixStore>(getBackendName(), store);
    return make_backend("merge", below, rank, size, opts->timeout, opts->group_name, {});
  }

  // Called by the ranks that remain.
  c10::intrusive_ptr<Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                                     const c10::intrusive_ptr<Options>& opts) override {
    const Shrunk rest = shrunk(ranks_to_exclude, opts);
    if (flags == kShrinkAbort) {
      abort();
    }
    return connect_part("shrink", rest.store, rest.ranks, rest.timeout, rest.name);
  }

 protected:
  SplittableBackend(int rank, int size, Options options, c10::intrusive_ptr<c10d::Store> store,
                    GlobalRanks global_ranks)
      : c10d::Backend(rank, size),
        options_(std::move(options)),
        store_(std::move(store)),
        global_ranks_(std::move(global_ranks)),
        timeout_(options_.timeout) {}

  // The backend of some ranks that call `op`; collective over them.
  virtual c10::intrusive_ptr<Backend> make_backend(std::string_view op,
                                                   const c10::intrusive_ptr<c10d::Store>& store,
                                                   int rank, int size, Milliseconds timeout,
                                                   const std::string& name,
                                                   const GlobalRanks& global_ranks) const = 0;

  const Options options_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const GlobalRanks global_ranks_;
  std::atomic<Milliseconds> timeout_;

  // torch.distributed.SHRINK_ABORT
  static constexpr int kShrinkAbort = 1;

  // The group of those that shrink() keeps.
  struct Shrunk {
    std::vector<int> ranks;
    c10::intrusive_ptr<c10d::Store> store;
    Milliseconds timeout;
    std::string name;
  };
  Shrunk shrunk(const std::vector<int64_t>& to_exclude, const c10::intrusive_ptr<Options>& opts) {
    const auto ranks = remaining(to_exclude);
    // The ranks that remain have shrunk the group equally often.
    const std::string name = c10::str("shrink:", c10::Join(",", ranks), ":", shrink_count_++);
    return {
        ranks, c10::make_intrusive<c10d::PrefixStore>(name, store_),
        opts ? opts->timeout : timeout_.load(),
        opts && !opts->group_name.empty() ? opts->group_name : options_.group_name + ":" + name};
  }

 private:
  // `ranks` of this group, in their order there; null where this rank is none of them.
  c10::intrusive_ptr<Backend> connect_part(std::string_view op,
                                           const c10::intrusive_ptr<c10d::Store>& store,
                                           const std::vector<int>& ranks, Milliseconds timeout,
                                           const std::string& name) const {
    const auto self = std::find(ranks.begin(), ranks.end(), rank_);
    if (self == ranks.end()) {
      return {};
    }
    return make_backend(op, store, static_cast<int>(self - ranks.begin()),
                        static_cast<int>(ranks.size()), timeout, name, global_ranks_.part(ranks));
  }

  // Those that shrink() keeps, which call it.
  std::vector<int> remaining(const std::vector<int64_t>& to_exclude) const {
    const std::set<int64_t> excluded(to_exclude.begin(), to_exclude.end());
    C10D_EXT_CHECK_VALUE(excluded.count(rank_) == 0, "shrink",
                         Group({}, options_.group_name, rank_, size_),
                         "the ranks that remain must call it, got a call of excluded rank ", rank_);
    std::vector<int> ranks;
    for (int rank = 0; rank < size_; ++rank) {
      if (excluded.count(rank) == 0) {
        ranks.push_back(rank);
      }
    }
    return ranks;
  }

  int64_t shrink_count_ = 0;
};

}  // namespace c10d_ext
