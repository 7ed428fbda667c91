#include "backends/hierarchical/along_hosts.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "backends/hierarchical/pieces.h"
#include "backends/hierarchical/rail_messages.h"
#include "backends/hierarchical/sizes.h"
#include "base/dtype.h"
#include "base/kept_memory.h"
#include "kernels/kernels.h"

namespace c10d_ext::hierarchical {

namespace {

using std::string_view;
using Tensors = std::vector<at::Tensor>;

struct Piece {
  int64_t offset, count;

  at::Tensor of(const at::Tensor& row) const {
    return row.narrow(0, offset, count);
  }
};

// A Round cuts what goes round the hosts into pieces, and sends and receives these.
struct Round {
  Round(const Parts& parts, const at::Tensor& part)
      : hosts(static_cast<int>(parts.hosts.count())), host(parts.hosts.host()), rail(parts.rail) {
    each_piece(part.numel(), round_parts(part.nbytes()),
               [&](int64_t offset, int64_t count) { pieces.push_back({offset, count}); });
  }

  // The host that is so many steps before this one.
  int host_before(int steps) const {
    return (host + hosts - steps % hosts) % hosts;
  }
  // `step`: how many hosts have sent the piece, this time included.
  Step recv(const at::Tensor& piece, int step, size_t number) const {
    return rail.recv(piece, host_before(1), tag(step, number));
  }
  Step send(const at::Tensor& piece, int step, size_t number) const {
    return rail.send(piece, (host + 1) % hosts, tag(step, number));
  }
  int tag(int step, size_t number) const {
    return step * static_cast<int>(pieces.size()) + static_cast<int>(number);
  }

  const int hosts, host;
  std::vector<Piece> pieces;
  const Part& rail;
};

void reduce_two(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  const std::array<const void*, 2> sources{a.const_data_ptr(), b.const_data_ptr()};
  kernels::reduce(dtype_of(out.scalar_type()), op, out.mutable_data_ptr(), nullptr, sources.data(),
                  static_cast<int>(sources.size()), static_cast<size_t>(out.numel()), nullptr);
}

}  // namespace

bool broadcasts_along_hosts(const Parts& parts, const at::Tensor& t) {
  const int64_t hosts = parts.hosts.count(), pieces = chain_parts(t.nbytes());
  int64_t rounds = 0;
  while (int64_t{1} << rounds < hosts) {
    ++rounds;
  }
  return parts.flat.has_messages() && pieces > 1 && pieces + hosts - 2 < rounds * pieces;
}

void broadcast_along_hosts(const Parts& parts, const at::Tensor& t, int root, int on_rail,
                           bool is_known_there) {
  constexpr string_view op = "broadcast";
  const auto hosts = static_cast<int>(parts.hosts.count());
  const int host = parts.hosts.host();
  const int from_root = (host - root + hosts) % hosts;
  const bool tells_here = parts.local.is_there() && !(is_known_there && from_root == 0);
  struct Pipe {
    at::Tensor part;
    Step came, sent, inside;
  };
  std::vector<Pipe> pipes;
  const bool is_on_rail = parts.hosts.place() == on_rail;
  const int64_t pieces = chain_parts(t.nbytes());
  each_piece(t.numel(), pieces, [&](int64_t offset, int64_t count) {
    Pipe& pipe = pipes.emplace_back();
    pipe.part = t.narrow(0, offset, count);
    if (is_on_rail && from_root != 0) {
      const auto tag = static_cast<int>(pipes.size());
      pipe.came = parts.rail.recv(pipe.part, (host + hosts - 1) % hosts, tag);
    }
  });
  for (size_t i = 0; i < pipes.size(); ++i) {
    Pipe& pipe = pipes[i];
    pipe.came.wait();
    if (is_on_rail && from_root != hosts - 1) {
      pipe.sent = parts.rail.send(pipe.part, (host + 1) % hosts, static_cast<int>(i + 1));
    }
    if (tells_here) {
      const auto request = CollectiveRequest::broadcast(op, pipe.part, pipe.part, on_rail);
      pipe.inside = parts.local.start(request);
    }
  }
  for (auto& pipe : pipes) {
    pipe.sent.wait();
    pipe.inside.wait();
  }
}

bool goes_round(const Parts& parts, const at::Tensor& part) {
  return goes_by_messages(parts) && pays_round(part.nbytes(), parts.hosts.count());
}

// Each rank sends on what comes from the host before, and the others of its host take that from its
// memory.
void all_gather_along_hosts(const Parts& parts, const at::Tensor& in, const at::Tensor& out) {
  constexpr string_view op = "all_gather";
  const Round round(parts, in);
  const at::Tensor rows = rows_of(out, parts.size);
  const auto rows_from = [&](int host, const Piece& piece) {
    Tensors found;
    for (const int rank : parts.hosts.ranks()[static_cast<size_t>(host)]) {
      found.push_back(piece.of(rows.select(0, rank)));
    }
    return found;
  };
  const auto place = static_cast<size_t>(parts.hosts.place());
  struct Coming {
    Tensors rows;  // of the ranks of a host
    Step came, inside;
  };
  std::vector<Coming> all;
  std::vector<Step> sent;
  for (int step = 1; step < round.hosts; ++step) {
    for (size_t i = 0; i < round.pieces.size(); ++i) {
      Coming& coming = all.emplace_back();
      coming.rows = rows_from(round.host_before(step), round.pieces[i]);
      coming.came = round.recv(coming.rows[place], step, i);
    }
  }
  for (size_t i = 0; i < round.pieces.size(); ++i) {
    sent.push_back(round.send(round.pieces[i].of(in), 1, i));
  }
  Step own = parts.local.start(
      CollectiveRequest::all_gather_parts(op, in, rows_from(round.host, {0, in.numel()})));
  auto coming = all.begin();
  for (int step = 1; step < round.hosts; ++step) {
    for (size_t i = 0; i < round.pieces.size(); ++i, ++coming) {
      coming->came.wait();
      const at::Tensor& row = coming->rows[place];
      if (step + 1 < round.hosts) {
        sent.push_back(round.send(row, step + 1, i));
      }
      coming->inside =
          parts.local.start(CollectiveRequest::all_gather_parts(op, row, coming->rows));
    }
  }
  own.wait();
  for (auto& each : all) {
    each.inside.wait();
  }
  wait(sent);
}

// Inside, each rank reduces what is for the ranks of its place. What is sent first is reduced
// first, and the rest when something comes for it: until then other ranks may need the processors,
// to send what they send first.
void reduce_scatter_along_hosts(const Parts& parts, const at::Tensor& in, const at::Tensor& out,
                                const Reduction& reduction) {
  constexpr string_view op = "reduce_scatter";
  const Round round(parts, out);
  const at::Tensor rows = rows_of(in, parts.size);
  // By step: what was reduced inside, and what came.
  const at::Tensor sums = scratch({round.hosts, out.numel()}, in.options());
  const at::Tensor others = scratch({round.hosts - 1, out.numel()}, in.options());
  const auto reduce_inside = [&](int step, const Piece& piece) {
    Tensors sources;
    for (const int rank : parts.hosts.ranks()[static_cast<size_t>(round.host_before(step + 1))]) {
      sources.push_back(piece.of(rows.select(0, rank)));
    }
    return parts.local.start(CollectiveRequest::reduce_scatter_parts(
        op, sources, piece.of(sums.select(0, step)), reduction));
  };
  std::vector<Step> came, sent, inside;
  for (int step = 1; step < round.hosts; ++step) {
    for (size_t i = 0; i < round.pieces.size(); ++i) {
      came.push_back(round.recv(round.pieces[i].of(others.select(0, step - 1)), step, i));
    }
  }
  for (size_t i = 0; i < round.pieces.size(); ++i) {
    // The next one is reduced while others finish this one.
    while (inside.size() < std::min(i + 2, round.pieces.size())) {
      inside.push_back(reduce_inside(0, round.pieces[inside.size()]));
    }
    inside[i].wait();
    sent.push_back(round.send(round.pieces[i].of(sums.select(0, 0)), 1, i));
  }
  auto next = came.begin();
  for (int step = 1; step < round.hosts; ++step) {
    const at::Tensor own = sums.select(0, step), other = others.select(0, step - 1);
    const bool is_last = step + 1 == round.hosts;
    for (size_t i = 0; i < round.pieces.size(); ++i) {
      const Piece& piece = round.pieces[i];
      (next++)->wait();
      if (i == 0) {
        reduce_inside(step, {0, out.numel()}).wait();
      }
      const at::Tensor sum = piece.of(is_last ? out : own);
      reduce_two(sum, piece.of(own), piece.of(other), reduction.op);
      if (!is_last) {
        sent.push_back(round.send(sum, step + 1, i));
      }
    }
  }
  wait(sent);
}

}  // namespace c10d_ext::hierarchical
