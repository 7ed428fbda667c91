#pragma once

// Sends that UCX refuses because the other end of the connection is gone. MPICH takes for granted
// that it takes them on, and where it does not writes to a null request (5.0.2, MPI_Isend): the
// process ends. So for sends of ours this stands between the two. No torch in here.

namespace c10d_ext::mpi {

// From now on `library`, which dlopen() has returned with RTLD_NOW, has a UcxSend hear of what UCX
// refuses. Does nothing to a library that does not send by UCX.
void watch_ucx_sends(void* library);

// While it lives, what UCX refuses to send on this thread is over at once.
class UcxSend {
 public:
  UcxSend();
  ~UcxSend();
  UcxSend(const UcxSend&) = delete;
  UcxSend& operator=(const UcxSend&) = delete;

  // Whether it has refused something.
  bool is_refused() const;
};

}  // namespace c10d_ext::mpi
