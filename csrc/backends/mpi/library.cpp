#include "backends/mpi/library.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>

#include "backends/mpi/ucx_sends.h"

namespace c10d_ext::mpi {

namespace {

constexpr int kSuccess = 0;  // MPI_SUCCESS, in every ABI
// More than MPI_MAX_LIBRARY_VERSION_STRING and MPI_MAX_ERROR_STRING of any.
constexpr size_t kTextSize = 16384;

// The values of one ABI. Handles are ints in MPICH's, pointers in the others.
template <class Handle>
struct Constants {
  Handle world;
  Handle errors_return;
  Handle byte;
  void* status_ignore;
  int tag_ub;
  int thread_multiple;
};

// MPICH's since 3.1, and what has agreed to be compatible: Intel MPI, MVAPICH. Values of mpi.h.
const Constants<int> kMpich{
    0x44000000, 0x54000001, 0x4c00010d, reinterpret_cast<void*>(intptr_t{1}), 0x64400001, 3};

void* handle(uintptr_t value) {
  return reinterpret_cast<void*>(value);
}

// MPI 5.0, appendix A: "MPI ABI".
Constants<void*> standard() {
  return {handle(0x101), handle(0x143), handle(0x247), handle(0), 501, 4096};
}

// Open MPI's handles are addresses of objects of the library.
Constants<void*> open_mpi(void* library) {
  const auto address = [library](const char* name) {
    void* found = dlsym(library, name);
    if (found == nullptr) {
      throw MpiError(std::string("it has no ") + name);
    }
    return found;
  };
  return {address("ompi_mpi_comm_world"),
          address("ompi_mpi_errors_return"),
          address("ompi_mpi_byte"),
          handle(0),
          0,
          3};
}

// With names and types as mpi.h declares them; statuses are ignored everywhere.
template <class H>
struct Functions {
  int (*Init_thread)(int*, char***, int, int*);
  int (*Initialized)(int*);
  int (*Finalized)(int*);
  int (*Query_thread)(int*);
  int (*Finalize)();
  int (*Error_string)(int, char*, int*);
  int (*Comm_rank)(H, int*);
  int (*Comm_size)(H, int*);
  int (*Comm_group)(H, H*);
  int (*Group_incl)(H, int, const int*, H*);
  int (*Group_free)(H*);
  int (*Comm_create_group)(H, H, int, H*);
  int (*Comm_free)(H*);
  int (*Comm_set_errhandler)(H, H);
  int (*Comm_get_attr)(H, int, void*, int*);
  int (*Ibcast)(void*, int, H, int, H, H*);
  int (*Ibarrier)(H, H*);
  int (*Isend)(const void*, int, H, int, int, H, H*);
  int (*Irecv)(void*, int, H, int, int, H, H*);
  int (*Test)(H*, int*, void*);

  explicit Functions(void* library) {
    const auto find = [library](auto& function, const char* name) {
      void* found = dlsym(library, name);
      if (found == nullptr) {
        throw MpiError(std::string("it has no ") + name);
      }
      function = reinterpret_cast<std::decay_t<decltype(function)>>(found);
    };
    find(Init_thread, "MPI_Init_thread");
    find(Initialized, "MPI_Initialized");
    find(Finalized, "MPI_Finalized");
    find(Query_thread, "MPI_Query_thread");
    find(Finalize, "MPI_Finalize");
    find(Error_string, "MPI_Error_string");
    find(Comm_rank, "MPI_Comm_rank");
    find(Comm_size, "MPI_Comm_size");
    find(Comm_group, "MPI_Comm_group");
    find(Group_incl, "MPI_Group_incl");
    find(Group_free, "MPI_Group_free");
    find(Comm_create_group, "MPI_Comm_create_group");
    find(Comm_free, "MPI_Comm_free");
    find(Comm_set_errhandler, "MPI_Comm_set_errhandler");
    find(Comm_get_attr, "MPI_Comm_get_attr");
    find(Ibcast, "MPI_Ibcast");
    find(Ibarrier, "MPI_Ibarrier");
    find(Isend, "MPI_Isend");
    find(Irecv, "MPI_Irecv");
    find(Test, "MPI_Test");
  }
};

template <class H>
class LibraryOf final : public Library {
 public:
  LibraryOf(void* library, std::string path, std::string version, bool is_open_mpi,
            const Constants<H>& constants)
      : Library(std::move(path), std::move(version), is_open_mpi),
        call_(library),
        constants_(constants) {}

  void init() override {
    int is_over = 0;
    check(call_.Finalized(&is_over), "MPI_Finalized");
    if (is_over != 0) {
      throw MpiError("MPI must not have been finalized, got MPI_Finalized");
    }
    int is_on = 0;
    check(call_.Initialized(&is_on), "MPI_Initialized");
    int level = 0;
    if (is_on != 0) {
      check(call_.Query_thread(&level), "MPI_Query_thread");
    } else {
      check(call_.Init_thread(nullptr, nullptr, constants_.thread_multiple, &level),
            "MPI_Init_thread");
      is_ours_ = true;
    }
    if (level != constants_.thread_multiple) {
      throw MpiError("MPI must be initialized with MPI_THREAD_MULTIPLE, which is level " +
                     std::to_string(constants_.thread_multiple) + ", got level " +
                     std::to_string(level));
    }
    // The default is to end the process.
    check(call_.Comm_set_errhandler(constants_.world, constants_.errors_return),
          "MPI_Comm_set_errhandler");
    if (is_ours_) {
      drop_segment_names();
    }
  }

  // MPICH keeps the name of its shared memory until MPI_Finalize: a rank that is killed before
  // would leave the memory behind. Once all ranks have mapped it nobody needs the name.
  void drop_segment_names() {
    H request{};
    check(call_.Ibarrier(constants_.world, &request), "MPI_Ibarrier");
    for (int is_done = 0; is_done == 0;) {
      check(call_.Test(&request, &is_done, constants_.status_ignore), "MPI_Test");
      if (is_done == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      const auto at = line.find("/dev/shm/mpich_shm_");
      if (at != std::string::npos) {
        unlink(line.c_str() + at);  // another rank may have been first
      }
    }
  }

  bool is_ours() const override {
    return is_ours_;
  }

  void finalize() override {
    int is_over = 0;
    check(call_.Finalized(&is_over), "MPI_Finalized");
    if (is_over == 0) {
      check(call_.Finalize(), "MPI_Finalize");
    }
  }

  int rank() override {
    int rank = 0;
    check(call_.Comm_rank(constants_.world, &rank), "MPI_Comm_rank");
    return rank;
  }

  int size() override {
    int size = 0;
    check(call_.Comm_size(constants_.world, &size), "MPI_Comm_size");
    return size;
  }

  int tag_limit() override {
    int* limit = nullptr;
    int is_set = 0;
    check(call_.Comm_get_attr(constants_.world, constants_.tag_ub, &limit, &is_set),
          "MPI_Comm_get_attr");
    return is_set != 0 && limit != nullptr ? *limit : 32767;
  }

  Comm world() const override {
    return {as_value(constants_.world)};
  }

  Comm create_group(const std::vector<int>& ranks, int tag) override {
    H everyone{}, some{}, comm{};
    check(call_.Comm_group(constants_.world, &everyone), "MPI_Comm_group");
    const int included =
        call_.Group_incl(everyone, static_cast<int>(ranks.size()), ranks.data(), &some);
    check(call_.Group_free(&everyone), "MPI_Group_free");
    check(included, "MPI_Group_incl");
    const int made = call_.Comm_create_group(constants_.world, some, tag, &comm);
    check(call_.Group_free(&some), "MPI_Group_free");
    check(made, "MPI_Comm_create_group");
    check(call_.Comm_set_errhandler(comm, constants_.errors_return), "MPI_Comm_set_errhandler");
    return {as_value(comm)};
  }

  void free(Comm comm) override {
    H gone = of(comm.value);
    check(call_.Comm_free(&gone), "MPI_Comm_free");
  }

  Request broadcast(void* data, int bytes, int root, Comm comm) override {
    return started("MPI_Ibcast", root, [&](H* request) {
      return call_.Ibcast(data, bytes, constants_.byte, root, of(comm.value), request);
    });
  }

  Request send(const void* data, int bytes, int peer, int tag, Comm comm) override {
    const UcxSend watched;
    Request request = started("MPI_Isend", peer, [&](H* handle) {
      return call_.Isend(data, bytes, constants_.byte, peer, tag, of(comm.value), handle);
    });
    if (watched.is_refused() && test(request)) {
      throw MpiError(
          "MPI_Isend: the connection to the other rank must be there, got one that ended");
    }
    return request;
  }

  Request receive(void* data, int bytes, int peer, int tag, Comm comm) override {
    return started("MPI_Irecv", peer, [&](H* request) {
      return call_.Irecv(data, bytes, constants_.byte, peer, tag, of(comm.value), request);
    });
  }

  bool test(Request& request) override {
    H now = of(request.value);
    int is_over = 0;
    check(call_.Test(&now, &is_over, constants_.status_ignore), "MPI_Test");
    request.value = as_value(now);
    return is_over != 0;
  }

 private:
  static uint64_t as_value(H handle) {
    uint64_t value = 0;
    std::memcpy(&value, &handle, sizeof(handle));
    return value;
  }
  static H of(uint64_t value) {
    H handle{};
    std::memcpy(&handle, &value, sizeof(handle));
    return handle;
  }

  template <class Start>
  Request started(const char* name, int peer, const Start& start) {
    H request{};
    check(start(&request), name);
    return {as_value(request), peer};
  }

  void check(int code, const char* name) {
    if (code == kSuccess) {
      return;
    }
    std::string text(kTextSize, '\0');
    int length = 0;
    if (call_.Error_string(code, text.data(), &length) != kSuccess) {
      length = 0;
    }
    text.resize(static_cast<size_t>(std::max(length, 0)));
    throw MpiError(std::string(name) + ": " +
                   (text.empty() ? "error " + std::to_string(code) : text));
  }

  const Functions<H> call_;
  const Constants<H> constants_;
  bool is_ours_ = false;
};

std::string file_of(void* library) {
  link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) {
    return {};
  }
  return map->l_name;
}

bool starts_with(std::string_view text, std::string_view with) {
  return text.substr(0, with.size()) == with;
}

}  // namespace

std::unique_ptr<Library> Library::open(const std::string& path) {
  // RTLD_GLOBAL: Open MPI's plug-ins look for its symbols there.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    const char* why = dlerror();
    throw MpiError(why != nullptr ? why : path + ": cannot be opened");
  }
  watch_ucx_sends(library);
  const std::string file = file_of(library);
  using GetVersion = int (*)(char*, int*);
  const auto get_version = reinterpret_cast<GetVersion>(dlsym(library, "MPI_Get_library_version"));
  std::string version(kTextSize, '\0');
  int length = 0;
  if (get_version == nullptr || get_version(version.data(), &length) != kSuccess) {
    throw MpiError(file + ": it is no MPI library, which has MPI_Get_library_version");
  }
  version.resize(static_cast<size_t>(std::max(length, 0)));
  const bool is_open_mpi = starts_with(version, "Open MPI");
  version = version.substr(0, version.find('\n'));
  try {
    const auto name = std::string_view(file).substr(file.find_last_of('/') + 1);
    if (starts_with(name, "libmpi_abi.")) {
      return std::make_unique<LibraryOf<void*>>(library, file, version, is_open_mpi, standard());
    }
    if (is_open_mpi) {
      return std::make_unique<LibraryOf<void*>>(library, file, version, true, open_mpi(library));
    }
    for (const auto* whose : {"MPICH", "Intel(R) MPI", "MVAPICH"}) {
      if (starts_with(version, whose)) {
        return std::make_unique<LibraryOf<int>>(library, file, version, false, kMpich);
      }
    }
  } catch (const MpiError& error) {
    throw MpiError(file + " (" + version + "): " + error.what());
  }
  throw MpiError(file + " (" + version +
                 "): its ABI must be MPICH's, Open MPI's or the standard one (libmpi_abi.so)");
}

}  // namespace c10d_ext::mpi
