#include "stages/quantize/stream_file.h"

#include <cstring>
#include <nlohmann/json.hpp>

#include "format/json.h"
#include "stages/quantize/stream.h"

namespace espalier {
namespace {

constexpr std::string_view kMagic = "ESPSTRM1";
constexpr char kSchema[] = "espalier-stream-1";

// Bytes of one row: arrays as count and elements, padded to 8 bytes.
class Packer {
 public:
  template <typename T>
  void array(const T* data, size_t n) {
    number(n);
    const auto* bytes = reinterpret_cast<const uint8_t*>(data);
    out.insert(out.end(), bytes, bytes + n * sizeof(T));
    out.resize((out.size() + 7) / 8 * 8);
  }
  template <typename T>
  void array(const std::vector<T>& v) {
    array(v.data(), v.size());
  }
  void number(uint64_t v) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&v);
    out.insert(out.end(), bytes, bytes + sizeof v);
  }
  void tensor(const Tensor& t) {
    number(t.empty() ? 0 : t.shape().size());
    if (t.empty()) return;
    for (const int64_t d : t.shape()) number(static_cast<uint64_t>(d));
    array(t.f32(), static_cast<size_t>(t.size()));
  }
  std::vector<uint8_t> out;
};

class Unpacker {
 public:
  explicit Unpacker(std::span<const uint8_t> bytes) : rest_(bytes) {}
  bool ok() const { return ok_; }

  uint64_t number() {
    uint64_t v = 0;
    if (rest_.size() < sizeof v) {
      ok_ = false;
      return 0;
    }
    std::memcpy(&v, rest_.data(), sizeof v);
    rest_ = rest_.subspan(sizeof v);
    return v;
  }
  template <typename T>
  void array(std::vector<T>* out) {
    const uint64_t n = number();
    const std::span<const uint8_t> bytes = take(n, sizeof(T));
    if (!ok_) return;
    out->resize(n);
    if (n > 0) std::memcpy(out->data(), bytes.data(), bytes.size());
  }
  void tensor(Tensor* out) {
    const uint64_t n_dims = number();
    if (!ok_ || n_dims > 4) ok_ = false;
    if (!ok_ || n_dims == 0) return;
    Shape shape;
    uint64_t size = 1;
    for (uint64_t i = 0; i < n_dims; ++i) {
      const uint64_t d = number();
      ok_ = ok_ && d <= (uint64_t{1} << 32) && size <= (uint64_t{1} << 40);
      if (!ok_) return;
      size *= d;
      shape.push_back(static_cast<int64_t>(d));
    }
    const std::span<const uint8_t> bytes = take(number(), sizeof(float));
    if (!ok_ || bytes.size() != size * sizeof(float)) {
      ok_ = false;
      return;
    }
    *out = Tensor(DType::kF32, std::move(shape));
    if (!bytes.empty()) std::memcpy(out->data(), bytes.data(), bytes.size());
  }

 private:
  std::span<const uint8_t> take(uint64_t n, size_t element) {
    if (!ok_ || n > rest_.size() / element) {
      ok_ = false;
      return {};
    }
    const size_t size = n * element;
    const std::span<const uint8_t> out = rest_.first(size);
    rest_ = rest_.subspan(std::min(rest_.size(), (size + 7) / 8 * 8));
    return out;
  }
  std::span<const uint8_t> rest_;
  bool ok_ = true;
};

}  // namespace

Result<StreamWriter> StreamWriter::create(const std::filesystem::path& path) {
  ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(path));
  return StreamWriter(std::move(file));
}

Status StreamWriter::add(const CalibrationRow& row) {
  const StreamState& s = row.stream;
  Packer p;
  p.array(s.ids);
  p.number(static_cast<uint64_t>(s.start));
  p.tensor(s.h);
  p.tensor(s.pre);
  p.array(s.selected.begin);
  p.array(s.selected.entries);
  p.array(s.candidates);
  p.number(static_cast<uint64_t>(s.n_candidate_blocks));
  p.tensor(s.taps);
  for (const CompressedCache& c : row.state.compressed) {
    p.array(c.kv);
    p.array(c.index_keys);
    p.array(c.group_kv);
    p.array(c.group_gate);
    p.number(static_cast<uint64_t>(c.n_group_slots));
  }
  p.array(row.state.engram_history);
  digest_.update(std::span<const uint8_t>(p.out));
  ids_.update({reinterpret_cast<const uint8_t*>(s.ids.data()), s.ids.size() * sizeof(int32_t)});
  begin_.push_back(begin_.back() + p.out.size());
  tokens_ += s.n_rows();
  return file_.write(std::span<const uint8_t>(p.out));
}

Result<std::string> StreamWriter::commit(int layer, std::string_view recipe) {
  const std::string sha256 = digest_.finish_hex();
  const Json footer = {{"schema", kSchema},        {"recipe", recipe},    {"layer", layer},
                       {"rows", begin_.size() - 1}, {"tokens", tokens_},   {"dtype", "F32"},
                       {"ids_sha256", ids_.finish_hex()}, {"begin", begin_}, {"sha256", sha256}};
  const std::string text = dump_json(footer);
  RETURN_IF_ERROR(file_.write(text));
  const uint64_t length = text.size();
  RETURN_IF_ERROR(file_.write(std::span(reinterpret_cast<const uint8_t*>(&length), sizeof length)));
  RETURN_IF_ERROR(file_.write(kMagic));
  RETURN_IF_ERROR(file_.commit());
  return sha256;
}

Result<StreamFile> StreamFile::open(const std::filesystem::path& path, int layer, std::string_view recipe,
                                    const std::optional<std::string>& sha256) {
  ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::open(path));
  StreamFile out(std::move(mapped));
  const std::span<const uint8_t> bytes = out.file_.bytes();
  const std::string where = "'" + path.string() + "'";
  constexpr size_t kTail = sizeof(uint64_t) + kMagic.size();
  uint64_t length = 0;
  if (bytes.size() >= kTail) std::memcpy(&length, bytes.data() + bytes.size() - kTail, sizeof length);
  if (bytes.size() < kTail || length > bytes.size() - kTail ||
      std::memcmp(bytes.data() + bytes.size() - kMagic.size(), kMagic.data(), kMagic.size()) != 0) {
    return data_loss(where + ": expected a stream of calibration rows");
  }
  const size_t end = bytes.size() - kTail - length;
  ASSIGN_OR_RETURN(const Json footer, parse_json({reinterpret_cast<const char*>(bytes.data()) + end, length}, where));
  try {
    if (footer.at("schema") != kSchema || footer.at("recipe").get<std::string>() != recipe || footer.at("layer") != layer) {
      return data_loss(where + ": is the stream of another run or layer");
    }
    out.begin_ = footer.at("begin").get<std::vector<uint64_t>>();
  } catch (const Json::exception&) {
    return data_loss(where + ": its footer is not of the expected form");
  }
  if (out.begin_.empty() || out.begin_.front() != 0 || out.begin_.back() != end) return data_loss(where + ": its rows do not fit the file");
  for (size_t i = 1; i < out.begin_.size(); ++i) {
    if (out.begin_[i] < out.begin_[i - 1]) return data_loss(where + ": its rows do not fit the file");
  }
  if (sha256 && sha256_hex(bytes.first(end)) != *sha256) return data_loss(where + ": its sha256 does not fit its bytes");
  return out;
}

Result<CalibrationRow> StreamFile::row(size_t i, const Config& config) const {
  const std::span<const uint8_t> bytes = file_.bytes().subspan(begin_.at(i), begin_.at(i + 1) - begin_[i]);
  CalibrationRow row{SequenceState(config), {}};
  StreamState& s = row.stream;
  Unpacker u(bytes);
  u.array(&s.ids);
  s.start = static_cast<int64_t>(u.number());
  u.tensor(&s.h);
  u.tensor(&s.pre);
  u.array(&s.selected.begin);
  u.array(&s.selected.entries);
  u.array(&s.candidates);
  s.n_candidate_blocks = static_cast<int64_t>(u.number());
  u.tensor(&s.taps);
  for (CompressedCache& c : row.state.compressed) {
    u.array(&c.kv);
    u.array(&c.index_keys);
    u.array(&c.group_kv);
    u.array(&c.group_gate);
    c.n_group_slots = static_cast<int64_t>(u.number());
  }
  u.array(&row.state.engram_history);
  if (!u.ok()) return data_loss("'" + file_.path().string() + "': row " + std::to_string(i) + " is damaged");
  return row;
}

}  // namespace espalier
