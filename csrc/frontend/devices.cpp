#include "frontend/devices.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string_view>

namespace c10d_ext {

namespace {

// A kind of device is one line here. NPU, MLU, MUSA and the like are PrivateUse1.
constexpr c10::DispatchKey kDevices[] = {
    c10::DispatchKey::XPU,
    c10::DispatchKey::HPU,
    c10::DispatchKey::MTIA,
    c10::DispatchKey::PrivateUse1,
};

// One kernel serves all devices: it finds the backend of its tensors' device, and orders that
// device's streams through c10's interfaces.
void shared_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.callBoxedForDispatchKey(c10::DispatchKey::CPU, *stack);
}

}  // namespace

void register_kernels_of_devices() {
  constexpr std::string_view kNamespace = "c10d_ext::";
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto device : kDevices) {
    // Never destroyed, as the ops.
    auto* library =
        new torch::Library(torch::Library::IMPL, "c10d_ext", device, __FILE__, __LINE__);
    for (const auto& name : dispatcher.getAllOpNames()) {
      if (name.name.compare(0, kNamespace.size(), kNamespace) != 0) {
        continue;
      }
      const auto op = dispatcher.findOp(name);
      if (op && op->hasSchema() && op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
        library->impl(name.name.c_str(),
                      torch::CppFunction::makeFromBoxedFunction<&shared_kernel>());
      }
    }
  }
}

}  // namespace c10d_ext
