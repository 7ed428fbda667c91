#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>
#include <string_view>
#include <vector>

#include "frontend/autograd.h"
#include "frontend/calls.h"
#include "frontend/fast_call.h"
#include "frontend/functionalize.h"

// The forms of a collective: functional, in place, into `out`, and of a list, functional and in
// place. An op's file has the kernels and one derivative; what autograd, torch.func,
// functionalization and the dispatcher's tables need of each form is made of them here.
//
//   struct Op {
//     static constexpr const char* stem = "all_reduce";
//     static constexpr auto functional = &all_reduce;
//     // Those there are of:
//     static constexpr auto in_place = &all_reduce_;
//     static constexpr auto out = &all_reduce_out;
//     static constexpr auto coalesced = &all_reduce_coalesced;
//     static constexpr auto coalesced_in_place = &all_reduce_coalesced_;
//     // Of the op of this name, with the arguments that the functional form has behind its input.
//     static Derivative derivative(string_view op, at::TensorList inputs, ...);
//   };
//   C10D_EXT_COLLECTIVE(Op)
//
// All forms have the same arguments; the group's name is the last string among them. A form that
// autograd or functionalization is to treat otherwise has a function of that name in `Op`
// (`in_place_autograd`, `out_functionalize`, ...).
namespace c10d_ext {

enum class Form { Functional, InPlace, Out, Coalesced, CoalescedInPlace };

// Below autograd from here on: what a differentiable kernel redispatches with.
inline c10::DispatchKeySet below_autograd(c10::DispatchKeySet keys) {
  return keys & c10::after_autograd_keyset;
}

// Conj and neg views reach the kernels as they are; requests are read and written through the bits.
inline void keep_lazy_bits(torch::Library& m, const char* op) {
  m.impl(op, torch::CppFunction::makeFallthrough());
}

namespace forms {

template <Form form>
constexpr const char* suffix() {
  constexpr const char* suffixes[] = {"", "_", "_out", "_coalesced", "_coalesced_"};
  return suffixes[static_cast<int>(form)];
}

template <class Op, Form form>
constexpr bool has() {
  if constexpr (form == Form::InPlace) {
    return requires { Op::in_place; };
  } else if constexpr (form == Form::Out) {
    return requires { Op::out; };
  } else if constexpr (form == Form::Coalesced) {
    return requires { Op::coalesced; };
  } else if constexpr (form == Form::CoalescedInPlace) {
    return requires { Op::coalesced_in_place; };
  } else {
    return true;
  }
}

template <class Op, Form form>
constexpr auto kernel() {
  if constexpr (form == Form::InPlace) {
    return Op::in_place;
  } else if constexpr (form == Form::Out) {
    return Op::out;
  } else if constexpr (form == Form::Coalesced) {
    return Op::coalesced;
  } else if constexpr (form == Form::CoalescedInPlace) {
    return Op::coalesced_in_place;
  } else {
    return Op::functional;
  }
}

// "all_reduce_coalesced_"
template <class Op, Form form>
const char* name() {
  static const std::string text = std::string(Op::stem) + suffix<form>();
  return text.c_str();
}

// The dispatcher's, typed like the kernel.
template <class Op, Form form>
const auto& handle() {
  using Function = std::remove_pointer_t<decltype(kernel<Op, form>())>;
  static const auto instance =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow((std::string("c10d_ext::") + name<Op, form>()).c_str(), "")
          .template typed<Function>();
  return instance;
}

inline std::string_view group_among(std::string_view last) {
  return last;
}
template <class First, class... Rest>
std::string_view group_among(std::string_view last, const First& first, const Rest&... rest) {
  if constexpr (std::is_same_v<First, std::string_view>) {
    last = first;
  }
  return group_among(last, rest...);
}

// `inputs`, or copies where the functional op saves what is overwritten next.
inline at::Tensor as_input(const at::Tensor& input, const Derivative& derivative) {
  return derivative.save ? input.clone() : input;
}
inline std::vector<at::Tensor> as_input(at::TensorList inputs, const Derivative& derivative) {
  std::vector<at::Tensor> values;
  for (const auto& input : inputs) {
    values.push_back(as_input(input, derivative));
  }
  return values;
}

// Derived from the functional kernel's type, whose input all forms have and then `Args`.
template <class Op, class Kernel>
struct Derived;

template <class Op, class... Args>
struct Derived<Op, at::Tensor (*)(const at::Tensor&, Args...)> {
  using Keys = c10::DispatchKeySet;
  using Tensors = std::vector<at::Tensor>;

  // --- Autograd ---------------------------------------------------------------------------------

  static at::Tensor functional_autograd(Keys keys, const at::Tensor& input, Args... args) {
    return differentiable(
        input,
        [&] {
          return handle<Op, Form::Functional>().redispatch(below_autograd(keys), input, args...);
        },
        [&] { return Op::derivative(name<Op, Form::Functional>(), input, args...); });
  }

  static at::Tensor& in_place_autograd(Keys keys, at::Tensor& input, Args... args) {
    if constexpr (requires { &Op::in_place_autograd; }) {
      return Op::in_place_autograd(keys, input, args...);
    } else {
      const auto derivative = [&] {
        return Op::derivative(name<Op, Form::Functional>(), input, args...);
      };
      differentiable_in_place(
          name<Op, Form::InPlace>(), group_among({}, args...), input,
          [&] { handle<Op, Form::InPlace>().redispatch(below_autograd(keys), input, args...); },
          [&] {
            return Tensors{call::wait_tensor(
                handle<Op, Form::Functional>().call(as_input(input, derivative()), args...))};
          },
          derivative);
      return input;
    }
  }

  static at::Tensor& out_autograd(Keys keys, const at::Tensor& input, Args... args,
                                  at::Tensor& out) {
    forward_out(name<Op, Form::Out>(), group_among({}, args...), input, out, [&] {
      handle<Op, Form::Out>().redispatch(below_autograd(keys), input, args..., out);
    });
    return out;
  }

  static Tensors coalesced_autograd(Keys keys, at::TensorList inputs, Args... args) {
    return differentiable(
        inputs,
        [&] {
          return handle<Op, Form::Coalesced>().redispatch(below_autograd(keys), inputs, args...);
        },
        [&] { return Op::derivative(name<Op, Form::Coalesced>(), inputs, args...); });
  }

  static Tensors coalesced_in_place_autograd(Keys keys, at::TensorList inputs, Args... args) {
    const auto derivative = [&] {
      return Op::derivative(name<Op, Form::Coalesced>(), inputs, args...);
    };
    differentiable_in_place(
        name<Op, Form::CoalescedInPlace>(), group_among({}, args...), inputs,
        [&] {
          handle<Op, Form::CoalescedInPlace>().redispatch(below_autograd(keys), inputs, args...);
        },
        [&] {
          return call::waited(
              handle<Op, Form::Coalesced>().call(as_input(inputs, derivative()), args...));
        },
        derivative);
    return inputs.vec();
  }

  // --- torch.func -------------------------------------------------------------------------------

  static Tensors coalesced_in_place_transformed(at::TensorList inputs, Args... args) {
    const auto derivative = Op::derivative(name<Op, Form::Coalesced>(), inputs, args...);
    return replaced(inputs, call::waited(handle<Op, Form::Coalesced>().call(
                                as_input(inputs, derivative), args...)));
  }

  // --- Functionalization ------------------------------------------------------------------------

  static at::Tensor& in_place_functionalize(at::Tensor& input, Args... args) {
    if constexpr (requires { &Op::in_place_functionalize; }) {
      return Op::in_place_functionalize(input, args...);
    } else {
      check_if_lazy(handle<Op, Form::InPlace>(), group_among({}, args...), input, args...);
      const at::Tensor value = functional_value(input);
      at::AutoDispatchSkipFunctionalize below_functionalize;
      replace_value(input, traced_wait(handle<Op, Form::Functional>().call(value, args...)));
      return input;
    }
  }

  static at::Tensor& out_functionalize(const at::Tensor& input, Args... args, at::Tensor& out) {
    check_if_lazy(handle<Op, Form::Out>(), group_among({}, args...), input, args..., out);
    at::Tensor value = functional_value(input);
    at::AutoDispatchSkipFunctionalize below_functionalize;
    if constexpr (requires { &Op::functional_input_of_out; }) {
      value = Op::functional_input_of_out(value, input, out);
    }
    replace_value(out, traced_wait(handle<Op, Form::Functional>().call(value, args...)));
    return out;
  }

  static Tensors coalesced_in_place_functionalize(at::TensorList inputs, Args... args) {
    check_if_lazy(handle<Op, Form::CoalescedInPlace>(), group_among({}, args...), inputs, args...);
    const Tensors values = functional_values(inputs);
    at::AutoDispatchSkipFunctionalize below_functionalize;
    replace_values(inputs, handle<Op, Form::Coalesced>().call(values, args...));
    return inputs.vec();
  }

  // --- The dispatcher's tables ------------------------------------------------------------------

  template <class Register>
  static void for_each_form(const Register& add) {
    const auto one = [&]<Form form>(std::integral_constant<Form, form> constant) {
      if constexpr (has<Op, form>()) {
        add(constant);
      }
    };
    one(std::integral_constant<Form, Form::Functional>());
    one(std::integral_constant<Form, Form::InPlace>());
    one(std::integral_constant<Form, Form::Out>());
    one(std::integral_constant<Form, Form::Coalesced>());
    one(std::integral_constant<Form, Form::CoalescedInPlace>());
  }

  static void register_kernels(torch::Library& m) {
    for_each_form([&]<Form form>(std::integral_constant<Form, form>) {
      m.impl(name<Op, form>(), kernel<Op, form>());
    });
  }
  static void register_autograd(torch::Library& m) {
    m.impl(name<Op, Form::Functional>(), &functional_autograd);
    if constexpr (has<Op, Form::InPlace>()) {
      m.impl(name<Op, Form::InPlace>(), &in_place_autograd);
    }
    if constexpr (has<Op, Form::Out>()) {
      m.impl(name<Op, Form::Out>(), &out_autograd);
    }
    if constexpr (has<Op, Form::Coalesced>()) {
      m.impl(name<Op, Form::Coalesced>(), &coalesced_autograd);
    }
    if constexpr (has<Op, Form::CoalescedInPlace>()) {
      m.impl(name<Op, Form::CoalescedInPlace>(), &coalesced_in_place_autograd);
    }
  }
  static void register_transforms(torch::Library& m) {
    if constexpr (has<Op, Form::CoalescedInPlace>()) {
      m.impl(name<Op, Form::CoalescedInPlace>(), &coalesced_in_place_transformed);
    }
  }
  static void register_functionalization(torch::Library& m) {
    if constexpr (has<Op, Form::InPlace>()) {
      m.impl(name<Op, Form::InPlace>(), &in_place_functionalize);
    }
    if constexpr (has<Op, Form::Out>()) {
      m.impl(name<Op, Form::Out>(), &out_functionalize);
    }
    if constexpr (has<Op, Form::CoalescedInPlace>()) {
      m.impl(name<Op, Form::CoalescedInPlace>(), &coalesced_in_place_functionalize);
    }
  }
  static void register_lazy_bits(torch::Library& m) {
    for_each_form([&]<Form form>(std::integral_constant<Form, form>) {
      keep_lazy_bits(m, name<Op, form>());
    });
  }
  // The short ways in from eager Python.
  static bool add_fast_calls() {
    for_each_form([]<Form form>(std::integral_constant<Form, form>) {
      fast_call::add<handle<Op, form>>(name<Op, form>());
    });
    return true;
  }
};

template <class Op>
using Of = Derived<Op, std::remove_const_t<decltype(Op::functional)>>;

}  // namespace forms

}  // namespace c10d_ext

// One kernel serves the CPU, CUDA and Meta.
#define C10D_EXT_ON_DEVICES(register)     \
  TORCH_LIBRARY_IMPL(c10d_ext, CPU, m) {  \
    register(m);                          \
  }                                       \
  TORCH_LIBRARY_IMPL(c10d_ext, CUDA, m) { \
    register(m);                          \
  }                                       \
  TORCH_LIBRARY_IMPL(c10d_ext, Meta, m) { \
    register(m);                          \
  }

#define C10D_EXT_KEEP_LAZY_BITS(register)      \
  TORCH_LIBRARY_IMPL(c10d_ext, Conjugate, m) { \
    register(m);                               \
  }                                            \
  TORCH_LIBRARY_IMPL(c10d_ext, Negative, m) {  \
    register(m);                               \
  }

// All that the dispatcher is told of a collective but its schemas.
#define C10D_EXT_COLLECTIVE(Op)                                     \
  C10D_EXT_ON_DEVICES(forms::Of<Op>::register_kernels)              \
  TORCH_LIBRARY_IMPL(c10d_ext, Autograd, m) {                       \
    forms::Of<Op>::register_autograd(m);                            \
  }                                                                 \
  TORCH_LIBRARY_IMPL(c10d_ext, FuncTorchDynamicLayerFrontMode, m) { \
    forms::Of<Op>::register_transforms(m);                          \
  }                                                                 \
  TORCH_LIBRARY_IMPL(c10d_ext, Functionalize, m) {                  \
    forms::Of<Op>::register_functionalization(m);                   \
  }                                                                 \
  C10D_EXT_KEEP_LAZY_BITS(forms::Of<Op>::register_lazy_bits)        \
  [[maybe_unused]] const bool has_fast_calls = forms::Of<Op>::add_fast_calls();
