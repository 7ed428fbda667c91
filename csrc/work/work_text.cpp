#include "work/work_text.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include "base/exceptions.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

namespace c10d_ext {

namespace {

// torch has one class for whatever goes wrong in nccl, without a code: the text has to tell.
std::optional<ErrorKind> kind_of(std::string_view text) {
  constexpr std::array<std::string_view, 2> kLate{"Watchdog caught collective operation timeout",
                                                  "timed out in blocking wait"};
  constexpr std::array<std::string_view, 2> kLost{
      "ncclRemoteError", "remote process exited or there was a network error"};
  const auto tells = [&](std::string_view part) { return text.find(part) != text.npos; };
  if (std::any_of(kLate.begin(), kLate.end(), tells)) {
    return ErrorKind::Timeout;
  }
  if (std::any_of(kLost.begin(), kLost.end(), tells)) {
    return ErrorKind::RankLost;
  }
  return std::nullopt;
}

}  // namespace

std::exception_ptr WorkText::described(const std::exception_ptr& error, uint64_t number) const {
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
    if (const auto kind = kind_of(e.what_without_backtrace())) {
      // Which ranks, it does not tell.
      return std::make_exception_ptr(CollectiveError(*kind, with_cause(e.what_without_backtrace()),
                                                     {}, std::string(op_), number, group_name_));
    }
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
