#include "frontend/async_tensor.h"

#include <ATen/EmptyTensor.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/exceptions.h"
#include "base/memory.h"
#include "frontend/autograd.h"
#include "frontend/calls.h"
#include "frontend/dispatch_state.h"
#include "frontend/fast_call.h"
#include "work/pending.h"

namespace c10d_ext {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::jit::Stack;

constexpr DispatchKey kKey = DispatchKey::DeferredInit;

// Leaked: tensors outlive the module at the interpreter's end.
PyObject* async_type = nullptr;
PyObject* wait_op = nullptr;  // torch.ops.c10d_ext.wait_tensor.default

class AsyncTensorImpl final : public c10::TensorImpl {
 public:
  AsyncTensorImpl(c10::Storage storage, DispatchKeySet keys, caffe2::TypeMeta dtype,
                  at::Tensor elem, bool over)
      : c10::TensorImpl(c10::TensorImpl::VIEW, std::move(storage), keys, dtype),
        elem_(std::move(elem)),
        over_(over) {
    copy_geometry();
    set_version_counter(elem_.unsafeGetTensorImpl()->version_counter());
  }

  const at::Tensor& elem() const {
    return elem_;
  }
  void set_elem(at::Tensor elem) {
    elem_ = std::move(elem);
  }
  void copy_geometry() {
    set_sizes_and_strides(elem_.sizes(), elem_.strides(), elem_.storage_offset());
  }

  // Said by whoever asked first, and never by the collective's own progress: what a user sees of
  // it must not depend on timing.
  bool waited() const {
    return waited_.load(std::memory_order_acquire);
  }
  void wait() {
    if (waited()) {
      return;
    }
    if (!over_) {
      c10d_ext::wait(elem_);
    }
    waited_.store(true, std::memory_order_release);
  }
  // Known to be complete from the start, so that waiting costs nothing.
  bool over() const {
    return over_ || waited();
  }

  void release_resources() override {
    c10::TensorImpl::release_resources();
    elem_.reset();
  }

 private:
  at::Tensor elem_;
  const bool over_;
  std::atomic<bool> waited_{false};
};

AsyncTensorImpl* impl_of(const at::Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  // The key alone does not tell: `z.data = wrapper` gives it to a tensor of another kind.
  return impl->key_set().has(kKey) && typeid(*impl) == typeid(AsyncTensorImpl)
             ? static_cast<AsyncTensorImpl*>(impl)
             : nullptr;
}

AsyncTensorImpl& impl_or_throw(const at::Tensor& t) {
  auto* impl = impl_of(t);
  TORCH_CHECK(impl != nullptr,
              "AsyncCollectiveTensor: must be the result of a functional collective, got a tensor "
              "of another kind");
  return *impl;
}

c10::Storage sealed_storage(const at::Tensor& elem) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), elem.storage().nbytes(),
                       c10::DataPtr(nullptr, elem.device()), c10::GetAllocator(c10::kMeta),
                       /*resizable=*/true);
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "AsyncCollectiveTensor: its memory must be reached through .wait(), got a request for its "
      "data pointer");
  return storage;
}

// A wrapper around `elem`, which has no history, with the storage of another one or a new one.
at::Tensor make(at::Tensor elem, bool over, c10::Storage storage = {}) {
  if (!storage) {
    storage = sealed_storage(elem);
  }
  const auto keys = elem.key_set().add(kKey);
  const auto dtype = elem.dtype();
  return at::detail::make_tensor<AsyncTensorImpl>(std::move(storage), keys, dtype, std::move(elem),
                                                  over);
}

// Its Python object, which lives as long as the tensor. With the GIL.
PyObject* make_object(const at::Tensor& wrapper) {
  PyObject* object = THPVariable_Wrap(wrapper, reinterpret_cast<PyTypeObject*>(async_type));
  if (object != nullptr) {
    wrapper.unsafeGetTensorImpl()->set_python_dispatch(true);
  }
  return object;
}

bool can_wrap(const at::Tensor& t) {
  constexpr DispatchKeySet special({DispatchKey::Python, DispatchKey::Functionalize,
                                    DispatchKey::FuncTorchGradWrapper,
                                    DispatchKey::FuncTorchBatched, DispatchKey::Batched, kKey});
  return !t.key_set().has_any(special) && !t.is_lazy() && t.layout() == c10::kStrided &&
         !t.is_conj() && !t.is_neg() && !t._is_zerotensor();
}

// Whether a compiler or a transform records what is called now.
bool is_recorded() {
  using c10::impl::TorchDispatchModeKey;
  using c10::impl::TorchDispatchModeTLS;
  constexpr DispatchKeySet recorders({DispatchKey::PythonDispatcher, DispatchKey::PreDispatch,
                                      DispatchKey::Functionalize,
                                      DispatchKey::FuncTorchDynamicLayerFrontMode});
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  if (included.has_any(recorders)) {
    return true;
  }
  // Modes of users see the ops, and get what everybody gets.
  return included.has(DispatchKey::Python) &&
         (TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE).has_value() ||
          TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value() ||
          TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FUNCTIONAL).has_value());
}

PyObject* wrap_known(const at::Tensor& t, bool over) {
  const bool recorded = t.requires_grad();
  const bool dual = has_tangent(t);
  const at::Tensor wrapper = make(recorded || dual ? alias_of(t) : t, over);
  if (recorded) {
    // The wrapper is the node's output from here on, and `t` is let go.
    torch::autograd::impl::set_gradient_edge(wrapper, torch::autograd::impl::gradient_edge(t));
  }
  PyObject* object = make_object(wrapper);
  if (dual && object != nullptr) {
    wrapper._set_fw_grad(t._fw_grad(/*level=*/0), /*level=*/0, /*is_inplace_op=*/false);
  }
  return object;
}

// --- The short way of an op ------------------------------------------------------------------

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

bool has_history(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->autograd_meta() != nullptr && t.requires_grad();
}

bool may_have_tangent(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->autograd_meta() != nullptr && has_tangent(t);
}

// The values as autograd has the wrapper: what is recorded of this is recorded of the wrapper.
at::Tensor recordable(const at::Tensor& wrapper, const AsyncTensorImpl& impl) {
  if (!c10::GradMode::is_enabled() || !has_history(wrapper)) {
    return impl.elem();
  }
  at::Tensor values = alias_of(impl.elem());
  torch::autograd::impl::set_gradient_edge(values, torch::autograd::impl::gradient_edge(wrapper));
  return values;
}

// A view taken where nothing was recorded has the base's need for gradients, and no edge.
bool is_recordable(const at::Tensor& wrapper) {
  return !c10::GradMode::is_enabled() || !has_history(wrapper) || !wrapper.is_view() ||
         wrapper.grad_fn() != nullptr;
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

// The view again, of another base: autograd asks for it after writes, and compilers of fake bases.
class ReplayView final : public torch::autograd::ViewFunc {
 public:
  ReplayView(c10::OperatorHandle op, Stack rest) : op_(std::move(op)), rest_(std::move(rest)) {}

  std::vector<c10::SymInt> get_symints() const override {
    std::vector<c10::SymInt> numbers;
    for (size_t i = 0; i < rest_.size(); ++i) {
      if (is_number(i)) {
        numbers.push_back(rest_[i].toSymInt());
      } else if (is_numbers(i)) {
        const auto list = rest_[i].toSymIntVector();
        numbers.insert(numbers.end(), list.begin(), list.end());
      }
    }
    return numbers;
  }
  size_t num_symints() const override {
    return get_symints().size();
  }
  at::Tensor operator()(const at::Tensor& base) const override {
    Stack stack{base};
    stack.insert(stack.end(), rest_.begin(), rest_.end());
    op_.callBoxed(&stack);
    return std::move(stack.back()).toTensor();
  }
  std::unique_ptr<ViewFunc> clone_and_set(
      std::optional<std::vector<c10::SymInt>> symints,
      std::optional<std::vector<at::Tensor>> /*tensors*/) const override {
    auto copy = std::make_unique<ReplayView>(op_, rest_);
    if (symints) {
      copy->set_symints(std::move(*symints));
    }
    return copy;
  }

 protected:
  void set_symints(std::vector<c10::SymInt> symints) override {
    auto next = symints.begin();
    for (size_t i = 0; i < rest_.size(); ++i) {
      if (is_number(i)) {
        rest_[i] = *next++;
      } else if (is_numbers(i)) {
        const auto count = static_cast<std::ptrdiff_t>(rest_[i].toSymIntVector().size());
        rest_[i] = std::vector<c10::SymInt>(next, next + count);
        next += count;
      }
    }
  }

 private:
  // Of the schema's type SymInt, or a list of them, and given.
  bool is_number(size_t i) const {
    return kind(i) == c10::TypeKind::SymIntType && (rest_[i].isInt() || rest_[i].isSymInt());
  }
  bool is_numbers(size_t i) const {
    return kind(i) == c10::TypeKind::ListType && (rest_[i].isIntList() || rest_[i].isSymIntList());
  }
  c10::TypeKind kind(size_t i) const {
    c10::TypePtr type = op_.schema().arguments()[i + 1].real_type();
    if (type->kind() == c10::TypeKind::OptionalType) {
      type = type->castRaw<c10::OptionalType>()->getElementType();
    }
    return type->kind();
  }

  c10::OperatorHandle op_;
  Stack rest_;
};

// The finished values of a wrapper as a view of it, so that what is written into either reaches the
// history of both.
at::Tensor waited_view(const at::Tensor& wrapper, c10::function_ref<at::Tensor()> values);

class WaitView final : public torch::autograd::ViewFunc {
 public:
  // `base` may be a wrapper around a fake tensor.
  at::Tensor operator()(const at::Tensor& base) const override {
    return waited_view(base, [&] { return call::wait_tensor(base); });
  }
  std::unique_ptr<ViewFunc> clone_and_set(
      std::optional<std::vector<c10::SymInt>> /*symints*/,
      std::optional<std::vector<at::Tensor>> /*tensors*/) const override {
    return std::make_unique<WaitView>();
  }
};

at::Tensor waited_view(const at::Tensor& wrapper, c10::function_ref<at::Tensor()> values) {
  const c10::AutoGradMode with_history(true);
  return differentiable(
      wrapper,
      [&] {
        return torch::autograd::as_view(wrapper, values(), /*is_bw_differentiable=*/true,
                                        /*is_fw_differentiable=*/true,
                                        std::make_unique<WaitView>());
      },
      [] {
        return Derivative{"WaitTensorBackward", Constants::none(),
                          [](const Tensors& grads, const Tensors&) { return grads; },
                          [](const Tensors& tangents, const Tensors&) { return tangents; }};
      });
}

bool view(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const at::Tensor base = (*stack)[stack->size() - count].toTensor();
  auto* impl = impl_of(base);
  if (impl == nullptr || may_have_tangent(base) || !is_recordable(base) ||
      c10::impl::tls_local_dispatch_key_set().excluded_.has(DispatchKey::ADInplaceOrView)) {
    return false;
  }
  const at::Tensor source = recordable(base, *impl);
  const bool recorded = has_history(source);
  Stack rest(stack->end() - static_cast<std::ptrdiff_t>(count) + 1, stack->end());
  Stack inner;
  inner.reserve(count);
  inner.emplace_back(source);
  inner.insert(inner.end(), rest.begin(), rest.end());
  if (recorded) {
    op.callBoxed(&inner);
  } else {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.callBoxed(&inner);
  }
  const at::Tensor result = std::move(inner.back()).toTensor();
  if (result.is_conj() || result.is_neg() || result.is_same(source)) {
    return false;
  }
  const at::Tensor elem = recorded ? alias_of(result) : result;
  if (!base.is_inference()) {
    elem.unsafeGetTensorImpl()->set_version_counter(
        impl->elem().unsafeGetTensorImpl()->version_counter());
  }
  at::Tensor wrapper = make(elem, impl->over(), base.storage());
  if (!base.is_inference()) {
    using torch::autograd::CreationMeta;
    const auto meta = c10::InferenceMode::is_enabled() ? CreationMeta::INFERENCE_MODE
                      : c10::GradMode::is_enabled()    ? CreationMeta::DEFAULT
                                                       : CreationMeta::NO_GRAD_MODE;
    wrapper = torch::autograd::as_view(base, wrapper, /*is_bw_differentiable=*/true,
                                       /*is_fw_differentiable=*/true,
                                       std::make_unique<ReplayView>(op, std::move(rest)),
                                       /*rev_view_func=*/nullptr, meta);
    if (recorded) {
      torch::autograd::impl::set_gradient_edge(wrapper,
                                               torch::autograd::impl::gradient_edge(result));
    }
  }
  {
    const pybind11::gil_scoped_acquire gil;
    PyObject* object = make_object(wrapper);
    if (object == nullptr) {
      throw pybind11::error_already_set();
    }
    Py_DECREF(object);  // the tensor keeps it
  }
  stack->erase(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  stack->emplace_back(std::move(wrapper));
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

void set_async_tensor_type(PyObject* type, PyObject* wait) {
  Py_INCREF(type);
  Py_INCREF(wait);
  async_type = type;
  wait_op = wait;
}

bool is_async_tensor(const at::Tensor& t) {
  return t.defined() && impl_of(t) != nullptr;
}

bool is_async_object(PyObject* object) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == async_type;
}

PyObject* wrap_async(const at::Tensor& t) {
  if (!can_wrap(t)) {
    Py_RETURN_NONE;
  }
  return wrap_known(t, !is_pending(t));
}

PyObject* deliver(const at::Tensor& result) {
  if (!can_wrap(result) || is_recorded()) {
    // By way of Python, where tracers look, too.
    PyObject* plain = THPVariable_Wrap(result);
    PyObject* waited = plain == nullptr ? nullptr : PyObject_CallOneArg(wait_op, plain);
    Py_XDECREF(plain);
    return waited;
  }
  return wrap_known(result, !is_pending(result));
}

PyObject* deliver_complete(const at::Tensor& result) {
  if (!can_wrap(result) || is_recorded()) {
    return THPVariable_Wrap(result);
  }
  return wrap_known(result, /*over=*/true);
}

const at::Tensor& elem_of(const at::Tensor& wrapper) {
  return impl_or_throw(wrapper).elem();
}

void set_elem(const at::Tensor& wrapper, const at::Tensor& elem) {
  auto& impl = impl_or_throw(wrapper);
  TORCH_CHECK(can_wrap(elem), "AsyncCollectiveTensor: must wrap a plain dense tensor, got another");
  TORCH_CHECK(elem.device() == wrapper.device(),
              "AsyncCollectiveTensor: .data must stay on its device, ", wrapper.device(), ", got ",
              elem.device(), "; assign to what .wait() returns");
  // Its own from here on: neither the shape nor the version of what it was before.
  at::Tensor own = alias_of(elem);
  own.unsafeGetTensorImpl()->set_version_counter(impl.version_counter());
  impl.set_elem(std::move(own));
  impl.set_storage_and_dtype(sealed_storage(elem), elem.dtype());
  impl.copy_geometry();
}

void follow_elem(const at::Tensor& wrapper) {
  auto& impl = impl_or_throw(wrapper);
  if (wrapper.sizes() != impl.elem().sizes() || wrapper.strides() != impl.elem().strides() ||
      wrapper.storage_offset() != impl.elem().storage_offset()) {
    impl.copy_geometry();
  }
}

bool is_waited(const at::Tensor& wrapper) {
  return impl_or_throw(wrapper).waited();
}

void wait_async(const at::Tensor& wrapper) {
  impl_or_throw(wrapper).wait();
}

std::optional<at::Tensor> plain_of(const at::Tensor& wrapper) {
  auto* found = impl_of(wrapper);
  if (found == nullptr || is_recorded()) {
    return std::nullopt;
  }
  auto& impl = *found;
  impl.wait();
  if (!has_history(wrapper) && !may_have_tangent(wrapper)) {
    return impl.elem();
  }
  return waited_view(wrapper, [&] { return alias_of(impl.elem()); });
}

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch>());
}

}  // namespace c10d_ext
