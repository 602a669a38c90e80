// Several matrix products over the same rows as one parallel phase.
#pragma once

#include <initializer_list>

#include "core/thread_pool.h"
#include "cpu/kernels/kernels.h"
#include "model/weights.h"

namespace k3 {

// y[rows, w.rows] = x[rows, w.cols] w^T
struct Product {
  const Matrix* w;
  const float* x;
  int64_t ldx;
  float* y;
  int64_t ldy;
  bool land_bf16;
};

void run_products(ThreadPool& pool, const Kernels& kernels, int64_t rows,
                  std::initializer_list<Product> products);

// Columns of one work item: enough to share, small enough that their weights stay in L2 while the
// rows stream past.
int64_t product_block(int64_t n, int64_t k, int num_threads);

}  // namespace k3
