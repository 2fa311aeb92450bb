// A vector of floats, as wide as the instruction set has them, by the compilers' vector extension:
// operators and `?:` work lane by lane on every processor. Where g++ makes slow code of that,
// intrinsics stand.
//
// No include guard: for_each_isa.h reads this file once for each instruction set.

namespace ppokern::PPOKERN_ISA {
namespace {

constexpr int kLanes = PPOKERN_LANES;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t Mask __attribute__((vector_size(4 * kLanes)));  // -1 (True) or 0 in each lane
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));

inline Lanes load(const float* from) {
  Lanes x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Mask load(const uint8_t* from) {
#if PPOKERN_LANES == 16
  return (Mask)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)from)) != 0;
#elif PPOKERN_LANES == 8
  return (Mask)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)) != 0;
#else
  return Mask{from[0], from[1], from[2], from[3]} != 0;
#endif
}

// A bit for each of kLanes bytes that is not 0.
inline uint32_t bits_of(const uint8_t* from) {
#if PPOKERN_LANES == 16
  const __m128i bytes = _mm_loadu_si128((const __m128i*)from);
  return _mm_test_epi8_mask(bytes, bytes);
#elif PPOKERN_LANES == 8
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)from);
  return ~_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_setzero_si128())) & 0xff;
#else
  return (from[0] != 0) | (from[1] != 0) << 1 | (from[2] != 0) << 2 | (from[3] != 0) << 3;
#endif
}

// 0 in the lanes whose bits are 0.
inline Lanes keep(uint32_t bits, Lanes x) {
#if PPOKERN_LANES == 16
  return _mm512_maskz_mov_ps(bits, x);
#elif PPOKERN_LANES == 8
  return ((Bits{} + bits) & Bits{1, 2, 4, 8, 16, 32, 64, 128}) != 0 ? x : Lanes{};
#else
  return ((Bits{} + bits) & Bits{1, 2, 4, 8}) != 0 ? x : Lanes{};
#endif
}

inline void store(float* to, Lanes x) { std::memcpy(to, &x, sizeof x); }

// How many lanes of a vector there are: all, or at the end of a tensor the first few.
using All = std::integral_constant<int, kLanes>;

template <class T>
inline auto load(const T* from, All) {
  return load(from);
}

template <class T>
inline auto load(const T* from, int count) {
  T padded[kLanes] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

inline void store(float* to, Lanes x, All) { store(to, x); }

inline void store(float* to, Lanes x, int count) { std::memcpy(to, &x, count * sizeof(float)); }

inline Mask first(All) { return Mask{} == 0; }

inline Mask first(int count) {
  Mask mask{};
  for (int i = 0; i < count; ++i) mask[i] = -1;
  return mask;
}

inline bool any(Mask mask) {
#if PPOKERN_LANES == 16
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif PPOKERN_LANES == 8
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  return mask[0] | mask[1] | mask[2] | mask[3];
#endif
}

inline Lanes broadcast(float x) { return Lanes{} + x; }

// a * b + c, rounded once where there is an instruction for it.
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
#if PPOKERN_LANES == 16
  return _mm512_fmadd_ps(a, b, c);
#elif PPOKERN_LANES == 8
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// The larger one of x and a negative number, x if that is NaN.
inline Lanes at_least(Lanes x, float low) {
#if PPOKERN_LANES == \
    16  // without the units that add and multiply: as an unsigned number -inf is large
  return (Lanes)_mm512_maskz_min_epu32(0xffff, (__m512i)x, (__m512i)broadcast(low));
#elif PPOKERN_LANES == 8
  return (Lanes)_mm256_min_epu32((__m256i)x, (__m256i)broadcast(low));
#else
  return x < low ? broadcast(low) : x;
#endif
}

// The second one if either is NaN.
inline Lanes max(Lanes a, Lanes b) {
#if PPOKERN_LANES == 16
  return _mm512_maskz_max_ps(0xffff, a, b);
#elif PPOKERN_LANES == 8
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// The second one if either is NaN.
inline Lanes min(Lanes a, Lanes b) { return a < b ? a : b; }

// NaN stays one.
inline Lanes clamp(Lanes x, float low, float high) {
  return min(broadcast(high), max(broadcast(low), x));
}

// scale * 2^x as a product of two factors, which a sum takes in by one operation: exact for
// integers, 0 below -126 or from there on subnormal, inf from 128 on, else of a relative error of
// 1.5e-7.
#if PPOKERN_LANES == 16
// The power at the next multiple of 1/32 below, from a table, and a polynomial, minimax on
// [0, 1/32] with value 1 at 0, of the distance from there. Half of this runs in the units that
// multiply, half in those that add.
struct Exp2 {
  Lanes lower, upper;  // the table

  explicit Exp2(float scale = 1) {
    static const float table[2 * kLanes] = {
        0x1.000000p+0, 0x1.059b0ep+0, 0x1.0b5586p+0, 0x1.11301ep+0, 0x1.172b84p+0, 0x1.1d4874p+0,
        0x1.2387a6p+0, 0x1.29e9e0p+0, 0x1.306fe0p+0, 0x1.371a74p+0, 0x1.3dea64p+0, 0x1.44e086p+0,
        0x1.4bfdaep+0, 0x1.5342b6p+0, 0x1.5ab07ep+0, 0x1.6247ecp+0, 0x1.6a09e6p+0, 0x1.71f75ep+0,
        0x1.7a1148p+0, 0x1.82589ap+0, 0x1.8ace54p+0, 0x1.93737cp+0, 0x1.9c4918p+0, 0x1.a5503cp+0,
        0x1.ae89fap+0, 0x1.b7f770p+0, 0x1.c199bep+0, 0x1.cb720ep+0, 0x1.d5818ep+0, 0x1.dfc974p+0,
        0x1.ea4afap+0, 0x1.f50766p+0};
    lower = load(table) * scale;
    upper = load(table + kLanes) * scale;
  }

  // Of several vectors in step: the instructions of one wait for each other, and behind them a
  // processor does not look far for others.
  template <int kCount>
  PPOKERN_INLINE void operator()(Lanes (&x)[kCount], Lanes (&power)[kCount]) const {
    constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    Lanes rest[kCount];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      rest[i] = _mm512_maskz_reduce_ps(0xffff, x[i], 5 << 4 | kDown);
      power[i] = _mm512_maskz_add_round_ps(0xffff, x[i], broadcast(0x1.8p18f), kDown);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {  // the lowest five bits choose
      power[i] = _mm512_permutex2var_ps(lower, (__m512i)power[i], upper);
      power[i] = _mm512_maskz_scalef_ps(0xffff, power[i], x[i]);
      x[i] = fma(rest[i], broadcast(0x1.f0f3e4p-3f), broadcast(0x1.62e11ep-1f));
    }
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) x[i] = fma(x[i], rest[i], broadcast(1));
  }
};
#else
// The power at the integer below, and a polynomial, minimax on [0, 1] with value 1 at 0, of the
// distance from there.
struct Exp2 {
  Lanes c0, c1, c2, c3, c4, c5;

  explicit Exp2(float scale = 1)
      : c0(broadcast(scale)),
        c1(broadcast(scale * 0x1.62e4bap-1f)),
        c2(broadcast(scale * 0x1.ebdb56p-3f)),
        c3(broadcast(scale * 0x1.c91ce6p-5f)),
        c4(broadcast(scale * 0x1.277854p-7f)),
        c5(broadcast(scale * 0x1.e974fep-10f)) {}

  template <int kCount>
  PPOKERN_INLINE void operator()(Lanes (&x)[kCount], Lanes (&power)[kCount]) const {
    Lanes rest[kCount];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      x[i] = x[i] < -127.0f ? broadcast(-127.0f) : x[i] > 128.0f ? broadcast(128.0f) : x[i];
#if PPOKERN_LANES == 8
      const Lanes below = _mm256_floor_ps(x[i]);
#else
      const Lanes nearest = (x[i] + 0x1.8p23f) - 0x1.8p23f;
      const Lanes below = nearest > x[i] ? nearest - 1.0f : nearest;
#endif
      rest[i] = x[i] - below;
      power[i] = (Lanes)((Bits)(below + (0x1.8p23f + 127)) << 23);  // the lowest bits: the exponent
      x[i] = c5;
    }
    horner(x, rest, c4);
    horner(x, rest, c3);
    horner(x, rest, c2);
    horner(x, rest, c1);
    horner(x, rest, c0);
  }

 private:
  template <int kCount>
  PPOKERN_INLINE static void horner(Lanes (&power)[kCount], const Lanes (&x)[kCount], Lanes c) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) power[i] = fma(power[i], x[i], c);
  }
};
#endif

inline Lanes exp2(Lanes x) {
  Lanes one[] = {x}, power[1];
  Exp2()(one, power);
  return one[0] * power[0];
}

// x = n log(2) + r for an integer n, and exp(r) - 1: exact to a rounding also near 0.
struct Expm1 {
  Lanes n, rest;

  explicit Expm1(Lanes x) {
    const float log2e = 1.44269504088896f;
    x = clamp(x, -150, 89);  // beyond, exp is 0 or infinite
    n = (x * log2e + 0x1.8p23f) - 0x1.8p23f;
    const Lanes r = fma(n, broadcast(2.12194440e-4f), fma(n, broadcast(-0.693359375f), x));
    const Lanes square = r * r;  // minimax on [-log(2) / 2, log(2) / 2]; Cephes, expf
    const Lanes high = fma(broadcast(1.9875691500e-4f), r, broadcast(1.3981999507e-3f));
    const Lanes middle = fma(broadcast(8.3334519073e-3f), r, broadcast(4.1665795894e-2f));
    const Lanes low = fma(broadcast(1.6666665459e-1f), r, broadcast(5.0000001201e-1f));
    rest = fma(fma(fma(high, square, middle), square, low), square, r);
  }
};

// x * 2^n, n an integer of at most 254 in size.
inline Lanes scaled(Lanes x, Lanes n) {
#if PPOKERN_LANES == 16
  return _mm512_maskz_scalef_ps(0xffff, x, n);
#else  // in two steps, neither of which overflows alone
  const Mask whole = (Mask)(n + 0x1.8p23f) - 0x4b400000, half = whole >> 1;
  return x * (Lanes)((half + 127) << 23) * (Lanes)((whole - half + 127) << 23);
#endif
}

inline Lanes exp(Lanes x) {
  const Expm1 e(x);
  return scaled(1.0f + e.rest, e.n);
}

inline Lanes expm1(Lanes x) {
  const Expm1 e(max(broadcast(-64), x));  // below it is -1
  return scaled(e.rest + (1.0f - scaled(broadcast(1), -e.n)), e.n);
}

inline Lanes tanh(Lanes x) {
  const Lanes square = x * x;  // near 0 an odd polynomial, minimax on [-.625, .625]
  Lanes near = broadcast(-0.005704984534531832f);
  near = fma(near, square, broadcast(0.0206390842795372f));
  near = fma(near, square, broadcast(-0.05373971536755562f));
  near = fma(near, square, broadcast(0.13331441581249237f));
  near = fma(near, square, broadcast(-0.3333328068256378f));
  near = fma(near * square, x, x);
  const float log2e = 1.44269504088896f;
  const Lanes size = x < 0 ? -x : x;
  const Lanes decayed = exp2(size * (-2 * log2e));
  const Lanes far = (1.0f - decayed) / (1.0f + decayed);
  return size < 0.625f ? near : x < 0 ? -far : far;
}

// Two vectors at a time: of bfloat16 those at even and those at odd places.
inline void load_pair(const float* from, Lanes* to) {
  to[0] = load(from);
  to[1] = load(from + kLanes);
}

inline void load_pair(const Bf16* from, Lanes* to) {
  Bits x;
  std::memcpy(&x, from, sizeof x);
  to[0] = (Lanes)(x << 16);
  to[1] = (Lanes)(x & 0xffff0000);
}

inline void load_pair(const Fp16* from, Lanes* to) {
#if PPOKERN_LANES == 16
  to[0] = _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)from));
  to[1] = _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)(from + kLanes)));
#elif PPOKERN_LANES == 8
  to[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
  to[1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + kLanes)));
#else
  float wide[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) wide[i] = widen(from[i]);
  load_pair(wide, to);
#endif
}

inline void store_pair(float* to, const Lanes* x) {
  store(to, x[0]);
  store(to + kLanes, x[1]);
}

// To nearest, ties to even; the lower half of a NaN must be empty. The instruction for it makes
// numbers below 2^-126 zero, which no other way does.
inline void store_pair(Bf16* to, const Lanes* x) {
#if defined(PPOKERN_BF16)  // the even places' 16, then the odd ones': each pair from i and 16 + i
  const Bits lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Bits from = lane | (lane + 16) << 16;
  const Bits bits = (Bits)_mm512_maskz_permutexvar_epi16(0xffffffff, (__m512i)from,
                                                         (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
#elif PPOKERN_LANES == 4
  const Bits first = (Bits)x[0] + 0x7fff + ((Bits)x[0] >> 16 & 1);
  const Bits second = (Bits)x[1] + 0x7fff + ((Bits)x[1] >> 16 & 1);
  const Bits bits = first >> 16 | (second & 0xffff0000);
#else  // the same for the halves of both: what low + 0x7fff + (high & 1) carries
  const Bits high = (Bits)x[0] >> 16 | ((Bits)x[1] & 0xffff0000);
  const Bits low = ((Bits)x[0] & 0xffff) | (Bits)x[1] << 16;
  const Bits odd = (high & 0x00010001) | 0x7ffe7ffe;
#if PPOKERN_LANES == 16
  const Bits carry = (Bits)_mm512_maskz_srli_epi16(
      0xffffffff, _mm512_maskz_avg_epu16(0xffffffff, (__m512i)low, (__m512i)odd), 15);
#else
  const Bits carry = (Bits)_mm256_srli_epi16(_mm256_avg_epu16((__m256i)low, (__m256i)odd), 15);
#endif
  const Bits bits = high + carry;
#endif
  std::memcpy(to, &bits, sizeof bits);
}

inline void store_pair(Fp16* to, const Lanes* x) {
#if PPOKERN_LANES == 16
  _mm256_storeu_si256((__m256i*)to, _mm512_maskz_cvtps_ph(0xffff, x[0], _MM_FROUND_TO_NEAREST_INT));
  _mm256_storeu_si256((__m256i*)(to + kLanes),
                      _mm512_maskz_cvtps_ph(0xffff, x[1], _MM_FROUND_TO_NEAREST_INT));
#elif PPOKERN_LANES == 8
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(x[0], _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(to + kLanes), _mm256_cvtps_ph(x[1], _MM_FROUND_TO_NEAREST_INT));
#else
  for (int lane = 0; lane < kLanes; ++lane) {
    to[lane] = narrow<Fp16>(x[0][lane]);
    to[kLanes + lane] = narrow<Fp16>(x[1][lane]);
  }
#endif
}

// Lanes by number, first those of a, then those of b.
template <int... kFrom, class V>
inline V shuffle(V a, V b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kFrom...);
#else
  return __builtin_shuffle(a, b, Mask{kFrom...});
#endif
}

// All lanes in one: the upper half to the lower, and so on.
template <int kHalf, class Take, int... kLane>
inline Lanes fold(Lanes x, Take take, std::integer_sequence<int, kLane...> lanes) {
  x = take(x, shuffle<(kLane ^ kHalf)...>(x, x));
  if constexpr (kHalf > 1) x = fold<kHalf / 2>(x, take, lanes);
  return x;
}

struct Plus {
  Lanes operator()(Lanes a, Lanes b) const { return a + b; }
};

struct Min {
  Lanes operator()(Lanes a, Lanes b) const { return min(a, b); }
};

struct Max {
  Lanes operator()(Lanes a, Lanes b) const { return max(a, b); }
};

template <class Take>
inline float reduce(Lanes x, Take take) {
  return fold<kLanes / 2>(x, take, std::make_integer_sequence<int, kLanes>())[0];
}

template <int kBlock, int... kLane>
inline void exchange_blocks(Lanes* rows, std::integer_sequence<int, kLane...> lanes) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & kBlock) continue;
    const Lanes upper = rows[i], lower = rows[i + kBlock];
    rows[i] = shuffle<(kLane & kBlock ? kLanes + kLane - kBlock : kLane)...>(upper, lower);
    rows[i + kBlock] = shuffle<(kLane & kBlock ? kLanes + kLane : kLane + kBlock)...>(upper, lower);
  }
  if constexpr (kBlock > 1) exchange_blocks<kBlock / 2>(rows, lanes);
}

// Transposes kLanes rows: at each size of block, those off the diagonal change places.
__attribute__((noinline, unused)) void transpose(const float* const* rows, Lanes* to) {
  Lanes x[kLanes];  // in registers, which the stores would not allow
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) x[i] = load(rows[i]);
  exchange_blocks<kLanes / 2>(x, std::make_integer_sequence<int, kLanes>());
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) to[i] = x[i];
}

}  // namespace
}  // namespace ppokern::PPOKERN_ISA
