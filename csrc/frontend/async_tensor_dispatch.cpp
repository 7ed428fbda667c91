// The short way of an op that is called on a result: before autograd, on the values in its place.

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/exceptions.h"
#include "frontend/async_tensor.h"
#include "frontend/async_tensor_impl.h"
#include "frontend/fast_call.h"

namespace c10d_ext::async_tensor {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::jit::Stack;

enum class Kind : uint8_t {
  Reads,  // computes from values
  Views,  // gives one view of its first argument, values unread
  Waits,  // ours and torch's wait_tensor
  Other,
};

bool is_aten(const c10::FunctionSchema& schema) {
  return schema.name().rfind("aten::", 0) == 0;
}

Kind find_kind(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto& returns = schema.returns();
  const auto has_alias = [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr;
  };
  const bool returns_alias = std::any_of(returns.begin(), returns.end(), has_alias);
  if (schema.name() == "c10d_ext::wait_tensor" ||
      schema.name() == "_c10d_functional::wait_tensor") {
    return Kind::Waits;
  }
  if (!returns_alias && std::none_of(arguments.begin(), arguments.end(), has_alias)) {
    return Kind::Reads;
  }
  if (arguments.empty() || returns.size() != 1 || !returns_alias || !has_alias(arguments[0]) ||
      arguments[0].alias_info()->isWrite() ||
      std::any_of(arguments.begin() + 1, arguments.end(), has_alias) ||
      arguments[0].type()->kind() != c10::TypeKind::TensorType ||
      returns[0].type()->kind() != c10::TypeKind::TensorType ||
      op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) || !is_aten(schema)) {
    return Kind::Other;
  }
  // These look at more than the geometry, or are what autograd treats by itself.
  for (const char* name : {"aten::detach", "aten::_make_dual", "aten::_fw_primal", "aten::lift",
                           "aten::lift_fresh", "aten::_values", "aten::_conj", "aten::_neg_view",
                           "aten::view_as_real", "aten::view_as_complex"}) {
    if (schema.name() == name || schema.overload_name() == "dtype") {
      return Kind::Other;
    }
  }
  return Kind::Views;
}

Kind kind_of(const c10::OperatorHandle& op) {
  // By the schema's address. Only torch's own ops stay where they are while the process lives.
  static thread_local std::unordered_map<const c10::FunctionSchema*, Kind> known;
  const auto* schema = &op.schema();
  const auto found = known.find(schema);
  if (found != known.end()) {
    return found->second;
  }
  const Kind kind = find_kind(op);
  if (is_aten(*schema)) {
    known.emplace(schema, kind);
  }
  return kind;
}

// Whether something between the caller and the kernel wants to see the op with its wrappers.
bool is_watched() {
  constexpr DispatchKeySet watchers(
      {DispatchKey::Python, DispatchKey::PreDispatch, DispatchKey::PythonDispatcher,
       DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode,
       DispatchKey::FuncTorchVmapMode, DispatchKey::VmapMode, DispatchKey::Functionalize,
       DispatchKey::Tracer});
  if (c10::impl::tls_local_dispatch_key_set().included_.has_any(watchers)) {
    return true;
  }
  // Hooks see what is saved, which is the wrapper.
  return c10::GradMode::is_enabled() && at::SavedTensorDefaultHooks::is_enabled() &&
         !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
}

// `visit` of every tensor among the arguments; false where it was false of one.
template <class Visit>
bool all_tensors(const Stack& stack, size_t count, Visit&& visit) {
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    const c10::IValue& value = stack[i];
    if (value.isTensor()) {
      if (value.toTensor().defined() && !visit(value.toTensor())) {
        return false;
      }
    } else if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor() && item.toTensor().defined() && !visit(item.toTensor())) {
          return false;
        }
      }
    }
  }
  return true;
}

// The wait of an op that torch's own bindings called. Of the classes in torch_c10d_ext.errors they
// know nothing, so these are Python's errors already here.
void wait_in_op(AsyncTensorImpl& impl) {
  try {
    impl.wait();
  } catch (const CollectiveError&) {
    const pybind11::gil_scoped_acquire gil;
    fast_call::raise(std::current_exception());
    throw pybind11::error_already_set();
  }
}

c10::IValue finished(const c10::IValue& value) {
  if (value.isTensor()) {
    if (auto* impl = value.toTensor().defined() ? impl_of(value.toTensor()) : nullptr) {
      wait_in_op(*impl);
      return recordable(value.toTensor(), *impl);
    }
    return value;
  }
  if (value.isList()) {
    const auto items = value.toListRef();
    const bool any = std::any_of(items.begin(), items.end(), [](const c10::IValue& item) {
      return item.isTensor() && item.toTensor().defined() && impl_of(item.toTensor()) != nullptr;
    });
    if (any) {
      auto list = value.toList().copy();
      for (size_t i = 0; i < list.size(); ++i) {
        list.set(i, finished(list.get(i)));
      }
      return list;
    }
  }
  return value;
}

bool read_values(const c10::OperatorHandle& op, Kind kind, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const bool plain = all_tensors(*stack, count, [](const at::Tensor& t) {
    return impl_of(t) != nullptr
               ? !may_have_tangent(t) && is_recordable(t)
               : !t.key_set().has_any(DispatchKeySet({DispatchKey::Python, kKey}));
  });
  if (!plain) {
    return false;
  }
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 2> given;  // values and their wrappers
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      at::Tensor wrapper = value.toTensor();
      value = finished(value);
      if (!value.toTensor().is_same(wrapper)) {
        given.emplace_back(value.toTensor(), std::move(wrapper));
      }
    } else if (value.isList()) {
      value = finished(value);
    }
  }
  op.callBoxed(stack);
  if (kind == Kind::Waits) {
    return true;
  }
  // Some return what they were given and do not say so in their schema: type_as, to_dense.
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    for (auto& [values, wrapper] : given) {
      if ((*stack)[i].isTensor() && (*stack)[i].toTensor().is_same(values)) {
        (*stack)[i] = std::move(wrapper);
        break;
      }
    }
  }
  return true;
}

bool wait_for_values(Stack* stack) {
  auto waited = plain_of(stack->back().toTensor());
  if (!waited) {
    return false;
  }
  stack->back() = *std::move(waited);
  return true;
}

// `z.data = wrapper` makes z look like a wrapper, without values.
void check_no_impostor(const c10::OperatorHandle& op, const Stack& stack) {
  all_tensors(stack, op.schema().arguments().size(), [](const at::Tensor& t) {
    TORCH_CHECK(!t.key_set().has(kKey) || impl_of(t) != nullptr,
                "AsyncCollectiveTensor: its memory must be reached through .wait(), got a tensor "
                "whose .data was set to a result");
    return true;
  });
}

void dispatch(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  if (!is_watched()) {
    const Kind kind = kind_of(op);
    // A wait keeps the history where none is recorded, too.
    const bool waits = kind == Kind::Waits && !c10::GradMode::is_enabled();
    if ((waits && wait_for_values(stack)) ||
        ((kind == Kind::Reads || kind == Kind::Waits) && read_values(op, kind, stack)) ||
        (kind == Kind::Views && view(op, stack))) {
      return;
    }
  }
  check_no_impostor(op, *stack);
  op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, kKey), stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch>());
}

}  // namespace c10d_ext::async_tensor
