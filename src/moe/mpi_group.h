// Ranks as processes, on one machine or several, over MPI: `mpirun -n N k3 ...`. A window is memory
// of this process, laid out as the peer's slab; publishing sends what was written there, and the
// peer's progress thread stores it into the real slab and rings. So the call protocol and EpMoe are
// the same as with threads, and so are the bits. No collective after create(), no allocation in a
// step.
//
// One thread (the progress thread) makes every MPI call after create(). It also sends each peer a
// sign of life four times in a timeout; a peer silent for a whole timeout, idle or not, is lost.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moe/ep_group.h"

namespace k3 {

// What mpirun says about this process. No MPI call is made to find out.
struct MpiJob {
  int64_t rank = 0, size = 1;
  int64_t local_size = 1;  // processes on this machine
};
// Nothing when this process was not started by mpirun.
std::optional<MpiJob> mpi_job();

class MpiGroup : public EpGroup {
 public:
  // Collective over the job's processes. `same`: a description that must be equal on every rank;
  // `limits`: each becomes the smallest of all ranks'. kInvalidArgument naming the rank that
  // differs, or when the program was built without MPI.
  static Result<std::unique_ptr<MpiGroup>> create(const SlabShape& shape, double timeout_seconds,
                                                  const std::string& same,
                                                  std::vector<int64_t>& limits);
  // Says goodbye to the peers (who will not count the silence as a loss) and ends the thread.
  ~MpiGroup() override;

  int64_t rank() const;

  Slab& window(int64_t from, int64_t to) override;
  void publish_dispatch(int64_t from, int64_t to, uint64_t generation) override;
  void publish_return(int64_t from, int64_t to, uint64_t generation,
                      std::span<const int32_t> assignments) override;
  void fail(const Status& status) override;

  // Messages besides the calls, in order between two ranks: the front end's requests and their
  // tokens. Any thread; `on_message` gets them on the progress thread and must not block; empty:
  // nobody listens any more, and no call is in progress when this returns.
  void send(int64_t to, const std::string& message);
  void on_message(std::function<void(int64_t from, std::string message)> call);
  // Called once, on the progress thread, when the group fails or if it has; else as on_message.
  void on_failure(std::function<void(const Status&)> call);
  // Waits until `rank` has said goodbye or the group has failed, or for `seconds`: false then.
  bool wait_for_goodbye(int64_t rank, double seconds);

 private:
  struct Impl;
  explicit MpiGroup(const SlabShape& shape, double timeout_seconds);
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
