#pragma once

// What a backend can do, as data: what it lacks is made of what it has (adapter/lowering.h). No
// name and no type of a backend is asked for anywhere else.

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

namespace c10d_ext {

// The methods of c10d::Backend that lowering calls.
enum class Method : uint8_t {
  AllReduce,
  AllReduceCoalesced,
  Reduce,
  Broadcast,
  AllGather,  // into lists of tensors, which may differ in size
  AllGatherIntoTensor,
  AllGatherIntoTensorCoalesced,
  ReduceScatterTensor,
  AllToAllSingle,
  Gather,
  Scatter,
  Barrier,
  Send,
  Recv,
};

class Methods {
 public:
  constexpr Methods() = default;
  constexpr Methods(std::initializer_list<Method> methods) {
    for (const Method method : methods) {
      bits_ |= bit(method);
    }
  }
  constexpr bool has(Method method) const {
    return (bits_ & bit(method)) != 0;
  }
  constexpr Methods with(Method method) const {
    Methods more = *this;
    more.bits_ |= bit(method);
    return more;
  }
  constexpr Methods without(Methods others) const {
    Methods fewer = *this;
    fewer.bits_ &= ~others.bits_;
    return fewer;
  }

 private:
  static constexpr uint32_t bit(Method method) {
    return uint32_t{1} << static_cast<int>(method);
  }
  uint32_t bits_ = 0;
};

// What c10d asks of a backend; lists of several tensors as one call are an extra.
inline constexpr Methods kMethodsOfC10d{
    Method::AllReduce,           Method::Reduce,         Method::Broadcast, Method::AllGather,
    Method::AllGatherIntoTensor, Method::AllToAllSingle, Method::Gather,    Method::Scatter,
    Method::ReduceScatterTensor, Method::Barrier,        Method::Send,      Method::Recv};

// The defaults hold for a backend of which nothing is known: it has c10d's methods, and of what
// c10d leaves open nothing is taken for granted.
struct Capabilities {
  enum class Futures : uint8_t { None, IfPossible, Always };

  Methods methods = kMethodsOfC10d;
  // Whether Work::getFuture works. If not, a work is finished by who waits for it or asks.
  Futures futures = Futures::None;
  // ReduceOp::AVG in all_reduce and reduce_scatter, and in reduce.
  bool reduces_avg = false;
  bool reduces_avg_to_one = false;
  // half and bfloat16 are accumulated in float32.
  bool reduces_low_precision = false;
  bool reduces_bitwise = true;
  // min and max of floats are NaN where one of them is, or may be as they are.
  bool keeps_nan = true;
  // all_gather into lists takes parts of different sizes.
  bool gathers_uneven = false;
  // gather and scatter meet c10d's own at the other ranks, which are exchanges: parts may differ.
  bool exchanges_rooted_parts = false;
  // Adds the ranks' values in one order, wherever in a message they stand.
  bool sums_in_rank_order = false;
  // What is made of a gather reduces the values of each host's ranks first where that is as exact.
  std::shared_ptr<const std::vector<std::vector<int>>> reduces_on_hosts;
  // Collectives do nothing: no values depend on them.
  bool moves_nothing = false;
  // A collective's inputs live as long as it needs them, whatever the caller does.
  bool keeps_inputs = false;
  // Works know how long they took.
  bool times_works = false;
  // Messages of every dtype and stride.
  bool sends_any_tensor = false;
  // Messages are of host memory alone: those of a device go through it.
  bool sends_host_memory_only = false;
  // Messages have every tag from 0 to an int's largest.
  bool has_every_tag = false;
  // Messages go over sockets, once their two ranks have told each other of them.
  bool sends_over_sockets = false;
  // A message is not done before its peer's has started: several must start as one.
  bool starts_messages_together = false;
  // The work of a message can only be waited for, by one thread.
  bool has_blocking_messages = false;
  // A collective that its caller waits for at once may run on the caller's stream (`asyncOp`
  // false), which takes no events, and then has no work.
  bool may_run_on_callers_stream = false;
  // The wait for a barrier blocks the host, which no capture into a graph allows.
  bool barrier_blocks_host = false;
};

}  // namespace c10d_ext
