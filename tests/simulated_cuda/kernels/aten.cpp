// aten's ops on CUDA tensors by their CPU kernels, in the order of the current stream.
//
// Every op that torch registers for CUDA, but for those that only make, describe or transfer
// memory, gets a kernel that (1) asks the op's Meta kernel for the results' sizes and for errors,
// (2) allocates the results, from torch's own caching allocator, and (3) queues the CPU kernel on
// the same memory. What is queued holds addresses and no tensors: memory that is given back too
// early is read too late, as on a device.
#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "kernels/generator.h"
#include "kernels/view.h"

extern "C" cudaError_t simulated_cuda_enqueue(cudaStream_t stream, std::function<void()>* run);

namespace simulated_cuda {

namespace {

using Stack = torch::jit::Stack;

// Real kernels of torch, which allocate, describe or transfer.
bool is_real(const c10::FunctionSchema& schema) {
  static const std::set<std::string> names = {
      "aten::empty",          "aten::empty_strided", "aten::resize_",
      "aten::set_",           "aten::view",          "aten::as_strided",
      "aten::_reshape_alias", "aten::unfold",        "aten::_local_scalar_dense",
      "aten::record_stream",  "aten::is_pinned",     "aten::_pin_memory",
      "aten::is_set_to",      "aten::copy_",         "aten::_efficientzerotensor",
      "aten::_copy_from",     "aten::view_as_real",  "aten::view_as_complex",
  };
  if (names.count(schema.name()) != 0) {
    return true;
  }
  // Views: what is returned aliases what is given, and nobody writes it.
  for (const auto& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

void enqueue(const c10::Device& device, std::function<void()> run) {
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  auto guarded = [run = std::move(run)] {
    at::AutoDispatchBelowAutograd below_autograd;
    run();
  };
  std::function<void()> queued = std::move(guarded);
  C10_CUDA_CHECK(simulated_cuda_enqueue(stream.stream(), &queued));
}

// A value for the CPU kernel, as of the time when it runs.
using Late = std::function<c10::IValue()>;

Late late(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) {
    const View view(value.toTensor());
    return [view] { return c10::IValue(view.tensor()); };
  }
  if (value.isTensorList() || value.isOptionalTensorList()) {
    const bool optional = value.isOptionalTensorList();
    std::vector<Late> each;
    for (const c10::IValue& item : value.toListRef()) {
      each.push_back(late(item));
    }
    return [each, optional] {
      if (optional) {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& item : each) {
          const c10::IValue now = item();
          list.push_back(now.isTensor() ? std::optional<at::Tensor>(now.toTensor()) : std::nullopt);
        }
        return c10::IValue(list);
      }
      c10::List<at::Tensor> list;
      for (const auto& item : each) {
        list.push_back(item().toTensor());
      }
      return c10::IValue(list);
    };
  }
  if (value.isDevice()) {
    return [] { return c10::IValue(c10::Device(c10::kCPU)); };
  }
  return [value] { return value; };
}

// Tensors in place of tensors, in a value of any kind.
c10::IValue mapped(const c10::IValue& value,
                   const std::function<at::Tensor(const at::Tensor&)>& f) {
  if (value.isTensor() && value.toTensor().defined()) {
    return f(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const c10::IValue& item : value.toListRef()) {
      list.push_back(mapped(item, f).toTensor());
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const c10::IValue& item : value.toListRef()) {
      list.push_back(item.isTensor() ? std::optional<at::Tensor>(mapped(item, f).toTensor())
                                     : std::nullopt);
    }
    return list;
  }
  return value;
}

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& f) {
  mapped(value, [&](const at::Tensor& t) {
    f(t);
    return t;
  });
}

at::Tensor meta_of(const at::Tensor& t) {
  if (t.is_cpu() && t.dim() == 0) {
    return t;  // a number
  }
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta));
}

c10::Device device_of(const c10::FunctionSchema& schema,
                      const std::vector<c10::IValue>& arguments) {
  std::optional<c10::Device> found;
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& t) {
      if (t.is_cuda()) {
        TORCH_CHECK(!found || *found == t.device(), schema.name(),
                    ": Expected all tensors to be on the same device, but found at least two "
                    "devices, ",
                    *found, " and ", t.device(), "!");
        found = t.device();
      }
    });
  }
  for (const auto& argument : arguments) {
    if (!found && argument.isDevice() && argument.toDevice().is_cuda()) {
      found = argument.toDevice();
    }
  }
  if (!found || !found->has_index()) {
    found = c10::Device(c10::kCUDA, c10::cuda::current_device());
  }
  // A tensor of the host takes part as a number.
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& t) {
      TORCH_CHECK(!t.is_cpu() || t.dim() == 0 || schema.name().find("index") != std::string::npos,
                  schema.name(),
                  ": Expected all tensors to be on the same device, but found at least two "
                  "devices, ",
                  *found, " and cpu!");
    });
  }
  return *found;
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), schema_(op.schema()), stack_(stack) {
    const size_t count = schema_.arguments().size();
    arguments_.assign(stack->end() - static_cast<int64_t>(count), stack->end());
    torch::jit::drop(*stack, count);
    device_ = device_of(schema_, arguments_);
  }

  void run() {
    const c10::DeviceGuard guard(device_);
    at::AutoDispatchBelowAutograd below_autograd;
    take_generator();
    infer();
    for (const auto& argument : schema_.arguments()) {
      if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) {
        write();
        return;
      }
    }
    make();
  }

 private:
  // Random numbers come from one generator per device, in the order in which kernels run.
  void take_generator() {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& type = schema_.arguments()[i].type();
      if (type->str().find("Generator") != std::string::npos) {
        arguments_[i] = generator_of(device_.index());
        random_ = true;
      }
    }
  }

  // The results as Meta tensors; none where the op has no Meta kernel, or where they depend on
  // values.
  void infer() {
    Stack stack;
    for (const auto& argument : arguments_) {
      stack.push_back(argument.isDevice() ? c10::IValue(c10::Device(c10::kMeta))
                      : argument.isGenerator()
                          ? c10::IValue()
                          : mapped(argument, [](const at::Tensor& t) { return meta_of(t); }));
    }
    given_as_meta_ = stack;
    if (!op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
      return;
    }
    try {
      op_.callBoxed(stack);
      results_ = stack;
      inferred_ = true;
    } catch (const c10::NotImplementedError&) {
      // Its sizes depend on values.
    } catch (const std::exception& error) {
      if (std::string_view(error.what()).find("meta") == std::string_view::npos &&
          std::string_view(error.what()).find("Meta") == std::string_view::npos) {
        throw;
      }
    }
  }

  // What the CPU kernel is given when it runs.
  std::function<Stack()> late_arguments() const {
    std::vector<Late> each;
    for (const auto& argument : arguments_) {
      each.push_back(late(argument));
    }
    return [each] {
      Stack stack;
      for (const auto& argument : each) {
        stack.push_back(argument());
      }
      return stack;
    };
  }

  // In place, or into `out`.
  void write() {
    std::vector<c10::IValue> written;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& argument = schema_.arguments()[i];
      if (argument.alias_info() == nullptr || !argument.alias_info()->isWrite()) {
        continue;
      }
      written.push_back(arguments_[i]);
      if (argument.is_out() && inferred_ && arguments_[i].isTensor()) {
        const at::Tensor out = arguments_[i].toTensor();
        const at::Tensor meta = given_as_meta_[i].toTensor();
        if (out.sizes() != meta.sizes()) {
          out.resize_(meta.sizes());
        }
      }
    }
    enqueue(device_, [op = op_, arguments = late_arguments(), random = random_] {
      const auto lock = random ? lock_generators() : std::unique_lock<std::mutex>();
      Stack stack = arguments();
      op.callBoxed(stack);
    });
    if (!schema_.returns().empty()) {
      for (auto& each : written) {
        stack_->push_back(std::move(each));
      }
    }
  }

  at::Tensor empty_as(const at::Tensor& meta) const {
    return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device_));
  }

  void make() {
    if (!inferred_) {
      make_now();
      return;
    }
    std::vector<View> targets;
    for (const auto& result : results_) {
      stack_->push_back(mapped(result, [&](const at::Tensor& meta) {
        at::Tensor made = empty_as(meta);
        targets.emplace_back(made);
        return made;
      }));
    }
    enqueue(device_, [op = op_, arguments = late_arguments(), targets, random = random_] {
      const auto lock = random ? lock_generators() : std::unique_lock<std::mutex>();
      Stack stack = arguments();
      op.callBoxed(stack);
      size_t i = 0;
      for (const auto& result : stack) {
        for_each_tensor(result, [&](const at::Tensor& t) { targets.at(i++).tensor().copy_(t); });
      }
    });
  }

  // The results' sizes depend on values, or nobody tells them: the host waits, as it does for
  // nonzero on a device.
  void make_now() {
    c10::cuda::getCurrentCUDAStream(device_.index()).synchronize();
    Stack stack = late_arguments()();
    op_.callBoxed(stack);
    for (const auto& result : stack) {
      stack_->push_back(mapped(result, [&](const at::Tensor& t) {
        at::Tensor made = at::empty_strided(t.sizes(), t.strides(), t.options().device(device_));
        enqueue(device_, [target = View(made), t] { target.tensor().copy_(t); });
        return made;
      }));
    }
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  std::vector<c10::IValue> arguments_;
  c10::Device device_{c10::kCUDA};
  Stack given_as_meta_;
  Stack results_;
  bool inferred_ = false;
  bool random_ = false;
};

void simulated(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Call(op, stack).run();
}

// torch's own transfers between host and devices and whole blocks within one; the rest converts or
// has strides, which takes a kernel.
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool takes_kernel =
      self.is_cuda() && source.is_cuda() && self.device() == source.device() &&
      (self.scalar_type() != source.scalar_type() || !self.is_contiguous() ||
       !source.is_contiguous() || self.sizes() != source.sizes() ||
       self.is_conj() != source.is_conj() || self.is_neg() != source.is_neg());
  if (!takes_kernel) {
    return at::native::copy_(self, source, non_blocking);
  }
  TORCH_CHECK(at::is_expandable_to(source.sizes(), self.sizes()),
              "The size of tensor a must match the size of tensor b: output with shape ",
              self.sizes(), " doesn't match the broadcast shape of ", source.sizes());
  const c10::DeviceGuard guard(self.device());
  enqueue(self.device(),
          [to = View(self), from = View(source)] { to.tensor().copy_(from.tensor()); });
  return self;
}

// torch warns of every op that is registered twice.
class Quiet : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

struct Registration {
  Registration() {
    static Quiet quiet;
    const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findSchema(name);
      if (!op || name.getNamespace() != "aten" ||
          !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || is_real(op->schema())) {
        continue;
      }
      library.impl(c10::toString(name).c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&simulated>());
    }
    library.impl("copy_", &copy);
  }

  torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__};
};

// For the whole process.
const auto& registration = *new Registration;

}  // namespace

}  // namespace simulated_cuda
