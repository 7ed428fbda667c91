#include "backends/mpi/ucx_sends.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace c10d_ext::mpi {

namespace {

// ucp_tag_send_nbx() as ucp.h declares it: endpoint, buffer, count, tag, parameters; a request,
// null where it is over at once, or an error.
using Send = void* (*)(void*, const void*, size_t, uint64_t, const void*);
constexpr char kSend[] = "ucp_tag_send_nbx";

#if defined(__x86_64__)
constexpr uint64_t kSlot = R_X86_64_JUMP_SLOT, kData = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
constexpr uint64_t kSlot = R_AARCH64_JUMP_SLOT, kData = R_AARCH64_GLOB_DAT;
#else
constexpr uint64_t kSlot = ~uint64_t{0}, kData = ~uint64_t{0};
#endif

std::atomic<Send> real_send{nullptr};

thread_local bool watches = false;
thread_local bool refused = false;

// UCS_PTR_IS_ERR(): the last 100 addresses are errors.
bool is_error(const void* request) {
  constexpr intptr_t kLast = -100;
  const auto value = reinterpret_cast<intptr_t>(request);
  return value < 0 && value >= kLast;
}

void* send(void* endpoint, const void* buffer, size_t count, uint64_t tag, const void* parameters) {
  void* request = real_send.load()(endpoint, buffer, count, tag, parameters);
  if (watches && is_error(request)) {
    refused = true;
    return nullptr;
  }
  return request;
}

struct Relocations {
  const ElfW(Rela) * first;
  size_t bytes;
};

void redirect(uintptr_t slot) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void* const start = reinterpret_cast<void*>(slot / page * page);
  if (mprotect(start, page, PROT_READ | PROT_WRITE) == 0) {
    *reinterpret_cast<Send*>(slot) = &send;
  }
}

}  // namespace

void watch_ucx_sends(void* library) {
  const auto real = reinterpret_cast<Send>(dlsym(library, kSend));
  link_map* map = nullptr;
  if (real == nullptr || real == &send || dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) {
    return;
  }
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  Relocations slots{}, others{};
  for (const auto* entry = map->l_ld; entry->d_tag != DT_NULL; ++entry) {
    const auto address = entry->d_un.d_ptr;
    switch (entry->d_tag) {
      case DT_SYMTAB:
        symbols = reinterpret_cast<const ElfW(Sym)*>(address);
        break;
      case DT_STRTAB:
        names = reinterpret_cast<const char*>(address);
        break;
      case DT_JMPREL:
        slots.first = reinterpret_cast<const ElfW(Rela)*>(address);
        break;
      case DT_PLTRELSZ:
        slots.bytes = entry->d_un.d_val;
        break;
      case DT_RELA:
        others.first = reinterpret_cast<const ElfW(Rela)*>(address);
        break;
      case DT_RELASZ:
        others.bytes = entry->d_un.d_val;
        break;
      default:
        break;
    }
  }
  real_send = real;
  for (const auto& [first, bytes] : {slots, others}) {
    for (size_t i = 0; first != nullptr && i < bytes / sizeof(*first); ++i) {
      const auto type = ELF64_R_TYPE(first[i].r_info);
      const auto& symbol = symbols[ELF64_R_SYM(first[i].r_info)];
      if ((type == kSlot || type == kData) && std::strcmp(names + symbol.st_name, kSend) == 0) {
        redirect(map->l_addr + first[i].r_offset);
      }
    }
  }
}

UcxSend::UcxSend() {
  watches = true;
  refused = false;
}

UcxSend::~UcxSend() {
  watches = false;
}

bool UcxSend::is_refused() const {
  return refused;
}

}  // namespace c10d_ext::mpi
