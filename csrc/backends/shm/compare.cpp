// Compares what the ranks have announced, before any data is touched.

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "backends/shm/collective.h"

namespace c10d_ext::shm {

namespace {

// `shapes`: as far as they are compared.
std::string describe(const CollectiveHeader& d, uint64_t shapes) {
  Fingerprint said;
  said.op_type = static_cast<OpType>(d.type);
  if (said.op_type == OpType::Barrier) {
    return text_of(said);
  }
  const DType dtype = static_cast<DType>(d.dtype);
  const bool sparse = said.op_type == OpType::SparseAllReduce;
  said.unit = name_of(dtype);
  if (d.even) {
    said.count = static_cast<int64_t>(d.bytes / std::max<size_t>(size_of(dtype), 1));
  }
  said.is_uneven = !d.even && !sparse;
  if (sparse) {
    said.details = " of shape " + text_of_shapes(d.members_sizes) + " with " +
                   std::to_string(d.members) + " sparse dimensions";
  } else if (d.members > 1) {
    said.details =
        " in " + std::to_string(d.members) + " tensors of sizes " + text_of_shapes(d.members_sizes);
  }
  said.reduce_op = static_cast<ReduceOp>(d.reduce_op);
  said.root = d.root;
  said.shapes = shapes;
  return text_of(said);
}

// How a rank chooses algorithms, as it has said in the shared memory.
std::string describe_overrides(const Control& control) {
  // A copy of a bounded length, whatever a peer has written.
  std::array<char, Control::kMaxOverrides> text;
  std::memcpy(text.data(), control.overrides, text.size());
  text.back() = '\0';
  return *text.data() == '\0' ? " with the default algorithms"
                              : " with algorithms '" + std::string(text.data()) + "'";
}

}  // namespace

Failure Collective::mismatch(Difference found) const {
  const std::string op(name_of(type()));
  return {ErrorKind::Mismatch,
          op + ": " + found.text + " " + place_.text(),
          std::move(found.ranks),
          op,
          seq_,
          found.ends_group};
}

std::optional<Failure> Collective::compare(bool strict) {
  if (n_ == 1) {
    factors_ = {request_.factor};
    return std::nullopt;
  }
  if (auto failure = compare_headers(strict)) {
    return failure;
  }
  if (all_even_) {
    return std::nullopt;
  }
  if (type() != OpType::SparseAllReduce) {
    if (auto failure = compare_tables()) {
      return failure;
    }
  }
  algorithm_ = selection_.choose(type(), request_.dtype, largest_input(), /*fits_eagerly=*/false);
  return std::nullopt;
}

std::optional<Failure> Collective::compare_headers(bool strict) {
  // Copies: a peer that writes its header later cannot change the outcome.
  std::vector<CollectiveHeader> all(static_cast<size_t>(n_));
  for (int p = 0; p < n_; ++p) {
    std::memcpy(&all[static_cast<size_t>(p)], &memory_.header(p, seq_), sizeof(CollectiveHeader));
    all_even_ &= all[static_cast<size_t>(p)].even == 1;
  }
  const auto agree = [&](const CollectiveHeader& a, const CollectiveHeader& b) {
    return a.seq == b.seq && a.type == b.type && a.dtype == b.dtype && a.reduce_op == b.reduce_op &&
           a.root == b.root && (!all_even_ || a.bytes == b.bytes) && a.members == b.members &&
           a.members_sizes == b.members_sizes && a.algorithms == b.algorithms &&
           (!strict || !all_even_ || shapes_agree(a.shapes, b.shapes));
  };
  const bool same_algorithms = std::all_of(all.begin(), all.end(), [&](const CollectiveHeader& d) {
    return d.algorithms == all[0].algorithms;
  });
  const auto said = [&](size_t rank) {
    return describe(all[rank], strict ? all[rank].shapes : 0) +
           (same_algorithms ? "" : describe_overrides(memory_.control(static_cast<int>(rank))));
  };
  if (auto found = difference_of_calls(
          all.size(), seq_, [&](size_t a, size_t b) { return agree(all[a], all[b]); }, said)) {
    end_where_tensors_differ(*found, all.size(), [&](size_t p) {
      const bool sparse = static_cast<OpType>(all[p].type) == OpType::SparseAllReduce;
      return sparse ? int64_t{1} : std::max<int64_t>(all[p].members, 1);
    });
    return mismatch(std::move(*found));
  }
  if (!request_.call_site.empty()) {
    if (auto failure = compare_call_sites(all)) {
      return failure;
    }
  }
  if (request_.reduce_op == ReduceOp::PremulSum) {
    for (const CollectiveHeader& d : all) {
      factors_.push_back({d.factor_real, d.factor_imaginary});
    }
  }
  return std::nullopt;
}

std::optional<Failure> Collective::compare_call_sites(
    const std::vector<CollectiveHeader>& headers) const {
  std::vector<CallSite> sites(static_cast<size_t>(n_));
  for (int p = 0; p < n_; ++p) {
    CallSite& site = sites[static_cast<size_t>(p)];
    std::memcpy(site.data(), memory_.call_site(p, seq_), site.size());
  }
  auto found = difference_of_calls(
      sites.size(), seq_, [&](size_t a, size_t b) { return sites[a] == sites[b]; },
      [&](size_t rank) {
        const CallSite& site = sites[rank];
        const auto end = std::find(site.begin(), site.end(), '\0');
        return describe(headers[rank], 0) + " at " + std::string(site.begin(), end);
      });
  return found ? std::optional(mismatch(std::move(*found))) : std::nullopt;
}

// Between every two ranks, what one sends must be what the other expects. Every rank checks all
// pairs, so that all of them raise.
std::optional<Failure> Collective::compare_tables() const {
  const size_t n = static_cast<size_t>(n_);
  std::vector<uint64_t> sends(n * n), expects(n * n);
  for (size_t p = 0; p < n; ++p) {
    std::memcpy(&sends[p * n], memory_.table(static_cast<int>(p), seq_, 0), n * sizeof(uint64_t));
    std::memcpy(&expects[p * n], memory_.table(static_cast<int>(p), seq_, 1), n * sizeof(uint64_t));
  }
  const auto element = static_cast<int64_t>(std::max<size_t>(size_of(request_.dtype), 1));
  auto found = difference_of_parts(
      type(), n, seq_, [&](size_t) { return request_.root; },
      [&](size_t from, size_t to) { return static_cast<int64_t>(sends[from * n + to]); },
      [&](size_t from, size_t to) { return static_cast<int64_t>(expects[to * n + from]); }, element,
      [&](size_t) { return std::string(name_of(request_.dtype)); });
  return found ? std::optional(mismatch(std::move(*found))) : std::nullopt;
}

// The same on every rank: the tables are.
size_t Collective::largest_input() const {
  const bool personal =
      type() == OpType::AllToAll || type() == OpType::ReduceScatter || type() == OpType::Scatter;
  size_t largest = 0;
  for (int p = 0; p < n_; ++p) {
    const uint64_t* sends = memory_.table(p, seq_, 0);
    size_t bytes = 0;
    for (int to = 0; to < (personal ? n_ : 1); ++to) {
      bytes += sends[to];
    }
    largest = std::max(largest, bytes);
  }
  return largest;
}

}  // namespace c10d_ext::shm
