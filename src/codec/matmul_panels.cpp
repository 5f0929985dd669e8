#include "codec/matmul_panels.h"

#include <array>
#include <cmath>
#include <memory>
#include <mutex>

#include "base/check.h"

namespace espalier::codec {
namespace {

std::unique_ptr<WindowTable> make_window_table(int k2) {
  auto table = std::make_unique<WindowTable>();
  const uint8_t* to_ring = row_major_to_ring();
  const int n_words = 4 * k2;
  for (int r = 0; r < kTile; ++r) {
    for (int c = 0; c < kTile; ++c) {
      const int last = window_end(k2, to_ring[r * kTile + c]) + 128 * k2;
      const int low_word = (last - 1) / 32;
      table->rows[r].high[c] = ((last - 16) / 32) % n_words;
      table->rows[r].low[c] = low_word % n_words;
      table->rows[r].shift[c] = (low_word + 1) * 32 - last;
    }
  }
  return table;
}

void decode_panel(const TrellisView& view, int64_t panel_row, int64_t panel_column, float* panel) {
  const float* values = codebook_table_f32(view.codebook);
  const uint8_t* to_row_major = ring_to_row_major();
  uint16_t states[kTileSize];
  for (int rt = 0; rt < kPanelRows / kTile; ++rt) {
    for (int ct = 0; ct < kPanelColumns / kTile; ++ct) {
      unpack_tile(view.tile(panel_row * (kPanelRows / kTile) + rt, panel_column * (kPanelColumns / kTile) + ct), view.k2,
                  states);
      float* corner = panel + rt * kTile * kPanelColumns + ct * kTile;
      for (int p = 0; p < kTileSize; ++p) {
        const int e = to_row_major[p];
        corner[(e / kTile) * kPanelColumns + e % kTile] = values[states[p]];
      }
    }
  }
}

void multiply_panel(const float* panel, const float* xh, int64_t x_stride, int64_t rows, float* z) {
  for (int64_t t = 0; t < rows; ++t) {
    for (int r = 0; r < kPanelRows; ++r) {
      const float x = xh[t * x_stride + r];
      for (int c = 0; c < kPanelColumns; ++c) {
        float& sum = z[t * kPanelColumns + c];
        sum = std::fma(x, panel[r * kPanelColumns + c], sum);
      }
    }
  }
}

}  // namespace

const WindowTable& window_table(int k2) {
  struct Slot {
    std::once_flag once;
    std::unique_ptr<WindowTable> table;
  };
  static std::array<Slot, 17> slots;
  CHECK(is_width(k2)) << k2;
  Slot& slot = slots[static_cast<size_t>(k2)];
  std::call_once(slot.once, [&] { slot.table = make_window_table(k2); });
  return *slot.table;
}

const PanelKernels& panel_kernels_portable() {
  static constexpr PanelKernels kKernels = {decode_panel, multiply_panel};
  return kKernels;
}

}  // namespace espalier::codec
