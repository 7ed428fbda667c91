// What UCX refuses to send, with a library in MPICH's place: C10D_EXT_FAKE_MPI has test_send(),
// which calls ucp_tag_send_nbx() of another library and says what that returns: a request, or for a
// count of 0 an error.

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

#include "backends/mpi/ucx_sends.h"
#include "program.h"

using namespace c10d_ext;

namespace {

constexpr intptr_t kRequest = 0x1000, kError = -25;

void a_refused_send_is_over_at_once() {
  void* library = dlopen(std::getenv("C10D_EXT_FAKE_MPI"), RTLD_NOW | RTLD_GLOBAL);
  CHECK(library != nullptr);
  const auto send = reinterpret_cast<intptr_t (*)(size_t)>(dlsym(library, "test_send"));
  CHECK(send(0) == kError && send(1) == kRequest);
  for (int times = 0; times < 2; ++times) {  // a group that is made later opens it once more
    mpi::watch_ucx_sends(library);
    // Nobody has asked.
    CHECK(send(0) == kError && send(1) == kRequest);
    {
      const mpi::UcxSend watched;
      CHECK(send(1) == kRequest && !watched.is_refused());
      CHECK(send(0) == 0 && watched.is_refused());
      // Other threads are others' business.
      std::thread([&] { CHECK(send(0) == kError); }).join();
    }
    CHECK(send(0) == kError);
    CHECK(!mpi::UcxSend().is_refused());
  }
}

void other_libraries_are_left_alone() {
  mpi::watch_ucx_sends(dlopen(nullptr, RTLD_NOW));
}

const std::vector<Test> kTests = {
    TEST(a_refused_send_is_over_at_once),
    TEST(other_libraries_are_left_alone),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
