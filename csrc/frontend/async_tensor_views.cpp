// Views of results that may not have arrived.

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "frontend/async_tensor_impl.h"
#include "frontend/autograd.h"
#include "frontend/calls.h"

namespace c10d_ext::async_tensor {

using c10::DispatchKey;
using torch::jit::Stack;

namespace {

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

}  // namespace

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

}  // namespace c10d_ext::async_tensor
