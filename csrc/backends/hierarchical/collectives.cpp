// Collectives of several hosts, as schedules of requests.

#include "backends/hierarchical/collectives.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "base/reduction.h"

namespace c10d_ext::hierarchical {

namespace {

using std::string_view;
using Sizes = std::vector<int64_t>;

// Up to so many bytes every rail carries all of them: one step between hosts and none after it.
constexpr int64_t kSmall = int64_t{16} << 10;
// Larger ones travel in parts, so that memory and links work at once.
constexpr int64_t kPart = int64_t{1} << 20;
constexpr int64_t kParts = 8;

at::Tensor flat(const at::Tensor& t) {
  return span_of(t, 0, t.numel());
}

at::Tensor rows_of(const at::Tensor& t, int64_t rows) {
  return flat(t).view({rows, t.numel() / std::max<int64_t>(rows, 1)});
}

// to[i] = from[order[i]]
void gather_rows(const at::Tensor& to, const at::Tensor& from, const Sizes& order) {
  for (size_t i = 0; i < order.size(); ++i) {
    to.select(0, static_cast<int64_t>(i)).copy_(from.select(0, order[i]));
  }
}

// to[order[i]] = from[i]
void scatter_rows(const at::Tensor& to, const at::Tensor& from, const Sizes& order) {
  for (size_t i = 0; i < order.size(); ++i) {
    to.select(0, order[i]).copy_(from.select(0, static_cast<int64_t>(i)));
  }
}

// Into how many parts a tensor of so many bytes is cut.
int64_t parts_of(size_t bytes) {
  return std::clamp<int64_t>(static_cast<int64_t>(bytes) / kPart, int64_t{1}, kParts);
}

// Calls `piece(offset, count)` for each of `pieces` parts of `count` elements; the last is smaller.
template <class Piece>
void each_piece(int64_t count, int64_t pieces, Piece&& piece) {
  const int64_t each = std::max<int64_t>((count + pieces - 1) / pieces, 1);
  for (int64_t offset = 0; offset < count; offset += each) {
    piece(offset, std::min(each, count - offset));
  }
}

Reduction reduction_of(const InnerCollective& what) {
  return {what.reduce_op, std::nullopt};
}

// Inside, each rank reduces a share; the shares are reduced between hosts, each on a rail of its
// own; inside, everybody gathers them. Parts of the tensor are in different steps at once.
void all_reduce_over_rails(const Parts& parts, const at::Tensor& t, const Reduction& reduction) {
  constexpr string_view op = "all_reduce";
  const int64_t here = parts.hosts.count_here();
  const int64_t pieces = parts_of(t.nbytes());
  const int64_t share = t.numel() / (pieces * here);
  struct Pipe {
    at::Tensor whole, share;
    Step scattered, reduced, gathered;
  };
  std::vector<Pipe> pipes(share > 0 ? static_cast<size_t>(pieces) : 0);
  int64_t offset = 0;
  for (auto& pipe : pipes) {
    pipe.whole = t.narrow(0, offset, share * here);
    pipe.share = at::empty({share}, t.options());
    offset += share * here;
    pipe.scattered =
        parts.local.start(CollectiveRequest::reduce_scatter(op, pipe.whole, pipe.share, reduction));
  }
  const at::Tensor rest = t.narrow(0, offset, t.numel() - offset);
  for (auto& pipe : pipes) {
    pipe.scattered.wait();
    pipe.reduced =
        parts.rail.start(CollectiveRequest::all_reduce(op, pipe.share, pipe.share, reduction));
  }
  for (auto& pipe : pipes) {
    pipe.reduced.wait();
    pipe.gathered = parts.local.start(CollectiveRequest::all_gather(op, pipe.share, pipe.whole));
  }
  if (rest.numel() != 0) {
    // Less than an element for each share: every rail carries it.
    parts.local.start(CollectiveRequest::all_reduce(op, rest, rest, reduction)).wait();
    parts.rail.start(CollectiveRequest::all_reduce(op, rest, rest, reduction)).wait();
  }
  for (auto& pipe : pipes) {
    pipe.gathered.wait();
  }
}

void all_reduce_by_leaders(const Parts& parts, const at::Tensor& t, const Reduction& reduction) {
  constexpr string_view op = "all_reduce";
  if (parts.local.is_there()) {
    parts.local.start(CollectiveRequest::reduce(op, t, t, reduction, 0)).wait();
  }
  if (parts.hosts.is_leader()) {
    parts.rail.start(CollectiveRequest::all_reduce(op, t, t, reduction)).wait();
  }
  if (parts.local.is_there()) {
    parts.local.start(CollectiveRequest::broadcast(op, t, t, 0)).wait();
  }
}

void all_reduce(const Parts& parts, const InnerCollective& what) {
  constexpr string_view op = "all_reduce";
  const at::Tensor t = flat(what.out);
  const Reduction reduction = reduction_of(what);
  if (!parts.hosts.is_even()) {
    all_reduce_by_leaders(parts, t, reduction);
  } else if (!parts.local.is_there()) {
    parts.rail.start(CollectiveRequest::all_reduce(op, t, t, reduction)).wait();
  } else if (static_cast<int64_t>(t.nbytes()) <= kSmall) {
    parts.local.start(CollectiveRequest::all_reduce(op, t, t, reduction)).wait();
    parts.rail.start(CollectiveRequest::all_reduce(op, t, t, reduction)).wait();
  } else {
    all_reduce_over_rails(parts, t, reduction);
  }
}

void reduce(const Parts& parts, const InnerCollective& what) {
  constexpr string_view op = "reduce";
  const at::Tensor t = flat(what.out);
  const Reduction reduction = reduction_of(what);
  const int root = what.root;
  const int place = parts.hosts.place_of(root);
  const bool is_here = parts.hosts.is_here(root);
  // On a rail the root is reduced to at once; leaders are where it may have none.
  const int on_rail = parts.hosts.is_even() ? place : 0;
  if (parts.local.is_there()) {
    parts.local.start(CollectiveRequest::reduce(op, t, t, reduction, on_rail)).wait();
  }
  if (parts.hosts.place() == on_rail) {
    parts.rail.start(CollectiveRequest::reduce(op, t, t, reduction, parts.hosts.host_of(root)))
        .wait();
  }
  if (is_here && place != on_rail) {
    parts.local.start(CollectiveRequest::broadcast(op, t, t, on_rail)).wait();
  }
}

void broadcast(const Parts& parts, const InnerCollective& what) {
  constexpr string_view op = "broadcast";
  const at::Tensor t = flat(what.out);
  const int root = what.root;
  const int place = parts.hosts.place_of(root);
  const bool is_here = parts.hosts.is_here(root);
  const int on_rail = parts.hosts.is_even() ? place : 0;
  if (is_here && parts.local.is_there() && on_rail != place) {
    parts.local.start(CollectiveRequest::broadcast(op, t, t, place)).wait();
  }
  if (parts.hosts.place() == on_rail) {
    parts.rail.start(CollectiveRequest::broadcast(op, t, t, parts.hosts.host_of(root))).wait();
  }
  if (parts.local.is_there() && !(is_here && on_rail != place)) {
    parts.local.start(CollectiveRequest::broadcast(op, t, t, on_rail)).wait();
  }
}

// The ranks of this place, then those of all places: rows by place and host. Parts of each row are
// in different steps at once.
void all_gather_over_rails(const Parts& parts, const at::Tensor& in, const at::Tensor& out) {
  constexpr string_view op = "all_gather";
  struct Pipe {
    at::Tensor rows, column, all;
    Step between, inside;
  };
  std::vector<Pipe> pipes;
  each_piece(in.numel(), parts_of(out.nbytes()), [&](int64_t offset, int64_t count) {
    Pipe& pipe = pipes.emplace_back();
    pipe.rows = rows_of(out, parts.size).narrow(1, offset, count);
    pipe.column = at::empty({parts.hosts.count(), count}, in.options());
    pipe.between = parts.rail.start(
        CollectiveRequest::all_gather(op, in.narrow(0, offset, count), pipe.column));
  });
  for (auto& pipe : pipes) {
    pipe.between.wait();
    if (parts.local.is_there()) {
      pipe.all = at::empty(pipe.rows.sizes(), in.options());
      pipe.inside = parts.local.start(CollectiveRequest::all_gather(op, pipe.column, pipe.all));
    }
  }
  for (auto& pipe : pipes) {
    pipe.inside.wait();
    scatter_rows(pipe.rows, parts.local.is_there() ? pipe.all : pipe.column,
                 parts.hosts.order_by_place());
  }
}

void all_gather(const Parts& parts, const InnerCollective& what) {
  constexpr string_view op = "all_gather";
  const at::Tensor in = flat(what.source);
  const at::Tensor& out = what.out;
  if (parts.hosts.is_even()) {
    all_gather_over_rails(parts, in, out);
    return;
  }
  const at::Tensor all = at::empty({parts.size, in.numel()}, in.options());
  const at::Tensor own = at::empty({parts.hosts.count_here(), in.numel()}, in.options());
  if (parts.local.is_there()) {
    parts.local.start(CollectiveRequest::gather(op, in, own, 0)).wait();
  } else {
    own.select(0, 0).copy_(in);
  }
  if (parts.hosts.is_leader()) {
    parts.rail.start(CollectiveRequest::all_gather_uneven(op, own, all, parts.hosts.sizes()))
        .wait();
  }
  if (parts.local.is_there()) {
    parts.local.start(CollectiveRequest::broadcast(op, all, all, 0)).wait();
  }
  scatter_rows(rows_of(out, parts.size), all, parts.hosts.order_by_host());
}

// What is for the ranks of this place, then what is for this rank. Parts of each row are in
// different steps at once.
void reduce_scatter_over_rails(const Parts& parts, const at::Tensor& in, const at::Tensor& out,
                               const Reduction& reduction) {
  constexpr string_view op = "reduce_scatter";
  struct Pipe {
    at::Tensor sorted, column, out;
    Step inside, between;
  };
  std::vector<Pipe> pipes;
  each_piece(out.numel(), parts_of(in.nbytes()), [&](int64_t offset, int64_t count) {
    Pipe& pipe = pipes.emplace_back();
    pipe.out = out.narrow(0, offset, count);
    pipe.column = pipe.sorted = at::empty({parts.size, count}, in.options());
    gather_rows(pipe.sorted, rows_of(in, parts.size).narrow(1, offset, count),
                parts.hosts.order_by_place());
    if (parts.local.is_there()) {
      pipe.column = at::empty({parts.hosts.count(), count}, in.options());
      pipe.inside = parts.local.start(
          CollectiveRequest::reduce_scatter(op, pipe.sorted, pipe.column, reduction));
    }
  });
  for (auto& pipe : pipes) {
    pipe.inside.wait();
    pipe.between =
        parts.rail.start(CollectiveRequest::reduce_scatter(op, pipe.column, pipe.out, reduction));
  }
  for (auto& pipe : pipes) {
    pipe.between.wait();
  }
}

void reduce_scatter(const Parts& parts, const InnerCollective& what) {
  constexpr string_view op = "reduce_scatter";
  const at::Tensor& in = what.source;
  const at::Tensor out = flat(what.out);
  const Reduction reduction = reduction_of(what);
  if (parts.hosts.is_even()) {
    reduce_scatter_over_rails(parts, in, out, reduction);
    return;
  }
  const at::Tensor sorted = at::empty({parts.size, out.numel()}, in.options());
  gather_rows(sorted, rows_of(in, parts.size), parts.hosts.order_by_host());
  if (parts.local.is_there()) {
    parts.local.start(CollectiveRequest::reduce(op, sorted, sorted, reduction, 0)).wait();
  }
  const at::Tensor own = at::empty({parts.hosts.count_here(), out.numel()}, in.options());
  if (parts.hosts.is_leader()) {
    parts.rail
        .start(CollectiveRequest::reduce_scatter_uneven(op, sorted, own, reduction,
                                                        parts.hosts.sizes()))
        .wait();
  }
  if (parts.local.is_there()) {
    parts.local.start(CollectiveRequest::scatter(op, own, out, 0)).wait();
  } else {
    out.copy_(own.select(0, 0));
  }
}

void all_to_all(const Parts& parts, const InnerCollective& what) {
  constexpr string_view op = "all_to_all";
  const at::Tensor in = flat(what.source);
  const at::Tensor out = flat(what.out);
  const Sizes &sent = what.sent, &received = what.received;
  // What stays here goes by shared memory, and the rest by the engine between hosts.
  struct Side {
    Sizes here, there;
    at::Tensor near, far;
    std::vector<std::pair<at::Tensor, at::Tensor>> pieces;  // of the whole, of near or far
  };
  const auto& ranks = parts.hosts.ranks_here();
  const auto part = [&](const at::Tensor& whole, const Sizes& sizes) {
    Side side;
    side.there = sizes;
    Sizes offsets(sizes.size(), 0);
    for (size_t i = 1; i < sizes.size(); ++i) {
      offsets[i] = offsets[i - 1] + sizes[i - 1];
    }
    int64_t near = 0;
    for (const int rank : ranks) {
      const auto i = static_cast<size_t>(rank);
      side.here.push_back(sizes[i]);
      side.there[i] = 0;
      near += sizes[i];
    }
    side.near = at::empty({near}, whole.options());
    side.far = at::empty({whole.numel() - near}, whole.options());
    int64_t at_near = 0, at_far = 0;
    for (const int rank : ranks) {
      const auto i = static_cast<size_t>(rank);
      side.pieces.emplace_back(whole.narrow(0, offsets[i], sizes[i]),
                               side.near.narrow(0, at_near, sizes[i]));
      at_near += sizes[i];
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (side.there[i] != 0) {
        side.pieces.emplace_back(whole.narrow(0, offsets[i], sizes[i]),
                                 side.far.narrow(0, at_far, sizes[i]));
        at_far += sizes[i];
      }
    }
    return side;
  };
  const Side from = part(in, sent), to = part(out, received);
  for (const auto& [whole, piece] : from.pieces) {
    piece.copy_(whole);
  }
  Step far =
      parts.flat.start(CollectiveRequest::all_to_all(op, from.far, to.far, to.there, from.there));
  if (parts.local.is_there()) {
    parts.local.start(CollectiveRequest::all_to_all(op, from.near, to.near, to.here, from.here))
        .wait();
  } else {
    to.near.copy_(from.near);
  }
  far.wait();
  for (const auto& [whole, piece] : to.pieces) {
    whole.copy_(piece);
  }
}

void barrier(const Parts& parts, const InnerCollective& /*what*/) {
  constexpr string_view op = "barrier";
  const at::Tensor nothing = at::empty({0}, at::kByte);
  const auto request = CollectiveRequest::barrier(op, nothing, nothing);
  if (parts.local.is_there()) {
    parts.local.start(request).wait();
  }
  if (parts.hosts.is_leader()) {
    parts.rail.start(request).wait();
  }
  if (parts.local.is_there()) {
    parts.local.start(request).wait();
  }
}

}  // namespace

const InnerTable<Schedule> kSchedules{.barrier = barrier,
                                      .all_reduce = all_reduce,
                                      .reduce = reduce,
                                      .broadcast = broadcast,
                                      .all_gather = all_gather,
                                      .reduce_scatter = reduce_scatter,
                                      .all_to_all = all_to_all};

}  // namespace c10d_ext::hierarchical
