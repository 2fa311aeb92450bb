// Compiles the file PPOKERN_KERNELS once for each instruction set, in a namespace of that name.
//
// All that the kernels inline is read anew with them, since g++ splits vectors that it meets
// outside a target region. The headers of others are read before, so that no function of theirs
// is compiled for an instruction set that the machine may lack. PPOKERN_LANES tells the sets
// apart, since g++ 12 defines no __AVX512F__ in a target region. A file that defines
// PPOKERN_STORES_BF16 is compiled once more, for processors that round to bfloat16.

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "portable.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PPOKERN_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define PPOKERN_BEGIN_TARGET(set) \
  PPOKERN_PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#define PPOKERN_END_TARGET PPOKERN_PRAGMA(clang attribute pop)
#else
#define PPOKERN_BEGIN_TARGET(set) PPOKERN_PRAGMA(GCC push_options) PPOKERN_PRAGMA(GCC target(set))
#define PPOKERN_END_TARGET PPOKERN_PRAGMA(GCC pop_options)
#endif

#define PPOKERN_ISA plain
#define PPOKERN_LANES 4
#include "lanes.h"
#include "token_math.h"
#include PPOKERN_KERNELS
#undef PPOKERN_ISA
#undef PPOKERN_LANES

#if defined(__x86_64__)

PPOKERN_BEGIN_TARGET("avx2,fma,f16c")
#define PPOKERN_ISA avx2
#define PPOKERN_LANES 8
#include "lanes.h"
#include "token_math.h"
#include PPOKERN_KERNELS
#undef PPOKERN_ISA
#undef PPOKERN_LANES
PPOKERN_END_TARGET

PPOKERN_BEGIN_TARGET("fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#define PPOKERN_ISA avx512
#define PPOKERN_LANES 16
#include "lanes.h"
#include "token_math.h"
#include PPOKERN_KERNELS
#undef PPOKERN_ISA
#undef PPOKERN_LANES
PPOKERN_END_TARGET

#ifdef PPOKERN_STORES_BF16
PPOKERN_BEGIN_TARGET("fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#define PPOKERN_ISA avx512_bf16
#define PPOKERN_LANES 16
#define PPOKERN_BF16  // has an instruction that rounds to bfloat16
#include "lanes.h"
#include "token_math.h"
#include PPOKERN_KERNELS
#undef PPOKERN_ISA
#undef PPOKERN_LANES
#undef PPOKERN_BF16
PPOKERN_END_TARGET
#else
namespace ppokern {
namespace avx512_bf16 = avx512;
}
#endif

// The address of the version of a function that this machine runs.
#define PPOKERN_BEST(function)                        \
  (isa() == Isa::kAvx512Bf16 ? &avx512_bf16::function \
   : isa() == Isa::kAvx512   ? &avx512::function      \
   : isa() == Isa::kAvx2     ? &avx2::function        \
                             : &plain::function)

#else

#define PPOKERN_BEST(function) (&plain::function)

#endif
