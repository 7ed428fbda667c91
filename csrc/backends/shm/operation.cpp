#include "backends/shm/operation.h"

#include <chrono>
#include <exception>
#include <string>
#include <utility>

#include "base/exceptions.h"

namespace c10d_ext {

void ShmBackend::TensorOperation::settle(const Failure* failure, const TensorOperation& carrier) {
  std::exception_ptr error;
  if (C10_UNLIKELY(failure != nullptr)) {
    // The engine knows types of collectives: all_gather is all_gather_into_tensor's as well.
    disagrees_ = failure->kind == ErrorKind::Mismatch;
    std::string op = failure->op, text = failure->text;
    if (op == name_of(request.type) && text.starts_with(op + ":")) {
      text.replace(0, op.size(), this->op());
      op = this->op();
    }
    error = std::make_exception_ptr(
        CollectiveError(failure->kind, text, failure->ranks, op, failure->seq, place().name()));
  } else {
    error = trouble();
  }
  state_.set_source(carrier.source_rank());
  state_.set_number(static_cast<int64_t>(carrier.seq()));
  state_.set_milliseconds(
      std::chrono::duration<float, std::milli>(carrier.shm::Operation::duration()).count());
  release_tensors();
  state_.settle(std::move(error), op(), [this] { return c10::IValue(outputs()); });
}

}  // namespace c10d_ext
