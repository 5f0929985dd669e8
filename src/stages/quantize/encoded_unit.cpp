#include "stages/quantize/encoded_unit.h"

#include <cstring>
#include <nlohmann/json.hpp>

#include "base/hash.h"
#include "format/json.h"
#include "stages/quantize/matrix_record.h"

namespace espalier {
namespace {

constexpr std::string_view kMagic = "ESPUNIT1";
constexpr size_t kDigest = 64;
constexpr size_t kFixed = 8 + sizeof(uint64_t);

void append(std::vector<uint8_t>* out, const void* data, size_t n) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  out->insert(out->end(), bytes, bytes + n);
}

// Reads 16-bit words one array after another; the total was checked before.
struct Words {
  const uint8_t* at;
  std::vector<uint16_t> take(int64_t n) {
    std::vector<uint16_t> out(static_cast<size_t>(n));
    std::memcpy(out.data(), at, out.size() * sizeof(uint16_t));
    at += out.size() * sizeof(uint16_t);
    return out;
  }
};

int64_t words_of(const MatrixSpec& spec, int k2) { return codec::trellis_words(spec.in, spec.out, k2) + spec.in + spec.out; }

}  // namespace

codec::Exl3Tensor copy_exl3(const codec::Exl3View& view) {
  codec::Exl3Tensor t;
  t.k = view.trellis.k;
  t.n = view.trellis.n;
  t.k2 = view.trellis.k2;
  t.codebook = view.trellis.codebook;
  t.trellis.assign(view.trellis.words, view.trellis.words + codec::trellis_words(t.k, t.n, t.k2));
  t.suh.assign(view.suh, view.suh + t.k);
  t.svh.assign(view.svh, view.svh + t.n);
  return t;
}

std::vector<uint8_t> unit_bytes(const EncodedUnit& unit, std::string_view name, std::string_view recipe) {
  Json header = {{"name", name}, {"recipe", recipe}, {"records", Json::array()}};
  for (const MatrixRecord& record : unit.records) header["records"].push_back(record_json(record));
  const std::string text = dump_json(header);
  std::vector<uint8_t> out;
  append(&out, kMagic.data(), kMagic.size());
  const uint64_t length = text.size();
  append(&out, &length, sizeof length);
  append(&out, text.data(), text.size());
  for (const codec::Exl3Tensor& t : unit.tensors) {
    for (const std::vector<uint16_t>* words : {&t.trellis, &t.suh, &t.svh}) {
      append(&out, words->data(), words->size() * sizeof(uint16_t));
    }
  }
  const std::string digest = sha256_hex(std::span<const uint8_t>(out));
  append(&out, digest.data(), digest.size());
  return out;
}

Result<EncodedUnit> parse_unit(std::span<const uint8_t> bytes, const UnitShape& shape, std::string_view recipe,
                               std::string_view what) {
  const std::string where(what);
  if (bytes.size() < kFixed + kDigest || std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) {
    return data_loss(where + ": expected an encoded unit, found " + std::to_string(bytes.size()) + " bytes of something else");
  }
  const std::span<const uint8_t> body = bytes.first(bytes.size() - kDigest);
  const std::string found(reinterpret_cast<const char*>(bytes.data()) + body.size(), kDigest);
  if (sha256_hex(body) != found) return data_loss(where + ": its sha256 does not fit its bytes");
  uint64_t length = 0;
  std::memcpy(&length, body.data() + kMagic.size(), sizeof length);
  if (length > body.size() - kFixed) return data_loss(where + ": header of " + std::to_string(length) + " bytes does not fit");
  ASSIGN_OR_RETURN(const Json header, parse_json({reinterpret_cast<const char*>(body.data()) + kFixed, length}, where));
  EncodedUnit unit;
  try {
    if (header.at("recipe").get<std::string>() != recipe) return data_loss(where + ": belongs to another run");
    if (header.at("name").get<std::string>() != shape.name) {
      return data_loss(where + ": expected '" + shape.name + "', found '" + header.at("name").get<std::string>() + "'");
    }
    for (const Json& record : header.at("records")) unit.records.push_back(record_of(record));
  } catch (const Json::exception&) {
    return data_loss(where + ": its records are not of the expected form");
  }
  if (unit.records.size() != shape.specs.size()) return data_loss(where + ": another number of matrices than expected");
  int64_t words = 0;
  for (size_t i = 0; i < shape.specs.size(); ++i) {
    const MatrixSpec& spec = shape.specs[i];
    const MatrixRecord& r = unit.records[i];
    if (r.stem != spec.stem || r.in != spec.in || r.out != spec.out || r.k2 != shape.k2[i]) {
      return data_loss(where + ": expected '" + spec.stem + "' in another shape or width than found ('" + r.stem + "')");
    }
    words += words_of(spec, shape.k2[i]);
  }
  if (body.size() - kFixed - length != static_cast<uint64_t>(words) * sizeof(uint16_t)) {
    return data_loss(where + ": its tensors have another size than expected");
  }
  Words reader{body.data() + kFixed + length};
  for (size_t i = 0; i < shape.specs.size(); ++i) {
    codec::Exl3Tensor t;
    t.k = shape.specs[i].in;
    t.n = shape.specs[i].out;
    t.k2 = shape.k2[i];
    t.codebook = shape.codebook;
    t.trellis = reader.take(codec::trellis_words(t.k, t.n, t.k2));
    t.suh = reader.take(t.k);
    t.svh = reader.take(t.n);
    if (tensor_digest(t) != unit.records[i].sha256) {
      return data_loss(where + ": the bytes of '" + shape.specs[i].stem + "' are not those that were encoded");
    }
    unit.tensors.push_back(std::move(t));
  }
  return unit;
}

}  // namespace espalier
