#include "checkpoint/checkpoint.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "checkpoint/catalog.h"

namespace k3 {
namespace {

// One file, mapped whole; pages are read when touched.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  Mapping(Mapping&& other) noexcept
      : path_(std::move(other.path_)),
        fd_(std::exchange(other.fd_, -1)),
        data_(std::exchange(other.data_, nullptr)),
        size_(other.size_) {}
  ~Mapping() {
    if (data_) ::munmap(data_, static_cast<size_t>(size_));
    if (fd_ >= 0) ::close(fd_);
  }

  Status map(const CatalogFile& file) {
    path_ = file.path;
    size_ = file.size;
    fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd_ < 0) return checkpoint_error(path_, ": cannot open: ", std::strerror(errno));
    K3_RETURN_IF_ERROR(check_size());
    void* data = ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_SHARED, fd_, 0);
    if (data == MAP_FAILED) {
      return checkpoint_error(path_, ": cannot map ", size_, " bytes: ", std::strerror(errno));
    }
    data_ = static_cast<std::byte*>(data);
    return {};
  }

  // A file that shrinks under its mapping would raise SIGBUS where its lost pages are read.
  Status check_size() const {
    struct stat st = {};
    if (::fstat(fd_, &st) != 0) return checkpoint_error(path_, ": ", std::strerror(errno));
    if (st.st_size != size_) {
      return checkpoint_error(path_, ": found ", st.st_size, " bytes, expected ", size_,
                              " as when its header was read");
    }
    return {};
  }

  std::byte* at(int64_t offset) const { return data_ + offset; }
  int64_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int fd_ = -1;
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

struct Range {
  int32_t file;
  int64_t begin, end;
};

constexpr int64_t kWarmChunk = int64_t{32} << 20;
constexpr int kWarmAhead = 4;  // chunks asked for before the one being waited on

// Widens [begin, end) to whole pages inside the file.
std::pair<std::byte*, size_t> pages(const Mapping& map, int64_t begin, int64_t end) {
  static const int64_t page = ::sysconf(_SC_PAGESIZE);
  begin -= begin % page;
  return {map.at(begin), static_cast<size_t>(end - begin)};
}

Status read_pages(const Mapping& map, int64_t begin, int64_t end) {
  const auto [start, length] = pages(map, begin, end);
#ifdef MADV_POPULATE_READ
  // Reports an unreadable page as an error instead of a signal.
  if (::madvise(start, length, MADV_POPULATE_READ) == 0) return {};
  if (errno != EINVAL) {
    return checkpoint_error(map.path(), ": cannot read bytes ", begin, " to ", end, ": ",
                            std::strerror(errno));
  }
#endif
  // Kernels before 5.14: touch a byte of each page.
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  for (int64_t i = 0; i < static_cast<int64_t>(length); i += page) {
    (void)*static_cast<volatile const std::byte*>(start + i);
  }
  return {};
}

}  // namespace

struct Checkpoint::Impl {
  Catalog catalog;
  LoadPlan plan;
  std::vector<Mapping> maps;  // as catalog.files; unmapped if not needed
  std::unordered_map<std::string_view, TensorView> views;  // keys point into catalog
  std::vector<Range> ranges;                               // held bytes, ascending, merged
};

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::~Checkpoint() = default;

Result<std::unique_ptr<Checkpoint>> Checkpoint::open(const std::string& model_dir,
                                                     const ModelConfig& config,
                                                     const RankSpec& rank) {
  auto impl = std::make_unique<Impl>();
  K3_ASSIGN_OR_RETURN(impl->plan, plan_load(config, rank));
  K3_ASSIGN_OR_RETURN(impl->catalog, read_catalog(model_dir, config));
  LoadPlan& plan = impl->plan;
  const Catalog& catalog = impl->catalog;
  plan.skipped_layers = catalog.skipped_layers;
  plan.skipped_vision = catalog.skipped_vision;
  plan.notes = catalog.notes;

  const auto is_held = [&](const TensorSpec& spec) {
    return spec.expert < 0 || (spec.expert >= plan.first_expert && spec.expert < plan.end_expert);
  };
  for (const LocatedTensor& t : catalog.tensors) {
    if (is_held(t.spec)) impl->ranges.push_back({t.file, t.offset, t.offset + t.spec.bytes});
  }
  std::sort(impl->ranges.begin(), impl->ranges.end(), [](const Range& a, const Range& b) {
    return a.file != b.file ? a.file < b.file : a.begin < b.begin;
  });
  size_t merged = 0;
  for (const Range& r : impl->ranges) {
    Range* last = merged > 0 ? &impl->ranges[merged - 1] : nullptr;
    if (last && last->file == r.file && last->end == r.begin) {
      last->end = r.end;
    } else {
      impl->ranges[merged++] = r;
    }
  }
  impl->ranges.resize(merged);

  impl->maps.resize(catalog.files.size());
  int32_t mapped = -1;
  for (const Range& r : impl->ranges) {
    if (r.file == mapped) continue;
    mapped = r.file;
    K3_RETURN_IF_ERROR(
        impl->maps[static_cast<size_t>(mapped)].map(catalog.files[static_cast<size_t>(mapped)]));
  }

  impl->views.reserve(static_cast<size_t>(plan.held.tensors));
  for (const LocatedTensor& t : catalog.tensors) {
    if (!is_held(t.spec)) continue;
    const TensorView view{impl->maps[static_cast<size_t>(t.file)].at(t.offset), t.spec.dtype,
                          t.spec.shape, t.spec.bytes, t.spec.name};
    if (t.spec.name.ends_with(".A_log")) {
      for (int64_t i = config.kda_num_heads; i < t.spec.shape[0]; ++i) {
        float value;
        std::memcpy(&value, view.data + i * 4, 4);
        if (value != 0) {
          return checkpoint_error("tensor ", t.spec.name, ": element ", i, ": found ", value,
                                  ", expected 0 behind the ", config.kda_num_heads, " heads");
        }
      }
    }
    impl->views.emplace(t.spec.name, view);
  }
  return std::unique_ptr<Checkpoint>(new Checkpoint(std::move(impl)));
}

const TensorView* Checkpoint::find(std::string_view canonical_name) const {
  const auto it = impl_->views.find(canonical_name);
  return it == impl_->views.end() ? nullptr : &it->second;
}

void Checkpoint::read(const TensorView& tensor, int64_t first, int64_t bytes,
                      std::byte* out) const {
  std::memcpy(out, tensor.data + first, static_cast<size_t>(bytes));
}

int64_t Checkpoint::total_bytes() const { return impl_->plan.held.bytes; }
int64_t Checkpoint::num_tensors() const { return impl_->plan.held.tensors; }
const LoadPlan& Checkpoint::plan() const { return impl_->plan; }
const RankSpec& Checkpoint::rank() const { return impl_->plan.rank; }

Status Checkpoint::warm(const ProgressFn& progress) const {
  std::vector<Range> chunks;
  for (const Range& r : impl_->ranges) {
    for (int64_t at = r.begin; at < r.end; at += kWarmChunk) {
      chunks.push_back({r.file, at, std::min(at + kWarmChunk, r.end)});
    }
  }
  const auto map_of = [&](const Range& r) -> const Mapping& {
    return impl_->maps[static_cast<size_t>(r.file)];
  };
  int64_t done = 0;
  size_t asked = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const Mapping& map = map_of(chunks[i]);
    K3_RETURN_IF_ERROR(map.check_size());
    for (; asked < chunks.size() && asked <= i + kWarmAhead; ++asked) {
      const Range& ahead = chunks[asked];
      const auto [start, length] = pages(map_of(ahead), ahead.begin, ahead.end);
      ::madvise(start, length, MADV_WILLNEED);  // advice: its failure only costs time
    }
    K3_RETURN_IF_ERROR(read_pages(map, chunks[i].begin, chunks[i].end));
    done += chunks[i].end - chunks[i].begin;
    if (progress) progress(done, total_bytes());
  }
  return {};
}

}  // namespace k3
