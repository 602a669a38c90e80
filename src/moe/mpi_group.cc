#include "moe/mpi_group.h"

#include <mpi.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <thread>
#include <utility>

namespace k3 {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

enum Tag : int { kDispatch = 1, kReturn, kFailure, kMessage, kAlive, kGoodbye };

struct DispatchHead {
  uint64_t generation;
  int64_t layer, rows;
};
struct ReturnHead {
  uint64_t generation;
  int64_t count;
};

int64_t dispatch_bytes(const SlabShape& s, int64_t rows) {
  return static_cast<int64_t>(sizeof(DispatchHead)) + rows * 4 * (1 + s.top_k + s.latent);
}
int64_t return_bytes(const SlabShape& s, int64_t count) {
  return static_cast<int64_t>(sizeof(ReturnHead)) + count * 4 * (1 + s.latent);
}

// Plain copies one after another into, or out of, one message.
class Cursor {
 public:
  explicit Cursor(std::byte* at) : at_(at) {}
  template <typename T>
  void put(const T* from, int64_t count) {
    std::memcpy(at_, from, static_cast<size_t>(count) * sizeof(T));
    at_ += static_cast<size_t>(count) * sizeof(T);
  }
  template <typename T>
  void take(T* to, int64_t count) {
    std::memcpy(to, at_, static_cast<size_t>(count) * sizeof(T));
    at_ += static_cast<size_t>(count) * sizeof(T);
  }

 private:
  std::byte* at_;
};

std::string mpi_text(int error) {
  std::array<char, MPI_MAX_ERROR_STRING> text;
  int length = 0;
  MPI_Error_string(error, text.data(), &length);
  return std::string(text.data(), static_cast<size_t>(length));
}

struct Outgoing {
  int64_t to = 0;
  Tag tag = kAlive;
  const std::byte* data = nullptr;  // lasts until the send is done; or
  int64_t bytes = 0;
  std::vector<char> owned;  // the message itself, when data is null; stays put when moved
};

}  // namespace

struct MpiGroup::Impl {
  explicit Impl(MpiGroup* g) : group(*g) {}

  void run();
  void start_sends();
  void finish_sends();
  bool receive_all();
  void receive(const MPI_Status& status, int64_t bytes);
  void receive_dispatch(int64_t from, int64_t bytes);
  void receive_return(int64_t from, int64_t bytes);
  void beat();
  void tell_of_failure();
  void queue(Outgoing out);
  void check(int error, const char* what, int64_t peer);
  bool all_said_goodbye();

  MpiGroup& group;
  int64_t rank = 0;
  MPI_Comm comm = MPI_COMM_NULL;
  std::vector<std::unique_ptr<Slab>> windows;                     // own slab at [rank]
  std::vector<std::unique_ptr<std::byte[]>> dispatches, returns;  // one message a peer
  std::unique_ptr<std::byte[]> received;
  int64_t received_bytes = 0;

  std::mutex mutex;
  std::condition_variable wake;        // the progress thread: something to send, or stop
  std::condition_variable goodbye_cv;  // wait_for_goodbye
  std::vector<Outgoing> outgoing;
  std::vector<bool> goodbye;
  bool stop = false;

  std::mutex calls_mutex;  // held during a call to a listener
  std::function<void(int64_t, std::string)> message_call;
  std::vector<std::pair<int64_t, std::string>> early_messages;  // before anybody listened
  std::function<void(const Status&)> failure_call;

  // The progress thread's alone.
  std::vector<Outgoing> sending;  // with requests, index for index
  std::vector<MPI_Request> requests;
  std::vector<Clock::time_point> heard;
  Clock::time_point next_beat;
  bool failure_told = false;

  std::thread thread;
};

MpiGroup::MpiGroup(const SlabShape& shape, double timeout_seconds)
    : EpGroup(shape, timeout_seconds), impl_(std::make_unique<Impl>(this)) {}

Result<std::unique_ptr<MpiGroup>> MpiGroup::create(const SlabShape& shape, double timeout_seconds,
                                                   const std::string& same,
                                                   std::vector<int64_t>& limits) {
  const int64_t largest = std::max(dispatch_bytes(shape, shape.max_rows),
                                   return_bytes(shape, shape.max_rows * shape.top_k));
  if (largest > INT_MAX) {
    return invalid_argument("steps of ", shape.max_rows, " rows need messages of ", largest,
                            " bytes between ranks, expected at most ", INT_MAX,
                            ": lower --max-num-batched-tokens");
  }
  int provided = 0, initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized == 0 &&
      MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided) != MPI_SUCCESS) {
    return Status(ErrorCode::kInternal, "MPI does not start (MPI_Init_thread)");
  }
  if (provided < MPI_THREAD_SERIALIZED) {
    return Status(ErrorCode::kInternal,
                  "this MPI serves only the main thread, expected MPI_THREAD_SERIALIZED");
  }
  std::unique_ptr<MpiGroup> group(new MpiGroup(shape, timeout_seconds));
  Impl& i = *group->impl_;
  MPI_Comm_dup(MPI_COMM_WORLD, &i.comm);
  MPI_Comm_set_errhandler(i.comm, MPI_ERRORS_RETURN);
  int rank = 0, size = 0;
  MPI_Comm_rank(i.comm, &rank);
  MPI_Comm_size(i.comm, &size);
  i.rank = rank;
  if (size != shape.world) {
    return invalid_argument("mpirun started ", size, " processes, expected ", shape.world);
  }

  constexpr size_t kText = 1024;
  std::string mine = cat(same, " max_rows=", shape.max_rows, " top_k=", shape.top_k,
                         " latent=", shape.latent, " limits=", limits.size());
  mine.resize(kText);
  std::string all(kText * static_cast<size_t>(size), '\0');
  MPI_Allgather(mine.data(), kText, MPI_CHAR, all.data(), kText, MPI_CHAR, i.comm);
  for (int r = 0; r < size; ++r) {
    const char* theirs = all.data() + static_cast<size_t>(r) * kText;
    if (std::memcmp(theirs, all.data(), kText) != 0) {
      return invalid_argument("rank ", r, " runs with ", theirs,
                              ", expected what rank 0 has: ", all.data());
    }
  }
  MPI_Allreduce(MPI_IN_PLACE, limits.data(), static_cast<int>(limits.size()), MPI_INT64_T, MPI_MIN,
                i.comm);

  for (int64_t r = 0; r < shape.world; ++r) {
    K3_ASSIGN_OR_RETURN(std::unique_ptr<Slab> slab, Slab::create(shape));
    i.windows.push_back(std::move(slab));
    // Not touched until used, so a page costs nothing until then.
    const auto buffer = [](int64_t bytes) {
      return std::unique_ptr<std::byte[]>(new std::byte[static_cast<size_t>(bytes)]);
    };
    i.dispatches.push_back(buffer(r == rank ? 0 : dispatch_bytes(shape, shape.max_rows)));
    i.returns.push_back(buffer(r == rank ? 0 : return_bytes(shape, shape.max_rows * shape.top_k)));
  }
  i.received_bytes = largest;
  i.received.reset(new std::byte[static_cast<size_t>(largest)]);
  i.outgoing.reserve(64);
  i.sending.reserve(64);
  i.requests.reserve(64);
  i.goodbye.assign(static_cast<size_t>(size), false);
  i.heard.assign(static_cast<size_t>(size), Clock::now());
  i.next_beat = Clock::now();
  i.thread = std::thread([&i] { i.run(); });
  return group;
}

MpiGroup::~MpiGroup() {
  Impl& i = *impl_;
  if (!i.thread.joinable()) return;  // create() refused
  if (!failed()) {
    for (int64_t p = 0; p < shape().world; ++p) {
      if (p != i.rank) i.queue({p, kGoodbye, nullptr, 0, {}});
    }
  }
  {
    std::lock_guard lock(i.mutex);
    i.stop = true;
  }
  i.wake.notify_one();
  i.thread.join();
  // With a peer gone, finalising (a collective) might never return; the process ends without.
  if (!failed()) MPI_Finalize();
}

int64_t MpiGroup::rank() const { return impl_->rank; }

Slab& MpiGroup::window(int64_t /*from: this rank*/, int64_t to) {
  return *impl_->windows[static_cast<size_t>(to)];
}

void MpiGroup::publish_dispatch(int64_t from, int64_t to, uint64_t generation) {
  const SlabShape& s = shape();
  Slab& w = window(from, to);
  const SlabHeader& header = w.header(from);
  std::byte* message = impl_->dispatches[static_cast<size_t>(to)].get();
  const DispatchHead head{generation, header.layer, header.rows};
  Cursor c(message);
  c.put(&head, 1);
  c.put(w.row_ids(from), header.rows);
  c.put(w.topk_ids(from), header.rows * s.top_k);
  c.put(w.latents(from), header.rows * s.latent);
  // The buffer is free again: this is call g, and `to` has answered call g - 1.
  impl_->queue({to, kDispatch, message, dispatch_bytes(s, header.rows), {}});
}

void MpiGroup::publish_return(int64_t from, int64_t to, uint64_t generation,
                              std::span<const int32_t> assignments) {
  const SlabShape& s = shape();
  std::byte* message = impl_->returns[static_cast<size_t>(to)].get();
  const ReturnHead head{generation, static_cast<int64_t>(assignments.size())};
  Cursor c(message);
  c.put(&head, 1);
  c.put(assignments.data(), head.count);
  const float* outputs = window(from, to).returned();
  for (const int32_t a : assignments) c.put(outputs + a * s.latent, s.latent);
  impl_->queue({to, kReturn, message, return_bytes(s, head.count), {}});
}

void MpiGroup::fail(const Status& status) {
  if (failed()) return;
  EpGroup::fail(status);
  const std::string text = cat(static_cast<int>(failure().code()), " ", failure().message());
  for (int64_t p = 0; p < shape().world; ++p) {
    if (p != impl_->rank) impl_->queue({p, kFailure, nullptr, 0, {text.begin(), text.end()}});
  }
}

void MpiGroup::send(int64_t to, const std::string& message) {
  impl_->queue({to, kMessage, nullptr, 0, {message.begin(), message.end()}});
}

void MpiGroup::on_message(std::function<void(int64_t, std::string)> call) {
  std::lock_guard lock(impl_->calls_mutex);
  impl_->message_call = std::move(call);
  if (!impl_->message_call) return;
  for (auto& [from, text] : impl_->early_messages) impl_->message_call(from, std::move(text));
  impl_->early_messages.clear();
}

void MpiGroup::on_failure(std::function<void(const Status&)> call) {
  std::lock_guard lock(impl_->calls_mutex);
  impl_->failure_call = std::move(call);
}

bool MpiGroup::wait_for_goodbye(int64_t rank, double seconds) {
  std::unique_lock lock(impl_->mutex);
  return impl_->goodbye_cv.wait_for(lock, Seconds(seconds), [&] {
    return impl_->goodbye[static_cast<size_t>(rank)] || failed();
  });
}

void MpiGroup::Impl::queue(Outgoing out) {
  {
    std::lock_guard lock(mutex);
    outgoing.push_back(std::move(out));
  }
  wake.notify_one();
}

void MpiGroup::Impl::check(int error, const char* what, int64_t peer) {
  if (error == MPI_SUCCESS) return;
  group.fail({ErrorCode::kRankLost,
              cat("rank ", rank, ": ", what, " rank ", peer, ": MPI: ", mpi_text(error))});
}

bool MpiGroup::Impl::all_said_goodbye() {
  std::lock_guard lock(mutex);
  for (int64_t p = 0; p < group.shape().world; ++p) {
    if (p != rank && !goodbye[static_cast<size_t>(p)]) return false;
  }
  return true;
}

void MpiGroup::Impl::run() {
  int quiet_rounds = 0;
  std::optional<Clock::time_point> give_up;
  for (;;) {
    bool stopping = false, nothing_queued = false;
    {
      std::unique_lock lock(mutex);
      // A step's messages follow each other closely, an idle group has none: yield, then nap, then
      // doze, so that a wake-up stays within a millisecond and idling costs little.
      if (outgoing.empty() && !stop && quiet_rounds > 32) {
        wake.wait_for(lock, std::chrono::microseconds(quiet_rounds < 512 ? 50 : 700));
      }
      nothing_queued = outgoing.empty();
      stopping = stop;
    }
    start_sends();
    finish_sends();
    const bool moved = receive_all() || !nothing_queued;
    quiet_rounds = moved ? 0 : std::min(quiet_rounds + 1, 1 << 20);
    if (!moved) std::this_thread::yield();
    beat();
    if (group.failed()) tell_of_failure();
    if (stopping && nothing_queued) {
      if (!group.failed() && requests.empty() && all_said_goodbye()) return;
      // A failed group owes its peers no more than a moment to hear why.
      if (group.failed()) {
        if (!give_up) give_up = Clock::now() + std::chrono::seconds(1);
        if (requests.empty() || Clock::now() > *give_up) return;
      }
    }
  }
}

void MpiGroup::Impl::start_sends() {
  const size_t first = sending.size();
  {
    std::lock_guard lock(mutex);
    for (Outgoing& out : outgoing) sending.push_back(std::move(out));
    outgoing.clear();
  }
  for (size_t n = first; n < sending.size(); ++n) {  // NOLINT(clang-analyzer-optin.mpi.MPI-Checker)
    const Outgoing& out = sending[n];
    const void* data = out.data != nullptr ? static_cast<const void*>(out.data) : out.owned.data();
    const auto bytes =
        static_cast<int>(out.data != nullptr ? out.bytes : static_cast<int64_t>(out.owned.size()));
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Isend(data, bytes, MPI_BYTE, static_cast<int>(out.to), out.tag, comm, &request),
          "cannot send to", out.to);
    requests.push_back(request);
  }
}

void MpiGroup::Impl::finish_sends() {
  for (size_t n = 0; n < requests.size();) {
    int done = 0;
    const int error = MPI_Test(&requests[n], &done, MPI_STATUS_IGNORE);
    check(error, "cannot send to", sending[n].to);
    if (done == 0 && error == MPI_SUCCESS) {
      ++n;
      continue;
    }
    requests[n] = requests.back();
    requests.pop_back();
    if (n + 1 != sending.size()) sending[n] = std::move(sending.back());
    sending.pop_back();
  }
}

bool MpiGroup::Impl::receive_all() {
  bool any = false;
  for (;;) {
    int there = 0;
    MPI_Status status;
    const int error = MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &there, &status);
    if (error != MPI_SUCCESS) {
      check(error, "cannot hear", -1);
      return any;
    }
    if (there == 0) return any;
    any = true;
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    receive(status, bytes);
  }
}

void MpiGroup::Impl::receive(const MPI_Status& status, int64_t bytes) {
  const auto from = static_cast<int64_t>(status.MPI_SOURCE);
  const auto get = [&](void* into) {
    check(MPI_Recv(into, static_cast<int>(bytes), MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, comm,
                   MPI_STATUS_IGNORE),
          "cannot hear", from);
  };
  heard[static_cast<size_t>(from)] = Clock::now();
  if (status.MPI_TAG == kDispatch || status.MPI_TAG == kReturn) {
    if (bytes > received_bytes) {
      group.fail(
          {ErrorCode::kRankLost, cat("rank ", rank, ": a message of ", bytes, " bytes from rank ",
                                     from, ", expected at most ", received_bytes)});
      return;
    }
    get(received.get());
    if (status.MPI_TAG == kDispatch) return receive_dispatch(from, bytes);
    return receive_return(from, bytes);
  }
  std::string text(static_cast<size_t>(bytes), '\0');
  get(text.data());
  switch (status.MPI_TAG) {
    case kFailure: {
      const size_t blank = text.find(' ');
      const int code = std::atoi(text.c_str());
      group.EpGroup::fail({static_cast<ErrorCode>(code), text.substr(blank + 1)});
      return;
    }
    case kMessage: {
      std::lock_guard lock(calls_mutex);
      if (message_call) {
        message_call(from, std::move(text));
      } else {
        early_messages.emplace_back(from, std::move(text));
      }
      return;
    }
    case kGoodbye: {
      {
        std::lock_guard lock(mutex);
        goodbye[static_cast<size_t>(from)] = true;
      }
      goodbye_cv.notify_all();
      return;
    }
    default:  // kAlive: that it came is all there is to it
      return;
  }
}

void MpiGroup::Impl::receive_dispatch(int64_t from, int64_t bytes) {
  const SlabShape& s = group.shape();
  Slab& slab = group.slab(rank);
  DispatchHead head{};
  Cursor c(received.get());
  c.take(&head, 1);
  if (head.rows < 0 || head.rows > s.max_rows || bytes != dispatch_bytes(s, head.rows)) {
    group.fail({ErrorCode::kRankLost, cat("rank ", rank, ": a dispatch of ", head.rows, " rows in ",
                                          bytes, " bytes from rank ", from)});
    return;
  }
  c.take(slab.row_ids(from), head.rows);
  c.take(slab.topk_ids(from), head.rows * s.top_k);
  c.take(slab.latents(from), head.rows * s.latent);
  slab.header(from).layer = head.layer;
  slab.header(from).rows = head.rows;
  slab.flags(from).dispatched.store(head.generation, std::memory_order_release);
  group.ring(rank);
}

void MpiGroup::Impl::receive_return(int64_t from, int64_t bytes) {
  const SlabShape& s = group.shape();
  Slab& slab = group.slab(rank);
  ReturnHead head{};
  Cursor ids(received.get());
  ids.take(&head, 1);
  if (head.count < 0 || head.count > s.max_rows * s.top_k || bytes != return_bytes(s, head.count)) {
    group.fail({ErrorCode::kRankLost, cat("rank ", rank, ": a return of ", head.count,
                                          " outputs in ", bytes, " bytes from rank ", from)});
    return;
  }
  Cursor outputs(received.get() + sizeof(ReturnHead) + static_cast<size_t>(head.count) * 4);
  for (int64_t n = 0; n < head.count; ++n) {
    int32_t a = 0;
    ids.take(&a, 1);
    outputs.take(slab.returned() + a * s.latent, s.latent);
  }
  slab.flags(from).returned.store(head.generation, std::memory_order_release);
  group.ring(rank);
}

// Signs of life, given and missed.
void MpiGroup::Impl::beat() {
  const auto now = Clock::now();
  if (now < next_beat || group.failed()) return;
  const double timeout = group.timeout_seconds();
  next_beat =
      now + std::chrono::duration_cast<Clock::duration>(Seconds(std::min(timeout / 4, 1.0)));
  for (int64_t p = 0; p < group.shape().world; ++p) {
    if (p == rank) continue;
    {
      std::lock_guard lock(mutex);
      if (goodbye[static_cast<size_t>(p)]) continue;
    }
    const double silent = Seconds(now - heard[static_cast<size_t>(p)]).count();
    if (silent > timeout) {
      group.fail({ErrorCode::kRankLost,
                  cat("rank ", rank, ": no sign of life from rank ", p, " for ", timeout, " s")});
      return;
    }
    queue({p, kAlive, nullptr, 0, {}});
  }
}

void MpiGroup::Impl::tell_of_failure() {
  if (failure_told) return;
  {
    std::lock_guard lock(mutex);  // wait_for_goodbye is between its check and its sleep, or asleep
  }
  goodbye_cv.notify_all();
  std::lock_guard lock(calls_mutex);
  if (!failure_call) return;
  failure_told = true;
  failure_call(group.failure());
}

}  // namespace k3
