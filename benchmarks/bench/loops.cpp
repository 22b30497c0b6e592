// What a loop written by hand takes for the sparse parts of a step of TopK: float32, B tokens, K of F latents, width D.
#include <algorithm>
#include <cstdint>
#include <vector>

extern "C" {

// The K largest of each row, by rising index. Numbers above a bound go into a buffer; when it is full its K largest
// stay, and the bound is the least of them. Of equals any may stay.
void select_rows(const float* pre, int64_t B, int64_t F, int64_t K, int32_t* at) {
#pragma omp parallel for schedule(static)
  for (int64_t b = 0; b < B; ++b) {
    const float* row = pre + b * F;
    std::vector<std::pair<float, int32_t>> best;
    best.reserve(4 * K);
    auto larger = [](const auto& one, const auto& other) { return one.first > other.first; };
    float bound = -1e38f;
    for (int64_t f = 0; f < F; ++f) {
      if (row[f] > bound) {
        best.emplace_back(row[f], static_cast<int32_t>(f));
        if (static_cast<int64_t>(best.size()) == 4 * K) {
          std::nth_element(best.begin(), best.begin() + K - 1, best.end(), larger);
          best.resize(K);
          bound = best[K - 1].first;
        }
      }
    }
    std::nth_element(best.begin(), best.begin() + K - 1, best.end(), larger);
    for (int64_t k = 0; k < K; ++k) at[b * K + k] = best[k].second;
    std::sort(at + b * K, at + (b + 1) * K);
  }
}

// out[b] = sum_k values[b, k] W[at[b, k]]
void decode(const float* values, const int32_t* at, const float* W, int64_t B, int64_t K, int64_t D, float* out) {
#pragma omp parallel for schedule(static)
  for (int64_t b = 0; b < B; ++b) {
    float* sum = out + b * D;
    std::fill(sum, sum + D, 0.0f);
    for (int64_t k = 0; k < K; ++k) {
      const float value = values[b * K + k];
      const float* row = W + at[b * K + k] * D;
      for (int64_t d = 0; d < D; ++d) sum[d] += value * row[d];
    }
  }
}

// out[b, k] = g[b] . W[at[b, k]]
void of_values(const float* g, const int32_t* at, const float* W, int64_t B, int64_t K, int64_t D, float* out) {
#pragma omp parallel for schedule(static)
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t k = 0; k < K; ++k) {
      const float* row = W + at[b * K + k] * D;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t d = 0; d < D; ++d) sum += g[b * D + d] * row[d];
      out[b * K + k] = sum;
    }
  }
}

// out[f] = sum of values[b, k] g[b] over the pairs with at[b, k] = f, by counting: no two cores write one row.
void of_rows(const float* values, const int32_t* at, const float* g, int64_t B, int64_t K, int64_t D, int64_t F,
             float* out) {
  std::vector<int64_t> start(F + 1, 0), next;
  for (int64_t p = 0; p < B * K; ++p) ++start[at[p] + 1];
  for (int64_t f = 0; f < F; ++f) start[f + 1] += start[f];
  next.assign(start.begin(), start.end() - 1);
  std::vector<int64_t> pairs(B * K);
  for (int64_t p = 0; p < B * K; ++p) pairs[next[at[p]]++] = p;
#pragma omp parallel for schedule(dynamic, 64)
  for (int64_t f = 0; f < F; ++f) {
    float* sum = out + f * D;
    std::fill(sum, sum + D, 0.0f);
    for (int64_t i = start[f]; i < start[f + 1]; ++i) {
      const float value = values[pairs[i]];
      const float* row = g + pairs[i] / K * D;
      for (int64_t d = 0; d < D; ++d) sum[d] += value * row[d];
    }
  }
}
}
