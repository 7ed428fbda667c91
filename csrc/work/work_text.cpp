#include "work/work_text.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include "base/exceptions.h"

namespace c10d_ext {

std::exception_ptr WorkText::described(const std::exception_ptr& error) const {
  try {
    std::rethrow_exception(error);
  } catch (const CollectiveError&) {
    return error;  // says it all
  } catch (const pybind11::error_already_set& e) {
    // Of a group written in Python. This may be thrown several times, which pybind11 takes for a
    // mistake in what it threw, and ends the process.
    return std::make_exception_ptr(c10::DistBackendError(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, with_cause(e.what())));
  } catch (const c10::DistBackendError& e) {
    return std::make_exception_ptr(
        c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                              with_cause(e.what_without_backtrace())));
  } catch (const c10::Error& e) {
    return std::make_exception_ptr(c10::Error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                                              with_cause(e.what_without_backtrace())));
  } catch (const std::exception& e) {
    return std::make_exception_ptr(c10::DistBackendError(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, with_cause(e.what())));
  } catch (...) {
    return error;
  }
}

std::string WorkText::with_cause(const char* cause) const {
  const std::string prefix = c10::str(op_, ": the ", what_, " must complete, got ");
  return std::string_view(cause).substr(0, prefix.size()) == prefix
             ? std::string(cause)
             : c10::str(prefix, cause, " ", where(rank_in_group_, group_size_, group_name_));
}

}  // namespace c10d_ext
