#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>

#include "backends/shm/bootstrap.h"

namespace c10d_ext::shm {

namespace {

// Nobody can change the size any more, so an access within it cannot raise SIGBUS.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Newer than the headers of some of the systems that we build on.
constexpr unsigned kNoExecSeal = 0x0008U;

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

// As the kernel estimates it, without swapping; where it says nothing, no limit.
uint64_t available_memory() {
  std::ifstream info("/proc/meminfo");
  std::string name;
  uint64_t kibibytes;
  std::string unit;
  while (info >> name >> kibibytes && std::getline(info, unit)) {
    if (name == "MemAvailable:") {
      return kibibytes << 10;
    }
  }
  return std::numeric_limits<uint64_t>::max();
}

std::byte* map(size_t bytes, int flags, int fd) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (data == MAP_FAILED) {
    fail(errno, "cannot map " + std::to_string(bytes) + " bytes of shared memory");
  }
  return static_cast<std::byte*>(data);
}

}  // namespace

std::shared_ptr<Mapping> Mapping::create(size_t bytes) {
  // Where there is not that much, reserving it would end processes, this one among them.
  const uint64_t available = available_memory();
  if (bytes > available / 2) {
    throw std::runtime_error("the group would take " + std::to_string(bytes) +
                             " bytes of shared memory, more than half of the " +
                             std::to_string(available) + " that are available");
  }
  // Some systems forbid memfds that could be executed; older kernels do not know the flag.
  int fd = memfd_create("c10d_ext", MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal);
  if (fd < 0 && errno == EINVAL) {
    fd = memfd_create("c10d_ext", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  }
  if (fd < 0) {
    fail(errno, "cannot create shared memory");
  }
  std::shared_ptr<Mapping> mapping(new Mapping(nullptr, bytes, fd));
  int error;
  do {
    error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error != 0) {
    fail(error, "cannot reserve " + std::to_string(bytes) + " bytes of shared memory");
  }
  if (fcntl(fd, F_ADD_SEALS, kSeals) < 0) {
    fail(errno, "cannot seal shared memory");
  }
  mapping->data_ = map(bytes, MAP_SHARED, fd);
  return mapping;
}

std::shared_ptr<Mapping> Mapping::adopt(int fd, size_t bytes) {
  std::shared_ptr<Mapping> mapping(new Mapping(nullptr, bytes, fd));
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    throw std::runtime_error("the shared memory offered is not sealed");
  }
  struct stat status;
  if (fstat(fd, &status) < 0) {
    fail(errno, "cannot inspect shared memory");
  }
  if (static_cast<uint64_t>(status.st_size) != bytes) {
    throw std::runtime_error("the shared memory offered has " + std::to_string(status.st_size) +
                             " bytes instead of " + std::to_string(bytes));
  }
  mapping->data_ = map(bytes, MAP_SHARED, fd);
  return mapping;
}

std::shared_ptr<Mapping> Mapping::anonymous(size_t bytes) {
  auto* data = map(bytes, MAP_SHARED | MAP_ANONYMOUS, -1);
  return std::shared_ptr<Mapping>(new Mapping(data, bytes, -1));
}

Mapping::~Mapping() {
  if (data_ != nullptr) {
    munmap(data_, bytes_);
  }
  if (fd_ >= 0) {
    close(fd_);
  }
}

}  // namespace c10d_ext::shm
