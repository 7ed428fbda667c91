// Messages between two processes by UCX and by a TCP socket, for benchmarks/ucx.py, which compiles
// this file with the headers of the wheel libucx and opens it by ctypes.
//
// An exchange: the first process sends `size` bytes and gets `back` bytes for them. Whoever waits
// sleeps until the kernel says that something came, or is busy: asks again and again.

#include <sys/socket.h>
#include <ucp/api/ucp.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct Ucx {
  ucp_worker_h worker{};
  ucp_ep_h peer{};
};

// The second one can sleep. A worker each: UCX may choose otherwise for one that can.
std::array<Ucx, 2> workers;

[[noreturn]] void fail(const char* what, const char* why) {
  std::fprintf(stderr, "%s: %s\n", what, why);
  std::exit(1);
}

void check(ucs_status_t status, const char* what) {
  if (status != UCS_OK) {
    fail(what, ucs_status_string(status));
  }
}

void wait_for(ucs_status_ptr_t request, ucp_worker_h worker, bool is_busy, const char* what) {
  if (!UCS_PTR_IS_PTR(request)) {
    return check(UCS_PTR_RAW_STATUS(request), what);
  }
  ucs_status_t status;
  while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS) {
    // It may only sleep once there is nothing more to do.
    if (ucp_worker_progress(worker) == 0 && !is_busy) {
      check(ucp_worker_wait(worker), "ucp_worker_wait");
    }
  }
  ucp_request_free(request);
  check(status, what);
}

// All of it, with a system call that moves some and need not sleep.
void move(ssize_t (*call)(int, char*, size_t, int), int fd, char* at, size_t left, bool is_busy) {
  while (left > 0) {
    const ssize_t moved = call(fd, at, left, is_busy ? MSG_DONTWAIT : 0);
    if (moved > 0) {
      at += moved;
      left -= static_cast<size_t>(moved);
    } else if (moved == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
      fail("socket", moved == 0 ? "closed" : std::strerror(errno));
    }
  }
}

ssize_t send_some(int fd, char* at, size_t size, int flags) {
  return send(fd, at, size, flags | MSG_NOSIGNAL);
}

ssize_t receive_some(int fd, char* at, size_t size, int flags) {
  return recv(fd, at, size, flags);
}

}  // namespace

extern "C" {

// Makes a worker; its address is written to `address`. Returns the bytes of it.
size_t ucx_open(int can_sleep, char* address, size_t capacity) {
  ucp_config_t* config = nullptr;
  check(ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
  check(ucp_config_modify(config, "TLS", "tcp"), "TLS");
  check(ucp_config_modify(config, "NET_DEVICES", "eth0"), "NET_DEVICES");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_TAG | (can_sleep != 0 ? UCP_FEATURE_WAKEUP : 0);
  ucp_context_h context = nullptr;
  check(ucp_init(&params, config, &context), "ucp_init");
  ucp_config_release(config);
  ucp_worker_params_t of_worker{};
  of_worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  of_worker.thread_mode = UCS_THREAD_MODE_SINGLE;
  ucp_worker_h worker = nullptr;
  check(ucp_worker_create(context, &of_worker, &worker), "ucp_worker_create");
  ucp_address_t* own = nullptr;
  size_t size = 0;
  check(ucp_worker_get_address(worker, &own, &size), "ucp_worker_get_address");
  if (size > capacity) {
    fail("ucx_open", "the address is too long");
  }
  std::memcpy(address, own, size);
  ucp_worker_release_address(worker, own);
  workers.at(can_sleep != 0).worker = worker;
  return size;
}

void ucx_connect(int can_sleep, const char* address) {
  Ucx& ucx = workers.at(can_sleep != 0);
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
  params.address = reinterpret_cast<const ucp_address_t*>(address);
  check(ucp_ep_create(ucx.worker, &params, &ucx.peer), "ucp_ep_create");
}

void ucx_exchange(int is_busy, int is_first, char* data, size_t size, char* reply, size_t back) {
  const Ucx& ucx = workers.at(is_busy == 0);
  const auto receive = [&](char* at, size_t count) {
    constexpr ucp_request_param_t kDefault{};
    return ucp_tag_recv_nbx(ucx.worker, at, count, 1, ~ucp_tag_t{0}, &kDefault);
  };
  const auto send_all = [&](const char* at, size_t count) {
    constexpr ucp_request_param_t kDefault{};
    wait_for(ucp_tag_send_nbx(ucx.peer, at, count, 1, &kDefault), ucx.worker, is_busy != 0, "send");
  };
  if (is_first != 0) {
    ucs_status_ptr_t expected = receive(reply, back);
    send_all(data, size);
    wait_for(expected, ucx.worker, is_busy != 0, "receive");
  } else {
    wait_for(receive(data, size), ucx.worker, is_busy != 0, "receive");
    send_all(reply, back);
  }
}

void socket_exchange(int fd, int is_busy, int is_first, char* data, size_t size, char* reply,
                     size_t back) {
  const auto send_all = [&](char* at, size_t count) {
    move(send_some, fd, at, count, is_busy != 0);
  };
  const auto receive_all = [&](char* at, size_t count) {
    move(receive_some, fd, at, count, is_busy != 0);
  };
  if (is_first != 0) {
    send_all(data, size);
    receive_all(reply, back);
  } else {
    receive_all(data, size);
    send_all(reply, back);
  }
}
}
