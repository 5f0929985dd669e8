// Products with every stored form on the GPU against the CPU's, bit for bit, and the independence of rows.
#include "codec/cuda/rows_product.h"

#include <algorithm>

#include "model/linear.h"
#include "tensor/float_formats.h"
#include "tests/gpu/ops_data.h"

namespace espalier::codec::cuda {
namespace {

using ops::bit_differences;
using ops::random_floats;
using ops::cuda::NativeForm;
using ops::cuda::NativeWeight;

// A random matrix in a stored form: the bytes, the CPU's Linear over them, and the device's view after upload.
struct Stored {
  std::vector<uint8_t> weight, scale;
  Linear linear;
  NativeWeight native;
  int64_t in = 0, out = 0;
};

class RowsProduct : public ops::OpsCuda {
 protected:
  std::shared_ptr<Stored> make(NativeForm form, int64_t in, int64_t out, const std::string& name, int64_t row_begin = 0) {
    auto s = std::make_shared<Stored>();
    s->in = in;
    s->out = out;
    const CounterRng rng(21, name);
    const int64_t all_rows = row_begin + out;
    const auto scales = [&](int64_t n) {
      for (int64_t i = 0; i < n; ++i) s->scale.push_back(static_cast<uint8_t>(120 + rng.bits(static_cast<uint64_t>(1000000 + i)) % 12));
    };
    NativeWeight& w = s->native;
    w.form = form;
    w.in = in;
    w.out = out;
    const int64_t n = all_rows * in;
    const auto dense = [&](DType dtype, int64_t size) {
      s->weight.resize(static_cast<size_t>(n * size));
      const std::vector<float> values = random_floats(name, n);
      for (int64_t i = 0; i < n; ++i) {
        const float v = values[static_cast<size_t>(i)];
        const uint16_t bits = dtype == DType::kBF16 ? encode_bf16(v) : encode_f16(v);
        std::memcpy(&s->weight[static_cast<size_t>(i * size)], size == 4 ? static_cast<const void*>(&v) : &bits, static_cast<size_t>(size));
      }
      s->linear = taken(Linear::from_dense(name, {s->weight.data(), dtype, {all_rows, in}}, row_begin, out, WeightResidency::kUnpacked));
      w.weight = up(s->weight) + row_begin * in * size;
    };
    switch (form) {
      case NativeForm::kF32: dense(DType::kF32, 4); break;
      case NativeForm::kF16: dense(DType::kF16, 2); break;
      case NativeForm::kBf16: dense(DType::kBF16, 2); break;
      case NativeForm::kFp8: {
        for (int64_t i = 0; i < n; ++i) {
          const uint8_t code = static_cast<uint8_t>(rng.bits(static_cast<uint64_t>(i)));
          s->weight.push_back((code & 0x7F) == 0x7F ? 0 : code);
        }
        w.block_rows = 32;
        w.block_cols = 32;
        w.scale_cols = (in + 31) / 32;
        scales((all_rows + 31) / 32 * w.scale_cols);
        s->linear = taken(Linear::from_fp8(name, {s->weight.data(), DType::kF8E4M3, {all_rows, in}},
                                           {s->scale.data(), DType::kF8E8M0, {(all_rows + 31) / 32, w.scale_cols}}, 32, 32, row_begin, out,
                                           WeightResidency::kUnpacked));
        w.row_begin = row_begin;
        w.weight = up(s->weight) + row_begin * in;
        w.scale = up(s->scale);
        break;
      }
      case NativeForm::kMxfp4:
        for (int64_t i = 0; i < n / 2; ++i) s->weight.push_back(static_cast<uint8_t>(rng.bits(static_cast<uint64_t>(i))));
        w.scale_cols = in / 32;
        scales(out * w.scale_cols);
        s->linear = taken(Linear::from_mxfp4(name, {s->weight.data(), DType::kI8, {out, in / 2}},
                                             {s->scale.data(), DType::kF8E8M0, {out, w.scale_cols}}, WeightResidency::kUnpacked));
        w.weight = up(s->weight);
        w.scale = up(s->scale);
        break;
    }
    return s;
  }

  std::vector<float> product(const DeviceWeight& w, const std::vector<float>& x, int64_t n_rows) {
    RowsProductParams p;
    p.weight = w;
    p.x = up(x);
    p.x_stride = w.in;
    p.y = room<float>(n_rows * w.out);
    p.y_stride = w.out;
    p.n_rows = n_rows;
    p.rotated = room<float>(n_rows * w.in);
    must(multiply_rows(stream_, p));
    return down(p.y, n_rows * w.out);
  }

  void expect_cpu_bits(const std::string& what, const DeviceWeight& w, const Linear& linear, int64_t n_rows) {
    const std::vector<float> x = random_floats("x" + what, n_rows * w.in);
    std::vector<float> expected(static_cast<size_t>(n_rows * w.out));
    linear.apply(pool_, x.data(), n_rows, expected.data());
    EXPECT_EQ(bit_differences(product(w, x, n_rows), expected), "") << what << ", " << n_rows << " rows";
  }
};

const NativeForm kForms[] = {NativeForm::kF32, NativeForm::kF16, NativeForm::kBf16, NativeForm::kFp8, NativeForm::kMxfp4};
const char* const kFormNames[] = {"F32", "F16", "BF16", "FP8", "MXFP4"};

TEST_F(RowsProduct, native_forms_of_awkward_sizes_have_the_bits_of_the_cpu) {
  for (const NativeForm form : kForms) {
    for (const auto& [in, out] : {std::pair<int64_t, int64_t>{32, 1}, {96, 65}, {160, 64}, {352, 130}, {1, 1}, {7, 3}, {129, 67}, {301, 40}}) {
      if (form == NativeForm::kMxfp4 && in % 32 != 0) continue;
      const std::string what = std::string(kFormNames[static_cast<int>(form)]) + " " + std::to_string(in) + " to " + std::to_string(out);
      const auto s = make(form, in, out, what);
      for (int64_t rows : {0, 1, 4, 5, 17}) expect_cpu_bits(what, weight_of(s->native), s->linear, rows);
    }
  }
}

TEST_F(RowsProduct, native_forms_of_released_sizes_have_the_bits_of_the_cpu) {
  struct Case {
    NativeForm form;
    int64_t in, out, rows;
  };
  for (const Case& c : {Case{NativeForm::kFp8, 5120, 1280, 1}, Case{NativeForm::kFp8, 5120, 512, 17}, Case{NativeForm::kMxfp4, 5120, 2304, 3},
                        Case{NativeForm::kMxfp4, 2304, 5120, 16}, Case{NativeForm::kF32, 20480, 24, 5}, Case{NativeForm::kBf16, 5120, 384, 33},
                        Case{NativeForm::kFp8, 8192, 640, 2}, Case{NativeForm::kBf16, 256, 129280, 1}}) {
    const std::string what = std::string(kFormNames[static_cast<int>(c.form)]) + " " + std::to_string(c.in) + " to " + std::to_string(c.out);
    const auto s = make(c.form, c.in, c.out, what);
    expect_cpu_bits(what, weight_of(s->native), s->linear, c.rows);
  }
}

TEST_F(RowsProduct, a_slice_of_rows_uses_its_own_scales) {
  for (int64_t row_begin : {32, 40, 96}) {
    const auto s = make(NativeForm::kFp8, 192, 70, "slice at " + std::to_string(row_begin), row_begin);
    expect_cpu_bits("slice at " + std::to_string(row_begin), weight_of(s->native), s->linear, 3);
  }
}

TEST_F(RowsProduct, every_code_of_fp8_and_mxfp4_has_its_value) {
  // One input that is 1, one column per code: the product is the code's value times the scale.
  for (const NativeForm form : {NativeForm::kFp8, NativeForm::kMxfp4}) {
    NativeWeight w;
    w.form = form;
    w.in = 32;
    w.out = 256;
    std::vector<uint8_t> codes(static_cast<size_t>(form == NativeForm::kFp8 ? 256 * 32 : 256 * 16), 0), scales;
    for (int64_t o = 0; o < 256; ++o) {
      codes[static_cast<size_t>(o * (form == NativeForm::kFp8 ? 32 : 16))] = (o & 0x7F) == 0x7F && form == NativeForm::kFp8 ? 0 : static_cast<uint8_t>(o);
      // At most 2^125: all 32 elements of the row are multiplied, and 6 times that is still finite.
      scales.push_back(static_cast<uint8_t>(o == 0 ? 127 : std::min<int64_t>(o, 252)));
    }
    w.block_rows = 1;
    w.scale_cols = 1;
    w.weight = up(codes);
    w.scale = up(scales);
    std::vector<float> x(32, 0.0f), expected;
    x[0] = 1.0f;
    for (size_t o = 0; o < 256; ++o) {
      const uint8_t code = codes[o * (form == NativeForm::kFp8 ? 32 : 16)];
      expected.push_back((form == NativeForm::kFp8 ? decode_e4m3(code) : decode_e2m1(code & 15)) * decode_e8m0(scales[o]) + 0.0f);
    }
    EXPECT_EQ(bit_differences(product(weight_of(w), x, 1), expected), "") << kFormNames[static_cast<int>(form)];
  }
}

TEST_F(RowsProduct, exl3_of_every_width_and_codebook_has_the_bits_of_the_cpu) {
  for (const Codebook codebook : {Codebook::kMul1, Codebook::kMcg, Codebook::k3Inst}) {
    for (int k2 : kAllWidths) {
      if (k2 % 2 != 0 && codebook != Codebook::kMul1) continue;
      const std::string what = std::string(codebook_name(codebook)) + " K " + width_text(k2);
      const Exl3Tensor t = random_tensor(384, 256, k2, codebook, what);
      const Matrix m = taken(Matrix::upload(stream_, t.view()));
      const Linear linear = Linear::from_exl3(t.view(), WeightResidency::kStored);
      for (int64_t rows : {1, 5, 17}) expect_cpu_bits(what, weight_of(m.view()), linear, rows);
    }
  }
}

TEST_F(RowsProduct, exl3_of_released_sizes_has_the_bits_of_the_cpu) {
  struct Case {
    int64_t k, n, rows;
    int k2;
  };
  for (const Case& c : {Case{5120, 2304, 1, 6}, Case{2304, 5120, 16, 5}, Case{1280, 4096, 33, 8}, Case{128, 128, 1, 6}, Case{5120, 128, 3, 7}}) {
    const std::string what = "EXL3 " + std::to_string(c.k) + " to " + std::to_string(c.n);
    const Exl3Tensor t = random_tensor(c.k, c.n, c.k2, Codebook::kMul1, what);
    const Matrix m = taken(Matrix::upload(stream_, t.view()));
    expect_cpu_bits(what, weight_of(m.view()), Linear::from_exl3(t.view(), WeightResidency::kStored), c.rows);
  }
}

TEST_F(RowsProduct, a_row_does_not_depend_on_the_other_rows) {
  const Exl3Tensor t = random_tensor(640, 384, 6, Codebook::kMul1, "alone");
  const Matrix m = taken(Matrix::upload(stream_, t.view()));
  const auto s = make(NativeForm::kFp8, 640, 384, "alone");
  for (const DeviceWeight& w : {weight_of(m.view()), weight_of(s->native)}) {
    const std::vector<float> x = random_floats("together", 40 * 640);
    const std::vector<float> together = product(w, x, 40);
    for (int64_t begin = 0, step = 1; begin < 40; begin += step, step = step % 9 + 1) {
      const int64_t n = std::min(step, 40 - begin);
      const std::vector<float> part = product(w, {x.begin() + begin * 640, x.begin() + (begin + n) * 640}, n);
      EXPECT_EQ(bit_differences(part, {together.begin() + begin * 384, together.begin() + (begin + n) * 384}), "") << "rows " << begin << " + " << n;
    }
  }
}

TEST_F(RowsProduct, strided_rows_read_and_write_their_part_only) {
  const auto s = make(NativeForm::kBf16, 96, 72, "strided");
  const std::vector<float> x = random_floats("strided x", 6 * 300);
  RowsProductParams p;
  p.weight = weight_of(s->native);
  p.x = up(x) + 100;
  p.x_stride = 300;
  float* y = up(std::vector<float>(6 * 200, 7.0f));
  p.y = y + 50;
  p.y_stride = 200;
  p.n_rows = 6;
  must(multiply_rows(stream_, p));
  const std::vector<float> got = down(y, 6 * 200);
  std::vector<float> expected(6 * 200, 7.0f);
  for (int64_t r = 0; r < 6; ++r) s->linear.apply(pool_, x.data() + r * 300 + 100, 1, expected.data() + r * 200 + 50);
  EXPECT_EQ(bit_differences(got, expected), "");
}

class ExpertRows : public RowsProduct {
 protected:
  // Experts of alternating forms; every row uses n_active different ones, expert 1 most often.
  void check(int64_t n_experts, int64_t n_rows, int64_t n_active, int64_t in, int64_t out, bool is_down) {
    const std::string what = std::to_string(n_rows) + " rows of " + std::to_string(n_active) + " among " + std::to_string(n_experts);
    std::vector<DeviceWeight> weights;
    std::vector<const Linear*> linears;
    std::vector<std::shared_ptr<Stored>> stored;
    std::vector<std::shared_ptr<Linear>> packed;
    for (int64_t e = 0; e < n_experts; ++e) {
      const std::string name = what + " expert " + std::to_string(e);
      if (e % 3 == 1) {
        stored.push_back(make(NativeForm::kMxfp4, in, out, name));
        weights.push_back(weight_of(stored.back()->native));
        linears.push_back(&stored.back()->linear);
        continue;
      }
      Exl3Tensor t = random_tensor(in, out, e % 3 == 0 ? 6 : 5, Codebook::kMul1, name);
      matrices_.push_back(std::make_shared<Matrix>(taken(Matrix::upload(stream_, t.view()))));
      weights.push_back(weight_of(matrices_.back()->view()));
      packed.push_back(std::make_shared<Linear>(Linear::from_exl3(std::move(t), WeightResidency::kStored)));
      linears.push_back(packed.back().get());
    }
    const int64_t n_slots = n_rows * n_active;
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < n_rows; ++t) {
      for (int64_t i = 0; i < n_active; ++i) ids.push_back(static_cast<int32_t>((i == 0 ? 1 : 1 + t % 5 + i) % n_experts));
      for (int64_t i = 1; i < n_active; ++i) {  // different from each other
        auto& id = ids[static_cast<size_t>(t * n_active + i)];
        while (std::find(ids.end() - n_active, ids.begin() + t * n_active + i, id) != ids.begin() + t * n_active + i) id = static_cast<int32_t>((id + 1) % n_experts);
      }
    }
    const int64_t slots_per_row = is_down ? 1 : n_active;
    const std::vector<float> x = random_floats("x" + what, n_slots / slots_per_row * in);
    ExpertPlan plan = taken(ExpertPlan::create(stream_, n_slots, n_experts));
    ExpertsProductParams p;
    p.ids = up(ids);
    must(plan_expert_rows(stream_, p.ids, n_slots, plan));
    p.weights = up(weights);
    p.plan = &plan;
    p.x = up(x);
    p.slots_per_row = slots_per_row;
    p.y = room<float>(n_slots * out);
    p.rotated = room<float>(n_slots * in);
    p.n_slots = n_slots;
    p.max_per_expert = n_rows;
    p.in = in;
    p.out = out;
    must(multiply_expert_rows(stream_, p));
    std::vector<float> expected(static_cast<size_t>(n_slots * out));
    for (int64_t s = 0; s < n_slots; ++s) {
      linears[static_cast<size_t>(ids[static_cast<size_t>(s)])]->apply(pool_, x.data() + s / slots_per_row * in, 1, expected.data() + s * out);
    }
    EXPECT_EQ(bit_differences(down(p.y, n_slots * out), expected), "") << what << (is_down ? ", down" : "");
  }
  std::vector<std::shared_ptr<Matrix>> matrices_;
};

TEST_F(ExpertRows, every_slot_has_the_bits_of_its_expert_alone) {
  for (int64_t rows : {1, 3, 4, 5, 16, 17, 70}) {
    check(7, rows, 3, 256, 384, false);
    check(7, rows, 3, 384, 256, true);
  }
  check(1, 5, 1, 128, 128, false);
}

TEST_F(ExpertRows, the_plan_covers_every_slot_once_for_384_experts) {
  const int64_t n_experts = 384, n_slots = 256 * 6;
  std::vector<int32_t> ids;
  const CounterRng rng(5, "plan");
  for (int64_t s = 0; s < n_slots; ++s) ids.push_back(static_cast<int32_t>(s % 3 == 0 ? 200 : rng.bits(static_cast<uint64_t>(s)) % 384));
  ExpertPlan plan = taken(ExpertPlan::create(stream_, n_slots, n_experts));
  must(plan_expert_rows(stream_, up(ids), n_slots, plan));
  const int32_t n_pieces = down(plan.n_pieces.data(), 1)[0];
  ASSERT_GT(n_pieces, 0);
  ASSERT_LE(n_pieces, n_experts + n_slots / kPieceRows);
  const std::vector<int32_t> order = down(plan.order.data(), n_slots);
  std::vector<int> seen(static_cast<size_t>(n_slots), 0);
  for (const ExpertPiece& piece : down(plan.pieces.data(), n_pieces)) {
    ASSERT_TRUE(piece.n >= 1 && piece.n <= kPieceRows && piece.first >= 0 && piece.first + piece.n <= n_slots);
    for (int32_t i = 0; i < piece.n; ++i) {
      const int32_t slot = order[static_cast<size_t>(piece.first + i)];
      ASSERT_TRUE(slot >= 0 && slot < n_slots);
      EXPECT_EQ(ids[static_cast<size_t>(slot)], piece.expert);
      ++seen[static_cast<size_t>(slot)];
    }
  }
  for (int count : seen) ASSERT_EQ(count, 1);
}

}  // namespace
}  // namespace espalier::codec::cuda
