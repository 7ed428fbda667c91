#include "nccl/comm.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <numeric>
#include <utility>

#include "nccl/faults.h"

extern "C" cudaError_t simulated_cuda_enqueue(cudaStream_t stream, std::function<void()>* run);

using simulated_nccl::Aborted;
using simulated_nccl::Broken;
using simulated_nccl::Fault;
using simulated_nccl::Mesh;
using simulated_nccl::Part;
using simulated_nccl::size_of;

namespace {

std::mutex error_mutex;

std::string& error_text() {
  static auto& instance = *new std::string;
  return instance;
}

// What both ends of a message must agree on.
uint64_t tag_of(const Task& task) {
  return (static_cast<uint64_t>(task.kind) << 32) | (static_cast<uint64_t>(task.dtype) << 16) |
         (static_cast<uint64_t>(task.reducer.op) << 8) | static_cast<uint64_t>(task.peer + 1);
}

bool is_message(const Task& task) {
  return task.kind == Task::Kind::Send || task.kind == Task::Kind::Receive;
}

char* bytes_at(const void* base, size_t offset = 0) {
  return static_cast<char*>(const_cast<void*>(base)) + offset;
}

bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  const auto* p = static_cast<const char*>(a);
  const auto* q = static_cast<const char*>(b);
  return p < q + b_bytes && q < p + a_bytes;
}

}  // namespace

void note_error(const std::string& text) {
  std::lock_guard<std::mutex> lock(error_mutex);
  error_text() = text;
}

const char* last_error() {
  static thread_local std::string text;
  std::lock_guard<std::mutex> lock(error_mutex);
  text = error_text();
  return text.c_str();
}

Comm::Comm(std::string name, int rank, int size, int device)
    : name(std::move(name)), rank(rank), size(size), device(device) {}

ncclResult_t Comm::join(bool blocking) {
  if (blocking) {
    return connect();
  }
  std::thread([this] { connect(); }).detach();
  return ncclInProgress;
}

ncclResult_t Comm::connect() {
  try {
    const auto aborted = [this] { return is_aborted(); };
    auto control = std::make_unique<Mesh>(name + "/control", rank, size, aborted);
    auto data = std::make_unique<Mesh>(name + "/data", rank, size, aborted);
    const auto devices = control->gather(static_cast<uint64_t>(device));
    for (int i = 0; i < size; ++i) {
      for (int j = 0; j < i; ++j) {
        if (devices[i] == devices[j]) {
          note_error("Duplicate GPU detected : rank " + std::to_string(j) + " and rank " +
                     std::to_string(i) + " both on CUDA device " + std::to_string(devices[i]));
          return state_ = ncclInvalidUsage;
        }
      }
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      control_ = std::move(control);
      data_ = std::move(data);
    }
    return state_ = ncclSuccess;
  } catch (const Aborted&) {
    return state_ = ncclInvalidUsage;
  } catch (const std::exception& error) {
    note_error(error.what());
    return state_ = ncclRemoteError;
  }
}

int Comm::add_factor(double factor, const void* device_factor, ncclDataType_t dtype) {
  std::lock_guard<std::mutex> lock(mutex_);
  factors_.push_back({factor, device_factor, dtype});
  return ncclNumOps + static_cast<int>(factors_.size()) - 1;
}

void Comm::resolve(Task* task, ncclRedOp_t op) {
  task->reducer.ranks = size;
  task->reducer.op = op;
  if (op >= ncclNumOps) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Factor& factor = factors_.at(op - ncclNumOps);
    task->is_scaled = true;
    task->reducer.op = ncclSum;
    task->reducer.factor = factor.value;
    task->device_factor = factor.at;
  }
}

ncclResult_t Comm::launch(cudaStream_t stream, std::vector<Task> tasks) {
  if (state_ != ncclSuccess) {
    return state_;
  }
  uint64_t turn = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    turn = launched_++;
  }
  cudaStreamCaptureStatus status;
  cudaStreamIsCapturing(stream, &status);
  const bool captured = status != cudaStreamCaptureStatusNone;
  if (captured) {
    std::lock_guard<std::mutex> lock(mutex_);
    --launched_;
  }
  std::function<void()> run = [this, turn, captured, tasks = std::move(tasks)] {
    uint64_t mine = turn;
    if (captured) {
      // Whenever the graph is launched.
      std::lock_guard<std::mutex> lock(mutex_);
      mine = launched_++;
    }
    this->run(mine, tasks);
  };
  if (simulated_cuda_enqueue(stream, &run) != cudaSuccess) {
    if (!captured) {
      std::lock_guard<std::mutex> lock(mutex_);
      ++served_;
    }
    return ncclUnhandledCudaError;
  }
  return ncclSuccess;
}

void Comm::run(uint64_t turn, const std::vector<Task>& tasks) {
  {
    // nccl keeps to the order of the calls, whatever streams they are on.
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return served_ == turn || is_aborted(); });
  }
  const Fault fault = simulated_nccl::fault_of(simulated_nccl::next_call());
  try {
    if (is_aborted()) {
      throw Aborted();
    }
    if (fault == Fault::Error) {
      throw Broken("an injected fault");
    }
    if (fault == Fault::Absent || state_ != ncclSuccess) {
      await_abort();
    }
    run_batch(tasks);
  } catch (const Aborted&) {
    // The stream goes on, with whatever the memory holds.
  } catch (const Broken& error) {
    break_down(ncclRemoteError, error.what());
    try {
      await_abort();
    } catch (const Aborted&) {
      // As above.
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  ++served_;
  changed_.notify_all();
}

void Comm::break_down(ncclResult_t error, const std::string& why) {
  note_error(why);
  state_ = error;
}

// A kernel whose peers do not answer spins until somebody aborts the communicator.
void Comm::await_abort() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return is_aborted(); });
  throw Aborted();
}

void Comm::abort() {
  std::unique_lock<std::mutex> lock(mutex_);
  aborted_ = true;
  for (const auto& mesh : {control_.get(), data_.get()}) {
    if (mesh != nullptr) {
      mesh->shut_down();
    }
  }
  changed_.notify_all();
}

void Comm::finish() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return served_ >= launched_ || is_aborted(); });
}

ncclResult_t Comm::split(int color, int key, bool blocking, Comm** made) {
  *made = nullptr;
  if (state_ != ncclSuccess) {
    return state_;
  }
  std::vector<uint64_t> colors;
  std::vector<uint64_t> keys;
  try {
    colors = control_->gather(static_cast<uint64_t>(static_cast<int64_t>(color)));
    keys = control_->gather(static_cast<uint64_t>(static_cast<int64_t>(key)));
  } catch (const Aborted&) {
    return ncclInvalidUsage;
  } catch (const Broken& error) {
    break_down(ncclRemoteError, error.what());
    return ncclRemoteError;
  }
  const int number = splits_++;
  if (color < 0) {
    return ncclSuccess;  // NCCL_SPLIT_NOCOLOR
  }
  std::vector<int> members;
  for (int i = 0; i < size; ++i) {
    if (static_cast<int64_t>(colors[i]) == color) {
      members.push_back(i);
    }
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return static_cast<int64_t>(keys[a]) < static_cast<int64_t>(keys[b]);
  });
  const auto place = std::find(members.begin(), members.end(), rank) - members.begin();
  *made = new Comm(name + "." + std::to_string(number) + "." + std::to_string(color),
                   static_cast<int>(place), static_cast<int>(members.size()), device);
  const auto result = (*made)->join(blocking);
  return result == ncclInProgress ? ncclSuccess : result;
}

void Comm::run_batch(const std::vector<Task>& tasks) {
  std::vector<Part> sends;
  std::vector<Part> receives;
  std::vector<const Task*> to_me;
  std::vector<const Task*> from_me;
  for (const auto& task : tasks) {
    if (!is_message(task)) {
      continue;
    }
    const size_t bytes = task.count * size_of(task.dtype);
    // The same at both ends.
    const uint64_t tag = (uint64_t{0x6d} << 32) | static_cast<uint64_t>(task.dtype);
    if (task.peer == rank) {
      (task.kind == Task::Kind::Send ? from_me : to_me).push_back(&task);
    } else if (task.kind == Task::Kind::Send) {
      sends.push_back({task.peer, tag, bytes_at(task.source), bytes});
    } else {
      receives.push_back({task.peer, tag, bytes_at(task.out), bytes});
    }
  }
  if (from_me.size() != to_me.size()) {
    throw Broken("a message from a rank to itself without its other end");
  }
  for (size_t i = 0; i < to_me.size(); ++i) {
    std::memmove(to_me[i]->out, from_me[i]->source, to_me[i]->count * size_of(to_me[i]->dtype));
  }
  data_->exchange(sends, receives);
  for (const auto& task : tasks) {
    if (!is_message(task)) {
      run_collective(task);
    }
  }
}

// Every rank gets the others' values and does what is to be done with them itself.
void Comm::run_collective(const Task& task) {
  using Kind = Task::Kind;
  const size_t bytes = task.count * size_of(task.dtype);
  const uint64_t tag = tag_of(task);
  const bool is_root = task.peer == rank;
  // What this rank sends to `peer`, and what it gets from everybody: bytes each.
  const auto sent_to = [&](int peer) -> std::pair<size_t, size_t> {
    switch (task.kind) {
      case Kind::Reduce:
        return {0, peer == task.peer ? bytes : 0};
      case Kind::Broadcast:
        return {0, is_root ? bytes : 0};
      case Kind::ReduceScatter:
      case Kind::AllToAll:
        return {peer * bytes, bytes};
      default:
        return {0, bytes};
    }
  };
  const auto got_from = [&](int peer) -> size_t {
    switch (task.kind) {
      case Kind::Reduce:
        return is_root ? bytes : 0;
      case Kind::Broadcast:
        return peer == task.peer ? bytes : 0;
      default:
        return bytes;
    }
  };
  const bool takes_all = task.kind == Kind::ReduceScatter || task.kind == Kind::AllToAll;
  const bool gives_all = task.kind == Kind::AllGather || task.kind == Kind::AllToAll;
  const size_t source_bytes = takes_all ? size * bytes : bytes;
  const bool is_written = (task.kind != Kind::Reduce || is_root);
  const size_t out_bytes = !is_written ? 0 : gives_all ? size * bytes : bytes;
  std::vector<char> source;
  if (task.kind != Kind::Broadcast || is_root) {
    source.assign(bytes_at(task.source), bytes_at(task.source) + source_bytes);
    if (task.is_scaled) {
      double factor = task.reducer.factor;
      if (task.device_factor != nullptr) {
        factor = task.dtype == ncclFloat64 ? *static_cast<const double*>(task.device_factor)
                                           : *static_cast<const float*>(task.device_factor);
      }
      simulated_nccl::multiply(source.data(), source_bytes / size_of(task.dtype), task.dtype,
                               factor);
    }
  }
  // A real one writes its output bit by bit from the start: whoever reads it too early sees that.
  if (out_bytes != 0 && !overlap(task.source, source_bytes, task.out, out_bytes)) {
    std::memset(task.out, 0x5a, out_bytes);
  }
  std::vector<std::vector<char>> rows(size);
  std::vector<Part> sends;
  std::vector<Part> receives;
  for (int peer = 0; peer < size; ++peer) {
    const auto [offset, length] = sent_to(peer);
    rows[peer].resize(got_from(peer));
    if (peer == rank) {
      if (!source.empty()) {
        std::copy_n(source.data() + offset, std::min(length, rows[peer].size()), rows[peer].data());
      }
      continue;
    }
    if (length != 0 || task.kind == Kind::AllReduce) {
      sends.push_back({peer, tag, source.data() + offset, length});
    }
    if (!rows[peer].empty() || task.kind == Kind::AllReduce) {
      receives.push_back({peer, tag, rows[peer].data(), rows[peer].size()});
    }
  }
  data_->exchange(sends, receives);
  switch (task.kind) {
    case Kind::AllReduce:
    case Kind::Reduce:
    case Kind::ReduceScatter: {
      if (!is_written) {
        return;
      }
      std::vector<const void*> each;
      for (const auto& row : rows) {
        each.push_back(row.data());
      }
      task.reducer.reduce(each, task.out, task.count, task.dtype);
      return;
    }
    case Kind::Broadcast:
      std::memcpy(task.out, rows[task.peer].data(), bytes);
      return;
    default:
      for (int peer = 0; peer < size; ++peer) {
        std::memcpy(bytes_at(task.out, peer * bytes), rows[peer].data(), bytes);
      }
  }
}
