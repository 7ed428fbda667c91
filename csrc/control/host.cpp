#include "control/host.h"

#include <limits.h>
#include <unistd.h>

#include <array>
#include <fstream>

namespace c10d_ext {

namespace {

std::string target_of_link(const char* path) {
  std::array<char, PATH_MAX> text;
  const ssize_t length = readlink(path, text.data(), text.size());
  return length > 0 ? std::string(text.data(), static_cast<size_t>(length)) : std::string();
}

}  // namespace

std::string this_host() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, HOST_NAME_MAX + 1> name{};
  gethostname(name.data(), name.size() - 1);
  std::string host = boot + ' ' + name.data();
  for (const char* space :
       {"/proc/self/ns/ipc", "/proc/self/ns/pid", "/proc/self/ns/net", "/proc/self/ns/user"}) {
    host += ' ' + target_of_link(space);
  }
  return host;
}

}  // namespace c10d_ext
