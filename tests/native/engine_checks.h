#pragma once

// Ranks that are threads, and every collective of the engine against plain loops.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backends/shm/engine.h"

using namespace c10d_ext;
using namespace c10d_ext::shm;
using std::chrono::milliseconds;

inline std::mutex report;
inline int failures = 0;

inline void expect(bool ok, const std::string& what) {
  if (!ok) {
    std::lock_guard lock(report);
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
    ++failures;
  }
}

constexpr size_t kArena = size_t{512} << 10;
constexpr milliseconds kPatience{60000};

using Ints = std::vector<int32_t>;

inline Buffer buffer(Ints& v) {
  return {{reinterpret_cast<std::byte*>(v.data()), v.size() * sizeof(int32_t)}};
}
// The same memory in three pieces, one of them empty.
inline Buffer pieces(Ints& v) {
  std::byte* data = reinterpret_cast<std::byte*>(v.data());
  const size_t third = v.size() / 3 * sizeof(int32_t);
  return {{data, third}, {data, 0}, {data + third, v.size() * sizeof(int32_t) - third}};
}

inline int32_t value(int rank, size_t i, int salt) {
  return static_cast<int32_t>((rank + 1) * 1000003u + i * 7919u + static_cast<unsigned>(salt));
}
inline Ints values(int rank, size_t count, int salt) {
  Ints v(count);
  for (size_t i = 0; i < count; ++i) {
    v[i] = value(rank, i, salt);
  }
  return v;
}

inline Request request(OpType type) {
  Request r;
  r.type = type;
  r.dtype = type == OpType::Barrier ? DType::Bytes : DType::Int32;
  return r;
}

inline std::shared_ptr<Operation> start(Engine& engine, Request r,
                                        milliseconds timeout = kPatience) {
  auto op = std::make_shared<Operation>(std::move(r), timeout);
  engine.submit(op);
  return op;
}
inline void finish(Engine& engine, Operation& op, const std::string& what) {
  expect(engine.wait(op, std::nullopt, nullptr), what + ": not done");
  expect(op.failure() == nullptr, what + ": " + (op.failure() ? op.failure()->text : ""));
}

// Runs `body(engine)` on `size` ranks, each a thread.
inline void with_ranks(int size, const std::function<void(Engine&)>& body, Settings settings = {}) {
  auto mapping = Mapping::anonymous(Engine::mapping_bytes(size, kArena));
  std::vector<std::unique_ptr<Engine>> engines;
  for (int r = 0; r < size; ++r) {
    engines.push_back(
        std::make_unique<Engine>(mapping, kArena, r, size, std::vector<Peer>(), settings));
  }
  std::vector<std::thread> threads;
  for (auto& engine : engines) {
    threads.emplace_back([&] { body(*engine); });
  }
  for (auto& t : threads) {
    t.join();
  }
}

inline void check_all_reduce(Engine& e, size_t count, bool in_place, int salt) {
  const int n = e.size();
  Ints in = values(e.rank(), count, salt), out(in_place ? 0 : count);
  Ints& result = in_place ? in : out;
  Request r = request(OpType::AllReduce);
  r.reduce_op = ReduceOp::Sum;
  r.sources = {pieces(in)};
  r.targets = {pieces(result)};
  auto op = start(e, std::move(r));
  finish(e, *op, "all_reduce");
  for (size_t i = 0; i < count; ++i) {
    uint32_t sum = 0;
    for (int p = 0; p < n; ++p) {
      sum += static_cast<uint32_t>(value(p, i, salt));
    }
    if (result[i] != static_cast<int32_t>(sum)) {
      expect(false, "all_reduce of " + std::to_string(count) + " at " + std::to_string(i));
      return;
    }
  }
}

inline void check_reduce(Engine& e, size_t count, int root, int salt) {
  Ints in = values(e.rank(), count, salt), out(count);
  Request r = request(OpType::Reduce);
  r.reduce_op = ReduceOp::Max;
  r.root = root;
  r.sources = {buffer(in)};
  if (e.rank() == root) {
    r.targets = {buffer(out)};
  }
  auto op = start(e, std::move(r));
  finish(e, *op, "reduce");
  for (size_t i = 0; i < count && e.rank() == root; ++i) {
    int32_t most = value(0, i, salt);
    for (int p = 1; p < e.size(); ++p) {
      most = std::max(most, value(p, i, salt));
    }
    if (out[i] != most) {
      expect(false, "reduce of " + std::to_string(count) + " at " + std::to_string(i));
      return;
    }
  }
}

inline void check_broadcast(Engine& e, size_t count, int root, int salt) {
  Ints data = values(e.rank(), count, salt);
  Request r = request(OpType::Broadcast);
  r.root = root;
  (e.rank() == root ? r.sources : r.targets) = {pieces(data)};
  auto op = start(e, std::move(r));
  finish(e, *op, "broadcast");
  expect(data == values(root, count, salt), "broadcast of " + std::to_string(count));
}

// Sizes of what rank `from` has for rank `to`.
using Sizes = std::function<size_t(int from, int to)>;

inline void check_all_to_all(Engine& e, const Sizes& sizes, int salt) {
  const int n = e.size(), me = e.rank();
  std::vector<Ints> in, out;
  Request r = request(OpType::AllToAll);
  for (int p = 0; p < n; ++p) {
    in.push_back(values(me * 16 + p, sizes(me, p), salt));
    out.emplace_back(sizes(p, me));
  }
  for (int p = 0; p < n; ++p) {
    r.sources.push_back(buffer(in[static_cast<size_t>(p)]));
    r.targets.push_back(buffer(out[static_cast<size_t>(p)]));
  }
  auto op = start(e, std::move(r));
  finish(e, *op, "all_to_all");
  for (int p = 0; p < n; ++p) {
    expect(out[static_cast<size_t>(p)] == values(p * 16 + me, sizes(p, me), salt),
           "all_to_all from " + std::to_string(p));
  }
}

inline void check_all_gather(Engine& e, const Sizes& sizes, int salt) {
  Ints in = values(e.rank(), sizes(e.rank(), 0), salt);
  std::vector<Ints> out;
  Request r = request(OpType::AllGather);
  r.sources = {pieces(in)};
  for (int p = 0; p < e.size(); ++p) {
    out.emplace_back(sizes(p, 0));
  }
  for (Ints& o : out) {
    r.targets.push_back(buffer(o));
  }
  auto op = start(e, std::move(r));
  finish(e, *op, "all_gather");
  for (int p = 0; p < e.size(); ++p) {
    expect(out[static_cast<size_t>(p)] == values(p, sizes(p, 0), salt),
           "all_gather from " + std::to_string(p));
  }
}

// What is sent is not known before the work begins, nor how much by the others at all.
inline void check_sparse(Engine& e, const Sizes& sizes, int salt) {
  struct Late final : Operation {
    explicit Late(Request r) : Operation(std::move(r), kPatience) {}
    void on_begin() override {
      request.sources = {pieces(in)};
    }
    Ints in;
  };
  std::vector<Ints> out;
  Request r = request(OpType::SparseAllReduce);
  r.sources.resize(1);
  r.room = [&](const std::vector<uint64_t>& bytes) {
    std::vector<Buffer> buffers;
    for (const auto b : bytes) {
      out.emplace_back(b / sizeof(int32_t));
    }
    for (Ints& o : out) {
      buffers.push_back(pieces(o));
    }
    return buffers;
  };
  auto op = std::make_shared<Late>(std::move(r));
  op->in = values(e.rank(), sizes(e.rank(), 0), salt);
  e.submit(op);
  finish(e, *op, "sparse all_reduce");
  for (int p = 0; p < e.size(); ++p) {
    expect(out[static_cast<size_t>(p)] == values(p, sizes(p, 0), salt),
           "sparse all_reduce from " + std::to_string(p));
  }
}

inline void check_reduce_scatter(Engine& e, const Sizes& sizes, int salt) {
  std::vector<Ints> in;
  Ints out(sizes(0, e.rank()));
  Request r = request(OpType::ReduceScatter);
  r.reduce_op = ReduceOp::Sum;
  for (int p = 0; p < e.size(); ++p) {
    in.push_back(values(e.rank() * 16 + p, sizes(0, p), salt));
  }
  for (Ints& i : in) {
    r.sources.push_back(pieces(i));
  }
  r.targets = {pieces(out)};
  auto op = start(e, std::move(r));
  finish(e, *op, "reduce_scatter");
  for (size_t i = 0; i < out.size(); ++i) {
    uint32_t sum = 0;
    for (int p = 0; p < e.size(); ++p) {
      sum += static_cast<uint32_t>(value(p * 16 + e.rank(), i, salt));
    }
    if (out[i] != static_cast<int32_t>(sum)) {
      expect(false, "reduce_scatter at " + std::to_string(i));
      return;
    }
  }
}

inline void check_gather_and_scatter(Engine& e, const Sizes& sizes, int root, int salt) {
  Ints mine = values(e.rank(), sizes(e.rank(), 0), salt);
  std::vector<Ints> all;
  Request g = request(OpType::Gather);
  g.root = root;
  g.sources = {buffer(mine)};
  for (int p = 0; p < e.size() && e.rank() == root; ++p) {
    all.emplace_back(sizes(p, 0));
  }
  for (Ints& a : all) {
    g.targets.push_back(buffer(a));
  }
  auto gather = start(e, std::move(g));
  finish(e, *gather, "gather");
  for (size_t p = 0; p < all.size(); ++p) {
    expect(all[p] == values(static_cast<int>(p), sizes(static_cast<int>(p), 0), salt), "gather");
  }
  Ints back(mine.size());
  Request s = request(OpType::Scatter);
  s.root = root;
  for (Ints& a : all) {
    s.sources.push_back(buffer(a));
  }
  s.targets = {buffer(back)};
  auto scatter = start(e, std::move(s));
  finish(e, *scatter, "scatter");
  expect(back == mine, "scatter");
}

// Every rank sends two messages to every rank, itself included, which takes them in the other
// order.
inline void check_messages(Engine& e, size_t count, bool any_source) {
  const size_t n = static_cast<size_t>(e.size());
  std::vector<Ints> out, in(2 * n, Ints(count));
  std::vector<std::shared_ptr<Operation>> sends, receives;
  for (int to = 0; to < e.size(); ++to) {
    for (int tag = 0; tag < 2; ++tag) {
      out.push_back(values(e.rank() * 16 + to, count, tag));
    }
  }
  for (size_t i = 0; i < 2 * n; ++i) {
    Request r = request(OpType::Send);
    r.peer = static_cast<int>(i / 2);
    r.tag = static_cast<int64_t>(i % 2);
    r.sources = {pieces(out[i])};
    sends.push_back(start(e, std::move(r)));
  }
  for (size_t i = 0; i < 2 * n; ++i) {
    Request r = request(OpType::Recv);
    r.peer = any_source ? -1 : static_cast<int>(i / 2);
    r.tag = 1 - static_cast<int64_t>(i % 2);
    r.targets = {pieces(in[i])};
    receives.push_back(start(e, std::move(r)));
  }
  for (auto& op : sends) {
    finish(e, *op, "send");
  }
  for (size_t i = 0; i < 2 * n; ++i) {
    finish(e, *receives[i], "recv");
    const int from = receives[i]->source_rank();
    expect(any_source || from == static_cast<int>(i / 2), "recv: source");
    expect(in[i] == values(from * 16 + e.rank(), count, 1 - static_cast<int>(i % 2)),
           "recv of " + std::to_string(count));
  }
}

// Every collective and message against plain loops, on one rank.
inline void check_everything(Engine& e) {
  const int size = e.size();
  int salt = 0;
  for (size_t count : {0, 1, 3, 1000, 8191, 8193, 20000, 70001, 300007}) {
    check_all_reduce(e, count, true, ++salt);
    check_all_reduce(e, count, false, ++salt);
    check_broadcast(e, count, salt % size, salt);
    check_reduce(e, count, salt % size, salt);
    check_messages(e, count / 4, salt % 4 == 0);
    for (const Sizes& sizes :
         {Sizes([&](int, int) { return count; }), Sizes([&](int from, int to) {
            return count * static_cast<size_t>((from * 3 + to * 5) % 4) / 2;
          }),
          // Most stays where it is.
          Sizes([&](int from, int to) { return from == to ? count : count / 7; })}) {
      check_all_to_all(e, sizes, salt);
      check_all_gather(e, sizes, salt);
      check_sparse(e, sizes, salt);
      check_reduce_scatter(e, sizes, salt);
      check_gather_and_scatter(e, sizes, salt % size, salt);
    }
    auto barrier = start(e, request(OpType::Barrier));
    finish(e, *barrier, "barrier");
  }
}
