// Log-probs of selected tokens on the CPU.
//
// Forward: one pass over each row; reads it once (4 bytes per logit, 2 for 16-bit types). Backward:
// one pass that reads and writes it. A row is cut into pieces that fit the first cache, by its
// width alone, so that its result depends on nothing else.
//
// A piece is added up on the premise that nothing in it lies far above the highest logit seen so
// far. Where the sum proves that wrong, which is rare, its maximum is taken and it is added up
// again: no other instruction is spent on the maximum. The pieces of long rows are read as four
// streams, a quarter of the row apart, since not every processor keeps its memory busy with one.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "logprob/logprob.h"

#ifdef PPOKERN_ISA  // read by for_each_isa.h

namespace ppokern::PPOKERN_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kLog2 = 0.6931471805599453;

constexpr int kStreams = 4;
constexpr int kGroup = 4;  // vectors that are worked on in step
constexpr int64_t kPair = 2 * kLanes;
constexpr int64_t kStep = kStreams * kPair;  // logits that all streams read in a step
constexpr int64_t kPieceLogits = 4096;
constexpr float kFar = 4 * kPieceLogits;  // a piece's sum beyond which something lies far above top
constexpr int64_t kLongRow = 1 << 16;
constexpr float kLow = 1 << 20;  // bits; the shift of a row that lies lower is off by 1/32 at most
constexpr bool kFused = kLanes > 4;  // without it a shift would cancel what was rounded before

// Logits that are worked on in one go: from each of the streams `steps` pairs of vectors.
struct Piece {
  int64_t first, stream, step, steps;

  int64_t at(int64_t i, int s) const { return first + s * stream + i * step; }
};

constexpr Piece kTail = {0, kPair, kStep, 1};

// Calls `use` with each piece of a row, and returns how many logits are left for the tail.
template <class Use>
inline int64_t for_each_piece(int64_t size, Use use) {
  const int64_t steps = size / kStep;
  const bool is_long = size >= kLongRow;
  const int64_t stream = is_long ? steps * kPair : kPair, step = is_long ? kPair : kStep;
  for (int64_t i = 0; i < steps; i += kPieceLogits / kStep) {
    use(Piece{i * step, stream, step, std::min(kPieceLogits / kStep, steps - i)});
  }
  return size - steps * kStep;
}

// Calls `use` with the vectors of a piece, a group at a time.
template <class T, class Use>
inline void for_each_group(const T* row, const Piece& piece, Use use) {
  for (int64_t i = 0; i < piece.steps; ++i) {
#pragma GCC unroll 4
    for (int s = 0; s < kStreams; s += kGroup / 2) {
      Lanes x[kGroup];
#pragma GCC unroll 4
      for (int j = 0; j < kGroup / 2; ++j) load_pair(row + piece.at(i, s + j), x + 2 * j);
      use(x);
    }
  }
}

// The logits that are left, padded with forbidden tokens.
template <class T>
struct Tail {
  T logits[kStep];

  Tail(const T* row, int64_t size, int64_t left) {
    std::fill(logits, logits + kStep, narrow<T>(-kInfinity));
    std::copy(row + size - left, row + size, logits);
  }
};

template <bool kSoftcap, class F>
inline F capped(F logit, float softcap) {
  if constexpr (kSoftcap) return softcap_logit(logit, softcap);
  return logit;
}

// Distances of logits from a row's top, in bits.
struct Distance {
  float top, factor, shift;
  bool low;      // whether `shift` will do
  double error;  // by which it makes all distances too large

  explicit Distance(float top, float factor)
      : top(top),
        factor(factor),
        shift(-top * factor),
        low(kFused && std::abs(shift) < kLow),
        error(low ? shift + double{top} * factor : 0) {}

  template <class LowRow>
  PPOKERN_INLINE Lanes operator()(Lanes logit, LowRow) const {
    if constexpr (LowRow::value) return shifted_logit(logit, broadcast(factor), broadcast(shift));
    return tempered_logit(logit, broadcast(top), broadcast(factor));
  }

  // Calls `use` with the type that stands for `low`.
  template <class Use>
  auto with_low(Use use) const {
    return low ? use(std::true_type{}) : use(std::false_type{});
  }
};

// exp((z - top) / temperature) added up over part of a row, by distances that `Distance` gives.
struct Sums {
  double exps = 0;
  double terms = 0;  // of the entropy relative to top, in bits

  // Makes all distances larger by some bits, and the sums by a ratio of 2^bits.
  void move(double bits, double ratio) {
    terms = ratio == 0 ? 0 : ratio * (terms - bits * exps);
    exps *= ratio;
  }
};

template <bool kEntropy, bool kSoftcap, class T>
struct Adder {
  Distance distance;  // from the maximum, or from at most log(kFar) * temperature below
  float softcap;
  Sums sums;

  void add(const T* row, const Piece& piece) {
    if (distance.top == -kInfinity) raise(row, {piece.first, piece.stream, piece.step, 1});
    if (distance.top != -kInfinity && add_near_top(row, piece, kFar)) return;
    raise(row, piece);
    if (distance.top != -kInfinity) {
      add_near_top(row, piece, kInfinity);
    } else if (!all_forbidden(row, piece)) {
      sums.exps = std::numeric_limits<double>::quiet_NaN();
    }
  }

  void raise(const T* row, const Piece& piece) {
    Lanes top = broadcast(-kInfinity);
    for_each_group(row, piece, [&](Lanes(&logits)[kGroup]) {
      for (Lanes logit : logits) top = max(top, capped<kSoftcap>(logit, softcap));
    });
    const float highest = reduce(top, Max());
    if (!(highest > distance.top)) return;
    const Distance above(highest, distance.factor);
    if (distance.top != -kInfinity) {
      const double apart = (double{distance.top} - highest) * distance.factor;
      const double bits = apart - distance.error + above.error;
      sums.move(bits, std::exp2(bits));
    }
    distance = above;
  }

  bool all_forbidden(const T* row, const Piece& piece) const {
    Mask other{};
    for_each_group(row, piece, [&](Lanes(&logits)[kGroup]) {
      for (Lanes logit : logits) other |= logit != -kInfinity;
    });
    return !any(other);
  }

  // Adds nothing and returns false where the sum is more than `far` or NaN, unless `far` is
  // infinite.
  bool add_near_top(const T* row, const Piece& piece, float far) {
    return distance.with_low([&](auto low) { return add_near_top(row, piece, far, low); });
  }

  template <class LowRow>
  bool add_near_top(const T* row, const Piece& piece, float far, LowRow low) {
    const Distance distance = this->distance;
    const Exp2 exp2;
    Lanes exps[kGroup]{}, terms[kGroup]{};
    for_each_group(row, piece, [&](Lanes(&x)[kGroup]) {
      Lanes bits[kGroup], power[kGroup];
#pragma GCC unroll 8
      for (int i = 0; i < kGroup; ++i) {
        bits[i] = x[i] = distance(capped<kSoftcap>(x[i], softcap), low);
      }
      exp2(x, power);
#pragma GCC unroll 8
      for (int i = 0; i < kGroup; ++i) {
        if constexpr (kEntropy) {
          x[i] *= power[i];
          exps[i] += x[i];
          terms[i] = entropy_term(x[i], bits[i], terms[i]);
        } else {
          exps[i] = fma(x[i], power[i], exps[i]);
        }
      }
    });
    for (int i = 1; i < kGroup; ++i) {
      exps[0] += exps[i];
      terms[0] += terms[i];
    }
    const float sum = reduce(exps[0], Plus());
    if (far != kInfinity && !(sum <= far)) return false;
    sums.exps += sum;
    if (kEntropy) sums.terms += reduce(terms[0], Plus());
    return true;
  }
};

// log2(e) / temperature, finite so that a distance of 0 stays 0.
inline float factor_of(float temperature) {
  const double factor = 1 / (kLog2 * temperature);
  return factor > std::numeric_limits<float>::max() ? std::numeric_limits<float>::max() : factor;
}

template <bool kEntropy, bool kSoftcap, class T>
LogprobRow forward_row(const TokenLogits& tokens, int64_t at) {
  const int64_t id = token_of(tokens, at), size = tokens.vocab_size;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  if (id < 0) return {nan, nan, 0, nan};
  const T* row = tokens.logits.at<const T>(at);
  const float temperature = temperature_of(tokens, at);
  Adder<kEntropy, kSoftcap, T> adder = {
      Distance(-kInfinity, factor_of(temperature)), tokens.softcap, {}};
  const int64_t left = for_each_piece(size, [&](const Piece& piece) { adder.add(row, piece); });
  if (left) adder.add(Tail<T>(row, size, left).logits, kTail);

  Sums& sums = adder.sums;
  const float top = adder.distance.top;
  if (top == -kInfinity && sums.exps == 0) return {-kInfinity, 0, -kInfinity, 0};
  const Lanes target = capped<kSoftcap>(broadcast(widen(row[id])), tokens.softcap);
  const auto exp_of = [&](Lanes logit) -> double {
    return exp2(adder.distance.with_low([&](auto low) { return adder.distance(logit, low); }))[0];
  };
  const double share = exp_of(target) / sums.exps;
  sums.move(-adder.distance.error, 1 / exp_of(broadcast(top)));  // so that the top counts as 1
  const double log_sum = std::log(sums.exps);
  const double above = (double{target[0]} - top) / temperature;
  // near certainty by what was added up, so that the polynomial's error falls out
  const double logprob = share > .5 ? std::log(share) : above - log_sum;
  const double entropy = log_sum + kLog2 * sums.terms / sums.exps;
  if (log_sum != log_sum) return {nan, nan, nan, nan};
  const bool higher = target[0] > top;  // then the better one to measure from
  return {static_cast<float>(logprob > 0 ? 0 : logprob),
          static_cast<float>(entropy < 0 ? 0 : entropy), higher ? target[0] : top,
          static_cast<float>(higher ? log_sum - above : log_sum)};
}

template <bool kEntropy, bool kSoftcap, class T>
void forward_rows(const LogprobForwardArgs& args, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    LogprobRow row = {};
    if (is_valid(args.tokens, i)) row = forward_row<kEntropy, kSoftcap, T>(args.tokens, i);
    *args.logprobs.at(i, 0) = row.logprob;
    if (kEntropy) *args.entropy.at(i, 0) = row.entropy;
    *args.found.at(i, 0) = row;
  }
}

// The gradient of a row's logits.
template <bool kEntropy, bool kSoftcap, class T>
struct Slope {
  Distance distance;
  Exp2 exp2;  // times 1 / sum; without entropy times -grad / temperature too
  Lanes logprob_factor, entropy_factor, log_sum, entropy;
  float softcap;

  // Turns logits into their gradient.
  template <class LowRow>
  PPOKERN_INLINE void of(Lanes (&x)[kGroup], LowRow low) const {
    Lanes logits[kGroup], bits[kGroup], power[kGroup];
#pragma GCC unroll 8
    for (int i = 0; i < kGroup; ++i) {
      logits[i] = x[i];
      bits[i] = x[i] = distance(capped<kSoftcap>(x[i], softcap), low);
    }
    exp2(x, power);
#pragma GCC unroll 8
    for (int i = 0; i < kGroup; ++i) {
      x[i] *= power[i];
      if constexpr (kEntropy) {
        const Lanes logprob = fma(bits[i], broadcast(kLog2), -log_sum);
        x[i] = fma(entropy_factor, entropy_slope(x[i], logprob, entropy), x[i] * logprob_factor);
      }
      if constexpr (kSoftcap) x[i] *= softcap_slope(logits[i], softcap);
    }
  }

  void write(const T* row, T* out, const Piece& piece) const {
    distance.with_low([&](auto low) { write(row, out, piece, low); });
  }

  template <class LowRow>
  void write(const T* row, T* out, const Piece& piece, LowRow low) const {
    for (int64_t i = 0; i < piece.steps; ++i) {
#pragma GCC unroll 4
      for (int s = 0; s < kStreams; s += kGroup / 2) {
        Lanes x[kGroup];
#pragma GCC unroll 4
        for (int j = 0; j < kGroup / 2; ++j) load_pair(row + piece.at(i, s + j), x + 2 * j);
        of(x, low);
#pragma GCC unroll 4
        for (int j = 0; j < kGroup / 2; ++j) store_pair(out + piece.at(i, s + j), x + 2 * j);
      }
    }
  }
};

// A factor whose NaN has an empty lower half.
inline float plain_nan(double x) {
  return x == x ? static_cast<float>(x) : std::numeric_limits<float>::quiet_NaN();
}

template <bool kEntropy, bool kSoftcap, class T>
void backward_row(const LogprobBackwardArgs& args, int64_t at, T* out) {
  const TokenLogits& tokens = args.tokens;
  const int64_t id = token_of(tokens, at), size = tokens.vocab_size;
  const T* row = tokens.logits.at<const T>(at);
  const LogprobRow& found = *args.found.at(at, 0);
  std::fill(out + size, out + args.width, narrow<T>(0));
  if (id < 0 || found.max == -kInfinity) {
    std::fill(out, out + size, narrow<T>(id < 0 ? std::numeric_limits<float>::quiet_NaN() : 0));
    return;
  }
  const double temperature = temperature_of(tokens, at), log_sum = found.log_sum;
  const double grad_logprob = args.grad_logprobs.data ? *args.grad_logprobs.at(at, 0) : 0;
  const double grad_entropy = kEntropy ? *args.grad_entropy.at(at, 0) : 0;
  const double logprob = found.logprob, entropy = found.entropy;
  const Distance distance(found.max, plain_nan(factor_of(temperature)));
  const double shifted_log_sum = log_sum + kLog2 * distance.error;
  const double inverse_sum = std::exp(-shifted_log_sum);
  const Slope<kEntropy, kSoftcap, T> slope = {
      distance,
      Exp2(plain_nan(kEntropy ? inverse_sum : -grad_logprob / temperature * inverse_sum)),
      broadcast(plain_nan(-grad_logprob / temperature)),
      broadcast(plain_nan(grad_entropy / temperature)),
      broadcast(plain_nan(shifted_log_sum)),
      broadcast(plain_nan(entropy)),
      tokens.softcap};
  double own = grad_logprob * own_logprob_slope(logprob);
  if (kEntropy) own += grad_entropy * entropy_slope(std::exp(logprob), logprob, entropy);
  own /= temperature;
  if (kSoftcap) own *= softcap_slope(broadcast(widen(row[id])), tokens.softcap)[0];

  const Tail<T> tail(row, size, size % kStep);
  for_each_piece(size, [&](const Piece& piece) { slope.write(row, out, piece); });
  if (size % kStep) {
    T slopes[kStep];
    slope.write(tail.logits, slopes, kTail);
    std::copy(slopes, slopes + size % kStep, out + size / kStep * kStep);
  }
  out[id] = narrow<T>(plain_nan(own));
}

// Returns how many rows were written.
template <bool kEntropy, bool kSoftcap, class T>
int64_t backward_rows(const LogprobBackwardArgs& args, int64_t first, int64_t last) {
  int64_t to = first;
  for (int64_t i = first; i < last; ++i) {
    if (is_valid(args.tokens, i)) {
      backward_row<kEntropy, kSoftcap, T>(args, i, args.out.at<T>(to++));
    } else if (!args.compact) {
      T* out = args.out.at<T>(to++);
      std::fill(out, out + args.width, narrow<T>(0));
    }
  }
  return to - first;
}

void forward(const LogprobForwardArgs& args, int64_t first, int64_t last) {
  with_types(args.tokens, args.entropy.data, [&](auto entropy, auto softcap, auto type) {
    forward_rows<decltype(entropy)::value, decltype(softcap)::value, decltype(type)>(args, first,
                                                                                     last);
  });
}

int64_t backward(const LogprobBackwardArgs& args, int64_t first, int64_t last) {
  return with_types(
      args.tokens, args.grad_entropy.data, [&](auto entropy, auto softcap, auto type) {
        return backward_rows<decltype(entropy)::value, decltype(softcap)::value, decltype(type)>(
            args, first, last);
      });
}

}  // namespace
}  // namespace ppokern::PPOKERN_ISA

#else

#define PPOKERN_STORES_BF16
#define PPOKERN_KERNELS "logprob/logprob_cpu.cpp"
#include "for_each_isa.h"

namespace ppokern {
namespace {

int parts_of(const TokenLogits& tokens) {
  return threads_for(tokens.rows * tokens.vocab_size, tokens.threads);
}

template <class T>
void move(const LogprobBackwardArgs& args, int64_t from, int64_t to) {
  if (from != to) std::copy_n(args.out.at<T>(from), args.width, args.out.at<T>(to));
}

}  // namespace

bool token_ids_fit(const TokenIds& args) {
  bool fit = true;
  for (int64_t i = 0; i < args.rows; ++i) {
    const int64_t id = *args.token_ids.at(i, 0);
    const bool masked = id == -100 || (args.mask.data && !*args.mask.at(i, 0));
    fit &= masked | (0 <= id && id < args.vocab_size);
  }
  return fit;
}

void logprob_forward_cpu(const LogprobForwardArgs& args) {
  const auto forward = PPOKERN_BEST(forward);
  const int64_t rows = args.tokens.rows, parts = parts_of(args.tokens);
#pragma omp parallel for num_threads(parts) if (parts > 1)
  for (int64_t part = 0; part < parts; ++part) {
    forward(args, rows * part / parts, rows * (part + 1) / parts);
  }
}

void logprob_backward_cpu(const LogprobBackwardArgs& args) {
  const auto backward = PPOKERN_BEST(backward);
  const int64_t rows = args.tokens.rows, parts = parts_of(args.tokens);
  std::vector<int64_t> written(parts);
#pragma omp parallel for num_threads(parts) if (parts > 1)
  for (int64_t part = 0; part < parts; ++part) {
    written[part] = backward(args, rows * part / parts, rows * (part + 1) / parts);
  }
  if (!args.compact) return;
  // each part stands compact from its own first row on; out of these, the whole
  int64_t to = written[0];
  for (int64_t part = 1; part < parts; ++part) {
    for (int64_t i = 0; i < written[part]; ++i, ++to) {
      args.tokens.type == kFloat ? move<float>(args, rows * part / parts + i, to)
                                 : move<uint16_t>(args, rows * part / parts + i, to);
    }
  }
}

}  // namespace ppokern

#endif
