// Compares what the ranks have announced, before any data is touched.

#include <algorithm>
#include <array>
#include <cstring>
#include <sstream>

#include "backends/shm/collective.h"

namespace c10d_ext::shm {

namespace {

std::string describe(const CollectiveHeader& d) {
  std::ostringstream out;
  const Verb verb = static_cast<Verb>(d.verb);
  const DType dtype = static_cast<DType>(d.dtype);
  out << name_of(verb) << '(';
  if (verb != Verb::Barrier) {
    const size_t element = std::max<size_t>(size_of(dtype), 1);
    if (d.even) {
      out << d.bytes / element << " x ";
    }
    out << name_of(dtype);
    if (verb == Verb::SparseAllReduce) {
      out << " of shape " << text_of_shapes(d.members_sizes) << " with " << d.members
          << " sparse dimensions";
    } else if (d.members > 1) {
      out << " in " << d.members << " tensors of sizes " << text_of_shapes(d.members_sizes);
    }
    if (static_cast<ReduceOp>(d.reduce_op) != ReduceOp::None) {
      out << ", " << name_of(static_cast<ReduceOp>(d.reduce_op));
    }
    if (d.root >= 0) {
      out << ", root " << d.root;
    }
    if (!d.even && verb != Verb::SparseAllReduce) {
      out << ", uneven sizes";
    }
  }
  out << ')';
  return out.str();
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

Failure Collective::mismatch(const std::string& text, std::vector<int> ranks) const {
  const std::string op(name_of(verb()));
  return {Failure::Kind::Mismatch, op + ": " + text + " " + place_.text(), std::move(ranks), op,
          seq_};
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
  if (verb() != Verb::SparseAllReduce) {
    if (auto failure = compare_tables()) {
      return failure;
    }
  }
  algorithm_ = selection_.choose(verb(), request_.dtype, largest_input(), /*fits_eagerly=*/false);
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
    return a.seq == b.seq && a.verb == b.verb && a.dtype == b.dtype && a.reduce_op == b.reduce_op &&
           a.root == b.root && (!all_even_ || a.bytes == b.bytes) && a.members == b.members &&
           a.members_sizes == b.members_sizes && a.algorithms == b.algorithms &&
           (!strict || !all_even_ || shapes_agree(a.shapes, b.shapes));
  };
  std::vector<int> others;
  for (int p = 1; p < n_; ++p) {
    if (!agree(all[0], all[static_cast<size_t>(p)])) {
      others.push_back(p);
    }
  }
  if (!others.empty()) {
    const bool same_algorithms =
        std::all_of(all.begin(), all.end(),
                    [&](const CollectiveHeader& d) { return d.algorithms == all[0].algorithms; });
    const auto said = [&](size_t rank) {
      const uint64_t shapes = strict ? all[rank].shapes : 0;
      return describe(all[rank]) + (shapes != 0 ? " of shape " + text_of_shapes(shapes) : "") +
             (same_algorithms ? "" : describe_overrides(memory_.control(static_cast<int>(rank))));
    };
    const std::string text = text_of_difference(
        all.size(), seq_, [&](size_t a, size_t b) { return agree(all[a], all[b]); }, said);
    return mismatch(text, others);
  }
  if (request_.reduce_op == ReduceOp::PremulSum) {
    for (const CollectiveHeader& d : all) {
      factors_.push_back({d.factor_real, d.factor_imaginary});
    }
  }
  return std::nullopt;
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
  for (size_t from = 0; from < n; ++from) {
    for (size_t to = 0; to < n; ++to) {
      const bool concerned = verb() == Verb::Gather    ? static_cast<int>(to) == request_.root
                             : verb() == Verb::Scatter ? static_cast<int>(from) == request_.root
                                                       : true;
      const uint64_t sent = sends[from * n + to];
      const uint64_t expected = expects[to * n + from];
      if (concerned && sent != expected) {
        std::ostringstream text;
        const size_t element = std::max<size_t>(size_of(request_.dtype), 1);
        text << "what a rank sends must be what the other expects, got " << sent / element << " x "
             << name_of(request_.dtype) << " from rank " << from << " for rank " << to
             << ", which expects " << expected / element << ", in collective " << seq_;
        return mismatch(text.str(), {static_cast<int>(from), static_cast<int>(to)});
      }
    }
  }
  return std::nullopt;
}

// The same on every rank: the tables are.
size_t Collective::largest_input() const {
  const bool personal =
      verb() == Verb::AllToAll || verb() == Verb::ReduceScatter || verb() == Verb::Scatter;
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
