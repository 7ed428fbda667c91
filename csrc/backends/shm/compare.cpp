// Compares what the ranks have announced, before any data is touched.

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "backends/shm/collective.h"

namespace c10d_ext::shm {

namespace {

// What the rank that wrote `d` has called. `with_shapes`: they are compared.
Fingerprint fingerprint_of(const CollectiveHeader& d, bool with_shapes) {
  Fingerprint said;
  said.op_type = static_cast<OpType>(d.type);
  if (said.op_type == OpType::Barrier) {
    return said;
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
  } else {
    said.tensors = std::max<int64_t>(d.members, 1);
    said.details = text_of_members(d.members, text_of_shapes(d.members_sizes));
  }
  said.reduce_op = static_cast<ReduceOp>(d.reduce_op);
  said.root = d.root;
  said.shapes = with_shapes ? d.shapes : 0;
  return said;
}

// How a rank chooses algorithms, as it has said in the shared memory.
std::string describe_overrides(const Control& control, const CollectiveHeader& d) {
  // A copy of a bounded length, whatever a peer has written.
  std::array<char, Control::kMaxOverrides> text;
  std::memcpy(text.data(), control.overrides, text.size());
  text.back() = '\0';
  const std::string overrides(text.data());
  if (overrides.empty()) {
    return " with the default algorithms";
  }
  const bool is_cut = overrides.size() == text.size() - 1;
  return " with algorithms '" + overrides + "'" +
         (is_cut ? " (digest " + std::to_string(d.algorithms) + ")" : "");
}

Failure mismatch(const Collective& c, Difference found) {
  const std::string op(name_of(c.type()));
  return {ErrorKind::Mismatch,
          op + ": " + found.text + " " + c.place_.text(),
          std::move(found.ranks),
          op,
          c.seq_,
          found.ends_group};
}

// What is wrong with headers, or lines, that are not the same.
Difference difference_of(const Collective& c, const std::vector<CollectiveHeader>& all,
                         const std::vector<CallSite>& sites, bool with_shapes, bool with_sites) {
  const auto differs = [&](auto field) {
    return std::any_of(all.begin(), all.end(),
                       [&](const CollectiveHeader& d) { return d.*field != all[0].*field; });
  };
  const bool other_algorithms = differs(&CollectiveHeader::algorithms);
  const bool other_seq = differs(&CollectiveHeader::seq);
  std::vector<Fingerprint> calls;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    Fingerprint call = fingerprint_of(all[rank], with_shapes);
    if (other_algorithms) {
      call.manner = describe_overrides(c.memory_.control(static_cast<int>(rank)), all[rank]);
    }
    if (other_seq) {
      call.manner += " as collective " + std::to_string(all[rank].seq);
    }
    if (with_sites && !sites.empty()) {
      const CallSite& site = sites[rank];
      call.call_site.assign(site.begin(), std::find(site.begin(), site.end(), '\0'));
    }
    calls.push_back(std::move(call));
  }
  auto found = difference(calls, c.seq_);
  return found ? std::move(*found) : Difference{"the ranks' headers must agree, got others", {}};
}

// Of parts of different sizes. Between every two ranks, what one sends must be what the other
// expects. Every rank checks all pairs, so that all of them raise.
std::optional<Failure> compare_tables(const Collective& c) {
  const size_t n = static_cast<size_t>(c.n_);
  std::vector<uint64_t> sends(n * n), expects(n * n);
  for (size_t p = 0; p < n; ++p) {
    std::memcpy(&sends[p * n], c.memory_.table(static_cast<int>(p), c.seq_, 0),
                n * sizeof(uint64_t));
    std::memcpy(&expects[p * n], c.memory_.table(static_cast<int>(p), c.seq_, 1),
                n * sizeof(uint64_t));
  }
  const auto element = static_cast<int64_t>(std::max<size_t>(size_of(c.request_.dtype), 1));
  auto found = difference_of_parts(
      c.type(), n, c.seq_, [&](size_t) { return c.request_.root; },
      [&](size_t from, size_t to) { return static_cast<int64_t>(sends[from * n + to]); },
      [&](size_t from, size_t to) { return static_cast<int64_t>(expects[to * n + from]); }, element,
      [&](size_t) { return std::string(name_of(c.request_.dtype)); });
  return found ? std::optional(mismatch(c, std::move(*found))) : std::nullopt;
}

// The same on every rank: the tables are.
size_t largest_input(const Collective& c) {
  const bool personal = c.type() == OpType::AllToAll || c.type() == OpType::ReduceScatter ||
                        c.type() == OpType::Scatter;
  size_t largest = 0;
  for (int p = 0; p < c.n_; ++p) {
    const uint64_t* sends = c.memory_.table(p, c.seq_, 0);
    size_t bytes = 0;
    for (int to = 0; to < (personal ? c.n_ : 1); ++to) {
      bytes += sends[to];
    }
    largest = std::max(largest, bytes);
  }
  return largest;
}

}  // namespace

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
    if (auto failure = compare_tables(*this)) {
      return failure;
    }
  }
  algorithm_ =
      selection_.choose(type(), request_.dtype, largest_input(*this), /*fits_eagerly=*/false);
  return std::nullopt;
}

std::optional<Failure> Collective::compare_headers(bool strict) {
  // Copies: a peer that writes its header later cannot change the outcome.
  std::vector<CollectiveHeader> all(static_cast<size_t>(n_));
  std::vector<CallSite> sites(request_.call_site.empty() ? 0 : all.size());
  for (int p = 0; p < n_; ++p) {
    const auto rank = static_cast<size_t>(p);
    std::memcpy(&all[rank], &memory_.header(p, seq_), sizeof(CollectiveHeader));
    all_even_ &= all[rank].even == 1;
    if (!sites.empty()) {
      std::memcpy(sites[rank].data(), memory_.call_site(p, seq_), sites[rank].size());
    }
  }
  const auto is_as_first = [&](const CollectiveHeader& d) {
    const CollectiveHeader& a = all[0];
    return a.seq == d.seq && a.type == d.type && a.dtype == d.dtype && a.reduce_op == d.reduce_op &&
           a.root == d.root && (!all_even_ || a.bytes == d.bytes) && a.members == d.members &&
           a.members_sizes == d.members_sizes && a.algorithms == d.algorithms &&
           (!strict || !all_even_ || shapes_agree(a.shapes, d.shapes));
  };
  const bool are_same = std::all_of(all.begin(), all.end(), is_as_first);
  if (!are_same || std::any_of(sites.begin(), sites.end(),
                               [&](const CallSite& site) { return site != sites[0]; })) {
    return mismatch(*this, difference_of(*this, all, sites, strict && !are_same, are_same));
  }
  if (request_.reduce_op == ReduceOp::PremulSum) {
    for (const CollectiveHeader& d : all) {
      factors_.push_back({d.factor_real, d.factor_imaginary});
    }
  }
  return std::nullopt;
}

}  // namespace c10d_ext::shm
