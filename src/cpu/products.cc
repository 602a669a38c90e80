#include "cpu/products.h"

#include <algorithm>

namespace k3 {

int64_t product_block(int64_t n, int64_t k, int num_threads) {
  constexpr int64_t kWeightsInL2 = 64 * 1024;  // bf16 elements: 128 KiB of a 512 KiB L2
  const int64_t fits = std::clamp<int64_t>(kWeightsInL2 / std::max<int64_t>(k, 1), 8, 128);
  const int64_t share = (n + 2 * num_threads - 1) / (2 * num_threads);
  return std::max<int64_t>(8, std::min(fits, share) / 8 * 8);
}

void run_products(ThreadPool& pool, const Kernels& kernels, int64_t rows,
                  std::initializer_list<Product> products) {
  constexpr size_t kMax = 8;
  int64_t block[kMax], end[kMax];
  int64_t items = 0;
  size_t count = 0;
  for (const Product& p : products) {
    block[count] = product_block(p.w->rows, p.w->cols, pool.num_threads());
    items += (p.w->rows + block[count] - 1) / block[count];
    end[count++] = items;
  }
  pool.parallel_for(items, [&](int64_t item, int) {
    size_t which = 0;
    while (item >= end[which]) ++which;
    const Product& p = products.begin()[which];
    const int64_t first = (item - (which == 0 ? 0 : end[which - 1])) * block[which];
    GemmArgs a;
    a.x = p.x;
    a.ldx = p.ldx;
    a.rows = rows;
    a.k = p.w->cols;
    a.w = p.w->data;
    a.w_stride = p.w->row_bytes();
    a.n_begin = first;
    a.n_end = std::min(first + block[which], p.w->rows);
    a.y = p.y;
    a.ldy = p.ldy;
    a.land_bf16 = p.land_bf16;
    kernels.gemm_bf16(a);
  });
}

}  // namespace k3
