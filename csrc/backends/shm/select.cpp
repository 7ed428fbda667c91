#include "backends/shm/select.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace c10d_ext::shm {

namespace {

constexpr size_t kKiB = 1024;
constexpr size_t kAnyBytes = std::numeric_limits<size_t>::max();
constexpr int kAnyRanks = std::numeric_limits<int>::max();

using enum Algorithm;

// --- The table -----------------------------------------------------------------------------------

// Measured on 2 cores with 512 KiB of L2 each (docs/decisions.md, docs/results.md).
//
//  * 128 KiB beside the announcement save a meeting of all ranks; 256 KiB gain nothing more.
//  * all_reduce and reduce: from 32 KiB on it pays that each rank reduces a part for all, but for
//    two ranks, which send each other as many bytes either way: there only float8 takes longer to
//    reduce than to fetch.
//  * Two ranks that give and take swap: half the time of a pipeline from 128 KiB to 4 MiB.
constexpr Rule kMeasured[] = {
    // op, bytes, ranks, dtypes, algorithm
    {OpType::AllReduce, 0, 128 * kKiB, 2, 2, DTypeClass::Other, Eager},
    {OpType::AllReduce, 0, kAnyBytes, 2, 2, DTypeClass::Other, Swap},
    {OpType::AllReduce, 0, 32 * kKiB, 2, kAnyRanks, DTypeClass::Any, Eager},
    {OpType::AllReduce, 0, kAnyBytes, 2, kAnyRanks, DTypeClass::Any, TwoShot},

    {OpType::Reduce, 0, 128 * kKiB, 2, 2, DTypeClass::Other, Eager},
    {OpType::Reduce, 0, 32 * kKiB, 2, kAnyRanks, DTypeClass::Any, Eager},
    {OpType::Reduce, 0, kAnyBytes, 2, kAnyRanks, DTypeClass::Any, TwoShot},

    {OpType::AllGather, 0, 128 * kKiB, 2, kAnyRanks, DTypeClass::Any, Eager},
    {OpType::AllGather, 0, kAnyBytes, 2, 2, DTypeClass::Any, Swap},
    {OpType::AllGather, 0, kAnyBytes, 2, kAnyRanks, DTypeClass::Any, Pipelined},

    {OpType::ReduceScatter, 0, 128 * kKiB, 2, kAnyRanks, DTypeClass::Any, Eager},
    {OpType::ReduceScatter, 0, kAnyBytes, 2, 2, DTypeClass::Any, Swap},
    {OpType::ReduceScatter, 0, kAnyBytes, 2, kAnyRanks, DTypeClass::Any, Pipelined},

    {OpType::AllToAll, 0, 128 * kKiB, 2, kAnyRanks, DTypeClass::Any, Eager},
    {OpType::AllToAll, 0, kAnyBytes, 2, 2, DTypeClass::Any, Swap},
    {OpType::AllToAll, 0, kAnyBytes, 2, kAnyRanks, DTypeClass::Any, Pipelined},

    {OpType::Broadcast, 0, 128 * kKiB, 2, kAnyRanks, DTypeClass::Any, Eager},
    {OpType::Broadcast, 0, kAnyBytes, 2, kAnyRanks, DTypeClass::Any, Pipelined},
    {OpType::Gather, 0, 128 * kKiB, 2, kAnyRanks, DTypeClass::Any, Eager},
    {OpType::Gather, 0, kAnyBytes, 2, kAnyRanks, DTypeClass::Any, Pipelined},
    {OpType::Scatter, 0, 128 * kKiB, 2, kAnyRanks, DTypeClass::Any, Eager},
    {OpType::Scatter, 0, kAnyBytes, 2, kAnyRanks, DTypeClass::Any, Pipelined},

    {OpType::SparseAllReduce, 0, kAnyBytes, 2, 2, DTypeClass::Any, Swap},
    {OpType::SparseAllReduce, 0, kAnyBytes, 2, kAnyRanks, DTypeClass::Any, Pipelined},
};

// --- Names ---------------------------------------------------------------------------------------

constexpr std::string_view kAlgorithmNames[] = {"eager", "two_shot", "swap", "pipelined"};
static_assert(std::size(kAlgorithmNames) == kAlgorithms);

constexpr std::string_view kDTypeClassNames[] = {"*", "float8", "other"};

constexpr OpType kOpsWithRules[] = {
    OpType::AllReduce, OpType::Reduce,        OpType::Broadcast,
    OpType::AllGather, OpType::ReduceScatter, OpType::AllToAll,
    OpType::Gather,    OpType::Scatter,       OpType::SparseAllReduce};

// A sparse all_reduce has rules of its own.
std::string_view name_in_rules(OpType op) {
  return op == OpType::SparseAllReduce ? "all_reduce_sparse" : name_of(op);
}

std::string_view op_name(const Rule& rule) {
  return rule.op ? name_in_rules(*rule.op) : "*";
}

// --- Parsing -------------------------------------------------------------------------------------

[[noreturn]] void fail(const std::string& what, std::string_view got, std::string_view rule) {
  std::ostringstream text;
  text << "shm: TORCH_C10D_EXT_SHM_ALGORITHMS: " << what << ", got '" << got << "'";
  if (got != rule) {
    text << " in '" << rule << "'";
  }
  throw std::invalid_argument(text.str());
}

std::string_view trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\n");
  return first == std::string_view::npos
             ? std::string_view()
             : text.substr(first, text.find_last_not_of(" \t\n") - first + 1);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(trimmed(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return parts;
}

// "8", and with units "32k"; none where it is no number up to `most`.
std::optional<uint64_t> number(std::string_view text, uint64_t most, bool units) {
  int shift = 0;
  if (units && !text.empty()) {
    const size_t unit = std::string_view("kmgKMG").find(text.back());
    if (unit != std::string_view::npos) {
      shift = 10 * (static_cast<int>(unit % 3) + 1);
      text.remove_suffix(1);
    }
  }
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value > most >> shift) {
    return std::nullopt;
  }
  return value << shift;
}

// "*", "8", "8-64" or "8-inf".
template <class T>
std::pair<T, T> range(std::string_view text, T least, T any, bool units, const std::string& what,
                      std::string_view rule) {
  if (text == "*") {
    return {least, any};
  }
  const auto ends = split(text, '-');
  const auto begin = number(ends[0], static_cast<uint64_t>(any) - 1, units);
  const auto end = ends.size() == 2 && ends[1] == "inf"
                       ? std::optional<uint64_t>(any)
                       : number(ends.back(), static_cast<uint64_t>(any) - 1, units);
  if (ends.size() > 2 || !begin || !end || *begin > *end) {
    fail(what, text, rule);
  }
  return {static_cast<T>(*begin), static_cast<T>(*end)};
}

std::string list_of(const std::vector<std::string_view>& names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + std::string(names[i]);
  }
  return text;
}

std::optional<OpType> parse_op(std::string_view text, std::string_view rule) {
  std::vector<std::string_view> names;
  for (const OpType op : kOpsWithRules) {
    names.push_back(name_in_rules(op));
    if (text == names.back()) {
      return op;
    }
  }
  if (text != "*") {
    names.push_back("*");
    fail("the op must be " + list_of(names), text, rule);
  }
  return std::nullopt;
}

template <class T, size_t N>
T parse_name(const std::string_view (&names)[N], const std::string& what, std::string_view text,
             std::string_view rule) {
  const auto* const found = std::find(std::begin(names), std::end(names), text);
  if (found == std::end(names)) {
    fail(what + " must be " + list_of({std::begin(names), std::end(names)}), text, rule);
  }
  return static_cast<T>(found - std::begin(names));
}

// An algorithm for a collective that it cannot run is a mistake, not a rule without effect.
void check_can_run(const Rule& parsed, std::string_view rule) {
  const auto any_ranks_do = [&](Algorithm algorithm, OpType op) {
    return (parsed.min_ranks <= 2 && can_run(algorithm, op, 2)) ||
           (parsed.max_ranks >= 3 && can_run(algorithm, op, 3));
  };
  std::vector<std::string_view> able;
  for (size_t i = 0; i < kAlgorithms; ++i) {
    const auto algorithm = static_cast<Algorithm>(i);
    const bool does = std::any_of(
        std::begin(kOpsWithRules), std::end(kOpsWithRules),
        [&](OpType op) { return parsed.op.value_or(op) == op && any_ranks_do(algorithm, op); });
    if (does) {
      able.push_back(kAlgorithmNames[i]);
    }
  }
  const std::string_view asked = name_of(parsed.algorithm);
  if (std::find(able.begin(), able.end(), asked) == able.end()) {
    fail("the algorithm of " + std::string(op_name(parsed)) + " on so many ranks must be " +
             list_of(able),
         asked, rule);
  }
}

Rule parse_rule(std::string_view rule) {
  const auto fields = split(rule, ':');
  if (fields.size() != 4 && fields.size() != 5) {
    fail("a rule must be op:bytes:ranks:algorithm or op:bytes:ranks:dtype:algorithm", rule, rule);
  }
  Rule parsed{};
  parsed.op = parse_op(fields[0], rule);
  std::tie(parsed.min_bytes, parsed.max_bytes) =
      range(fields[1], size_t{0}, kAnyBytes, /*units=*/true,
            "the bytes must be *, or one or two numbers as in 8, 0-32k and 1m-inf", rule);
  std::tie(parsed.min_ranks, parsed.max_ranks) =
      range(fields[2], 2, kAnyRanks, /*units=*/false,
            "the ranks must be *, or one or two numbers from 2 as in 2, 3-8 and 4-inf", rule);
  if (parsed.min_ranks < 2) {
    fail("the ranks must be *, or one or two numbers from 2 as in 2, 3-8 and 4-inf", fields[2],
         rule);
  }
  parsed.dtypes = fields.size() == 4
                      ? DTypeClass::Any
                      : parse_name<DTypeClass>(kDTypeClassNames, "the dtype", fields[3], rule);
  parsed.algorithm = parse_name<Algorithm>(kAlgorithmNames, "the algorithm", fields.back(), rule);
  check_can_run(parsed, rule);
  return parsed;
}

template <class T>
std::string text_of_range(T min, T max, T least, T any) {
  if (min == max) {
    return std::to_string(min);
  }
  return min == least && max == any
             ? "*"
             : std::to_string(min) + "-" + (max == any ? "inf" : std::to_string(max));
}

// FNV-1a, and never 0.
uint32_t digest_of(const std::string& text) {
  uint32_t hash = 2166136261U;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
  }
  return hash == 0 ? 1 : hash;
}

}  // namespace

std::string_view name_of(Algorithm algorithm) {
  return kAlgorithmNames[static_cast<size_t>(algorithm)];
}

bool can_run(Algorithm algorithm, OpType op, int ranks) {
  const bool reduces_to_whole = op == OpType::AllReduce || op == OpType::Reduce;
  switch (op) {
    case OpType::Barrier:
    case OpType::Send:
    case OpType::Recv:
      return false;
    default:
      break;
  }
  switch (algorithm) {
    case Eager:
      // What a rank sends must be known, and of one size, when the collective is announced.
      return op != OpType::SparseAllReduce;
    case TwoShot:
      return reduces_to_whole;
    case Swap:
      return ranks == 2 &&
             (op == OpType::AllReduce || op == OpType::ReduceScatter || op == OpType::AllGather ||
              op == OpType::AllToAll || op == OpType::SparseAllReduce);
    case Pipelined:
      return !reduces_to_whole;
  }
  return false;
}

std::span<const Rule> measured_rules() {
  return kMeasured;
}

std::vector<Rule> parse_rules(const std::string& text) {
  std::vector<Rule> rules;
  for (const std::string_view rule : split(text, ';')) {
    if (!rule.empty()) {
      rules.push_back(parse_rule(rule));
    }
  }
  return rules;
}

std::string text_of(const std::vector<Rule>& rules) {
  std::string text;
  for (const Rule& rule : rules) {
    text += text.empty() ? "" : ";";
    text += op_name(rule);
    text += ":" + text_of_range(rule.min_bytes, rule.max_bytes, size_t{0}, kAnyBytes);
    text += ":" + text_of_range(rule.min_ranks, rule.max_ranks, 2, kAnyRanks);
    if (rule.dtypes != DTypeClass::Any) {
      text += ":" + std::string(kDTypeClassNames[static_cast<size_t>(rule.dtypes)]);
    }
    text += ":" + std::string(name_of(rule.algorithm));
  }
  return text;
}

Selection::Selection(int ranks, const std::string& overrides) {
  std::vector<Rule> rules = parse_rules(overrides);
  if (!rules.empty()) {
    overrides_ = text_of(rules);
    digest_ = digest_of(overrides_);
  }
  rules.insert(rules.end(), std::begin(kMeasured), std::end(kMeasured));
  for (const OpType op : kOpsWithRules) {
    for (const bool float8 : {false, true}) {
      for (const Rule& rule : rules) {
        const bool applies =
            rule.op.value_or(op) == op && rule.min_ranks <= ranks && ranks <= rule.max_ranks &&
            (rule.dtypes == DTypeClass::Any || (rule.dtypes == DTypeClass::Float8) == float8);
        if (applies && can_run(rule.algorithm, op, ranks)) {
          candidates_[static_cast<size_t>(op)][float8].push_back(
              {rule.min_bytes, rule.max_bytes, rule.algorithm});
        }
      }
    }
  }
}

}  // namespace c10d_ext::shm
