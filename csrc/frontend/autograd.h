#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <functional>
#include <string>
#include <vector>

#include "base/reduction.h"

namespace c10d_ext {

using Tensors = std::vector<at::Tensor>;

struct ReductionRule;

// What the functions of a derivative hold besides tensors, by value: where these are equal, so are
// the functions. Compiled autograd asks, before it runs the code of another node.
class Constants {
 public:
  Constants() = delete;
  template <class... T>
  explicit Constants(const T&... values) {
    (add(values), ...);
  }
  static Constants none() {
    return Constants(0);
  }

  const std::string& bytes() const {
    return bytes_;
  }

 private:
  void add(int64_t value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void add(const c10::SymInt& value);
  void add(std::string_view value) {
    add(static_cast<int64_t>(value.size()));
    bytes_.append(value);
  }
  void add(const ReductionRule& rule);
  template <class List>
  std::enable_if_t<!std::is_convertible_v<List, std::string_view>,
                   std::void_t<decltype(std::declval<List>().begin())>>
  add(const List& list) {
    add(static_cast<int64_t>(list.size()));
    for (const auto& value : list) {
      add(value);
    }
  }

  std::string bytes_;
};

// How a collective differentiates. Every rank calls the collective and every rank runs backward.
//
// The ops are recorded as autograd nodes of their own, like torch's built-in ops, and not as
// torch::autograd::Function, which torch.func refuses.
struct Derivative {
  // The node's name in a graph: "AllReduceBackward".
  const char* name;
  Constants constants;
  // (gradients of the outputs, saved) -> gradients of the inputs. A gradient that autograd left
  // undefined arrives as zeros, so that all ranks communicate alike.
  std::function<Tensors(const Tensors& grads, const Tensors& saved)> adjoint;
  // (tangents of the inputs, saved) -> tangents of the outputs.
  std::function<Tensors(const Tensors& tangents, const Tensors& saved)> tangent;
  // `saved` holds the inputs and, after them, the outputs; else it is empty.
  bool save = false;
};

// Runs `forward` below autograd and records `derivative` where a gradient is needed.
Tensors differentiable(at::TensorList inputs, c10::function_ref<Tensors()> forward,
                       const std::function<Derivative()>& derivative);
at::Tensor differentiable(const at::Tensor& input, c10::function_ref<at::Tensor()> forward,
                          const std::function<Derivative()>& derivative);

// The same for an op that writes its inputs. `op` refuses leaves that require grad in words. Where
// the derivative needs what would be overwritten, or there are tangents, the inputs take over
// `values` instead: those of the functional op, complete.
void differentiable_in_place(std::string_view op, std::string_view group_name,
                             at::TensorList inputs, c10::function_ref<void()> forward,
                             c10::function_ref<Tensors()> values,
                             const std::function<Derivative()>& derivative);

// An op that writes a list, under torch.func, which asks an op that mutates for one tensor:
// `inputs` take over `values`, those of the functional op, complete.
Tensors replaced(at::TensorList inputs, const Tensors& values);

// out= variants do not differentiate: raises where one of `tensors` would need a gradient.
void forward_out(std::string_view op, std::string_view group_name, at::TensorList tensors,
                 const at::Tensor& out, c10::function_ref<void()> forward);

// What the derivatives of a reduction over ranks ask of its values on this rank. `reduced`, the
// result with input's shape, is asked for by min and max alone.
struct ReductionRule {
  Reduction reduction;
  std::string group;
  int64_t rank;
  int64_t group_size;

  // The gradient with respect to `input`, given `grad`, the gradient of the result summed over all
  // ranks that hold it.
  at::Tensor pull_back(const at::Tensor& grad, const at::Tensor& input,
                       c10::function_ref<at::Tensor()> reduced) const;
  // What `tangent`, that of `input`, adds to the result's tangent: the sum over ranks of this.
  at::Tensor push_forward(const at::Tensor& tangent, const at::Tensor& input,
                          c10::function_ref<at::Tensor()> reduced) const;
};

}  // namespace c10d_ext
