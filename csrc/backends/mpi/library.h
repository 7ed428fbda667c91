#pragma once

// An MPI library, opened at run time: one binary serves MPICH's ABI, Open MPI's and the standard
// one. No torch in here, and no header of an MPI.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace c10d_ext::mpi {

// A call that the library has refused, or a library that cannot be used.
class MpiError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Handles of the library, whatever it takes them to be.
struct Comm {
  uint64_t value = 0;
};
struct Request {
  uint64_t value = 0;
  // Of the communicator.
  int peer = -1;
};

// The calls of a library that the backend is made of. All of them move bytes: reductions are ours,
// so that every library gives the same bits. So are the steps of collectives: a library's own, once
// begun, would go on to send to ranks that are gone meanwhile, which ends the process in MPICH
// (5.0.2, in MPI_Isend by UCX, at a null request). What starts something returns its request, and
// buffers belong to the library until test() is true.
// Every method throws an MpiError that names the call and says what the library says. They may be
// called by several threads once init() has been.
class Library {
 public:
  // `path`: as dlopen() takes it. Opens it, finds out whose ABI it has and looks its functions up.
  static std::unique_ptr<Library> open(const std::string& path);

  virtual ~Library() = default;
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  // "MPICH Version: 5.0.2": the first line of what it says of itself.
  const std::string& version() const {
    return version_;
  }
  // The file that it was loaded from.
  const std::string& path() const {
    return path_;
  }
  // Open MPI is started by its own mpirun alone; the others by what speaks PMI-1, too.
  bool is_open_mpi() const {
    return is_open_mpi_;
  }

  // MPI_Init_thread with MPI_THREAD_MULTIPLE. Where the program has called that already, checks
  // that it has asked for as much.
  virtual void init() = 0;
  // Whether init() was what has initialized the library, so that finalize() is due.
  virtual bool is_ours() const = 0;
  virtual void finalize() = 0;
  virtual int rank() = 0;  // in MPI_COMM_WORLD
  virtual int size() = 0;
  // The largest tag of a message.
  virtual int tag_limit() = 0;

  virtual Comm world() const = 0;
  // Collective over `ranks` of MPI_COMM_WORLD, this one among them, which come with one `tag`.
  virtual Comm create_group(const std::vector<int>& ranks, int tag) = 0;
  virtual void free(Comm comm) = 0;

  // For when the ranks begin.
  virtual Request broadcast(void* data, int bytes, int root, Comm comm) = 0;
  virtual Request send(const void* data, int bytes, int peer, int tag, Comm comm) = 0;
  virtual Request receive(void* data, int bytes, int peer, int tag, Comm comm) = 0;

  // Whether it is over; then the request is none any more.
  virtual bool test(Request& request) = 0;

 protected:
  Library(std::string path, std::string version, bool is_open_mpi)
      : path_(std::move(path)), version_(std::move(version)), is_open_mpi_(is_open_mpi) {}

 private:
  const std::string path_;
  const std::string version_;
  const bool is_open_mpi_;
};

}  // namespace c10d_ext::mpi
