// The choice of algorithms: its syntax and what it says of mistakes; every algorithm, forced, on
// every collective that it can run, against plain loops; ranks that choose differently. Prints what
// failed and exits with 1, or "ok".

#include <stdexcept>
#include <utility>

#include "backends/shm/select.h"
#include "engine_checks.h"

namespace {

constexpr size_t kAny = static_cast<size_t>(-1);
constexpr Algorithm kAll[] = {Algorithm::Eager, Algorithm::TwoShot, Algorithm::Swap,
                              Algorithm::Pipelined};
constexpr OpType kOps[] = {OpType::AllReduce, OpType::Reduce,        OpType::Broadcast,
                           OpType::AllGather, OpType::ReduceScatter, OpType::AllToAll,
                           OpType::Gather,    OpType::Scatter,       OpType::SparseAllReduce};

std::string op_text(OpType op) {
  return op == OpType::SparseAllReduce ? "all_reduce_sparse" : std::string(name_of(op));
}

// What is chosen where eager fits.
Algorithm chosen(const std::string& overrides, int ranks, OpType op, size_t bytes,
                 DType dtype = DType::Float) {
  return Selection(ranks, overrides).choose(op, dtype, bytes, /*fits_eagerly=*/true);
}

void check_measured() {
  constexpr size_t kKiB = 1024;
  struct Case {
    OpType op;
    DType dtype;
    int ranks;
    size_t bytes;
    Algorithm algorithm;
  };
  const DType half = DType::Half, tiny = DType::Float8_e5m2;
  for (const Case& c : {
           Case{OpType::AllReduce, half, 2, 8, Algorithm::Eager},
           Case{OpType::AllReduce, half, 2, 128 * kKiB, Algorithm::Eager},
           Case{OpType::AllReduce, half, 2, 128 * kKiB + 1, Algorithm::Swap},
           Case{OpType::AllReduce, half, 3, 32 * kKiB, Algorithm::Eager},
           Case{OpType::AllReduce, half, 3, 32 * kKiB + 1, Algorithm::TwoShot},
           Case{OpType::AllReduce, tiny, 2, 32 * kKiB, Algorithm::Eager},
           Case{OpType::AllReduce, tiny, 2, 32 * kKiB + 1, Algorithm::TwoShot},
           Case{OpType::Reduce, half, 2, 128 * kKiB, Algorithm::Eager},
           Case{OpType::Reduce, half, 2, 128 * kKiB + 1, Algorithm::TwoShot},
           Case{OpType::Reduce, tiny, 2, 32 * kKiB + 1, Algorithm::TwoShot},
           Case{OpType::AllGather, half, 2, 128 * kKiB + 1, Algorithm::Swap},
           Case{OpType::AllGather, half, 3, 128 * kKiB, Algorithm::Eager},
           Case{OpType::AllGather, half, 3, 128 * kKiB + 1, Algorithm::Pipelined},
           Case{OpType::Broadcast, half, 2, 128 * kKiB + 1, Algorithm::Pipelined},
           Case{OpType::SparseAllReduce, half, 2, 0, Algorithm::Swap},
           Case{OpType::SparseAllReduce, half, 256, 0, Algorithm::Pipelined},
       }) {
    expect(chosen("", c.ranks, c.op, c.bytes, c.dtype) == c.algorithm,
           op_text(c.op) + " of " + std::to_string(c.bytes) + " on " + std::to_string(c.ranks));
  }
  // There is an answer for everything, which can run it.
  for (const OpType op : kOps) {
    for (const int ranks : {2, 3, 4, 17, 256}) {
      for (const DType dtype : {half, tiny}) {
        for (const size_t bytes : {size_t{0}, size_t{1} << 40, kAny}) {
          for (const bool fits : {false, true}) {
            const Algorithm a = Selection(ranks, "").choose(op, dtype, bytes, fits);
            expect(can_run(a, op, ranks) && (fits || a != Algorithm::Eager),
                   op_text(op) + ": no algorithm on " + std::to_string(ranks));
          }
        }
      }
    }
  }
}

void check_overrides() {
  const auto is = [](const std::string& overrides, int ranks, OpType op, size_t bytes,
                     Algorithm expected, DType dtype = DType::Float) {
    expect(chosen(overrides, ranks, op, bytes, dtype) == expected,
           "'" + overrides + "' at " + std::to_string(bytes));
  };
  // Both ends of a range are in it.
  is("all_reduce:0-4k:2:two_shot", 2, OpType::AllReduce, 4096, Algorithm::TwoShot);
  is("all_reduce:0-4k:2:two_shot", 2, OpType::AllReduce, 4097, Algorithm::Eager);
  is("all_reduce:8:2:two_shot", 2, OpType::AllReduce, 8, Algorithm::TwoShot);
  is("all_reduce:8:2:two_shot", 2, OpType::AllReduce, 7, Algorithm::Eager);
  is("all_reduce:1m-inf:*:two_shot", 2, OpType::AllReduce, kAny, Algorithm::TwoShot);
  is("all_reduce:1m-2G:*:two_shot", 2, OpType::AllReduce, size_t{2} << 30, Algorithm::TwoShot);
  is("all_reduce:*:3-inf:two_shot", 2, OpType::AllReduce, 8, Algorithm::Eager);
  is("all_reduce:*:3-inf:two_shot", 3, OpType::AllReduce, 8, Algorithm::TwoShot);
  // Of others nothing is said.
  is("all_reduce:*:*:two_shot", 2, OpType::Reduce, 8, Algorithm::Eager);
  is("*:*:*:pipelined", 2, OpType::AllReduce, 8, Algorithm::Eager);
  is("*:*:*:pipelined", 2, OpType::AllGather, 8, Algorithm::Pipelined);
  // The first one wins.
  is("all_reduce:0-8:2:swap;all_reduce:*:*:two_shot", 2, OpType::AllReduce, 8, Algorithm::Swap);
  is("all_reduce:0-8:2:swap;all_reduce:*:*:two_shot", 2, OpType::AllReduce, 9, Algorithm::TwoShot);
  // By dtype.
  is("all_reduce:*:*:float8:swap", 2, OpType::AllReduce, 8, Algorithm::Eager);
  is("all_reduce:*:*:float8:swap", 2, OpType::AllReduce, 8, Algorithm::Swap,
     DType::Float8_e4m3fnuz);
  is("all_reduce:*:*:other:swap", 2, OpType::AllReduce, 8, Algorithm::Eager, DType::Float8_e4m3fn);
  // Empty rules and spaces are nothing.
  is(" ; all_gather : 0 - 8 : 2 : swap ;; ", 2, OpType::AllGather, 8, Algorithm::Swap);
  expect(Selection(2, " ;").digest() == 0 && Selection(2, " ;").overrides().empty(),
         "nothing is an override");

  const Selection one(2, "all_reduce:0-32k:2:eager"), other(2, " all_reduce : 0-32768 : 2:*:eager");
  expect(one.digest() != 0 && one.digest() == other.digest(), "two ways to write the same");
  expect(one.digest() != Selection(2, "all_reduce:0-32k:2:two_shot").digest(), "digests");
  expect(other.overrides() == "all_reduce:0-32768:2:eager", other.overrides());
  const std::string text = "*:8:*:float8:eager;reduce:0-1024:3-inf:two_shot;gather:*:2-4:pipelined";
  expect(text_of(parse_rules(text)) == text, text_of(parse_rules(text)));
  const std::vector<Rule> measured(measured_rules().begin(), measured_rules().end());
  expect(text_of(parse_rules(text_of(measured))) == text_of(measured), text_of(measured));
}

void check_mistakes() {
  const std::pair<const char*, const char*> mistakes[] = {
      {"all_reduce",
       "a rule must be op:bytes:ranks:algorithm or op:bytes:ranks:dtype:algorithm, got "
       "'all_reduce'"},
      {"all_reduce:*:*:*:eager:x",
       "a rule must be op:bytes:ranks:algorithm or op:bytes:ranks:dtype:algorithm, got "
       "'all_reduce:*:*:*:eager:x'"},
      {"gather:*:*:eager;allreduce:*:*:eager",
       "the op must be all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, "
       "gather, scatter, all_reduce_sparse or *, got 'allreduce' in 'allreduce:*:*:eager'"},
      {"barrier:*:*:eager", "the op must be all_reduce"},
      {"all_reduce:x:2:eager",
       "the bytes must be *, or one or two numbers as in 8, 0-32k and 1m-inf, got 'x' in "
       "'all_reduce:x:2:eager'"},
      {"all_reduce:8-4:2:eager", "the bytes must be"},
      {"all_reduce:-4:2:eager", "the bytes must be"},
      {"all_reduce:0-4-8:2:eager", "the bytes must be"},
      {"all_reduce::2:eager", "the bytes must be"},
      {"all_reduce:inf:2:eager", "the bytes must be"},
      {"all_reduce:99999999999999999999:2:eager", "the bytes must be"},
      {"all_reduce:0-99999999999999999g:2:eager", "the bytes must be"},
      {"all_reduce:*:1:eager",
       "the ranks must be *, or one or two numbers from 2 as in 2, 3-8 and 4-inf, got '1' in "
       "'all_reduce:*:1:eager'"},
      {"all_reduce:*:2k:eager", "the ranks must be"},
      {"all_reduce:*:4-3:eager", "the ranks must be"},
      {"all_reduce:*:*:half:eager",
       "the dtype must be *, float8 or other, got 'half' in 'all_reduce:*:*:half:eager'"},
      {"all_reduce:*:*:ring",
       "the algorithm must be eager, two_shot, swap or pipelined, got 'ring' in "
       "'all_reduce:*:*:ring'"},
      {"all_reduce:*:*:pipelined",
       "the algorithm of all_reduce on so many ranks must be eager, two_shot or swap, got "
       "'pipelined' in 'all_reduce:*:*:pipelined'"},
      {"all_gather:*:3-inf:swap",
       "the algorithm of all_gather on so many ranks must be eager or pipelined, got 'swap'"},
      {"all_reduce_sparse:*:*:eager",
       "the algorithm of all_reduce_sparse on so many ranks must be swap or pipelined, got"},
  };
  for (const auto& [text, said] : mistakes) {
    std::string got = "nothing";
    try {
      parse_rules(text);
    } catch (const std::invalid_argument& error) {
      got = error.what();
    }
    expect(got.find("shm: TORCH_C10D_EXT_SHM_ALGORITHMS: " + std::string(said)) == 0,
           "'" + std::string(text) + "': " + got);
  }
}

// Every algorithm on everything it can run, at sizes on both sides of all limits.
void check_forced(int size) {
  for (const Algorithm algorithm : kAll) {
    Settings settings;
    for (const OpType op : kOps) {
      if (can_run(algorithm, op, size)) {
        settings.algorithms += op_text(op) + ":*:" + std::to_string(size) + ":" +
                               std::string(name_of(algorithm)) + ";";
      }
    }
    with_ranks(size, [](Engine& e) { check_everything(e); }, settings);
  }
}

// Ranks that choose differently get an error that tells how, in each collective, and nothing is
// written; messages do not mind.
void check_disagreement(int size) {
  const std::string overrides[] = {"all_reduce:*:*:two_shot", "all_reduce:*:*:eager", ""};
  auto mapping = Mapping::anonymous(Engine::mapping_bytes(size, kArena));
  std::vector<std::unique_ptr<Engine>> engines;
  for (int r = 0; r < size; ++r) {
    Settings settings;
    settings.algorithms = overrides[r % 3];
    engines.push_back(
        std::make_unique<Engine>(mapping, kArena, r, size, std::vector<Peer>(), settings));
  }
  std::vector<std::thread> threads;
  for (auto& engine : engines) {
    threads.emplace_back([&e = *engine, &overrides] {
      for (int turn = 0; turn < 3; ++turn) {
        Ints data = values(e.rank(), 5000, turn);
        const Ints before = data;
        Request r = request(turn == 2 ? OpType::Barrier : OpType::AllReduce);
        if (turn != 2) {
          r.reduce_op = ReduceOp::Sum;
          r.sources = r.targets = {buffer(data)};
        }
        auto op = start(e, std::move(r));
        expect(e.wait(*op, std::nullopt, nullptr), "different algorithms: not done");
        const Failure* f = op->failure();
        const std::string text = f != nullptr ? f->text : "no failure";
        expect(f != nullptr && f->kind == ErrorKind::Mismatch && data == before,
               "different algorithms: " + text);
        for (int p = 0; p < e.size(); ++p) {
          const std::string& said = overrides[p % 3];
          const std::string how = said.empty() ? "with the default algorithms on rank "
                                               : "with algorithms '" + said + "' on rank ";
          expect(text.find(how + std::to_string(p)) != std::string::npos, text);
        }
      }
      check_messages(e, 1000, false);
    });
  }
  for (auto& t : threads) {
    t.join();
  }
}

// Overrides that are longer than what fits into an error text.
void check_long_overrides() {
  std::string text;
  for (int i = 0; i < 40; ++i) {
    text += "all_reduce:" + std::to_string(i) + ":*:two_shot;";
  }
  Settings settings;
  settings.algorithms = text;
  with_ranks(2, [](Engine& e) { check_all_reduce(e, 5, true, 1); }, settings);
}

}  // namespace

int main() {
  check_measured();
  check_overrides();
  check_mistakes();
  for (const int size : {2, 3, 4}) {
    check_forced(size);
  }
  // Of one rank there is nothing to choose.
  Settings alone;
  alone.algorithms = "*:*:*:eager";
  with_ranks(1, [](Engine& e) { check_everything(e); }, alone);
  check_disagreement(2);
  check_disagreement(3);
  check_long_overrides();
  if (failures == 0) {
    std::puts("ok");
  }
  return failures == 0 ? 0 : 1;
}
