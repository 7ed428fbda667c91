#include "core/wrapper.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/autograd/python_variable.h>

namespace c10d_ext {

namespace {

void seal(c10::StorageImpl& storage) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
      "AsyncCollectiveTensor: its memory must be reached through .wait(), got a request for its "
      "data pointer");
}

}  // namespace

PyObject* make_wrapper(PyObject* type, PyObject* elem) {
  static PyObject* const elem_name = PyUnicode_InternFromString("elem");
  static PyObject* const completed_name = PyUnicode_InternFromString("completed");
  const at::Tensor& inner = THPVariable_Unpack(elem);
  c10::Storage storage(c10::Storage::use_byte_size_t(),
                       at::detail::computeStorageNbytes(inner.sizes(), inner.strides(),
                                                        inner.itemsize(), inner.storage_offset()),
                       c10::DataPtr(nullptr, inner.device()), c10::GetAllocator(c10::kMeta),
                       /*resizable=*/true);
  seal(*storage.unsafeGetStorageImpl());
  const at::Tensor outer =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), inner.key_set(), inner.dtype());
  outer.unsafeGetTensorImpl()->set_sizes_and_strides(inner.sizes(), inner.strides(),
                                                     inner.storage_offset());
  PyObject* wrapper = THPVariable_Wrap(outer, reinterpret_cast<PyTypeObject*>(type));
  if (wrapper == nullptr) {
    return nullptr;
  }
  outer.unsafeGetTensorImpl()->set_python_dispatch(true);
  if (PyObject_SetAttr(wrapper, elem_name, elem) != 0 ||
      PyObject_SetAttr(wrapper, completed_name, Py_False) != 0) {
    Py_CLEAR(wrapper);
  }
  return wrapper;
}

void seal(const at::Tensor& wrapper) {
  seal(*wrapper.storage().unsafeGetStorageImpl());
}

}  // namespace c10d_ext
